"""Compares layers of all pairs of clients on common samples: passes over the samples, and rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from fl_core.bounds import at_least, check_value
from fl_core.errors import UsageError, check_known
from fl_core.layers import Layer
from fl_core.rows import Row, row

from ..measurement import ClientModel, Data, Measurement
from .features import Arrange, collect
from .probe import (
    LEAST,
    POSITIONS,
    PROBE,
    NoValue,
    arrange_positions,
    batch_bounds,
    probe_of,
)
from .similarity import Measure, cka_matrix, gram_entries

Spot = tuple[str, int]
"""Where features come from: the path of a module, and a client's number."""
Faults = Mapping[Spot, str]
"""Why features have no similarity to anything."""
Value = Callable[[Spot, Spot], float | str]
"""The value of a pair of spots without fault, or why there is none."""


@dataclass(frozen=True)
class SimilarityOptions:
    """The options of all similarity metrics: the common samples, and how positions are treated.

    Attributes:
        probe: the samples. Default: the first ``samples`` of the clients' own data, equally many of each.
        positions: how positions of convolutions and token sequences are treated, and the rows' variant. With
            ``"flatten"`` channels and positions together are the features. With ``"samples"`` samples x positions are
            the rows and channels the features. With ``"mean"`` channels are averaged over the positions.
        against: names of reference layers among those measured. It adds rows that compare every other layer with each
            reference layer, between every two clients in both orders and within each. Their variant is ``"<positions>,
            against <layer>"``. The row's layer is that of ``client``, the reference layer is that of ``client_b``.

    Raises:
        UsageError: a treatment is unknown, treatments do not go together, or there is less than 1 sample.
    """

    probe: Data | None = None
    samples: Annotated[int, at_least(1)] = PROBE
    positions: str = "flatten"
    against: str | Sequence[str] = ()

    treatments: ClassVar[tuple[str, ...]] = POSITIONS

    def __post_init__(self) -> None:
        check_known("positions", self.positions, self.treatments)
        if self.reference_layers and self.positions not in ("flatten", "mean"):
            raise UsageError(
                f"positions must be 'flatten' or 'mean' with against; got {self.positions!r}. Its rows differ by layer."
            )

    @property
    def unbiased(self) -> bool:
        """True if the unbiased HSIC is used. Batches must be large enough for it."""
        return False

    @property
    def reference_layers(self) -> tuple[str, ...]:
        """The layers with which every other layer is compared."""
        return (self.against,) if isinstance(self.against, str) else tuple(self.against)

    def check(self, measurement: Measurement) -> None:
        """Refuse reference layers that are not measured, and too small a batch."""
        if measurement.batch is not None:
            check_value("batch", measurement.batch, at_least(1))
        if self.unbiased:
            batch_bounds(0, measurement.batch or LEAST)
        for name in self.reference_layers:
            check_known(
                "layer to compare with",
                name,
                [layer.name for layer in measurement.layers],
            )


@dataclass(frozen=True)
class LayerComparison:
    """A comparison of all pairs of clients at every layer, and of every layer with the reference layers.

    Attributes:
        metric: name in the rows.
    """

    metric: str
    measurement: Measurement
    options: SimilarityOptions

    @cached_property
    def across(self) -> bool:
        """True if layers of different widths may be compared with each other."""
        shapes = {
            tuple((name, p.shape) for name, p in subject.model.named_parameters())
            for subject in self.subjects
        }
        return bool(self.options.reference_layers) or len(shapes) > 1

    @property
    def subjects(self) -> Sequence[ClientModel]:
        """The clients, in the order of the rows."""
        return self.measurement.subjects

    @property
    def empty(self) -> bool:
        """True if there is nothing to compare: no model, or one model without reference layers."""
        return len(self.subjects) < (1 if self.across else 2)

    @cached_property
    def x(self) -> Tensor:
        """The probe samples, the same for every model."""
        return probe_of(
            self.subjects,
            self.options.probe,
            self.options.samples,
            self.measurement.seed,
        )

    @cached_property
    def paths(self) -> list[str]:
        """Paths of the modules whose outputs are compared."""
        return sorted({layer.output for layer in self.measurement.layers if layer.used})

    def sides(
        self,
        side: Callable[[Tensor], Tensor],
        paths: Sequence[str] | None = None,
        arrange: Arrange | None = None,
    ) -> tuple[dict[Spot, Tensor], dict[Spot, str]]:
        """Pass the probe samples through every model, and keep what ``side`` makes of each layer's features.

        Args:
            paths: the modules to read. Default: all.
            arrange: makes features of a module and its output. Default: as the option ``positions`` says.

        Returns:
            What is kept, and why the others have nothing.
        """
        paths, how = self.paths if paths is None else paths, self.measurement
        positions = self.options.positions
        arrange = arrange or partial(arrange_positions, positions=positions)
        kept: dict[Spot, Tensor] = {}
        faults: dict[Spot, str] = {}
        for client, subject in enumerate(self.subjects):
            if not self.empty:
                data = self.x, torch.zeros(len(self.x), dtype=torch.long)
                seen = collect(
                    subject.model,
                    paths,
                    data,
                    batch=how.batch,
                    seed=how.seed,
                    mode=how.mode,
                    arrange=arrange,
                )
                for path in paths:
                    try:
                        kept[path, client] = side(seen.tensor(path))
                    except NoValue as reason:
                        faults[path, client] = str(reason)
            if paths[-1:] == self.paths[-1:]:
                how.tick(subject.client)
        return kept, faults

    def rows(
        self, faults: Faults, value: Value, *, estimator: str, unit: str = ""
    ) -> list[Row]:
        """Return the rows: for each layer all pairs of clients, then the layer against each reference layer."""
        common: dict[str, Any] = {
            "estimator": estimator,
            "unit": unit,
            "n_samples": 0 if self.empty else len(self.x),
        }
        rows = []
        for layer in self.measurement.layers if self.subjects else ():
            columns = {**common, "layer": layer.name, "n_params": self._size(layer)}
            if len(self.subjects) < 2:
                rows.append(
                    row(
                        self.metric,
                        None,
                        status="needs at least two models",
                        variant=self.options.positions,
                        **columns,
                    )
                )
            for (a, b), other in self._pairs(layer):
                result = self._value(layer, a, other, b, faults, value)
                rows.append(
                    row(
                        self.metric,
                        None if isinstance(result, str) else result,
                        status=result if isinstance(result, str) else "ok",
                        client=self.subjects[a].client,
                        client_b=self.subjects[b].client,
                        variant=self.options.positions
                        + (f", against {other.name}" if other is not layer else ""),
                        **columns,
                    )
                )
        return rows

    def _pairs(self, layer: Layer) -> Iterator[tuple[tuple[int, int], Layer]]:
        everyone = range(len(self.subjects))
        yield from ((pair, layer) for pair in itertools.combinations(everyone, 2))
        for name in self.options.reference_layers:
            other = next(own for own in self.measurement.layers if own.name == name)
            if other is not layer:
                yield from (((a, b), other) for a in everyone for b in everyone)

    def _value(
        self, layer: Layer, a: int, other: Layer, b: int, faults: Faults, value: Value
    ) -> float | str:
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
        sizes = {
            name: p.numel()
            for name, p in self.subjects[0].model.named_parameters(
                remove_duplicate=False
            )
        }
        return sum(sizes[name] for name in layer.parameters if name in sizes)


def by_grams(
    comparison: LayerComparison, estimator: str, bandwidth: float | None = None
) -> tuple[Faults, Value]:
    """Return values of CKA from Gram matrices."""
    places = None
    if estimator == "minibatch" and not comparison.empty:
        n = len(comparison.x)
        places = batch_bounds(n, comparison.measurement.batch or max(n, LEAST))
    sides, faults = comparison.sides(lambda x: gram_entries(x, places, bandwidth))
    values: dict[tuple[Spot, Spot], float] = {}
    groups = [{path} for path in comparison.paths]
    for paths in [set(comparison.paths)] if comparison.across else groups:
        spots = [spot for spot in sides if spot[0] in paths]
        if spots:
            table = cka_matrix([sides[spot] for spot in spots]).tolist()
            for a, row_of in zip(spots, table, strict=True):
                values |= {(a, b): v for b, v in zip(spots, row_of, strict=True)}
    return faults, lambda a, b: values[a, b]


def by_directions(
    comparison: LayerComparison, measure: Measure
) -> tuple[Faults, Value]:
    """Return values of another measure. If positions are rows, the features of one layer are held at a time."""
    if comparison.options.positions != "samples":
        sides, faults = comparison.sides(measure.side)
        return faults, lambda a, b: measure.between(sides[a], sides[b])
    values: dict[tuple[Spot, Spot], float | str] = {}
    faults = {}
    for path in comparison.paths:
        sides, lacking = comparison.sides(measure.side, [path])
        faults |= lacking
        for a, b in itertools.combinations(sides, 2):
            values[a, b] = measure.between(sides[a], sides[b])
    return faults, lambda a, b: values[a, b]
