"""What the commands share: flags for a run's configuration, KEY=VALUE arguments, and where results may be written."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import warnings
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from tyro.conf import DisallowNone, FlagConversionOff, FlagCreatePairsOff, OmitArgPrefixes, UseAppendAction, arg

from fedlayers import catalogue
from fl_core.config import RunConfig, check
from fl_core.errors import RunError, UsageError, check_known

KINDS = {"plan": "plan", "rows": "diagnosis"}
GROUPS: dict[str, tuple[str, ...]] = {
    "data": (
        "dataset", "data_root", "download", "clients", "partition", "alpha", "classes_per_client",
        "samples_per_client", "dominance", "samples", "client_column", "label_column",
        "text_column",
    ),
    "model": ("model", "init", "bn", "by"),
    "algorithm": ("algorithm", "plan", "rule", "threshold"),
    "training": (
        "rounds", "participation", "epochs", "batch", "lr", "optimizer", "momentum", "weight_decay", "amsgrad",
        "clip", "keep_optimizer", "loss",
    ),
    "execution": (
        "seed", "workers", "stack", "device", "memory_format", "recompute_frozen", "eval_every", "checkpoint_every",
        "local_scores",
    ),
}  # fmt: skip
"""The configuration's fields as the help groups them; what the ``--set`` arguments fill is not among them."""
ABOUT = {
    "data": "What is not given is the dataset's default: fedlayers list datasets.",
    "training": "What is not given is the dataset's default: fedlayers list datasets.",
}
MARKERS = (DisallowNone, FlagCreatePairsOff)


def hint(default: str) -> str:
    """What the help says of a default; nothing where the text says it."""
    return "" if default in ("None", "False", "") else f"(default: {default})"


def option(help: str, metavar: str | None = None, name: str | None = None) -> Any:
    """A flag with its help."""
    return arg(help=help, metavar=metavar, name=name, help_behavior_hint=hint)


Set = Annotated[
    UseAppendAction[tuple[str, ...]],
    option("The algorithm's own configuration, as often as needed: --set mu=0.1.", "KEY=VALUE", "set"),
]
SetEach = Annotated[
    UseAppendAction[tuple[str, ...]],
    option("An algorithm's own configuration: --set fedprox.mu=0.1.", "ALGORITHM.KEY=VALUE", "set"),
]
SetMetric = Annotated[
    UseAppendAction[tuple[str, ...]],
    option(
        "Option of a metric that is measured: --metrics hessian_spectrum --set hessian_spectrum.density=50.",
        "METRIC.KEY=VALUE",
        "set",
    ),
]
SetModel = Annotated[
    UseAppendAction[tuple[str, ...]],
    option("Option of the model: --set-model sizes=64,32.", "KEY=VALUE", "set-model"),
]
SetLoss = Annotated[
    UseAppendAction[tuple[str, ...]], option("Option of the loss: --set-loss gamma=2.", "KEY=VALUE", "set-loss")
]


# --- the configuration as flags --------------------------------------------------------------------------------


@cache
def documented() -> Mapping[str, str]:
    """The text beneath each field of the configuration, which is also its flag's help."""
    body = ast.parse(inspect.getsource(RunConfig)).body[0].body  # type: ignore[attr-defined]
    found = {}
    for field, text in pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            found[ast.unparse(field.target)] = " ".join(str(text.value.value).split())
    return found


def flags(without: Collection[str] = ()) -> Any:
    """The configuration's flags for one command, in groups, made into a ``RunConfig``; all but those named."""
    hints = get_type_hints(RunConfig)
    defaults = {field.name: field.default for field in dataclasses.fields(RunConfig)}
    groups: dict[str, Any] = {}
    for group, names in GROUPS.items():
        made: list[Any] = [(name, _flag(name, hints[name]), defaults[name]) for name in names if name not in without]
        if made:
            kind: Any = dataclasses.make_dataclass(group.capitalize(), made, frozen=True, kw_only=True)
            kind.__doc__ = ABOUT.get(group, " ")  # a blank, lest the help show the constructor's signature
            groups[group] = Annotated[kind, OmitArgPrefixes]

    def config(**given: Any) -> RunConfig:
        return RunConfig(**{name: value for group in given.values() for name, value in vars(group).items()})

    parameters = [inspect.Parameter(g, inspect.Parameter.KEYWORD_ONLY, annotation=kind) for g, kind in groups.items()]
    config.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    config.__annotations__ = groups
    return arg(constructor=config, name="")


def _flag(name: str, kind: Any) -> Any:
    switchable = kind == bool | None  # the dataset's default may be yes, so that no must be sayable
    metavar = "{True,False}" if switchable else None
    kind = Annotated[kind, option(documented()[name], metavar)]
    return Annotated[kind, FlagConversionOff] if switchable else kind


def configured(config: RunConfig, own: Sequence[str], model: Sequence[str], loss: Sequence[str]) -> RunConfig:
    """A configuration with the ``--set`` arguments in it, its names and choices checked.

    Raises:
        UsageError: an argument that is not KEY=VALUE, an unknown name, or a rule that cannot decide in mid-run.
    """
    check(config)
    catalogue.check_names(config)
    catalogue.check_deciding(config.rule)
    return dataclasses.replace(
        config,
        options=pairs("--set", own),
        model_options=pairs("--set-model", model),
        loss_options=pairs("--set-loss", loss) or None,
    )


# --- KEY=VALUE -------------------------------------------------------------------------------------------------


def pairs(kind: str, given: Sequence[str]) -> dict[str, Any]:
    """``key=value`` arguments as a dictionary; a value is JSON where it reads as JSON, a list where it has commas.

    Raises:
        UsageError: an argument without ``=``, or a key that was given twice.
    """
    found: dict[str, Any] = {}
    for item in given:
        key, equals, value = item.partition("=")
        if not equals or not key:
            raise UsageError(f"{kind} takes KEY=VALUE, not {item!r}")
        if key in found:
            raise UsageError(f"{kind} gives {key!r} twice")
        found[key] = _value(value)
    return found


def _value(text: str) -> Any:
    for candidate in (text, f"[{text}]" if "," in text else text):
        try:
            return json.loads(candidate)
        except json.JSONDecodeError:
            continue
    return text


def by_algorithm(given: Sequence[str], algorithms: Sequence[str]) -> dict[str, dict[str, Any]]:
    """``--set algorithm.key=value`` arguments of a comparison, by algorithm; errors as of :func:`by_name`."""
    return by_name(given, "algorithm", algorithms, "of this comparison")


def by_name(given: Sequence[str], kind: str, names: Sequence[str], of: str) -> dict[str, dict[str, Any]]:
    """``--set NAME.KEY=VALUE`` arguments, by name.

    Raises:
        UsageError: a key that names none of ``names``.
    """
    elsewhere = catalogue.entries(kind)
    found: dict[str, dict[str, Any]] = {}
    for key, value in pairs("--set", given).items():
        name, dot, own = key.partition(".")
        if not dot:
            raise UsageError(f"--set names the {kind} that it is for: --set {kind.upper()}.{key}=...")
        if name in elsewhere and name not in names:
            raise UsageError(f"unknown {kind} {of} {name!r}: add --{kind}s {name}")
        found.setdefault(check_known(f"{kind} {of}", name, names), {})[own] = value
    return found


# --- paths -----------------------------------------------------------------------------------------------------


def check_output(path: Path, kind: str) -> None:
    """Refuse, before any work, a file that could not be written, or in whose place no result belongs.

    An empty file is filled, an earlier plan makes room for a plan (``kind``: ``plan``), the rows of an earlier
    diagnosis for those of another (``rows``); everything else stays: a part of a run, the rows of a figure, any other
    file.

    Raises:
        UsageError: names the path.
    """
    if not path.parent.is_dir():
        raise UsageError(f"--out {path}: there is no folder {path.parent}")
    if path.is_dir():
        raise UsageError(f"--out {path} is a folder; name a file in it, such as {path / 'rows.jsonl'}")
    _no_run(path, path.parent)
    if path.exists() and not (path.is_file() and path.stat().st_size == 0) and kind not in _held(path):
        raise UsageError(
            f"--out {path} is there already and stays as it is, for it is no earlier {KINDS[kind]}: choose another "
            "file, or remove it first"
        )


def note_replaced(path: Path) -> None:
    """Warns of what is there, just before a result takes its place."""
    for what in _held(path).values():
        warnings.warn(f"{path} is replaced; it was {what}", stacklevel=2)


def _held(path: Path) -> dict[str, str]:
    """What of this package's a file holds, by kind: a plan, or the rows of a diagnosis."""
    from fl_core import rows
    from fl_core.plan import LayerPlan

    if not path.is_file():
        return {}
    try:
        return {"plan": repr(LayerPlan.load(path))}
    except (UsageError, RunError):
        pass
    try:
        header = rows.read_header(path)
    except (UsageError, RunError):
        return {}
    return {} if "item" in header else {"rows": f"measured by {header.get('command') or 'an unnamed command'!r}"}


def check_folder(path: Path) -> None:
    """Refuse, before any work, a folder that could not be made or that holds a run.

    Raises:
        UsageError: names the path.
    """
    if path.exists() and not path.is_dir():
        raise UsageError(f"--out {path} is a file; name a folder")
    _no_run(path, path)


def _no_run(path: Path, folder: Path) -> None:
    if (folder / "config.json").exists() and (folder / "lock").exists():
        raise UsageError(f"--out {path}: {folder} holds a run, whose files stay as they are; choose another folder")
