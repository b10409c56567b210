"""Similarities computed from cross-products X^T Y of two models' centred features, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from .probe import NoValue, Place, check_features, check_rows

VARIANCE = 0.99
"""Of the variance that SVCCA keeps."""
MARGIN = 2
"""How far above the features' rounding a direction must lie to be one: a forward pass rounds more than once."""
_COLUMNS = 4096  # features that are in float64 at a time
_ROWS = 1 << 14  # rows that are in float64 at a time


# --- what is read from X^T X and X^T Y -------------------------------------------------------------------------


@dataclass(frozen=True)
class Measure:
    """A similarity or distance as a function of A^T X^T Y B, with maps A and B of either side.

    Attributes:
        prepare: a function that returns the map A [d, k] (or a number) of one side. It takes the side's X^T X [d, d],
            its number of rows, and the rounding of its features relative to their spread (see :func:`_spread`).
        value: the number, from [k, l].
    """

    prepare: Callable[[Tensor, int, float], Tensor]
    value: Callable[[Tensor], Tensor]


def _spread(total: Tensor, offset: Tensor, eps: float) -> tuple[Tensor, float]:
    """Return the features' sum of squares around their mean, and their rounding relative to it.

    The rounding is eps ||X|| / ||X - mean||. Features in half precision are called constant no sooner than float32
    ones.

    Args:
        total, offset, eps: as in :func:`~.probe.check_features`.
    """
    total = check_features(total, offset, min(eps, torch.finfo(torch.float32).eps))
    return total, eps * math.sqrt(1 + float(offset / total))


def _unit_trace(own: Tensor, rows: int, noise: float) -> Tensor:
    return own.trace().rsqrt()


def _unit_norm(own: Tensor, rows: int, noise: float) -> Tensor:
    return torch.linalg.matrix_norm(own).rsqrt()


def _whitening_map(
    own: Tensor, rows: int, noise: float, *, variance: float | None = None
) -> Tensor:
    """Return the map to orthonormal columns, over all directions above rounding.

    With ``variance``, it covers the largest directions that hold this share. Independent errors of size s in an [n, d]
    matrix have no singular value above about s (sqrt n + sqrt d). Beneath :data:`MARGIN` times that, a direction may be
    the features' rounding. Beneath a second bound, it may be the rounding of the products.
    """
    values, vectors = torch.linalg.eigh(own)
    values, vectors = values.flip(0), vectors.flip(1)
    errors = (2 * MARGIN * noise) ** 2 / min(rows, len(own)) * own.trace()
    products = 4 * max(rows, len(own)) * torch.finfo(values.dtype).eps * values[0]
    rank = int((values > torch.maximum(errors, products)).sum())
    if variance is not None:
        share = values[:rank].cumsum(0) / values[:rank].sum()
        rank = min(rank, 1 + int((share < variance).sum()))
    if rank >= rows - 1:
        raise NoValue(
            f"{rank} directions of {rows} rows fill their space, so that every correlation would be 1"
        )
    return vectors[:, :rank] * values[:rank].rsqrt()


def _angle(product: Tensor) -> Tensor:
    return torch.linalg.svdvals(product).sum().clamp(max=1).arccos()


def _mean_correlation(product: Tensor) -> Tensor:
    return torch.linalg.svdvals(product).clamp(max=1).mean()


LINEAR_CKA = Measure(_unit_norm, lambda product: product.square().sum())
"""||Y^T X||_F^2 / (||X^T X||_F ||Y^T Y||_F) with columns centred, in [0, 1] (Kornblith et al. 2019, Eq. 5)."""
PROCRUSTES = Measure(_unit_trace, _angle)
"""The orthogonal Procrustes angle in radians: 0 means same and pi / 2 unrelated.

The angle remains after the best rotation. It is arccos(||X^T Y||_* / (||X||_F ||Y||_F)) with columns centred (Williams
et al. 2021, without whitening: alpha = 1). It is a metric, invariant to rotation, isotropic scale and offset of either
side. There is no value if one side is constant, not finite, or has fewer than 3 samples.
"""
CCA = Measure(_whitening_map, _mean_correlation)
"""The mean canonical correlation, in [0, 1]: 1 means same up to an invertible linear map.

The mean is over the min(rank x, rank y) correlations (Kornblith et al. 2019, Table 1). The rank is found in float64. It
leaves out directions that rounding the features in their type can make. Unrelated features of rank r have about
sqrt(r / n), not 0. Two ranks that add up to n or more force correlations of 1.

There is no value where :data:`PROCRUSTES` has none. Nor is there one if one side spans all n - 1 directions, as with
n - 1 features or more. Every correlation is then 1.
"""


def svcca_measure(variance: float = VARIANCE) -> Measure:
    """Return SVCCA: :data:`CCA` of the fewest principal directions of each side that hold this share of its variance.

    See Raghu et al. 2017. The value is invariant to rotation, isotropic scale and offset, but not to any linear map.
    """
    return Measure(partial(_whitening_map, variance=variance), _mean_correlation)


class StoredFeatures:
    """Stored features [n, d] of several models, with samples as rows.

    Each model keeps min(n, d) features with the same inner products: n x min(n, d) numbers in float64.

    Attributes:
        faults: number of a model -> why it has nothing to compare.
        bases: each model's features under the measure's map, [n, k], available after :meth:`prepare`.
    """

    def __init__(self, sides: int, n: int) -> None:
        self._sides, self._n = sides, n
        self._parts: dict[int, dict[int, Tensor]] = {}
        self._noise: dict[int, float] = {}
        self.bases: dict[int, Tensor] = {}
        self.faults: dict[int, str] = {}

    def take(self, side: int, place: Place, x: Tensor) -> None:
        """Store a model's features of a batch, [b, d]; the last call for the same samples counts."""
        self._parts.setdefault(side, {})[place[0]] = x.clone()

    def done(self, side: int) -> None:
        """Mark a model's features as complete."""
        if side in self.bases or side in self.faults:
            return
        parts = self._parts.pop(side, {})
        try:
            self.bases[side] = self._reduce(
                side, [parts[start] for start in sorted(parts)]
            )
        except NoValue as reason:
            self.faults[side] = str(reason)

    def _reduce(self, side: int, parts: list[Tensor]) -> Tensor:
        check_rows(self._n, "samples")
        if sum(map(len, parts)) != self._n:
            raise NoValue("not computed in every forward pass")
        widths = list(dict.fromkeys(part.shape[1] for part in parts))
        if len(widths) > 1:
            raise NoValue(f"{widths[1]} features after {widths[0]} in an earlier batch")
        if not widths[0]:
            raise NoValue("no features")
        x = torch.cat(parts)
        eps = torch.finfo(x.dtype).eps
        offset = x.mean(0, dtype=torch.float64).square().sum() * self._n
        if x.shape[1] <= self._n:
            x = x.double()
            x = x - x.mean(0)
            total, self._noise[side] = _spread(x.square().sum(), offset, eps)
            return x / total.sqrt()
        gram = x.new_zeros(self._n, self._n, dtype=torch.float64)
        for columns in x.split(_COLUMNS, 1):
            part = columns.double()
            part = part - part.mean(0)
            gram.addmm_(part, part.T)
        total, self._noise[side] = _spread(gram.trace(), offset, eps)
        values, vectors = torch.linalg.eigh(gram / total)
        return vectors * values.clamp(min=0).sqrt()

    def flush(self) -> None:
        """Do nothing after a batch: features are stored until the model is done."""

    def prepare(self, measure: Measure) -> None:
        """Map every model's features as the measure needs; a model that it refuses joins the faults."""
        for side, x in list(self.bases.items()):
            try:
                by = measure.prepare(x.T @ x, self._n, self._noise[side])
            except NoValue as reason:
                self.faults[side] = str(reason)
                del self.bases[side]
            else:
                self.bases[side] = x @ by if by.ndim else x * by

    def product(self, a: int, b: int) -> Tensor:
        """Return the cross-product of two models' mapped features, [k, l]."""
        return self.bases[a].T @ self.bases[b]


class Moments:
    """Cross-products of several models' features, with samples x positions as rows; features are not stored.

    All models must give a batch before the next one. For M models with d features, the memory is (M d)^2 / 2 numbers in
    float64, and one batch's features of every model.

    Attributes:
        faults: number of a model -> why it has nothing to compare.
    """

    def __init__(self, sides: int, n: int) -> None:
        self._sides, self._n = sides, n
        self._now: dict[int, Tensor] = {}
        self._samples = dict.fromkeys(range(sides), 0)
        self._references: dict[int, Tensor] = {}
        self._products: dict[tuple[int, int], Tensor] = {}
        self._sums: dict[int, Tensor] = {}
        self._shape: tuple[int, ...] = ()
        self._maps: dict[int, Tensor] = {}
        self._eps: dict[int, float] = {}
        self.faults: dict[int, str] = {}

    def take(self, side: int, place: Place, x: Tensor) -> None:
        """Hold a model's features of a batch, [b, p, d]; the last call before :meth:`flush` counts."""
        self._shape = self._shape or tuple(x.shape[1:])
        if tuple(x.shape[1:]) != self._shape:
            self.faults[side] = (
                f"(positions, features) {tuple(x.shape[1:])} where others have {self._shape}"
            )
        else:
            self._now[side] = x.flatten(0, 1).clone()

    def flush(self) -> None:
        """Add the cross-products of a batch that all models have seen."""
        now, self._now = self._now, {}
        rows = max((len(x) for x in now.values()), default=0)
        for side, x in now.items():
            self._samples[side] += len(x) // self._shape[0]
            self._eps[side] = torch.finfo(x.dtype).eps
            self._references.setdefault(side, x.double().mean(0))
        for start in range(0, rows, _ROWS):
            part = {
                s: x[start : start + _ROWS].double() - self._references[s]
                for s, x in now.items()
            }
            for a, x in part.items():
                self._sums[a] = self._sums.get(a, 0) + x.sum(0)
                for b, y in part.items():
                    if a <= b:
                        self._products[a, b] = self._products.get((a, b), 0) + x.T @ y

    def done(self, side: int) -> None:
        """Do nothing: a model alone needs no closing."""

    def prepare(self, measure: Measure) -> None:
        """Centre the products and compute every model's map; a model without one joins the faults."""
        rows = self._n * (self._shape[0] if self._shape else 1)
        for side in range(self._sides):
            if side in self.faults:
                continue
            try:
                if self._samples[side] != self._n:
                    raise NoValue("not computed in every forward pass")
                check_rows(rows, "rows")
                own = self._centre(side, side, rows)
                offset = (
                    self._references[side] + self._sums[side] / rows
                ).square().sum() * rows
                eps = self._eps[side]
                _, noise = _spread(own.trace(), offset, eps)
                self._maps[side] = measure.prepare(own, rows, noise)
            except NoValue as reason:
                self.faults[side] = str(reason)

    def _centre(self, a: int, b: int, rows: int) -> Tensor:
        return self._products[a, b] - torch.outer(self._sums[a], self._sums[b]) / rows

    def product(self, a: int, b: int) -> Tensor:
        """Return the mapped cross-product of two models, a before b, [k, l]."""
        product, left, right = (
            self._centre(a, b, self._n * self._shape[0]),
            self._maps[a],
            self._maps[b],
        )
        product = left.T @ product if left.ndim else left * product
        return product @ right if right.ndim else product * right
