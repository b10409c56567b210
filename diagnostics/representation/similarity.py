"""Similarities of clients' layers on common samples: of features x [n, d1] and y [n, d2] of the same n rows.

**CKA** compares the entries of the sides' Gram matrices. Their inner products are HSICs.

* ``"full"``: HSIC(X, Y) / sqrt(HSIC(X, X) HSIC(Y, Y)). With the linear kernel it is ||Y^T X||_F^2 / (||X^T X||_F
  ||Y^T Y||_F) with columns centred, in [0, 1] (Kornblith et al. 2019, Eq. 5). This is PLayer-FL, Eq. A.3, without its
  squared denominator.
* ``"minibatch"``: each HSIC is the unbiased estimator (Song et al. 2012, Eq. 5), averaged over batches (Nguyen et al.
  2021, Eq. 3). It may fall below 0.

The radial kernel is exp(-||a - b||^2 / (2 s^2)). Its width s is ``bandwidth`` times the median distance between two
different samples, each side's own (Kornblith et al. 2019, section 3). They use 0.2, 0.4 and 0.8. With ``"minibatch"``
each batch has its own s.

A :class:`Measure` compares the sides' directions, in float64.

The package torch-cka is a cross-check of minibatch CKA (:func:`by_torch_cka`). It multiplies features in float32 before
it centres them. If their mean is far from 0, its HSIC is a small difference of large sums. Its CKA may then differ from
that in float64 by a fifth or more in a layer. This package centres first.

All are invariant to rotation, isotropic scale and offset of either side. There is no value if one side is constant, not
finite, or has fewer than 3 rows (``"minibatch"``: 4). With the radial kernel it is missing if more than half of the
samples' pairs are identical.
"""

from __future__ import annotations

import copy
import io
import itertools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fl_core.errors import OneOf, UsageError, at_least, check_known
from fl_core.layers import Layer
from fl_core.rows import Row
from fl_core.tree import first_tensor

from ..measurement import (
    READING,
    SPENT,
    ClientModel,
    Data,
    Measurement,
    NoValue,
    row_or_reason,
)
from . import PAIRS
from .features import PROBE, Arrange, collect, probe_of

LEAST_SAMPLES = 4
"""The fewest samples from which the unbiased HSIC can be computed."""
ESTIMATORS = ("full", "minibatch")
BACKENDS = ("fedlayers", "torch_cka")
BANDWIDTH = 0.4
"""The default bandwidth of the radial kernel, as a fraction of the median distance of samples."""
VARIANCE = 0.99
"""The default share of the variance that the directions of SVCCA hold."""
MARGIN = 2
"""A direction counts if it lies this many times above the features' rounding.

A forward pass rounds more than once.
"""
_CHUNK = 1 << 16  # entries of each Gram matrix that are in float64 at a time
_SMALL = 1e-6  # a length whose squares, and those of its inverse, surely fit float32
_PANEL = 64  # rows of a Gram matrix that are computed at a time
_NARROW = 64  # features; so few are taken in float64, since their sums have little to average rounding over

Place = tuple[int, int]
"""First and last sample (exclusive) of a batch of the probe."""


def check_rows(n: int, what: str, least: int = 3) -> None:
    """Refuse too few samples to compare. Two centred samples lie on a line, so any two models would be the same.

    Args:
        n: number of samples.
        what: what the samples are called in the message, in the plural.
        least: the smallest number that can be compared.

    Raises:
        NoValue: there are fewer than ``least`` samples.
    """
    if n < least:
        raise NoValue(f"{n} {what}, at least {least} are needed")


def check_features(total: Tensor, offset: Tensor, eps: float) -> Tensor:
    """Return the features' sum of squares around their mean; refuse values not finite or constant.

    Values within rounding of constant count as constant.

    Args:
        total: the sum of squares.
        offset: number of rows times the squared length of the mean that was subtracted
            from each.
        eps: resolution of the features' type.

    Raises:
        NoValue: the features are not finite, or constant.
    """
    if not torch.isfinite(total):
        raise NoValue("not finite")
    if not total > 0 or total <= (8 * eps) ** 2 * offset:
        raise NoValue("constant over the probe")
    return total


def centred(
    x: Tensor, least: int = 3, what: str = "samples", dtype: torch.dtype | None = None
) -> tuple[Tensor, float]:
    """Return features [n, d] around their mean with length 1, and their rounding relative to it.

    The rounding is eps ||X|| / ||X - mean||. Features in half precision are called constant no sooner than float32
    ones.

    Args:
        x: the features, [n, d].
        least: the smallest number of rows that can be compared.
        what: what the rows are called in the message, in the plural.
        dtype: type of the result. Default: the features' own, and at least float32.
            With at most 64 features it is always float64.

    Raises:
        NoValue: there are fewer than ``least`` rows, no features, or they are constant or not finite.
    """
    check_rows(len(x), what, least)
    eps, single_eps = torch.finfo(x.dtype).eps, torch.finfo(torch.float32).eps
    if x.shape[1] <= _NARROW:
        dtype = torch.float64
    x = x.to(dtype or torch.promote_types(x.dtype, torch.float32))
    mean = x.mean(0)
    x = x - mean
    peak = 1.0
    length = torch.linalg.vector_norm(x)
    if not _SMALL < float(length) < 1 / _SMALL:  # so that squares fit the type
        peak = float(torch.linalg.vector_norm(x, torch.inf)) or 1.0
        x /= peak
        length = torch.linalg.vector_norm(x)
    total = length.double().square()
    offset = (mean.double() / peak).square().sum() * len(x)
    check_features(total, offset, min(eps, single_eps))
    x /= total.sqrt().to(x.dtype)
    return x, eps * math.sqrt(1 + float(offset / total))


# --- Gram matrices ---------------------------------------------------------------------------------------------


def gram_entries(
    x: Tensor, batches: Sequence[Place] | None = None, bandwidth: float | None = None
) -> Tensor:
    """Return the entries of a side's centred Gram matrix as a vector. Two sides' inner product is their HSIC.

    The vector has n x n entries, or b x b for each batch of b samples. Its type is that
    of the features, and at least float32.

    Args:
        x: features [n, d].
        batches: (start, stop) of each batch, for the unbiased estimator. None means the full one.
        bandwidth: the bandwidth of the radial kernel. None means the linear kernel.

    Raises:
        NoValue: there are too few samples, or the features are not finite, constant, or
            constant within every batch. With the radial kernel also if more than half
            of the samples' pairs are identical.
    """
    eps = torch.finfo(x.dtype).eps
    wide_type = torch.promote_types(x.dtype, torch.float32)
    x, _ = centred(x, 3 if batches is None else LEAST_SAMPLES)
    grams = []
    for start, stop in batches or [(0, len(x))]:
        gram = _gram(x[start:stop])
        if bandwidth is not None:
            gram = _radial(gram, bandwidth)
        if batches is None:
            gram = _centre(gram)
        else:
            gram = _u_centre(gram, eps)
        grams.append(gram.to(wide_type).reshape(-1))
    entries = torch.cat(grams)
    if not entries.any():
        raise NoValue("constant within every batch")
    return entries


def cka_matrix(entries: Sequence[Tensor]) -> Tensor:
    """Return the CKA of all pairs of m sides, [m, m] in float64, exactly symmetric.

    Args:
        entries: the result of :func:`gram_entries` for each side.
    """
    h = torch.zeros(len(entries), len(entries), dtype=torch.float64)
    for chunk in zip(*(entry.split(_CHUNK) for entry in entries), strict=True):
        stacked_chunk = torch.stack(chunk).double()
        h += (stacked_chunk @ stacked_chunk.T).cpu()
    h = h.triu() + h.triu(1).T
    return h / torch.outer(h.diagonal(), h.diagonal()).sqrt()


def _gram(x: Tensor) -> Tensor:
    """Return x x^T, exactly symmetric, from the blocks on and above the diagonal."""
    gram = x.new_empty(len(x), len(x))
    for start in range(0, len(x), _PANEL):
        stop = start + _PANEL
        gram[start:stop, start:] = x[start:stop] @ x[start:].T
    return gram.triu() + gram.triu(1).T


def _radial(gram: Tensor, bandwidth: float) -> Tensor:
    """Return the radial kernel's matrix [n, n] from the linear one.

    The kernel's width is ``bandwidth`` times the median distance between two samples.

    Raises:
        NoValue: more than half of the samples' pairs are identical.
    """
    n = len(gram)
    squares = gram.diagonal()
    distances = (squares + squares[:, None] - 2 * gram).clamp_(min=0)
    pair_distances = distances[~torch.eye(n, dtype=torch.bool, device=gram.device)]
    middle_rank = (
        len(pair_distances) // 2
    )  # of the sorted distances, whose number is even
    middle_pair = torch.stack(
        [pair_distances.kthvalue(middle_rank + k).values for k in (0, 1)]
    )
    median = middle_pair.sqrt().mean().square()
    if not middle_pair[0] > 0:
        raise NoValue(
            "identical in more than half of the pairs of samples, so that the median distance is 0"
        )
    return distances.div_(-2 * bandwidth**2 * median).exp_()


def _centre(gram: Tensor) -> Tensor:
    """Return a Gram matrix with centred rows and columns."""
    means = gram.mean(0, dtype=torch.float64)
    shift = (means - means.mean() / 2).to(gram.dtype)
    return gram - shift - shift[:, None]


def _u_centre(gram: Tensor, eps: float) -> Tensor:
    """U-centre a Gram matrix [b, b] and divide by sqrt(b (b - 3)): inner products are then HSIC_1.

    This form is the U-centring of Szekely and Rizzo 2014. It equals Song's estimator.
    The diagonal is left out. The other entries of each row and column add up to 0. If
    only rounding is left, all entries are 0.

    Args:
        gram: the matrix, whose diagonal is set to 0 in place.
        eps: resolution of the features' type.
    """
    b = len(gram)
    length_before = torch.linalg.vector_norm(gram)
    gram.fill_diagonal_(0)
    row_sums = gram.sum(0, dtype=torch.float64)
    shift = (row_sums / (b - 2) - row_sums.sum() / (2 * (b - 1) * (b - 2))).to(
        gram.dtype
    )
    gram = (gram - shift - shift[:, None]).fill_diagonal_(0)
    if torch.linalg.vector_norm(gram) <= 16 * eps * length_before:
        gram.zero_()  # nothing but rounding
    return gram / (b * (b - 3)) ** 0.5


# --- directions ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measure:
    """A similarity or distance as a function of A^T X^T Y B, with maps A and B of either side.

    Attributes:
        map: a function that returns the map A [d, k] (or a number) of one side. It takes the side's X^T X [d, d], its
            number of rows, and the rounding of its features (:func:`centred`).
        value: a function from the product [k, l] to the number.
    """

    map: Callable[[Tensor, int, float], Tensor]
    value: Callable[[Tensor], Tensor]

    def side(self, x: Tensor) -> Tensor:
        """Return features [n, d] under their map, [n, k] in float64. With [n, p, d], samples x positions are the rows.

        Raises:
            NoValue: there are fewer than 3 rows, no features, or they are constant or
                not finite. Also if the map refuses them.
        """
        row_kind = "rows"
        if x.ndim == 2:
            row_kind = "samples"
        x, noise = centred(x.flatten(0, -2), what=row_kind, dtype=torch.float64)
        n = len(x)
        if x.shape[1] > n:  # fewer features with the same inner products
            values, vectors = torch.linalg.eigh(x @ x.T)
            x = vectors * values.clamp(min=0).sqrt()
        projection = self.map(x.T @ x, n, noise)
        if projection.ndim:
            return x @ projection
        return x * projection

    def between(self, a: Tensor, b: Tensor) -> float | str:
        """Return the value of two sides, or why there is none.

        Args:
            a, b: the features of both sides under their maps, as :meth:`side` returns
                them. They have no value if their numbers of rows differ.
        """
        if len(a) != len(b):
            return f"{len(a)} rows at one client and {len(b)} at the other"
        return float(self.value(a.T @ b))


def _whitening_map(
    gram: Tensor, rows: int, noise: float, *, variance: float | None = None
) -> Tensor:
    """Return the map to orthonormal columns, over all directions above rounding.

    With ``variance``, it covers the largest directions that hold this share. Independent errors of size s in an [n, d]
    matrix have no singular value above about s (sqrt n + sqrt d). Beneath :data:`MARGIN` times that, a direction may be
    the features' rounding. Beneath a second bound, it may be the rounding of the products.

    Args:
        gram: X^T X of the side, [d, d].
        rows: number of rows n of X.
        noise: rounding of the features (:func:`centred`).
        variance: share of the variance, above 0 and at most 1. None means all
            directions.

    Raises:
        NoValue: the directions fill the space of the rows, so that every correlation is
            1.
    """
    values, vectors = torch.linalg.eigh(gram)
    values, vectors = values.flip(0), vectors.flip(1)
    errors = (2 * MARGIN * noise) ** 2 / min(rows, len(gram)) * gram.trace()
    products = 4 * max(rows, len(gram)) * torch.finfo(values.dtype).eps * values[0]
    rank = int((values > torch.maximum(errors, products)).sum())
    if variance is not None:
        share = values[:rank].cumsum(0) / values[:rank].sum()
        rank = min(rank, 1 + int((share < variance).sum()))
    if rank >= rows - 1:
        raise NoValue(
            f"{rank} directions of {rows} rows fill their space, so that every correlation would be 1"
        )
    return vectors[:, :rank] * values[:rank].rsqrt()


def _mean_correlation(product: Tensor) -> Tensor:
    return torch.linalg.svdvals(product).clamp(max=1).mean()


LINEAR_CKA = Measure(
    lambda own, rows, noise: torch.linalg.matrix_norm(own).rsqrt(),
    lambda product: product.square().sum(),
)
"""Linear CKA where samples x positions are the rows, and Gram matrices would be too large."""
PROCRUSTES = Measure(
    lambda own, rows, noise: own.new_ones(()),
    lambda product: torch.linalg.svdvals(product).sum().clamp(max=1).arccos(),
)
"""The orthogonal Procrustes angle in radians: 0 means same and pi / 2 unrelated.

The angle remains after the best rotation. It is arccos(||X^T Y||_* / (||X||_F ||Y||_F)) with columns centred (Williams
et al. 2021, without whitening: alpha = 1). It is a metric.
"""
CCA = Measure(_whitening_map, _mean_correlation)
"""The mean canonical correlation, in [0, 1]: 1 means same up to an invertible linear map.

The mean is over the min(rank x, rank y) correlations (Kornblith et al. 2019, Table 1). The rank is found in float64. It
leaves out directions that rounding the features in their type can make. Unrelated features of rank r have about
sqrt(r / n), not 0. Two ranks that add up to n or more force correlations of 1.

There is no value if one side spans all n - 1 directions, as with n - 1 features or more. Every correlation is then 1.
"""


def svcca_measure(variance: float = VARIANCE) -> Measure:
    """Return SVCCA: :data:`CCA` of the fewest principal directions of each side that hold this share of its variance.

    See Raghu et al. 2017. The value is invariant to rotation, isotropic scale and
    offset, but not to every linear map.

    Args:
        variance: the share, above 0 and at most 1.
    """
    return Measure(partial(_whitening_map, variance=variance), _mean_correlation)


# --- clients ---------------------------------------------------------------------------------------------------

POSITIONS = ("flatten", "samples", "mean")
"""How an activation's positions are treated.

They are features of their own, rows together with the samples, or averaged.
"""

_CHANNELS_LAST = (nn.Linear, nn.LayerNorm)
_ONE_DIMENSIONAL = (nn.Conv1d, nn.ConvTranspose1d, nn.BatchNorm1d, nn.InstanceNorm1d)


def along_one(module: nn.Module) -> bool:
    """Return True if a module contains a one-dimensional convolution, batch or instance norm.

    An output with three axes is then [n, d, positions].
    """
    return any(
        isinstance(submodule, _ONE_DIMENSIONAL) for submodule in module.modules()
    )


def by_position(module: nn.Module, output: Tensor) -> Tensor:
    """Return an output with its features last, [n, ..., d]; without positions [n, d].

    An output with three axes has its features last (tokens), or second after
    one-dimensional convolutions and norms (:func:`along_one`). An output with more axes
    has them second (maps), or last after a Linear or LayerNorm.

    Args:
        module: the module that gave the output.
        output: the output, [n, ...].
    """
    if output.ndim < 3:
        return output.reshape(len(output), -1)
    if output.ndim == 3:
        features_second = along_one(module)
    else:
        features_second = not isinstance(module, _CHANNELS_LAST)
    if features_second:
        return output.movedim(1, -1)
    return output


def arrange_positions(module: nn.Module, output: Tensor, positions: str) -> Tensor:
    """Return an output as features: [n, d], or with ``"samples"`` [n, p, d] if it has positions.

    Args:
        module: the module that gave the output.
        output: the output, [n, ...].
        positions: ``"flatten"``, ``"samples"`` or ``"mean"`` (:class:`SimilarityOptions`).
    """
    if positions == "flatten" or output.ndim < 3:
        if output.ndim > 1:
            return output.flatten(1)
        return output[:, None]
    rows = by_position(module, output).flatten(1, -2)
    # in half precision summed in float32, and rounded again
    if positions == "samples":
        return rows
    return rows.mean(1)


Spot = tuple[str, int]
"""Where features come from: the path of a module, and a client's number."""
Faults = Mapping[Spot, str]
"""Why the features of a spot have no value, by spot."""
Value = Callable[[Spot, Spot], float | str]
"""A function from two spots without a fault to their value, or to why there is none."""


@dataclass(frozen=True)
class CommonSamples:
    """The options of metrics that compare clients on the same samples.

    Attributes:
        probe: the samples. Default: the first samples of the clients' own data, equally
            many of each.
        samples: number of samples of all clients together, without ``probe``. At least
            one of each client is taken.

    Raises:
        UsageError: there is less than 1 sample (checked by ``Metric.settings``).
    """

    probe: Data | None = None
    samples: Annotated[int, at_least(1)] = PROBE


@dataclass(frozen=True)
class SimilarityOptions(CommonSamples):
    """The options of all similarity metrics, in addition to the samples: what is compared.

    Attributes:
        positions: how positions of convolutions and token sequences are treated, and the rows' variant. With
            ``"flatten"`` channels and positions together are the features. With ``"samples"`` samples x positions are
            the rows and channels the features. With ``"mean"`` channels are averaged over the positions.
        variant: ``"pairs"`` also compares each layer of one client with each layer of
            the other. These rows have the variant ``pairs LAYER``, with the other's
            layer. None compares equal layers alone.

    Raises:
        UsageError: ``positions`` is unknown, or does not go with ``variant``. Also an
            unknown variant (checked by ``Metric.settings``).
    """

    positions: str = "flatten"
    variant: Annotated[str | None, OneOf("variant", (PAIRS,))] = None

    treatments: ClassVar[tuple[str, ...]] = POSITIONS

    def __post_init__(self) -> None:
        check_known("positions", self.positions, self.treatments)
        if self.variant and self.positions == "samples":
            raise UsageError(
                "positions must be 'flatten' or 'mean' with variant 'pairs'; got 'samples'. "
                "Layers differ in their numbers of positions."
            )


@dataclass(frozen=True)
class LayerComparison:
    """A comparison of all pairs of clients at every layer, or of all pairs of layers.

    Attributes:
        metric: name in the rows.
        measurement: the clients, the layers and the settings.
        options: the samples, and what is compared.
    """

    metric: str
    measurement: Measurement
    options: SimilarityOptions

    @property
    def subjects(self) -> Sequence[ClientModel]:
        """Return the clients, in the order of the rows."""
        return self.measurement.subjects

    @cached_property
    def x(self) -> Tensor:
        """Return the probe samples [n, ...], the same for every model. They are read once.

        Raises:
            UsageError: as :func:`diagnostics.representation.features.probe_of`.
        """
        return probe_of(
            self.subjects,
            self.options.probe,
            self.options.samples,
            self.measurement.seed,
        )

    @cached_property
    def paths(self) -> list[str]:
        """Return the sorted paths of the modules whose outputs are compared: those of used layers."""
        return sorted({layer.output for layer in self.measurement.layers if layer.used})

    def sides(
        self,
        side: Callable[[Tensor], Tensor],
        paths: Sequence[str] | None = None,
        arrange: Arrange | None = None,
    ) -> tuple[dict[Spot, Tensor], dict[Spot, str]]:
        """Pass the probe samples through every model, and store the result of ``side`` on each layer's features.

        Args:
            side: a function from a layer's features to the result that is stored.
            paths: paths of the modules to read. Default: all.
            arrange: a function (module, output) -> features. Default: as the option ``positions`` says.

        Returns:
            The stored results by (path, client's number), and why the others have none,
            by the same keys. Spots that the time budget did not reach are among the
            latter.

        Raises:
            UsageError: the probe does not fit a model.
        """
        paths, settings = self.paths if paths is None else paths, self.measurement
        positions = self.options.positions
        arrange = arrange or partial(arrange_positions, positions=positions)
        sides: dict[Spot, Tensor] = {}
        faults: dict[Spot, str] = {}
        with settings.clock.within(READING):
            for client, subject in enumerate(settings.turns()):
                if settings.clock.over:
                    break
                data = self.x, torch.zeros(len(self.x), dtype=torch.long)
                features = collect(
                    subject.model,
                    paths,
                    data,
                    batch=settings.batch,
                    seed=settings.seed,
                    mode=settings.mode,
                    arrange=arrange,
                    clock=settings.clock,
                )
                for path in paths:
                    try:
                        settings.clock.check()
                        sides[path, client] = side(features.tensor(path))
                    except NoValue as reason:
                        faults[path, client] = str(reason)
        for spot in itertools.product(paths, range(len(self.subjects))):
            if spot not in sides:
                faults.setdefault(spot, SPENT)
        return sides, faults

    def rows(
        self, faults: Faults, value: Value, *, estimator: str, unit: str = ""
    ) -> list[Row]:
        """Return the rows: for each layer all pairs of clients, and with ``variant="pairs"`` for each pair of layers.

        Args:
            faults: why a layer of a client has no features, by (path, client's number).
            value: a function of two such keys that returns the value, or why there is none.
            estimator: how the values are computed, for the rows.
            unit: unit of the values.
        """
        rows, layers, options = [], self.measurement.layers, self.options
        layer_pairs = [(layer, layer, options.positions) for layer in layers]
        if options.variant:
            for layer in layers:
                layer_pairs += [(layer, e, f"{PAIRS} {e.name}") for e in layers]
        parameters = self.subjects[0].model.named_parameters(remove_duplicate=False)
        sizes = {name: parameter.numel() for name, parameter in parameters}
        for layer, layer_b, variant in self.measurement.clock.turns(layer_pairs):
            for a, b in itertools.combinations(range(len(self.subjects)), 2):
                result = self._value([(layer, a), (layer_b, b)], faults, value)
                reason = ""
                if isinstance(result, str):
                    reason = result
                rows.append(
                    row_or_reason(
                        self.metric,
                        None if reason else float(result),
                        reason,
                        client=self.subjects[a].client,
                        client_b=self.subjects[b].client,
                        layer=layer.name,
                        variant=variant,
                        estimator=estimator,
                        unit=unit,
                        n_params=sum(sizes.get(name, 0) for name in layer.parameters),
                        n_samples=len(self.x),
                    )
                )
        return rows

    def _value(
        self, sides: Sequence[tuple[Layer, int]], faults: Faults, value: Value
    ) -> float | str:
        for layer, client in sides:
            if not layer.used:
                return "unused in the forward pass"
            if (layer.output, client) in faults:
                client_name = self.subjects[client].client
                reason = faults[layer.output, client]
                return f"output of layer {layer.name!r} at client {client_name!r}: {reason}"
        if self.measurement.clock.over:
            return SPENT
        (layer, a), (layer_b, b) = sides
        result = value((layer.output, a), (layer_b.output, b))
        if isinstance(result, str):
            return f"layer {layer.name!r}: {result}"
        return result


def by_grams(
    comparison: LayerComparison, estimator: str, bandwidth: float | None = None
) -> tuple[Faults, Value]:
    """Return why layers have no features, by (path, client's number), and a function that returns a pair's CKA.

    The function takes two such keys. It reads stored Gram matrices.

    Args:
        comparison: the clients, the layers and the options.
        estimator: ``"full"`` or ``"minibatch"``.
        bandwidth: the bandwidth of the radial kernel. None means the linear kernel.

    Raises:
        UsageError: the batch is too small, or the probe does not fit the models.
    """
    places = None
    if estimator == "minibatch":
        n = len(comparison.x)
        places = batch_bounds(n, comparison.measurement.batch or max(n, LEAST_SAMPLES))
    sides, faults = comparison.sides(lambda x: gram_entries(x, places, bandwidth))
    values: dict[tuple[Spot, Spot], float] = {}
    groups = [[spot for spot in sides if spot[0] == path] for path in comparison.paths]
    for spots in [list(sides)] if comparison.options.variant else groups:
        table = cka_matrix([sides[spot] for spot in spots]).tolist()
        for a, table_row in zip(spots, table, strict=True):
            values |= {(a, b): v for b, v in zip(spots, table_row, strict=True)}
    return faults, lambda a, b: values[a, b]


class _LayerOutput(nn.Module):
    """A copy of a model that computes in float32 and returns the output of one of its modules."""

    def __init__(self, model: nn.Module, path: str) -> None:
        super().__init__()
        self.model = copy.deepcopy(model).float()
        self.model.get_submodule(path).register_forward_hook(self._keep)

    def _keep(self, module: nn.Module, inputs: object, output: object) -> None:
        tensor = first_tensor(output)
        assert tensor is not None
        self.output = tensor.clone()  # a later module may work in place

    def forward(self, x: Tensor) -> Tensor:
        self.model(x)
        return self.output


def by_torch_cka(comparison: LayerComparison) -> tuple[Faults, Value]:
    """Return a function that computes a pair's minibatch CKA with the package torch-cka, to check our own.

    The first result, the layers without features, is always empty. The function takes two keys (path, client's
    number), and runs copies of the models. It returns the CKA, or the reason as text if the package gives no finite
    value.

    Raises:
        UsageError: the batch size does not divide the number of samples, or is below :data:`LEAST_SAMPLES`.
    """
    from torch_cka import CKA

    n = len(comparison.x)
    size = comparison.measurement.batch or n
    if n % size or size < LEAST_SAMPLES:
        raise UsageError(
            f"batch must divide the {n} samples and be at least {LEAST_SAMPLES} with backend 'torch_cka'; got {size}."
        )
    batches = DataLoader(TensorDataset(comparison.x.float()), size)
    device = str(next(comparison.subjects[0].model.parameters()).device)

    def value(a: Spot, b: Spot) -> float | str:
        sides = [
            _LayerOutput(comparison.subjects[client].model, path)
            for path, client in (a, b)
        ]
        with (
            warnings.catch_warnings(action="ignore"),
            redirect_stderr(io.StringIO()),  # its progress bar
            suppress(AssertionError),  # of a NaN, which is the result then
            torch.no_grad(),
        ):
            package = CKA(*sides, "a", "b", [""], [""], device=device)
            package.compare(batches, batches)
        cka = float(package.hsic_matrix[0, 0])
        if math.isfinite(cka):
            return cka
        return "no finite value"

    return {}, value


def by_directions(
    comparison: LayerComparison, measure: Measure
) -> tuple[Faults, Value]:
    """Return why layers have no features, by (path, client's number), and a function that returns a pair's value.

    The function takes two such keys, and returns their value of ``measure``, or why there is none. If positions are
    rows, the features of one layer are in memory at a time.

    Raises:
        UsageError: the probe does not fit the models.
    """
    if comparison.options.positions != "samples":
        sides, faults = comparison.sides(measure.side)
        return faults, lambda a, b: measure.between(sides[a], sides[b])
    values: dict[tuple[Spot, Spot], float | str] = {}
    faults = {}
    for path in comparison.measurement.clock.turns(comparison.paths):
        sides, path_faults = comparison.sides(measure.side, [path])
        faults |= path_faults
        for a, b in itertools.combinations(sides, 2):
            values[a, b] = measure.between(sides[a], sides[b])
    return faults, lambda a, b: values[a, b]


def batch_bounds(n: int, batch: int) -> list[Place]:
    """Return (start, stop) of each batch of ``n`` samples for the unbiased HSIC, the stop excluded.

    A last batch with fewer than :data:`LEAST_SAMPLES` joins the one before it. Without
    samples the list is empty.

    Raises:
        UsageError: ``batch`` is below :data:`LEAST_SAMPLES`.
    """
    if batch < LEAST_SAMPLES:
        raise UsageError(
            f"batch must be at least {LEAST_SAMPLES} for minibatch CKA; got {batch}."
        )
    starts = list(range(0, n, batch))
    if len(starts) > 1 and n - starts[-1] < LEAST_SAMPLES:
        starts.pop()
    if n:
        return list(zip(starts, [*starts[1:], n], strict=True))
    return []
