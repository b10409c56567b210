"""The base of all commands, and the flags that a dataclass stands for: its fields, with their docstrings as help."""

from __future__ import annotations

import ast
import dataclasses
import gc
import inspect
import io
import json
import re
import sys
from collections.abc import Collection, Sequence
from contextlib import redirect_stderr
from functools import cache, partial
from importlib import import_module
from itertools import chain, pairwise, takewhile
from pathlib import Path
from types import UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

from fl_core.config import GROUPS, KEYS, RunConfig
from fl_core.data.reading import BETWEEN, check_removed
from fl_core.errors import (
    UsageError,
    about,
    as_list,
    check_known,
    check_type,
    listing,
    nearest,
    warn,
)
from fl_core.kinds import Kind, kind_of
from fl_core.storage import check_folder, read_toml

USUAL = (
    *("dataset", "client_column", "label_column", "text_column", "exclude_columns"),
    *("impute", "positive", "model", "algorithm", "plan"),
    *("rounds", "epochs", "batch_size", "lr", "seed", "workers", "device"),
)
"""Keys of the configuration whose flags ``--help`` shows; ``--help-all`` shows all."""
OPTIONS = {
    "options": "option",
    "model_options": "model_option",
    "loss_options": "loss_option",
}
"""The keys of the configuration that are options, each with the flag of one option. It is repeatable."""
AFTER_EQUALS = "\0"
"""The mark of a word after an equals sign, which may begin with a hyphen."""
LARGEST = 2**20
"""Bytes of a configuration file at most."""


@dataclass_transform(kw_only_default=True, frozen_default=True)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """A command. Its class is a frozen dataclass. Its fields are its flags, and its docstring is its help."""

    debug: bool = False
    """Show the traceback of an error."""

    json = False  # a command with an answer for programs has it as a flag
    argument: ClassVar[str] = ""
    """The field that is given without a flag."""
    without: ClassVar[Collection[str]] = ()
    """The keys of the configuration that the command has no flag for, if it takes one."""

    def __init_subclass__(cls) -> None:
        dataclasses.dataclass(frozen=True, kw_only=True)(cls)

    def main(self, line: str) -> Any:
        """Run the command, and return what ``--json`` prints. ``line`` is the command as it was typed.

        If the result reports faults, the program ends with exit code 1.

        Raises:
            UsageError, RunError: the command cannot be carried out.
        """
        raise NotImplementedError

    def printed(self) -> str | None:
        """Return a text to print in place of running the command; None if the command runs."""
        return None

    after_stop = "nothing was written"

    def interrupted(self) -> str:
        """Return the message to print after Ctrl-C, on how to continue the work."""
        return self.after_stop


def load(module: str) -> None:
    """Import a module that imports torch, unless torch is imported already.

    Garbage collection is off meanwhile, which saves a sixth of the time.
    """
    if "torch" not in sys.modules:
        gc.disable()
        import_module(module)
        gc.freeze()
        gc.enable()


class ConfiguredCommand(Command):
    """A command that takes a run's configuration.

    Unless it has another argument, the dataset is given by position, or as ``--dataset``.
    """

    data: str | None = None
    """Your table, a folder, several tables, or a name: the same as --dataset."""

    keys: RunConfig
    option: tuple[str, ...] = ()
    """An option of the algorithm, such as --option mu=0.1. Repeatable."""
    model_option: tuple[str, ...] = ()
    """An option of the model, such as --model-option sizes=64,32. Repeatable."""
    loss_option: tuple[str, ...] = ()
    """An option of the loss, such as --loss-option gamma=2. Repeatable."""
    config: Path | None = None
    """Read options from a TOML file, as --print-config prints it. Options on the command line win."""
    print_config: bool = False
    """Print the configuration as TOML and stop."""
    help_all: bool = False
    """Show all options; --help shows the usual ones."""

    argument = "data"

    def asked_config(self) -> RunConfig:
        """Return the configuration of the command line, with numbers checked.

        Raises:
            UsageError: a value is wrong, or an option is not KEY=VALUE.
        """
        keys = {k: v for k, v in vars(self).items() if k in KEYS and v is not None}
        for key in OPTIONS.keys() - {*self.without}:
            if entries := pairs(OPTIONS[key], getattr(self, OPTIONS[key])):
                keys[key] = {**(self.keys.value(key) or {}), **entries}
        config = self.keys.with_keys(**keys)
        load("torch")
        return config

    def printed(self) -> str | None:
        """Return the keys that differ from their defaults as TOML, if the flags ask for it; else None."""
        if not self.print_config:
            return None
        import tomli_w

        from fl_core.algorithms import find

        config = self.asked_config()
        find(config.federation.algorithm, config.federation.options)  # a known one
        groups: dict[str, dict[str, Any]] = {}
        for group, key, value in config.summary().rows:
            groups.setdefault(str(group), {})[str(key)] = value
        return tomli_w.dumps(groups)


def read_config(file: Path, command: str, foreign: Collection[str]) -> dict[str, Any]:
    """Return the values of a configuration file by field. They replace the defaults of the flags.

    Args:
        file: the file, in TOML with a table for each group of keys.
        command: the name of the command.
        foreign: keys for which the command has no flag.

    Raises:
        UsageError: the file is missing, no TOML, or has an unknown group or key, a wrong value, or a key that the
            command has no flag for.
    """
    values: dict[str, Any] = {}
    if file.name == "config.json" and kind_of(file.parent) is Kind.RUN:
        raise UsageError(
            f"--config must be a file of TOML; got {str(file)!r} of a run. Write one by --print-config, or continue "
            f"the run: fedlayers resume {file.parent}."
        )
    for group, table in read_toml(file, LARGEST).items():
        if group in KEYS.keys() - GROUPS:
            raise UsageError(
                f"{group} of {file} must be in its group; got none. "
                f"Write it below [{KEYS[group].group}]."
            )
        check_known(f"group of {file}", group, GROUPS)
        check_type(f"{group} of {file}", table, dict)
        values |= table
    with about(str(file)):
        RunConfig(**values)
    if foreign_keys := [key for key in values if key in foreign]:
        raise UsageError(
            f"keys of {file} must be options of fedlayers {command}; "
            f"got {listing(foreign_keys)}. Remove them from the file."
        )
    return values


# --- flags -----------------------------------------------------------------------------------------------------

SEVERAL: dict[Any, str] = {
    **dict.fromkeys(("dataset", "data"), "NAME or FILE [FILE ...]"),
    **dict.fromkeys((tuple, list), "NAME [NAME ...]"),
    tuple[int, ...]: "INT [INT ...]",
    dict: "KEY=VALUE [KEY=VALUE ...]",
    bool: "[BOOL]",
}
"""Flags with none, one or several words after them, by their name or type, each with how help shows the words."""
KINDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "True or False",
}
COMMAS = ("algorithms", "arms", "metrics", "null", "federations")
"""Flags with lists of names that contain no comma.

A comma may separate the names in place of a blank."""
SWITCH = {"": True, "True": True, "False": False}
"""The value of a switch by the word after it. Without a word the switch is on."""


def parse(
    command: type[Command],
    name: str,
    words: Sequence[str],
    commands: Collection[str] = (),
) -> Command:
    """Return the command with its flags parsed. Help ends the program.

    Args:
        command: the class of the command.
        name: the command's name, for messages.
        words: the flags and their values, as they were typed.
        commands: the names of all commands.

    Raises:
        UsageError: an unknown flag, one without a value, or a value of another type.
    """
    import tyro

    asks_for_help = {"-h", "--help", "--help-all"}.intersection(words)
    field_names = {field.name for field in dataclasses.fields(command)}
    groups = GROUPS if "keys" in field_names else {}
    hidden = {*command.without, *OPTIONS}
    if asks_for_help and "--help-all" not in asks_for_help:
        hidden |= KEYS.keys() - {*USUAL}
    positional_fields = {"keys", "data"} - {command.argument}
    if issubclass(command, ConfiguredCommand):
        fields = _flags(command, positional_fields, bool(asks_for_help))
    else:
        fields = _flags(command, {"keys"}, bool(asks_for_help))
    for group, kind in groups.items():
        flags = _flags(kind, hidden, bool(asks_for_help))
        group_type: Any = dataclasses.make_dataclass(group, flags, kw_only=True)
        text = tyro.conf.arg(name=group, help=inspect.getdoc(kind) if flags else "")
        fields.append(
            (f"{group}_keys", Annotated[group_type, tyro.conf.OmitArgPrefixes, text])
        )
    lists = [*chain.from_iterable(map(_lists, (command, *groups.values())))]
    if groups:
        flags_given = [
            word.partition("=")[0] for word in words if word.startswith("--")
        ]
        check_removed([flag[2:].replace("-", "_") for flag in flags_given])
    if not asks_for_help:
        _check_flags(words, known_flags(command), name, commands)
        _check_one_value(words, known_flags(command))
        _check_unflagged(words, known_flags(command))
    words = _once(words, lists)
    output = io.StringIO()
    try:
        with redirect_stderr(output):
            parsed_flags: Any = tyro.cli(
                dataclasses.make_dataclass(command.__name__, fields, kw_only=True),
                prog=f"fedlayers {name}",
                description=inspect.getdoc(command),
                args=["--help"] if asks_for_help else words,
            )
    except SystemExit as ended:
        if ended.code:
            text = one_line(output.getvalue())
            raise UsageError(_refusal(text, words, name, command)) from None
        raise
    arguments: dict[str, Any] = vars(parsed_flags)
    for group in groups:
        arguments |= vars(arguments.pop(f"{group}_keys"))
    values = {key: value for key, value in arguments.items() if value not in (None, [])}
    if issubclass(command, ConfiguredCommand) and "data" in values:
        if "dataset" in values:
            raise UsageError(
                f"--dataset must be given once; got it and {values['data']!r}. Leave one out."
            )
        values["dataset"] = values.pop("data")
    if "config" in values:
        foreign = {*command.without} - field_names
        values = read_config(values["config"], name, foreign) | values
    if groups:
        keys = {key: values.pop(key) for key in values.keys() - field_names}
        values["keys"] = RunConfig(**keys)
    return command(**values)


def _refusal(text: str, words: Sequence[str], name: str, command: type[Command]) -> str:
    """Return the message of tyro on wrong flags in the form of this package's errors.

    >>> from fedlayers.cli.train import Tune
    >>> text = "Required options. Missing from fedlayers tune: --search NAME [NAME ...] (required). For options, run it"
    >>> print(_refusal(text, [], "tune", Tune))
    fedlayers tune must have --search NAME [NAME ...]; got none. Such as: fedlayers tune --algorithms fedavg ...
    """
    required = re.match(r"Required options\. Missing from [\w ]+: (.*)\. For", text)
    if required:
        missing_flags = [
            flag_text.strip() for flag_text in required[1].split("(required)")
        ]
        examples = re.findall(rf"fedlayers {name} .*", inspect.getdoc(command) or "")
        example = next(iter(examples), f"fedlayers {name}")
        flags_text = " and ".join(filter(None, missing_flags))
        rule = f"fedlayers {name} must have {flags_text}; got none."
        return f"{rule} Such as: {example}. For options, run fedlayers {name} --help"
    text = re.sub("^(Unrecognized options|Value error|Missing argument)\\. ", "", text)
    missing = r"Missing value for argument '(.*?)'"
    text = re.sub(missing, r"\1 must have a value; got none", text)
    text = text.replace("Unrecognized options:", "unexpected words:")
    place = _place_of(text, words, command)
    return text.replace(" For", f"{place} For", 1)


def _place_of(text: str, words: Sequence[str], command: type[Command]) -> str:
    """Return where the first unexpected word belongs, as one more sentence, or an empty text."""
    unexpected = re.search(r"unexpected words: (\S+?)\.? ", text)
    if not unexpected or unexpected[1] not in words:
        return ""
    word = unexpected[1]
    place = words.index(word)
    flag, value = ["", "", *words][place : place + 2]
    if flag == "--label-column":
        return f" Join columns by a comma: {flag} {value},{word}."
    if "--data" in known_flags(command) and "--data" not in words:
        return f" Name the data: --data {word}."
    return ""


MEANT = {
    "--learning-rate": "--lr",
    "--method": "--algorithm",
    "--output": "--out",
    "--output-dir": "--out",
    "--save": "--out",
    "--target": "--label-column",
    "--label": "--label-column",
    "--outcome": "--label-column",
    "--client": "--client-column",
    "--site": "--client-column",
    "--hospital": "--client-column",
    "--patient-column": "--group-column",
    "--data": "--dataset",
    "--csv-file": "--dataset",
    "--file": "--dataset",
    "--table": "--dataset",
    "--input": "--dataset",
    "--gpu": "--device",
    "--cuda": "--device",
    "--local-epochs": "--epochs",
    "--num-rounds": "--rounds",
    "--n-rounds": "--rounds",
    "--num-clients": "--clients",
    "--n-clients": "--clients",
    "--random-state": "--seed",
    "--n-seeds": "--seeds",
    "--jobs": "--workers",
    "--n-jobs": "--workers",
    "--threads": "--workers",
    "--drop": "--exclude-columns",
    "--ignore": "--exclude-columns",
    "--fillna": "--impute",
    "--fill": "--impute",
    "--metric": "--score",
    "--early-stopping": "--patience",
    "--ways": "--arms",
    "--client-fraction": "--participation",
    "--fraction": "--participation",
    "--fraction-fit": "--participation",
    "--sample-rate": "--participation",
    "--local-steps": "--epochs",
}
"""Options by the words of other tools. A word counts where the command has the option."""


def known_flags(command: type[Command]) -> list[str]:
    """Return all flags of a command, also those that ``--help`` leaves out."""
    field_names = [field.name for field in dataclasses.fields(command)]
    names = [
        name for name in field_names if name not in ("keys", "data", command.argument)
    ]
    if "data" in field_names and not issubclass(command, ConfiguredCommand):
        names.append("data")
    if "keys" in field_names:
        names += KEYS.keys() - {*command.without, *OPTIONS}
    return [flag_of(name) for name in dict.fromkeys(names)]


def flag_of(name: str) -> str:
    """Return the flag of a dataclass's field, such as ``--data-root`` of ``data_root``.

    >>> flag_of("batch_size")
    '--batch-size'
    """
    return "--" + name.replace("_", "-")


def _check_flags(
    words: Sequence[str],
    known_flags: Collection[str],
    name: str,
    commands: Collection[str],
) -> None:
    """Refuse a flag that the command does not have, and name what was meant.

    Raises:
        UsageError: there is such a flag. The message has the nearest one, or how an option is written.
    """
    for place, word in enumerate(words):
        flag, equals, value = word.partition("=")
        flag = flag.replace("_", "-")
        if re.fullmatch("-[a-zA-Z]\\w*", word):
            candidates = [
                candidate for candidate in known_flags if candidate[2] == word[1]
            ]
            candidates_text = listing(sorted(candidates), 4) or "--help"
            raise UsageError(
                f"an option must begin with two hyphens; got {word}. Write such as {candidates_text}."
            )
        meant_flag = flag_of(flag)
        is_first = not any(
            earlier_word.startswith("--") for earlier_word in words[:place]
        )
        if equals and is_first and meant_flag in known_flags:
            raise UsageError(
                f"an option must begin with two hyphens; got {word!r}. Write {meant_flag} {value}."
            )
        if not word.startswith("--") or flag in known_flags:
            continue
        if not equals:
            value = next(iter(words[place + 1 :]), "VALUE")
        nearest_flag = MEANT.get(flag, "")
        if nearest_flag not in known_flags:
            nearest_name = nearest(
                flag[2:], [candidate[2:] for candidate in known_flags]
            )
            nearest_flag = ""
            if nearest_name:
                nearest_flag = f"--{nearest_name}"
        option = flag[2:].replace("-", "_")
        option_texts = _as_option(option, value, known_flags)
        hint = "."
        if nearest_flag:
            hint = f": did you mean {nearest_flag}?"
        if option_texts and MEANT.get(flag) not in known_flags:
            ways_text = " or ".join(option_texts)
            hint = f": write {ways_text}."
        elif flag[2:] in commands:
            hint = f": it is a command, fedlayers {flag[2:]}."
        elif flag == "--version":
            hint = ": write fedlayers --version."
        elif flag in OF_SEVERAL:
            hint = f": fedlayers {OF_SEVERAL[flag]} takes it."
            if nearest_flag:
                hint = f": did you mean {nearest_flag}? Or {hint[2:]}"
        elif option in KEYS and not nearest_flag:
            hint = ", which a new run takes: fedlayers run."
        raise UsageError(
            f"unknown option {flag}{hint} For options, run fedlayers {name} --help"
        )


NAMED = {
    "algorithms": ("--algorithms", "--algorithm"),
    "metrics": ("--metrics",),
    "models": ("--model",),
}
"""The flags that take names, by the kind of the names."""


STORED = Path(__file__).with_name("lists.json")
"""The texts of all listings. A test compares them with what they describe."""


@cache
def stored_lists() -> dict[str, dict[str, dict[str, str]]]:
    """Return the lists of ``fedlayers list``, by kind, family and name, as ``make lists`` wrote them."""
    lists: dict[str, dict[str, dict[str, str]]] = json.loads(STORED.read_bytes())
    return lists


@cache
def _listed(kind: str) -> frozenset[str]:
    """Return the names of algorithms, metrics or models."""
    return frozenset(chain.from_iterable(stored_lists()[kind].values()))


def _check_unflagged(words: Sequence[str], known: Collection[str]) -> None:
    """Refuse names of algorithms, metrics or models that stand without their flag.

    Raises:
        UsageError: there is such a name. The message has the flag.
    """
    unflagged_words = takewhile(lambda word: not word.startswith("--"), words)
    bare_names = ",".join(unflagged_words).split(",")
    for kind, flags in NAMED.items():
        flag = next(filter(known.__contains__, flags), "")
        names = [word for word in bare_names if word in _listed(kind)]
        names = [word for word in names if not Path(word).exists()]
        if flag and names:
            names_text = ",".join(names)
            advice = f"Write {flag} {names_text}."
            if len(names) > 1 and flag == "--algorithm":
                advice = f"Write fedlayers compare --algorithms {names_text}."
            raise UsageError(
                f"words without an option must be data; got {names[0]!r}, one of the {kind}. {advice}"
            )


ONE_VALUE = {
    "--seed": ("compare", "--seeds VALUES", r"-?[0-9]+"),
    "--lr": ("tune", "--search 'lr=VALUES'", r"[0-9.e-]+"),
    "--algorithm": ("compare", "--algorithms VALUES", ""),
}
"""Flags of one value, each with the command and the option that take several, and how a value looks, unless it is a
name."""
OF_SEVERAL = {"--seeds": "compare", "--algorithms": "compare"}
"""Flags that other commands have, each with the command that a message names."""


def _check_one_value(words: Sequence[str], flags: Collection[str]) -> None:
    """Refuse several values of a flag that takes one, and name the flag that takes them.

    Raises:
        UsageError: there are several values. The message names both flags.
    """
    for place, word in enumerate(words):
        flag, _, value = word.partition("=")
        if flag not in ONE_VALUE or flag not in flags:
            continue
        command, plural_flag, form = ONE_VALUE[flag]
        values = [value] if value else [*words[place + 1 : place + 2]]
        later_words = words[place + 2 - bool(value) :]
        form = form or "|".join(_listed("algorithms"))
        values += takewhile(re.compile(form).fullmatch, later_words)
        values = ",".join(values).split(",")
        if len(values) < 2:
            continue
        advice = plural_flag.replace("VALUES", ",".join(values))
        if plural_flag.split()[0] not in flags:
            advice = f"fedlayers {command} {advice}"
        raise UsageError(
            f"{flag} must be one value; got {len(values)}. Several are written {advice}."
        )


def _as_option(option: str, value: str, flags: Collection[str]) -> list[str]:
    """Return how an option of an algorithm or of a model is written, for a message.

    Args:
        option: the option's name.
        value: its value, as text.
        flags: the flags of the command.

    Returns:
        A text for algorithms and one for models that have the option, with their names.
        The list is empty if none has it, or the command takes no model.
    """
    takes_several = "--algorithms" in flags
    option_texts = []
    for kind, flag in (("algorithms", "--option"), ("models", "--model-option")):
        texts = dict(
            chain.from_iterable(map(dict.items, stored_lists()[kind].values()))
        )
        option_keys = [
            k for k, text in texts.items() if re.search(rf"\b{option}=", text)
        ]
        if not option_keys or (
            kind == "algorithms" and not takes_several and "--algorithm" not in flags
        ):
            continue
        key = option
        if takes_several and kind == "algorithms":
            key = f"{option_keys[0]}.{option}"
        option_texts.append(
            f"{flag} {key}={value}, an option of {listing(option_keys, 3)}"
        )
    if "--model" in flags:
        return option_texts
    return []


def _once(words: Sequence[str], lists: Collection[str]) -> list[str]:
    """Return the words of a command with each flag once. A list that is given again goes on.

    >>> _once(["--names", "a", "--seed", "1", "t.csv", "--names=-b"], ["--names"])
    ['--names', 'a', '\\x00-b', '--seed', '1', 't.csv']

    Args:
        lists: flags with several words.

    Raises:
        UsageError: a flag of one value is given twice.
    """
    flag_words: list[str] = []
    words_by_flag, positions = [flag_words], {}
    for word in words:
        flag, equals, value = word.partition("=")
        flag = flag.replace("_", "-")
        if not word.startswith("--"):
            flag_words.append(word)
        elif flag in lists:
            if flag not in positions:
                positions[flag] = [flag]
                words_by_flag.append(positions[flag])
            flag_words = positions[flag]
            if equals:
                flag_words.append(AFTER_EQUALS + value)
                flag_words = words_by_flag[0]
        elif flag in positions:
            advice = "Leave one out."
            if flag in ONE_VALUE:
                command, plural_flag, _ = ONE_VALUE[flag]
                advice += f" Several are written fedlayers {command} {plural_flag}."
            raise UsageError(f"{flag} must be given once; got it twice. {advice}")
        else:
            flag_words = [word]
            words_by_flag.append(flag_words)
            if flag[2:].replace("-", "_") not in OPTIONS.values():
                positions[flag] = flag_words
    return [*chain.from_iterable(words_by_flag)]


def one_line(box: str) -> str:
    """Return the parser's message in one line, without its frame.

    >>> print(one_line('''
    ... ╭─ Unrecognized options ──────────────────────╮
    ... │ Unrecognized options: --rond                │
    ... │ ─────────────────────────────────────────── │
    ... │ Perhaps you meant:                          │
    ... │     --rounds INT                            │
    ... ╰─────────────────────────────────────────────╯'''))
    Unrecognized options: --rond. Perhaps you meant: --rounds INT
    >>> print(one_line("Error parsing --seed: must be so. Argument helptext: INT. For full helptext, see a --help"))
    --seed: must be so. For options, see a --help
    """
    rows = [row.strip(" │") for row in box.splitlines() if row[:1] not in ("╭", "╰")]
    text = " ".join(" ".join(rows).split()).replace("Error parsing ", "")
    text = re.sub(r" Argument helptext:.*(?= For)| Expected 1 values\.", "", text)
    text = text.replace("full helptext", "options")
    return re.sub(r"[ .:]*(─+|-{3,})", ".", text)


def _flags(kind: type, hidden: Collection[str], helps: bool) -> list[Any]:
    """Return a triple (name, annotated type, field) for each flag of a dataclass.

    tyro parses the dataclass that :func:`dataclasses.make_dataclass` makes of them. A
    flag that is not given is None, or an empty list for those of :data:`OPTIONS`. A
    field without a default is a required flag.

    Args:
        kind: the dataclass whose fields become flags.
        hidden: names of fields that get no flag.
        helps: whether help is asked for. Only then are the fields' docstrings read.
    """
    from tyro import conf
    from tyro.constructors import PrimitiveConstructorSpec

    defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    hints, texts, flags = get_type_hints(kind), descriptions(kind) if helps else {}, []
    names = chain.from_iterable(map(inspect.get_annotations, kind.__mro__))
    for name in dict.fromkeys(names):
        if name in hidden or name not in defaults:
            continue
        hint, default = hints[name], defaults[name]
        value_type = hint
        if isinstance(hint, UnionType):
            value_type = get_args(hint)[0]
        list_kind = _several(name, value_type)
        metavar = list_kind or value_type.__name__.upper()
        nargs: Any = "*" if list_kind else 1
        if hint is bool:
            metavar, nargs = "", 0
        parse_words = partial(_value, value_type, commas=name in COMMAS)
        spec = PrimitiveConstructorSpec(
            nargs, metavar, parse_words, lambda value: True, lambda value: [str(value)]
        )
        flag: Any = Annotated[object, spec]
        dataclass_field: Any = dataclasses.field(default=None)
        if name in OPTIONS.values():
            flag, metavar = Annotated[list, conf.UseAppendAction], "KEY=VALUE"
            dataclass_field = dataclasses.field(default_factory=list)
        elif default is dataclasses.MISSING:
            dataclass_field, default = dataclasses.field(), ""
        if name == getattr(kind, "argument", ""):
            flag = Annotated[flag, conf.Positional]
            metavar = f"[{name.upper()}]" if default is None else name.upper()
        shown_default = " ".join(map(str, as_list(name, default, empty=True)))
        default_text = (
            "" if shown_default in ("", "False") else f"(default: {shown_default})"
        )
        flag_settings = conf.arg(
            help=texts.get(name, ""), metavar=metavar, help_behavior_hint=default_text
        )
        flags.append((name, Annotated[flag, flag_settings], dataclass_field))
    return flags


def _several(name: str, kind: object) -> str | None:
    """Return how help shows the words after a flag of a type, or None for one word."""
    by_type = SEVERAL.get(kind) or SEVERAL.get(get_origin(kind) or kind)
    return SEVERAL.get(name, by_type)


def _lists(kind: type) -> list[str]:
    """Return the flags of a dataclass that take several words."""
    hints = get_type_hints(kind)
    kinds_of_list = {
        name: _several(name, get_args(hint)[0] if isinstance(hint, UnionType) else hint)
        for name, hint in hints.items()
    }
    return [
        flag_of(name)
        for name, metavar in kinds_of_list.items()
        if metavar and metavar != SEVERAL[bool] and name not in OPTIONS.values()
    ]


def _value(kind: Any, words: Sequence[str], *, commas: bool = False) -> Any:
    """Return the value of a flag from the words after it.

    Args:
        kind: the type of the value.
        words: the words, as they were typed.
        commas: whether commas divide words, too.

    Raises:
        ValueError: they are no value of its type.
    """
    words = [word.removeprefix(AFTER_EQUALS) for word in words]
    if get_origin(kind) is dict:
        return texts("csv", words)
    if kind == tuple[int, ...]:
        numbers = ",".join(words).split(",")
        return tuple(_value(int, [number]) for number in numbers)
    if commas:
        words = ",".join(words).split(",")
    if get_origin(kind):
        return get_origin(kind)(words)
    text = BETWEEN.join(words)
    if not text and kind not in KINDS:  # as of a variable of the shell without value
        raise ValueError("must be a name, a folder or files; got none")
    try:
        if kind is bool:
            return SWITCH[text]
        return kind(text)
    except (ValueError, KeyError):
        raise ValueError(f"must be {KINDS[kind]}; got {text!r}") from None


def descriptions(kind: type) -> dict[str, str]:
    """Return the docstring beneath each field of a dataclass, the help of its flag."""
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):
        texts |= _descriptions(base.__module__).get(base.__name__, {})
    return texts


@cache
def _descriptions(module: str) -> dict[str, dict[str, str]]:
    """Return the docstrings beneath fields in a module, {class: {field: text}}."""
    descriptions: dict[str, dict[str, str]] = {}
    for kind in ast.parse(inspect.getsource(sys.modules[module])).body:
        if isinstance(kind, ast.ClassDef):
            descriptions[kind.name] = {
                ast.unparse(field.target): " ".join(str(text.value.value).split())
                for field, text in pairwise(kind.body)
                if isinstance(field, ast.AnnAssign)
                and isinstance(text, ast.Expr)
                and isinstance(text.value, ast.Constant)
            }
    return descriptions


ARGUMENTS = (
    *("allow_changed_code", "allow_code", "backend", "baseline", "by_position"),
    *("client", "layers", "metrics", "out", "resamples", "round", "seeds"),
)
"""Arguments of Python that are flags and no keys."""
NAMES = {**OPTIONS, "batch": "measure_batch", "ids": "id_columns", "which": "model"}
FLAGS = {name: flag_of(NAMES.get(name, name)) for name in (*KEYS, *ARGUMENTS, *NAMES)}
"""The flags of arguments of Python, for messages."""


# --- KEY=VALUE -------------------------------------------------------------------------------------------------


def pairs(flag: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Parse ``key=value`` arguments, of which the last one counts.

    A value is JSON if it parses as JSON. Values of JSON with commas between them are a
    list. Any other value is text. ``flag`` is the flag's name, for the message.

    >>> pairs("option", ["a=1", "b=true", "c=64,32", "d=x", "e="])
    {'a': 1, 'b': True, 'c': [64, 32], 'd': 'x', 'e': ''}

    Raises:
        UsageError: an argument without ``=``.
    """
    return {key: _parsed(value) for key, value in texts(flag, arguments).items()}


def texts(flag: str, arguments: Sequence[str]) -> dict[str, str]:
    """Parse ``key=value`` arguments, with values as text. Arguments and errors are those of :func:`pairs`."""
    values = {}
    for item in arguments:
        key, equals, value = item.partition("=")
        if not equals or not key:
            name = flag.replace("_", "-")
            raise UsageError(f"--{name} must be KEY=VALUE; got {item!r}.")
        values[key] = value
    return values


def _parsed(text: str) -> Any:
    for candidate in (text, f"[{text}]" if "," in text else text):
        try:
            return json.loads(candidate)
        except json.JSONDecodeError:
            continue
    return text


def by_name(
    arguments: Sequence[str], kind: str, names: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Parse ``--option NAME.KEY=VALUE`` arguments. Return {name: {key: value}}.

    Args:
        arguments: texts ``NAME.KEY=VALUE``.
        kind: what a name stands for in messages, such as ``algorithm``.
        names: the allowed names.

    Raises:
        UsageError: an argument begins with none of ``names``, or has no ``=``.
    """
    options: dict[str, dict[str, Any]] = {}
    for key, value in pairs("option", arguments).items():
        name, _, option = key.rpartition(".")
        if not name:
            raise UsageError(
                f"--option must name its {kind}; got {key!r}. Write --option {kind.upper()}.{key}=..."
            )
        check_known(f"{kind} of --{kind}s", name, names)
        options.setdefault(name, {})[option] = value
    return options


# --- paths -----------------------------------------------------------------------------------------------------


def check_file(path: Path, such: str, begins: str, flag: str = "--out") -> None:
    """Refuse, before any work, an output file in a wrong folder, or one that has other contents than expected.

    If an earlier file will be replaced, a warning says so. Permissions are not checked.

    Args:
        path: the output file.
        such: what the file contains, for the message.
        begins: a regular expression of such a file's beginning.
        flag: the flag with which the user named the file.

    Raises:
        UsageError: the path is a folder or has other contents, or its folder is a run, a
            file or the root of all folders.
    """
    check_folder(path.parent)
    if not path.exists():
        return
    text = "a folder"
    if path.is_file():
        text = path.read_text("utf-8", "replace")
    if not re.match(rf"{begins}|\Z", text):
        raise UsageError(
            f"{flag} must be a new file or {such}; got {path}. Choose another name."
        )
    warn(f"{path} will be replaced")
