"""The metrics: a decorated function in a module of this folder is registered by its name.

The decorators are ``@metric`` and ``@layer_metric`` (:mod:`diagnostics.metrics.base`).
This module has the facts about a metric that do not need its code. Pictures and reports
of stored rows need no more, so they do not import torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from fl_core.errors import read_as
from fl_core.registry import Registry

STORED = Path(__file__).with_name("facts.json")
"""The file with the facts of this folder's metrics by name.

``make lists`` writes it. A test compares it with the metrics.
"""


@dataclass(frozen=True)
class PlotStyle:
    """The style of a metric's picture over the layers: labels, and whether the axis is logarithmic.

    Attributes:
        label: the label of the axis. Empty: a label made from the metric's name.
        meaning: a few words beneath the label, such as ``"higher = sharper"``.
        log: whether the axis is logarithmic.
        symbol: the heading of its column in a printed plan. Empty: ``value``.
        variants: styles of variants that differ from the metric's own, {variant: {attribute: value}}.
    """

    label: str = ""
    meaning: str = ""
    log: bool = False
    symbol: str = ""
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def for_variant(self, variant: str | None) -> PlotStyle:
        """Return the style of a variant: its own from ``variants`` if it is listed there, else this style.

        Attributes that a variant's own style does not name have their defaults.
        """
        if variant is not None and variant in self.variants:
            return PlotStyle(**self.variants[variant])
        return self


@dataclass(frozen=True)
class Facts:
    """The facts about a metric that do not need its code.

    Attributes:
        name: the function's name, which the rows contain.
        description, direction: one line each. The direction states the meaning of a higher value.
        how: how the metric is computed, and what its options change, for the list of metrics.
        variants: variants of its rows, the default first.
        look: the style of its pictures.
        pairs: whether a value belongs to two clients.
        distance: for pairs: whether a value is a distance (0 = same) and not a similarity (1 = same).
        requires: what the metric reads of a client: the ``losses`` of its samples, ``samples`` without labels, or only
            the ``weights``.
        features: the samples whose outputs it reads: the common ``probe``, or each client's ``own``. Empty: neither.
        classes: whether it needs labels that are classes, and so has no value for other tasks.
        separable: whether it needs a loss of each sample alone, and so has no value for survival.
        needs_all_layers: whether it needs all layers of the network for the value of one.
        shared: whether it reads the one model that all clients share, in a run the server's.
        uses_gradient_pass: whether it reads the pass over the gradients that all such metrics share. Its options are
            then a :class:`~diagnostics.gradients.GradientReader`.
        default_variant: the variant that rules read if the rows hold it. Empty: the default.
        differs: the end of its scale that means that clients differ at a layer, ``high`` or ``low``. Empty: not known.
            It was measured on layers that were planted to differ, in ten seeds.
    """

    name: str
    description: str
    direction: str = ""
    how: str = ""
    variants: tuple[str, ...] = ()
    look: PlotStyle = PlotStyle()
    pairs: bool = False
    distance: bool = False
    requires: str = "losses"
    features: str = ""
    classes: bool = False
    separable: bool = False
    needs_all_layers: bool = False
    shared: bool = False
    uses_gradient_pass: bool = False
    default_variant: str = ""
    differs: str = ""

    def to_distance(self, value: float) -> float:
        """Return a value of two clients as a distance.

        Args:
            value: the metric's value.

        Returns:
            The value itself if the metric is a distance, else 1 - value.
        """
        if self.distance:
            return value
        return 1 - value

    @property
    def variant(self) -> str:
        """Return the default variant: the first of ``variants``, or "" without variants."""
        if self.variants:
            return self.variants[0]
        return ""

    @property
    def preferred(self) -> tuple[str, ...]:
        """Return the variants in order of preference for a decision.

        ``default_variant`` comes first if it is set. The others follow in the order of
        ``variants``.
        """
        return tuple(
            dict.fromkeys(
                [*[self.default_variant] * bool(self.default_variant), *self.variants]
            )
        )


def known_metrics() -> Mapping[str, Facts]:
    """Return the facts of all metrics by name: of those that are loaded, or else the stored ones.

    The stored facts are those of this folder's metrics alone. They serve until
    :mod:`diagnostics.metrics.base` is imported.

    >>> known_metrics()["cka"].pairs
    True
    """
    loaded = Registry.of_kind.get("metric")
    if loaded is None:
        return _stored()
    return loaded.members()


@cache
def _stored() -> dict[str, Facts]:
    facts: dict[str, Facts] = read_as(
        dict[str, Facts], json.loads(STORED.read_bytes()), "the facts of metrics"
    )
    return facts


def facts_of(name: str) -> Facts:
    """Return the facts of the metric of this name; if it is unknown, a placeholder that knows only the name.

    Rows outlive the code that made them. They may be read on a machine without somebody's own metric.
    """
    return known_metrics().get(name, Facts(name, name.replace("_", " ")))
