"""Compares layers of all pairs of clients on common samples: the samples, passes over them, and rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import torch
from torch import Tensor, nn

from fl_core.bounds import at_least, check_value
from fl_core.errors import UsageError, check_known, listing
from fl_core.layers import Layer
from fl_core.rows import Row, row
from fl_core.seeds import seed_of, torch_seeded

from ..measurement import Batch, ClientModel, Data, Measurement, batches
from .features import Arrange, NoValue, collect
from .similarity import LEAST, Measure, Place, cka_matrix, gram_entries

if TYPE_CHECKING:
    from fl_core.data import FederatedData


PROBE = 512
"""Samples of a probe set, all clients together."""

POSITIONS = ("flatten", "samples", "mean")
"""What becomes of an activation's positions: features of their own, rows beside the samples, or one mean."""


_CHANNELS_LAST = (nn.Linear, nn.LayerNorm)
_ONE_DIMENSIONAL = (nn.Conv1d, nn.ConvTranspose1d, nn.BatchNorm1d, nn.InstanceNorm1d)


# --- the samples -----------------------------------------------------------------------------------------------


def probe_set(data: FederatedData, n: int = PROBE) -> Batch:
    """Return the first validation samples of every client, equally many: (x [m, ...], y [m]).

    There are about ``n`` in all, m <= n. If ``n`` does not divide evenly, the first clients give one more. A client
    with fewer gives all that it has.

    Raises:
        UsageError: there are fewer samples than clients, or a client has no validation samples.
    """
    empty = [client.name for client in data.clients if not len(client.validation.y)]
    if empty:
        raise UsageError(
            f"each client must have validation samples to compare models on; got none for {listing(empty)}. "
            "Pass a probe, or measure other metrics."
        )
    return shared_probe(
        [(client.validation.x, client.validation.y) for client in data.clients], n
    )


def shared_probe(sources: Sequence[Data], n: int = PROBE) -> Batch:
    """Return the first samples of each of several data sets, equally many, ``n`` in all.

    A set given twice counts once.

    Raises:
        UsageError: there are fewer samples than sources, or samples have different shapes.
    """
    distinct = list({id(source): source for source in sources}.values())
    if n < len(distinct):
        raise UsageError(
            f"samples of the probe must be at least one of each client; got {n} samples over {len(distinct)} clients."
        )
    shares = [
        n // len(distinct) + (k < n % len(distinct)) for k in range(len(distinct))
    ]
    return _join(
        [
            pair
            for source, share in zip(distinct, shares, strict=True)
            for pair in _first(source, share)
        ]
    )


def probe_of(
    subjects: Sequence[ClientModel], probe: Data | None, samples: int, seed: int
) -> Tensor:
    """Return the samples that all models see, read once: ``probe``, else the first of the clients' own."""
    with torch_seeded(
        seed_of(seed, "diagnose", "probe")
    ):  # a shuffling loader draws its order
        if probe is None:
            return shared_probe(
                [subject.data for subject in subjects], max(samples, len(subjects))
            )[0]
        return _join(list(batches(probe, None)))[0]


def batch_bounds(n: int, batch: int) -> list[Place]:
    """Return first and last positions of batches for the unbiased HSIC.

    A last batch that is too small joins the one before it.

    Raises:
        UsageError: the batch is too small.
    """
    if batch < LEAST:
        raise UsageError(
            f"batch must be at least {LEAST} for minibatch CKA; got {batch}."
        )
    starts = list(range(0, n, batch))
    if len(starts) > 1 and n - starts[-1] < LEAST:
        starts.pop()
    return list(zip(starts, [*starts[1:], n], strict=True)) if n else []


def _first(source: Data, count: int) -> Iterator[Batch]:
    for x, y in batches(source, count):
        yield x[:count], y[:count]
        count -= len(x)
        if count <= 0:
            return


def _join(pairs: Sequence[Batch]) -> Batch:
    shapes = sorted({tuple(x.shape[1:]) for x, _ in pairs})
    if len(shapes) > 1:
        raise UsageError(
            f"shapes of probe samples must be equal; got {shapes[0]} and {shapes[1]}."
        )
    x, y = zip(*pairs, strict=True)
    return torch.cat([part.to(x[0].device) for part in x]), torch.cat(
        [part.to(y[0].device) for part in y]
    )


# --- what the models put out -----------------------------------------------------------------------------------


def along_one(module: nn.Module) -> bool:
    """Return True if a module convolves in one dimension, so that its output with three axes is [n, d, positions]."""
    return any(isinstance(part, _ONE_DIMENSIONAL) for part in module.modules())


def by_position(module: nn.Module, output: Tensor) -> Tensor:
    """Return an output as [n, *positions, d], features last; without positions [n, d].

    With three axes the features are the last one (tokens). After a one-dimensional convolution or batch norm they are
    the second one. With more axes they are the second one (maps). After a Linear or LayerNorm they are the last one.
    """
    if output.ndim < 3:
        return output.reshape(len(output), -1)
    if output.ndim == 3:
        second = along_one(module)
    else:
        second = not isinstance(module, _CHANNELS_LAST)
    return output.movedim(1, -1) if second else output


def arrange_positions(module: nn.Module, output: Tensor, positions: str) -> Tensor:
    """Return an output with its positions treated: [n, d], or with ``"samples"`` [n, p, d] if it has positions."""
    if positions == "flatten" or output.ndim < 3:
        return output.flatten(1) if output.ndim > 1 else output[:, None]
    rows = by_position(module, output).flatten(1, -2)
    return (
        rows if positions == "samples" else rows.mean(1)
    )  # in half precision summed in float32, and rounded again


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
            "n_samples": len(self.x),
        }
        rows = []
        for layer in self.measurement.layers:
            columns = {**common, "layer": layer.name, "n_params": self._size(layer)}
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
    if estimator == "minibatch":
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
