"""The base class of all commands, and the flags they share: a run's configuration, KEY=VALUE, and output paths."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import sys
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from tyro.conf import (
    DisallowNone,
    FlagConversionOff,
    FlagCreatePairsOff,
    OmitArgPrefixes,
    Positional,
    UseAppendAction,
    arg,
)
from tyro.constructors import PrimitiveConstructorSpec

from fl_core.config import GROUPS, KEYS, RunConfig
from fl_core.data.columns import BETWEEN
from fl_core.errors import RunError, UsageError, check_known, warn

OTHERWISE = ("options", "model_options", "loss_options")
"""Keys of the configuration without a flag of their own name."""
USUAL = (
    *("dataset", "client_column", "label_column", "model", "algorithm", "plan"),
    *("rounds", "epochs", "batch_size", "lr", "seed", "workers", "device"),
)
"""Keys of the configuration whose flags ``--help`` shows; ``--help-all`` shows all."""
DEFAULTS = (
    "Options that you omit use the dataset's defaults: see fedlayers list datasets."
)
ABOUT = {"data": DEFAULTS, "training": DEFAULTS}
_WITHOUT: dict[Any, Collection[str]] = {}
"""The keys that a command has no flag for, by the mark of its configuration."""
MARKERS = (DisallowNone, FlagCreatePairsOff)


def hint(default: str) -> str:
    """Return a flag's default as help shows it; empty if the help text has it already."""
    return "" if default in ("None", "False", "", "''") else f"(default: {default})"


def option(help: str, metavar: str | None = None, name: str | None = None) -> Any:
    """Make a flag with its help text."""
    return arg(help=help, metavar=metavar, name=name, help_behavior_hint=hint)


Set = Annotated[
    UseAppendAction[tuple[str, ...]],
    option(
        "An option of the algorithm, such as --option mu=0.1. Repeatable.",
        "KEY=VALUE",
        "option",
    ),
]
SetEach = Annotated[
    UseAppendAction[tuple[str, ...]],
    option(
        "An option of one algorithm, such as --option fedprox.mu=0.1. Repeatable.",
        "ALGORITHM.KEY=VALUE",
        "option",
    ),
]
SetMetric = Annotated[
    UseAppendAction[tuple[str, ...]],
    option(
        "An option of a metric, such as --option hessian_spectrum.density=50. Repeatable.",
        "METRIC.KEY=VALUE",
        "option",
    ),
]
SetModel = Annotated[
    UseAppendAction[tuple[str, ...]],
    option(
        "An option of the model, such as --model-option sizes=64,32. Repeatable.",
        "KEY=VALUE",
        "model-option",
    ),
]
SetLoss = Annotated[
    UseAppendAction[tuple[str, ...]],
    option(
        "An option of the loss, such as --loss-option gamma=2. Repeatable.",
        "KEY=VALUE",
        "loss-option",
    ),
]


# --- the configuration as flags --------------------------------------------------------------------------------


@cache
def key_descriptions() -> Mapping[str, str]:
    """Return the description beneath each key of the configuration, the help of its flag."""
    texts = {}
    bases = {base for group in GROUPS.values() for base in group.mro()[:-1]}
    for module in {base.__module__ for base in bases}:
        source = Path(str(sys.modules[module].__file__)).read_text(encoding="utf-8")
        for node in ast.parse(source).body:
            body = node.body if isinstance(node, ast.ClassDef) else []
            for field, text in pairwise(body):
                if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                    words = str(ast.literal_eval(text.value)).split()
                    texts[ast.unparse(field.target)] = " ".join(words)
    return texts


def flags(without: Collection[str] = ()) -> Any:
    """Return the flags for the keys of the configuration, in groups; they are parsed into a ``RunConfig``.

    Args:
        without: keys that the command has no flag for.
    """

    def config(**filled: Any) -> RunConfig:
        groups = map(vars, filled.values())
        return RunConfig(**{key: v for group in groups for key, v in group.items()})

    groups = _groups(without)
    parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=group)
        for name, group in groups.items()
    ]
    config.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    config.__annotations__ = groups
    flag = arg(constructor=config, name="")
    _WITHOUT[flag] = without
    return flag


def _groups(without: Collection[str]) -> dict[str, Any]:
    """Return a dataclass with the flags of each group of keys."""
    groups: dict[str, Any] = {}
    for group in GROUPS:
        fields: list[Any] = [
            (name, _flag(name, key.hint), key.default)
            for name, key in KEYS.items()
            if key.group == group and name not in (*without, *OTHERWISE)
        ]
        if fields:
            made: Any = dataclasses.make_dataclass(
                group.capitalize(), fields, kw_only=True, repr=False, eq=False
            )
            # a blank, or help would show the constructor's signature
            made.__doc__ = ABOUT.get(group, " ")
            groups[group] = Annotated[made, OmitArgPrefixes]
    return groups


def keys_of(command: type) -> set[str]:
    """Return the keys of the configuration that a command has flags for."""
    hints = get_type_hints(command, include_extras=True)
    (flag,) = hints["config"].__metadata__
    keys = {*KEYS}
    parsed = keys - {*_WITHOUT[flag], "options"}
    return (
        parsed
        | keys.intersection(hints)
        | ({"options"} if hints.get("set") == Set else set())
    )


def for_help(command: type, usual: bool) -> type:
    """Return a dataclass with a command's flags in the order of its help: its own first, common ones last.

    Args:
        command: The dataclass of the command.
        usual: Show only the usual flags of the configuration.
    """
    hints = get_type_hints(command, include_extras=True)
    if "config" in hints:
        (flag,) = hints["config"].__metadata__
        rest = [key for key in KEYS if usual and key not in USUAL]
        groups = _groups([*_WITHOUT[flag], *rest])
        kind = dataclasses.make_dataclass("Config", groups.items())
        hints["config"] = Annotated[kind, arg(name="")]
    defaults = {each.name: each.default for each in dataclasses.fields(command)}
    ordered = dict.fromkeys(
        name
        for kind in command.__mro__
        for name in vars(kind).get("__annotations__", ())
    )
    fields = []
    for name in filter(defaults.__contains__, ordered):
        kind, *extras = get_args(hints[name])
        if get_origin(kind) is tuple:  # tyro would check it by a slow import
            kind, extras = object, [extras[-1], WORDS]
        shown: Any = Annotated[(_optional(kind), *extras)]
        fields.append((name, shown, dataclasses.field(default=defaults[name])))
    return dataclasses.make_dataclass(command.__name__, fields, kw_only=True)


def _optional(kind: Any) -> Any:
    """Return a type ``X | None`` with None first, where tyro finds a default at once."""
    return Union[None, *get_args(kind)] if isinstance(kind, UnionType) else kind


def _flag(name: str, field_type: Any) -> Any:
    if name == "dataset":
        return Annotated[str, option(key_descriptions()[name]), FILES]
    switchable = (
        field_type == bool | None
    )  # the default may be yes, so that no must be sayable
    metavar = "NAME [NAME ...]" if field_type == list[str] | None else None
    about = option(key_descriptions()[name], metavar)
    field_type = Annotated[_optional(field_type), about]
    return (
        Annotated[field_type, SWITCH, FlagConversionOff] if switchable else field_type
    )


def _parse_switch(words: list[str]) -> bool:
    if words not in ([], ["True"], ["False"]):
        raise ValueError(f"takes True or False, not {' '.join(words)!r}")
    return words != ["False"]


SWITCH = PrimitiveConstructorSpec(
    nargs="*",
    metavar="[BOOL]",
    instance_from_str=_parse_switch,
    is_instance=lambda value: value is None or isinstance(value, bool),
    str_from_instance=lambda value: [] if value is None else [str(value)],
)
"""A flag that means yes alone, and yes or no by the word after it."""


def _files(words: list[str]) -> str:
    if not words:
        raise ValueError("takes a name, a folder, or files")
    return BETWEEN.join(words)


WORDS = PrimitiveConstructorSpec(
    nargs="*",
    metavar="WORD [WORD ...]",
    instance_from_str=tuple,
    is_instance=lambda value: isinstance(value, tuple),
    str_from_instance=list,
)
"""Any number of words."""
FILES = PrimitiveConstructorSpec(
    nargs="*",
    metavar="NAME or FILE [FILE ...]",
    instance_from_str=_files,
    is_instance=lambda value: value is None or isinstance(value, str),
    str_from_instance=lambda value: [] if value is None else [value],
)
"""A dataset's name, or one or more files, which are joined to one name."""


def apply_options(
    config: RunConfig,
    options: Sequence[str],
    model_options: Sequence[str],
    loss_options: Sequence[str],
) -> RunConfig:
    """Return the configuration with the ``--option`` arguments filled in, after checks of names and choices.

    Raises:
        UsageError: an argument that is not KEY=VALUE, an unknown name, or a rule that cannot decide during a run.
    """
    from fedlayers import catalogue

    catalogue.check_names(config)
    catalogue.check_deciding(config.federation.rule)
    return config.with_keys(
        options=pairs("--option", options),
        model_options=pairs("--model-option", model_options),
        loss_options=pairs("--loss-option", loss_options) or None,
    )


# --- KEY=VALUE -------------------------------------------------------------------------------------------------


def pairs(flag: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Parse ``key=value`` arguments. A value is JSON if it parses as JSON, and a list if it has commas.

    Raises:
        UsageError: an argument without ``=``, or a repeated key.
    """
    return {key: _value(value) for key, value in texts(flag, arguments).items()}


def texts(flag: str, arguments: Sequence[str]) -> dict[str, str]:
    """Parse ``key=value`` arguments, with values as text. For errors see :func:`pairs`."""
    values: dict[str, str] = {}
    for item in arguments:
        key, equals, value = item.partition("=")
        if not equals or not key:
            raise UsageError(f"{flag} must be KEY=VALUE; got {item!r}.")
        if key in values:
            raise UsageError(f"{flag} must give each key once; got {key!r} twice.")
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
    arguments: Sequence[str], kind: str, names: Sequence[str], of: str
) -> dict[str, dict[str, Any]]:
    """Parse ``--option NAME.KEY=VALUE`` arguments, by name.

    Raises:
        UsageError: a key that begins with none of ``names``.
    """
    from fedlayers import catalogue

    elsewhere = catalogue.registry(kind)
    options: dict[str, dict[str, Any]] = {}
    for key, value in pairs("--option", arguments).items():
        name = next(
            (name for name in names if key.startswith(f"{name}.")),
            key.partition(".")[0],
        )
        option_name = key.removeprefix(name).removeprefix(".")
        if name == key:
            raise UsageError(
                f"--option must name its {kind}; got {key!r}. Write --option {kind.upper()}.{key}=..."
            )
        if name in elsewhere and name not in names:
            raise UsageError(f"unknown {kind} {of} {name!r}. Add --{kind}s {name}.")
        options.setdefault(check_known(f"{kind} {of}", name, names), {})[
            option_name
        ] = value
    return options


# --- paths -----------------------------------------------------------------------------------------------------


def check_plan_file(path: Path) -> None:
    """Refuse, before any work, a file for a plan that cannot be written or that is something else than a plan.

    Raises:
        UsageError: names the path.
    """
    from fl_core.plan import LayerPlan

    check_place(path, "plan.json")
    _no_run(path, path.parent)
    if not path.exists() or path.stat().st_size == 0:
        return
    try:
        warn(f"{path} is replaced; it was {LayerPlan.load(path)!r}")
    except (UsageError, RunError):
        raise UsageError(
            f"--out {path} must be a new file or an earlier plan; it is another file. Choose another name, or remove "
            "it."
        ) from None


def check_place(path: Path, such: str) -> None:
    """Refuse an output file in no folder, or that is a folder.

    Raises:
        UsageError: names the path.
    """
    if not path.parent.is_dir():
        raise UsageError(
            f"--out {path} must be in an existing folder; got {path.parent}. Make it first."
        )
    if path.is_dir():
        raise UsageError(
            f"--out must be a file; got the folder {path}. Name a file such as {path / such}."
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
    _no_run(path, path)


def _no_run(path: Path, folder: Path) -> None:
    if (folder / "config.json").exists() and (folder / "lock").exists():
        raise UsageError(
            f"--out must not be a run directory; got {path}, in {folder}. Choose another folder."
        )


RunDirectory = Annotated[Positional[Path], option("Run directory.", "DIR")]
ModelCode = Annotated[
    tuple[str, ...],
    option(
        "Custom code that this run may import and call, as package.module:name. A model option that is no size or "
        "rate needs it too, such as pretrained=true.",
        "NAME [NAME ...]",
    ),
]

OF_RACE = ("lr", "eval_every", "patience")
"""Keys of the configuration for which a race has defaults of its own."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """A command. Its fields are its flags, its docstring is its help."""

    debug: Annotated[bool, option("Show the traceback of an error.")] = False

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
    """Base of the commands that take a run's configuration."""

    config: RunConfig
    model_option: SetModel = ()
    loss_option: SetLoss = ()
    file: Annotated[
        Path | None,
        option(
            "Read options from a TOML file, as --print-config prints it. Options on the command line win.",
            "FILE",
            "config",
        ),
    ] = None
    print_config: Annotated[
        bool, option("Print the configuration as TOML and stop.")
    ] = False
    help_all: Annotated[
        bool, option("Show all options; --help shows the usual ones.")
    ] = False

    def asked_config(self) -> RunConfig:
        """Return the configuration of the command line, with names and numbers checked.

        Raises:
            UsageError: a value is wrong, or an option is not KEY=VALUE.
        """
        raise NotImplementedError

    def changed_flags(self) -> list[str]:
        """Return the configuration's flags whose values are not the defaults."""
        default = RunConfig()
        changed = [
            key
            for key, value in self.config.flat().items()
            if value != default.value(key) and key not in ("options", "model_options")
        ]
        given = [
            name for name in ("model_option", "loss_option") if getattr(self, name)
        ]
        return [f"--{name.replace('_', '-')}" for name in (*changed, *given)]

    def own_defaults(self) -> Collection[str]:
        """Return the keys of the configuration for which the command has defaults of its own, not the dataset's."""
        return ()

    def printed(self) -> str:
        """Return the configuration as TOML, with the dataset's defaults filled in, if it was asked for.

        Only keys with a flag of the command are in it. Those with a default of its own are in it if they are given.
        """
        if not self.print_config:
            return ""
        from fedlayers.cli.config_files import to_toml

        given = {**self.config.flat(), **vars(self)}
        left_out = {key for key in self.own_defaults() if given[key] is None}
        return to_toml(self.asked_config(), keys_of(type(self)) - left_out)
