"""Earlier names in stored configurations, and today's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

KEYS = {
    "batch": "batch_size",
    "bn": "batchnorm",
    "by": "layer_granularity",
    "clip": "max_grad_norm",
    "drop": "exclude_columns",
    "samples": "max_samples",
    "weights": "client_weights",
}
"""Keys of a configuration before version 0.3, by today's."""
_OPTIONS = {"over": "base"}


def current_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stored configuration under the keys of today.

    >>> current_keys({"batch": 32, "lr": 0.1, "options": {"over": "fedper"}})
    {'batch_size': 32, 'lr': 0.1, 'options': {'base': 'fedper'}}
    """
    found = {KEYS.get(key, key): value for key, value in config.items()}
    if isinstance(found.get("options"), Mapping):
        found["options"] = {_OPTIONS.get(key, key): value for key, value in found["options"].items()}
    return found


def current(stored: Any) -> Any:
    """Return stored data with every configuration inside it under the keys of today.

    >>> current([{"dataset": "heart", "algorithm": "fedavg", "options": {}, "bn": "local"}, {"batch": 3}])
    [{'dataset': 'heart', 'algorithm': 'fedavg', 'options': {}, 'batchnorm': 'local'}, {'batch': 3}]
    """
    if isinstance(stored, list):
        return [current(each) for each in stored]
    if not isinstance(stored, Mapping):
        return stored
    found = {key: current(value) for key, value in stored.items()}
    return current_keys(found) if {"dataset", "algorithm", "options"} <= found.keys() else found


__all__ = ["KEYS", "current", "current_keys"]
