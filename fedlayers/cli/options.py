"""The base of all commands, and the flags that a dataclass stands for: its fields, with their docstrings as help."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, ClassVar, Union, get_args, get_origin, get_type_hints

from fl_core.bounds import check_type
from fl_core.config import GROUPS, KEYS, RunConfig
from fl_core.data.columns import BETWEEN
from fl_core.errors import UsageError, about, check_known, listing
from fl_core.storage import read_toml

USUAL = (
    *("dataset", "client_column", "label_column", "model", "algorithm", "plan"),
    *("rounds", "epochs", "batch_size", "lr", "seed", "workers", "device"),
)
"""Keys of the configuration whose flags ``--help`` shows; ``--help-all`` shows all."""
OPTIONS = {
    "options": "option",
    "model_options": "model_option",
    "loss_options": "loss_option",
}
"""The keys of the configuration that are options, each with the flag of one option. It is repeatable."""
DEFAULTS = (
    "Options that you omit use the dataset's defaults: see fedlayers list datasets."
)
LARGEST = 2**20
"""Bytes of a configuration file at most."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """A command. Its fields are its flags, and its docstring is its help."""

    debug: bool = False
    """Show the traceback of an error."""

    argument: ClassVar[str] = ""
    """The field that is given without a flag."""
    without: ClassVar[Collection[str]] = ()
    """The keys of the configuration that the command has no flag for, if it takes one."""

    def main(self, line: str) -> None:
        """Run the command. ``line`` is the command as it was typed.

        Raises:
            UsageError, RunError: with the reason.
        """
        raise NotImplementedError

    def printed(self) -> str:
        """Return the text that the command prints instead of its work; empty = it works."""
        return ""

    def interrupted(self) -> str:
        """Return what to print after Ctrl-C: how to continue the work."""
        return "nothing was written"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConfiguredCommand(Command):
    """A command that takes a run's configuration."""

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

    def asked_config(self) -> RunConfig:
        """Return the configuration of the command line, with names and numbers checked.

        Raises:
            UsageError: a value is wrong, or an option is not KEY=VALUE.
        """
        from fedlayers import catalogue

        given = {key: pairs(flag, getattr(self, flag)) for key, flag in OPTIONS.items()}
        given = {k: v for k, v in given.items() if v and k not in self.without}
        own = {k: v for k, v in vars(self).items() if k in KEYS and v is not None}
        config = self.keys.with_keys(**given, **own)
        catalogue.check_names(config)
        catalogue.check_deciding(config.federation.rule)
        return config

    @classmethod
    def readable(cls) -> set[str]:
        """Return the keys of the configuration that a file may give to the command."""
        own = {field.name for field in dataclasses.fields(cls)}
        return {key for key in KEYS if key not in cls.without or key in own}

    def printed(self) -> str:
        """Return the configuration as TOML if it was asked for: the keys that differ from their defaults."""
        if not self.print_config:
            return ""
        import tomli_w

        config = self.asked_config()
        groups: dict[str, dict[str, Any]] = {}
        for name, key in KEYS.items():
            value = config.value(name)
            if name in self.readable() and value != key.default:
                groups.setdefault(key.group, {})[name] = value
        return tomli_w.dumps(groups)


def read_config(file: Path, command: str, keys: Collection[str]) -> dict[str, Any]:
    """Return the values of a configuration's file, by the fields and keys that they are the defaults of.

    Args:
        command: the name of the command.
        keys: those that it has flags for.

    Raises:
        UsageError: the file is missing, no TOML, or has an unknown group or key, a wrong value, or a key that the
            command has no flag for.
    """
    if not file.is_file():
        raise UsageError(
            f"--config must name a file; got {file}. Write one with --print-config."
        )
    values: dict[str, Any] = {}
    for group, given in read_toml(file, LARGEST).items():
        check_known(f"group of {file}", group, GROUPS)
        check_type(f"{group} of {file}", given, dict)
        values |= given
    with about(str(file)):
        RunConfig(**values)
    if other := [key for key in values if key not in keys]:
        raise UsageError(
            f"keys of {file} must be options of fedlayers {command}; got {listing(other)}. Remove them from the file."
        )
    for key in OPTIONS.keys() & values.keys():
        given = values.pop(key)
        values[OPTIONS[key]] = tuple(f"{k}={json.dumps(v)}" for k, v in given.items())
    return values


# --- flags -----------------------------------------------------------------------------------------------------


def parse(
    command: type[Command],
    words: Sequence[str],
    name: str,
    defaults: Mapping[str, Any],
    usual: bool = False,
) -> Command:
    """Return the command with its flags parsed. Help ends the program.

    Args:
        defaults: values of fields and keys in place of their own defaults.
        usual: show only the usual flags of the configuration.
    """
    import tyro

    helps = "--help" in words
    ordered = [
        name for kind in command.__mro__ for name in inspect.get_annotations(kind)
    ]
    fields = _flags(command, dict.fromkeys(ordered), defaults, helps)
    if "keys" in ordered:
        groups: dict[str, Any] = {}
        for group, kind in GROUPS.items():
            names = [
                name
                for name, key in KEYS.items()
                if key.group == group
                and name not in (*command.without, *OPTIONS)
                and (name in USUAL or not usual)
            ]
            made: Any = dataclasses.make_dataclass(
                group, _flags(kind, names, defaults, helps), kw_only=True
            )
            titled = tyro.conf.arg(
                help=DEFAULTS if group in ("data", "training") else ""
            )
            if names:
                groups[group] = Annotated[made, tyro.conf.OmitArgPrefixes, titled]
        form: Any = dataclasses.make_dataclass("Keys", groups.items())
        fields.append(("keys", Annotated[form, tyro.conf.arg(name="", help="")]))
    form = dataclasses.make_dataclass(command.__name__, fields, kw_only=True)
    markers = (tyro.conf.DisallowNone, tyro.conf.FlagCreatePairsOff)
    values = vars(
        tyro.cli(
            form,
            prog=f"fedlayers {name}",
            description=inspect.getdoc(command),
            args=words,
            config=markers,
        )
    )
    if "keys" in values:
        keys: dict[str, Any] = {}
        for each in vars(values["keys"]).values():
            keys |= vars(each)
        values["keys"] = RunConfig(**keys)
    return command(**values)


def _flags(
    kind: type, names: Collection[str], defaults: Mapping[str, Any], helps: bool
) -> list[Any]:
    """Return fields of a dataclass as tyro reads them, with their docstrings as help.

    Args:
        defaults: values in place of the fields' own defaults.
        helps: whether help is asked for, where tyro would check a tuple by a slow import.
    """
    from tyro import conf

    known = {field.name: field.default for field in dataclasses.fields(kind)}
    hints, texts, flags = get_type_hints(kind), descriptions(kind), []
    for name in [name for name in names if name in known and name != "keys"]:
        default = defaults.get(name, known[name])
        hint: Any = hints[name]
        parts = (hint, *get_args(hint))
        container: Any = {list, tuple}.intersection(map(get_origin, parts))
        metavar = None
        if name in ("dataset", "data"):
            hint = Annotated[object, _words(_files, "NAME or FILE [FILE ...]")]
        elif name in OPTIONS.values() and not helps:
            hint = Annotated[hint, conf.UseAppendAction]
        elif container:
            shown = "KEY=VALUE" if name in OPTIONS.values() else "NAME [NAME ...]"
            hint = Annotated[object, _words(container.pop(), shown)]
        elif hint == bool | None:
            read = _words(_switch, "[BOOL]")
            hint = Annotated[object, read, conf.FlagConversionOff]
        elif isinstance(hint, UnionType):
            hint = Union[None, *get_args(hint)]  # tyro finds a default None at once
        if name == getattr(kind, "argument", ""):
            hint = Annotated[hint, conf.Positional]
            metavar = f"[{name.upper()}]" if default is None else name.upper()
        text = conf.arg(
            help=texts.get(name, ""), metavar=metavar, help_behavior_hint=_default
        )
        flags.append((name, Annotated[hint, text], dataclasses.field(default=default)))
    return flags


def _default(value: str) -> str:
    """Return a default as help shows it; empty if the help text has it already."""
    return "" if value in ("None", "False", "", "''") else f"(default: {value})"


def _words(read: Callable[[list[str]], Any], metavar: str) -> Any:
    """Return how tyro reads a flag of any number of words."""
    from tyro.constructors import PrimitiveConstructorSpec

    def shown(value: Any) -> list[str]:
        if value is None:
            return []
        return list(map(str, value if isinstance(value, list | tuple) else [value]))

    return PrimitiveConstructorSpec("*", metavar, read, lambda value: True, shown)


def _switch(words: list[str]) -> bool:
    """Read a flag that means yes alone, and yes or no by the word after it."""
    if words not in ([], ["True"], ["False"]):
        raise ValueError(f"takes True or False, not {' '.join(words)!r}")
    return words != ["False"]


def _files(words: list[str]) -> str:
    """Read a dataset's name, or files, which are joined to one name."""
    if not words:
        raise ValueError("takes a name, a folder, or files, not nothing")
    return BETWEEN.join(words)


def descriptions(kind: type) -> dict[str, str]:
    """Return the docstring beneath each field of a dataclass, the help of its flag."""
    texts = {}
    for base in reversed(kind.__mro__[:-1]):
        body = _classes(base.__module__).get(base.__name__, [])
        for field, text in pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                words = str(ast.literal_eval(text.value)).split()
                texts[ast.unparse(field.target)] = " ".join(words)
    return texts


@cache
def _classes(module: str) -> dict[str, list[ast.stmt]]:
    """Return the statements of a module's classes."""
    source = Path(str(sys.modules[module].__file__)).read_text("utf-8")
    nodes = ast.parse(source).body
    return {node.name: node.body for node in nodes if isinstance(node, ast.ClassDef)}


# --- KEY=VALUE -------------------------------------------------------------------------------------------------


def pairs(flag: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Parse ``key=value`` arguments, of which the last one counts.

    A value is JSON if it parses as JSON, and a list if it has commas.

    Raises:
        UsageError: an argument without ``=``.
    """
    return {key: _value(value) for key, value in texts(flag, arguments).items()}


def texts(flag: str, arguments: Sequence[str]) -> dict[str, str]:
    """Parse ``key=value`` arguments, with values as text. For errors see :func:`pairs`."""
    values = {}
    for item in arguments:
        key, equals, value = item.partition("=")
        if not equals or not key:
            name = flag.replace("_", "-")
            raise UsageError(f"--{name} must be KEY=VALUE; got {item!r}.")
        values[key] = value
    return values


def _value(text: str) -> Any:
    for candidate in (text, f"[{text}]" if "," in text else text):
        try:
            return json.loads(candidate)
        except json.JSONDecodeError:
            continue
    return text


def by_name(
    arguments: Sequence[str], kind: str, names: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Parse ``--option NAME.KEY=VALUE`` arguments, by name.

    Raises:
        UsageError: a key that begins with none of ``names``.
    """
    options: dict[str, dict[str, Any]] = {}
    for key, value in pairs("option", arguments).items():
        own = [name for name in names if key.startswith(f"{name}.")]
        name = own[0] if own else key.partition(".")[0]
        if name == key:
            raise UsageError(
                f"--option must name its {kind}; got {key!r}. Write --option {kind.upper()}.{key}=..."
            )
        check_known(f"{kind} of --{kind}s", name, names)
        options.setdefault(name, {})[key.removeprefix(f"{name}.")] = value
    return options


# --- paths -----------------------------------------------------------------------------------------------------


def check_file(path: Path, such: str, is_earlier: Callable[[Path], bool]) -> None:
    """Refuse, before any work, an output file that cannot be written, or that has other contents than earlier ones.

    Args:
        such: the contents, for the message.
        is_earlier: whether an existing file has such contents.

    Raises:
        UsageError: names the path.
    """
    if not path.parent.is_dir():
        raise UsageError(
            f"--out {path} must be in an existing folder; got {path.parent}. Make it first."
        )
    _check_no_run(path, path.parent)
    if path.is_dir() or (path.exists() and not is_earlier(path)):
        raise UsageError(
            f"--out must be a new file or {such}; got {path}. Choose another name."
        )


def check_folder(path: Path) -> None:
    """Refuse, before any work, an output folder that cannot be made or that is a run.

    Raises:
        UsageError: names the path.
    """
    if path.exists() and not path.is_dir():
        raise UsageError(
            f"--out must be a folder; got {path}, which is a file. Choose another."
        )
    _check_no_run(path, path)


def _check_no_run(path: Path, folder: Path) -> None:
    if (folder / "config.json").exists() and (folder / "lock").exists():
        raise UsageError(
            f"--out must not be a run directory; got {path}, in {folder}. Choose another folder."
        )
