"""The registries of all named things by kind.

>>> from fedlayers import catalogue
>>> catalogue.registry("algorithm")["fedprox"].paper
'Li et al. 2020'
"""

from __future__ import annotations

from typing import Any

from fl_core.errors import check_known
from fl_core.registry import Registry, import_object

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
