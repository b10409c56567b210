"""The base of all commands, and the flags that a dataclass stands for: its fields, with their docstrings as help."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
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
from fl_core.data.columns import BETWEEN
from fl_core.errors import UsageError, about, check_known, check_type, listing, warn
from fl_core.storage import check_folder, read_toml

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
LARGEST = 2**20
"""Bytes of a configuration file at most."""


@dataclass_transform(kw_only_default=True, frozen_default=True)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """A command. Its class is a frozen dataclass. Its fields are its flags, and its docstring is its help."""

    debug: bool = False
    """Show the traceback of an error."""

    argument: ClassVar[str] = ""
    """The field that is given without a flag."""
    without: ClassVar[Collection[str]] = ()
    """The keys of the configuration that the command has no flag for, if it takes one."""

    def __init_subclass__(cls) -> None:
        dataclasses.dataclass(frozen=True, kw_only=True)(cls)

    def main(self, line: str) -> None:
        """Run the command. ``line`` is the command as it was typed.

        Raises:
            UsageError, RunError: with the reason.
        """
        raise NotImplementedError

    def printed(self) -> str | None:
        """Return the text that the command prints instead of its work; None = it works."""
        return None

    def interrupted(self) -> str:
        """Return what to print after Ctrl-C: how to continue the work."""
        return "nothing was written"


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

    def printed(self) -> str | None:
        """Return the configuration as TOML if it was asked for: the keys that differ from their defaults, or none."""
        if not self.print_config:
            return None
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
    own = [name for kind in command.__mro__ for name in inspect.get_annotations(kind)]
    fields = _flags(command, dict.fromkeys(own), defaults, helps)
    groups = GROUPS if "keys" in own else {}
    for group, kind in groups.items():
        hidden = {*command.without, *OPTIONS}
        names = [
            name for name in KEYS if name not in hidden and (name in USUAL or not usual)
        ]
        flags = _flags(kind, names, defaults, helps)
        made: Any = dataclasses.make_dataclass(group, flags, kw_only=True)
        text = tyro.conf.arg(name=group, help=inspect.getdoc(kind) if flags else "")
        fields.append(
            (f"{group}_keys", Annotated[made, tyro.conf.OmitArgPrefixes, text])
        )
    form = dataclasses.make_dataclass(command.__name__, fields, kw_only=True)
    markers = (tyro.conf.DisallowNone, tyro.conf.FlagCreatePairsOff)
    parsed: Any = tyro.cli(
        form,
        prog=f"fedlayers {name}",
        description=inspect.getdoc(command),
        args=words,
        config=markers,
    )
    values: dict[str, Any] = dict(vars(parsed))
    keys: dict[str, Any] = {}
    for group in groups:
        keys |= vars(values.pop(f"{group}_keys"))
    if groups:
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
        default, hint = defaults.get(name, known[name]), hints[name]
        metavar = None
        if name in OPTIONS.values() and not helps:
            hint = Annotated[hint, conf.UseAppendAction]
        elif hint is not bool:
            hint = Annotated[object, _words(name, hint)]
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


NUMBERS: dict[type, str] = {int: "a whole number", float: "a number"}
SWITCH = {(): True, ("True",): True, ("False",): False}
"""A switch means yes alone, and yes or no by the word after it."""


def _words(name: str, hint: Any) -> Any:
    """Return how tyro reads the words after a flag, by the type of its field."""
    from tyro.constructors import PrimitiveConstructorSpec

    kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    kind = next(each for each in kinds if each is not NoneType)
    nargs: Any = "*"
    if name in ("dataset", "data"):
        metavar = "NAME or FILE [FILE ...]"
    elif kind is bool:
        metavar = "[BOOL]"
    elif get_origin(kind):
        metavar = "KEY=VALUE" if name in OPTIONS.values() else "NAME [NAME ...]"
    else:
        nargs, metavar = 1, kind.__name__.upper()

    def read(words: list[str]) -> Any:
        if kind is bool:
            if tuple(words) not in SWITCH:
                raise ValueError(f"must be True or False; got {' '.join(words)!r}")
            return SWITCH[tuple(words)]
        if get_origin(kind):
            return get_origin(kind)(words)
        if not words:
            raise ValueError("must be a name, a folder or files; got none")
        text = BETWEEN.join(words)
        try:
            return kind(text)
        except ValueError:
            raise ValueError(f"must be {NUMBERS[kind]}; got {text!r}") from None

    def shown(value: Any) -> list[str]:
        values = value if isinstance(value, list | tuple) else [value]
        return [str(each) for each in values if each is not None]

    return PrimitiveConstructorSpec(nargs, metavar, read, lambda value: True, shown)


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


def check_file(path: Path, such: str, begins: str) -> None:
    """Refuse, before any work, an output file that cannot be written, or that has other contents than earlier ones.

    An earlier one is named, since it is replaced.

    Args:
        such: the contents, for the message. begins: a regular expression of how a file of them begins.

    Raises:
        UsageError: names the path.
    """
    check_folder(path.parent)
    if not path.exists():
        return
    own = path.is_file() and path.stat().st_size == 0
    if path.is_file() and not own:
        with path.open(encoding="utf-8", errors="replace") as file:
            own = re.match(begins, file.read(10_000)) is not None
    if not own:
        raise UsageError(
            f"--out must be a new file or {such}; got {path}. Choose another name."
        )
    warn(f"{path} is replaced")
