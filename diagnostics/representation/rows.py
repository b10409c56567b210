"""A request for a similarity of clients' layers, and its rows: who is compared with whom, on which samples."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from fl_core.errors import UsageError, check_known
from fl_core.layers import Layer
from fl_core.rows import Row, row

from ..capture import Data
from ..gradients import Subject, Tick
from .probe import LEAST, POSITIONS, Place, check_batch, places, probe_of

Spot = tuple[str, int]
"""Where features come from: the path of a module, and a client's number."""
Faults = Mapping[Spot, str]
"""Why features have no similarity to anything."""
Value = Callable[[Spot, Spot], float | str]
"""The value of a pair of spots without fault, or why there is none."""


@dataclass(frozen=True)
class Request:
    """What is compared: every two clients at every layer, and every layer with those named in ``against``.

    Attributes:
        metric: name in the rows.
        positions: their treatment, the rows' variant.
        unbiased: whether batches must be large enough for the unbiased HSIC.
        allowed: the treatments of positions that the metric has.

    Raises:
        UsageError: an unknown treatment or layer, treatments that do not go together, or a number below 1.
    """

    metric: str
    subjects: Sequence[Subject]
    layers: Sequence[Layer]
    batch: int | None
    seed: int
    mode: str
    tick: Tick
    probe: Data | None
    samples: int
    positions: str
    against: str | Sequence[str] = ()
    unbiased: bool = False
    allowed: tuple[str, ...] = POSITIONS

    def __post_init__(self) -> None:
        check_known("treatment of positions", self.positions, self.allowed)
        for what, number in (("samples", self.samples), ("batch", self.batch)):
            if number is not None and number < 1:
                raise UsageError(f"{self.metric}: {what}={number}; at least 1 is needed")
        check_batch(self.batch or LEAST, self.unbiased)
        for name in self._against:
            check_known("layer to compare with", name, [layer.name for layer in self.layers])
        if self._against and self.positions not in ("flatten", "mean"):
            raise UsageError(
                f"against needs positions 'flatten' or 'mean': with {self.positions!r} the rows of two layers differ"
            )

    @property
    def _against(self) -> tuple[str, ...]:
        return (self.against,) if isinstance(self.against, str) else tuple(self.against)

    @property
    def across(self) -> bool:
        """Whether different layers are compared."""
        return bool(self._against)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to compare: no model at all, or one and no layer with another."""
        return len(self.subjects) < (1 if self.across else 2)

    @cached_property
    def x(self) -> Tensor:
        """The samples, the same for all."""
        return probe_of(self.subjects, self.probe, self.samples, self.seed)

    @cached_property
    def where(self) -> list[Place]:
        """The batches."""
        return places(len(self.x), self.batch or max(len(self.x), LEAST), self.unbiased)

    @cached_property
    def paths(self) -> list[str]:
        """The modules whose outputs are compared."""
        return sorted({layer.output for layer in self.layers if layer.used})

    def rows(self, faults: Faults, value: Value, *, estimator: str, unit: str = "") -> list[Row]:
        """The rows: of every layer each pair of clients, then of every layer ``against``."""
        common: dict[str, Any] = {"estimator": estimator, "unit": unit, "n_samples": 0 if self.empty else len(self.x)}
        found = []
        for layer in self.layers if self.subjects else ():
            own = {**common, "layer": layer.name, "n_params": self._size(layer)}
            if len(self.subjects) < 2:
                found.append(row(self.metric, None, status="needs at least two models", variant=self.positions, **own))
            for (a, b), other in self._pairs(layer):
                result = self._value(layer, a, other, b, faults, value)
                found.append(
                    row(
                        self.metric,
                        None if isinstance(result, str) else result,
                        status=result if isinstance(result, str) else "ok",
                        client=self.subjects[a].client,
                        client_b=self.subjects[b].client,
                        variant=self.positions + (f", against {other.name}" if other is not layer else ""),
                        **own,
                    )
                )
        return found

    def _pairs(self, layer: Layer) -> Iterator[tuple[tuple[int, int], Layer]]:
        everyone = range(len(self.subjects))
        yield from ((pair, layer) for pair in itertools.combinations(everyone, 2))
        for name in self._against:
            other = next(own for own in self.layers if own.name == name)
            if other is not layer:
                yield from (((a, b), other) for a in everyone for b in everyone)

    def _value(self, layer: Layer, a: int, other: Layer, b: int, faults: Faults, value: Value) -> float | str:
        for own, client in ((layer, a), (other, b)):
            if not own.used:
                return (
                    "unused in the forward pass"
                    if own is layer
                    else f"layer {own.name!r} is unused in the forward pass"
                )
            if (own.output, client) in faults:
                where = f"output of layer {own.name!r} at client {self.subjects[client].client!r}"
                return f"{where}: {faults[own.output, client]}"
        result = value((layer.output, a), (other.output, b))
        return f"layer {layer.name!r}: {result}" if isinstance(result, str) else result

    def _size(self, layer: Layer) -> int:
        sizes = {name: p.numel() for name, p in self.subjects[0].model.named_parameters(remove_duplicate=False)}
        return sum(sizes[name] for name in layer.parameters if name in sizes)
