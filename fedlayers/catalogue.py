"""Lists of all named things: algorithms, metrics, rules, datasets and models.

They are read from source files, so nothing heavy is imported.

>>> from fedlayers import catalogue
>>> catalogue.entries("algorithm")["fedprox"].facts["paper"]
'Li et al. 2020'
>>> catalogue.check("algorithm", "fedprxo")
Traceback (most recent call last):
    ...
fl_core.errors.UsageError: unknown algorithm 'fedprxo': did you mean 'fedprox'? known: ...
"""

from __future__ import annotations

from collections.abc import Iterable

from fl_core.config import RunConfig
from fl_core.data.registry import DATASETS, path_of
from fl_core.errors import UsageError, check_known
from fl_core.models.registry import describe
from fl_core.registry import Registry, import_object, is_outside
from fl_core.source_scan import Entry

HOMES = {
    "algorithm": ("fl_core.algorithms", "register"),
    "metric": ("diagnostics.metrics", "metric"),
    "rule": ("diagnostics.decide.rules", "rule"),
    "dataset": ("fl_core.data.named", "dataset"),
    "partition": ("fl_core.data.partitions", "partition"),
    "model": ("fl_core.models", "model"),
    "logger": ("fl_core.loggers", "logger"),
}
"""The package of each kind, and the decorator that registers a member."""


def entries(kind: str) -> dict[str, Entry]:
    """Return all members of a kind by name.

    They come from this package, from other installed packages, and from this process.

    Args:
        kind: one of :data:`HOMES`.
    """
    return _registry(kind).entries()


def own_entries(kind: str) -> dict[str, Entry]:
    """Return the members of a kind in this project's own files, by name."""
    return _registry(kind).inside


def _registry(kind: str) -> Registry[object]:
    """Return the registry of a kind. It is read-only if the kind's package is not loaded."""
    return Registry.of_kind.get(kind) or Registry(
        kind, *HOMES[check_known("kind", kind, HOMES)], _no_member
    )


def _no_member(made: object, name: str) -> object:
    raise AssertionError(f"{name} is read here and made elsewhere")


def check(kind: str, name: str) -> str:
    """Return the name of a known member, or a place ``package.module:attribute``.

    Raises:
        UsageError: the name is unknown; suggests the nearest.
    """
    registry = _registry(kind)
    if kind == "logger" and not is_outside(name) and not _near(name, registry):
        raise UsageError(
            f"unknown logger {name!r}: known: {', '.join(registry.names())}. For your own subclass of fl.Logger use "
            "--logger package.module:Class."
        )
    return (
        name
        if is_outside(name) or name in registry
        else check_known(kind, name, registry.names())
    )


def _near(name: str, registry: Registry[object]) -> bool:
    """Return whether a name is one of a registry, or resembles one."""
    import difflib  # for a mistake only

    return name in registry or bool(
        difflib.get_close_matches(name, registry.names(), cutoff=0.5)
    )


def check_value(kind: str, name: str) -> str:
    """Return the name if a run's configuration may have it as a value.

    Besides members, a model may be a library's, such as ``timm:resnet18``. A dataset may be an existing path. A rule
    must be able to decide during a run.

    Raises:
        UsageError: the name is unknown, and the message suggests the nearest, or a path is not there.
    """
    if name.endswith(".py"):
        import_object(kind, name)  # raises: a file is named as a module
    if kind == "rule":
        return check_deciding(name)
    if kind == "model":
        return name if ":" in name else check_known("model", name, describe())
    if kind == "dataset":
        return name if is_outside(name) or name in DATASETS else str(path_of(name))
    return check(kind, name)


def check_names(config: RunConfig) -> None:
    """Check that the algorithm, model, partition and dataset of a configuration exist.

    Raises:
        UsageError: a name is unknown; suggests the nearest.
    """
    for kind in ("algorithm", "model", "partition", "dataset"):
        name = getattr(config, kind)
        if name is not None:
            check_value(kind, name)


def check_deciding(rule: str) -> str:
    """Return the rule's name if it can decide during a run, from one curve and a threshold.

    Raises:
        UsageError: it cannot; suggests the nearest rule that can.
    """
    deciding = [
        name
        for name, entry in entries("rule").items()
        if entry.facts.get("reads", "curve") == "curve"
    ]
    return (
        rule
        if is_outside(rule)
        else check_known("rule that decides by itself", rule, deciding)
    )


def families(members: Iterable[Entry]) -> dict[str, list[Entry]]:
    """Group entries by the subject of their module, sorted by module and name."""
    grouped: dict[str, list[Entry]] = {}
    for entry in sorted(members, key=lambda each: (each.module, each.name)):
        grouped.setdefault(entry.family or entry.module, []).append(entry)
    return grouped
