"""The registries of all named things by kind, and checks of names.

>>> from fedlayers import catalogue
>>> catalogue.registry("algorithm")["fedprox"].paper
'Li et al. 2020'
>>> catalogue.check("algorithm", "fedprxo")
Traceback (most recent call last):
    ...
fl_core.errors.UsageError: unknown algorithm 'fedprxo': did you mean 'fedprox'? known: ...
"""

from __future__ import annotations

from typing import Any

from fl_core.config import RunConfig
from fl_core.data.registry import DATASETS, path_of
from fl_core.errors import check_known
from fl_core.registry import Registry, import_object, is_outside

HOMES = {
    "algorithm": "fl_core.algorithms.base:ALGORITHMS",
    "metric": "diagnostics.metrics.base:METRICS",
    "rule": "diagnostics.select:RULES",
    "dataset": "fl_core.data.registry:DATASETS",
    "partition": "fl_core.data.partitions.base:PARTITIONS",
    "model": "fl_core.models.building:MODELS",
}
"""The registry of each kind."""


def registry(kind: str) -> Registry[Any]:
    """Return the registry of a kind, one of :data:`HOMES`."""
    return import_object("registry", HOMES[check_known("kind", kind, HOMES)])


def check(kind: str, name: str) -> str:
    """Return the name of a known member, or a place ``package.module:attribute``.

    Raises:
        UsageError: the name is unknown; suggests the nearest.
    """
    members = registry(kind)
    if is_outside(name) or name in members:
        return name
    return check_known(kind, name, members.names())


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
        from fl_core.models.building import describe  # with torch

        return name if ":" in name else check_known("model", name, describe())
    if kind == "dataset":
        return name if is_outside(name) or name in DATASETS else str(path_of(name))
    return check(kind, name)


def check_names(config: RunConfig) -> None:
    """Check that the algorithm, model, partition and dataset of a configuration exist.

    Raises:
        UsageError: a name is unknown; suggests the nearest.
    """
    for kind in ("model", "dataset", "partition", "algorithm"):
        name = config.value(kind)
        if name is not None:
            check_value(kind, name)


def check_deciding(rule: str) -> str:
    """Return the rule's name if it can decide during a run, from one curve and a threshold.

    Raises:
        UsageError: it cannot; suggests the nearest rule that can.
    """
    deciding = [name for name, member in registry("rule").own.items() if member.decides]
    return (
        rule
        if is_outside(rule)
        else check_known("rule that decides by itself", rule, deciding)
    )
