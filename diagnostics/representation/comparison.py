"""Compares layers of all pairs of clients on common samples: passes over the samples, and rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn

from fl_core.bounds import at_least, check_value
from fl_core.errors import UsageError, check_known
from fl_core.layers import Layer
from fl_core.models.building import normalises_batches
from fl_core.rows import Row, row

from ..measurement import ClientModel, Data, Measurement
from .gram import Recorder, Summary, hsic
from .moments import Measure, Moments, StoredFeatures
from .probe import (
    LEAST,
    POSITIONS,
    PROBE,
    NoValue,
    Place,
    Take,
    arrange_positions,
    batch_bounds,
    check_batch,
    probe_of,
    watch,
)

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
        check_batch(measurement.batch or LEAST, self.unbiased)
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
    def where(self) -> list[Place]:
        """First and last position (exclusive) of each batch of the probe samples."""
        n, training = len(self.x), self.measurement.mode == "train"
        least = (
            2
            if any(
                normalises_batches(subject.model, training) for subject in self.subjects
            )
            else 1
        )
        return batch_bounds(
            n, self.measurement.batch or max(n, LEAST), self.options.unbiased, least
        )

    @cached_property
    def paths(self) -> list[str]:
        """Paths of the modules whose outputs are compared."""
        return sorted({layer.output for layer in self.measurement.layers if layer.used})

    def watch(
        self,
        subject: ClientModel,
        take: Take,
        where: Sequence[Place] | None = None,
        paths: Sequence[str] | None = None,
    ) -> None:
        """Pass all or some probe samples through a model (see :func:`~.probe.watch`)."""
        where, paths = (
            self.where if where is None else where,
            self.paths if paths is None else paths,
        )
        how = self.measurement
        watch(subject, self.x, where, paths, take, how.seed, how.mode, how.kept)

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


def _none(a: Spot, b: Spot) -> float | str:
    return "nothing to compare"


def unseen(comparison: LayerComparison) -> tuple[Faults, Value]:
    """Return no values, as for fewer than two models, and tell the progress of every client."""
    for subject in comparison.subjects:
        comparison.measurement.tick(subject.client)
    return {}, _none


def by_grams(
    comparison: LayerComparison, estimator: str, bandwidth: float | None = None
) -> tuple[Faults, Value]:
    """Return values from Gram matrices, one client after another; features are summarised as they arrive."""
    if comparison.empty:
        return unseen(comparison)
    models = None if comparison.across else len(comparison.subjects)
    recorders = {
        path: Recorder(comparison.where, estimator, models, bandwidth)
        for path in comparison.paths
    }
    summaries: dict[Spot, Summary] = {}
    faults: dict[Spot, str] = {}

    def take(path: str, place: Place, module: nn.Module, output: Tensor) -> None:
        try:
            recorders[path].take(
                *place,
                arrange_positions(module, output, place, comparison.options.positions),
            )
        except NoValue as reason:
            recorders[path].fault = str(reason)

    for client, subject in enumerate(comparison.subjects):
        for recorder in recorders.values():
            recorder.begin()
        comparison.watch(subject, take)
        for path, recorder in recorders.items():
            kept = recorder.summarise()
            if isinstance(kept, str):
                faults[path, client] = kept
            else:
                summaries[path, client] = kept
        comparison.measurement.tick(subject.client)
    together = (
        [list(summaries)]
        if comparison.across
        else [[s for s in summaries if s[0] == path] for path in comparison.paths]
    )
    place = {
        spot: (group, k)
        for group, spots in enumerate(together)
        for k, spot in enumerate(spots)
    }
    products = [
        hsic([summaries[spot] for spot in spots]).cpu() if spots else torch.empty(0, 0)
        for spots in together
    ]

    def value(a: Spot, b: Spot) -> float:
        (group, i), (_, j) = place[a], place[b]
        h = products[group]
        return float(h[i, j] / (h[i, i] * h[j, j]).sqrt())

    return faults, value


def by_products(comparison: LayerComparison, measure: Measure) -> tuple[Faults, Value]:
    """Return values from cross-products of centred features.

    The features are stored, or processed batch by batch if positions are rows.
    """
    if comparison.empty:
        return unseen(comparison)
    clients, n, rows = (
        len(comparison.subjects),
        len(comparison.x),
        comparison.options.positions == "samples",
    )
    collected: dict[str, StoredFeatures | Moments] = {}
    faults: dict[Spot, str] = {}
    client = 0

    def take(path: str, place: Place, module: nn.Module, output: Tensor) -> None:
        collector = collected.get(path)
        try:
            x = arrange_positions(module, output, place, comparison.options.positions)
            if collector is None:
                collector = collected[path] = (
                    Moments(clients, n) if x.ndim == 3 else StoredFeatures(clients, n)
                )
            if (x.ndim == 3) != isinstance(collector, Moments):
                raise NoValue("positions in some of its outputs only")
            collector.take(client, place, x)
        except NoValue as reason:
            faults.setdefault((path, client), str(reason))

    for places in (
        [[place] for place in comparison.where] if rows else [comparison.where]
    ):
        for client, subject in enumerate(comparison.subjects):
            comparison.watch(subject, take, places)
            if not rows:
                for collector in collected.values():
                    collector.done(client)
                comparison.measurement.tick(subject.client)
        if rows:
            for collector in collected.values():
                collector.flush()
    for path in comparison.paths:
        collector = collected.setdefault(path, StoredFeatures(clients, n))
        for k in range(clients):
            collector.done(k)
        collector.prepare(measure)
        for k, reason in collector.faults.items():
            faults.setdefault((path, k), reason)
    if rows:
        for subject in comparison.subjects:
            comparison.measurement.tick(subject.client)

    def value(a: Spot, b: Spot) -> float:
        (path_a, left), (path_b, right) = a, b
        first, second = collected[path_a], collected[path_b]
        if path_a == path_b:
            return float(measure.value(first.product(left, right)))
        assert isinstance(
            first, StoredFeatures
        )  # other layers are compared with samples as rows only
        assert isinstance(second, StoredFeatures)
        return float(measure.value(first.bases[left].T @ second.bases[right]))

    return faults, value
