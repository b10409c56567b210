"""CKA with a linear or radial kernel, from Gram matrices that are summed while features arrive.

CKA compares features x [n, d1] and y [n, d2] of the same n samples; 1 = same, 0 = unrelated.

* ``"full"``: HSIC(X, Y) / sqrt(HSIC(X, X) HSIC(Y, Y)). With the linear kernel it is ||Y^T X||_F^2 / (||X^T X||_F
  ||Y^T Y||_F) with columns centred, in [0, 1] (Kornblith et al. 2019, Eq. 5). This is PLayer-FL, Eq. A.3, without its
  squared denominator.
* ``"minibatch"``: each HSIC is the unbiased estimator (Song et al. 2012, Eq. 5), averaged over batches (Nguyen et al.
  2021, Eq. 3). It may fall below 0.

The radial kernel is exp(-||a - b||^2 / (2 s^2)). Its width s is ``bandwidth`` times the median distance between two
different samples, each side's own (Kornblith et al. 2019, section 3). They use 0.2, 0.4 and 0.8. With ``"minibatch"``
each batch has its own s.

All are invariant to rotation, isotropic scale and offset of either side. There is no value if one side is constant, not
finite, or has fewer than 3 samples (``"minibatch"``: 4). With the radial kernel it is missing if more than half of the
samples' pairs are identical.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .probe import LEAST, NoValue, Place, check_features, check_rows

ESTIMATORS = ("full", "minibatch")
BANDWIDTH = 0.4
"""Of the radial kernel, as a fraction of the median distance between samples."""
_CHUNK = 1 << 16  # entries of each Gram matrix that are in float64 at a time
_PANEL = 64  # rows of a Gram matrix that are computed at a time
_NARROW = 64  # features; so few are taken in float64, since their sums have little to average rounding over


@dataclass(frozen=True)
class Summary:
    """A summary of a model's features: entries of the centred Gram matrix, or the centred features [n, d]."""

    gram: Tensor | None = None
    features: Tensor | None = None


class Recorder:
    """Summarises features [n, d] batch by batch, so that the HSIC of two models is an inner product of summaries.

    The first batch's mean is subtracted at once. CKA does not depend on an offset, but the digits of a float32 Gram
    matrix do. The buffer serves one model after the other.

    Args:
        where: the batches' positions.
        estimator: ``"full"`` or ``"minibatch"``.
        models: number of models to compare at this output alone. It allows to keep features instead of a Gram matrix,
            if that takes fewer numbers and products. None means Gram matrices always.
        bandwidth: bandwidth of the radial kernel. None means a linear kernel.
    """

    def __init__(
        self,
        where: Sequence[Place],
        estimator: str,
        models: int | None = None,
        bandwidth: float | None = None,
    ) -> None:
        self._places, self._estimator, self._models, self._bandwidth = (
            where,
            estimator,
            models,
            bandwidth,
        )
        self._buffer = torch.empty(0)
        self.begin()

    def begin(self) -> None:
        """Prepare for the next model."""
        self._taken: set[int] = set()
        self._grams: dict[int, Tensor] = {}
        self._reference = torch.empty(0)
        self._scale, self._eps = 1.0, 0.0
        self.fault = ""

    def take(self, start: int, stop: int, output: Tensor) -> None:
        """Add the output for samples ``start`` to ``stop``; a second call for them replaces the first."""
        if not output.numel():
            self.fault = "no features"
            return
        x = output.reshape(len(output), -1)
        x = x if x.dtype in (torch.float32, torch.float64) else x.float()
        eps = torch.finfo(x.dtype).eps
        x = x.double() if x.shape[1] <= _NARROW else x
        if start == 0:
            self._eps = eps
            self._reference = x.mean(0)
        elif 0 not in self._taken:
            return
        elif x.shape[1:] != self._reference.shape:
            self.fault = f"{x.shape[1]} features after {len(self._reference)} in an earlier batch"
            return
        whole = self._estimator == "full"
        size = (
            self._places[-1][1] if whole else max(e - s for s, e in self._places),
            x.shape[1],
        )
        if self._buffer.shape != size or (self._buffer.dtype, self._buffer.device) != (
            x.dtype,
            x.device,
        ):
            self._buffer = x.new_empty(size)
        target = self._buffer[start:stop] if whole else self._buffer[: stop - start]
        torch.sub(x, self._reference, out=target)
        if start == 0:
            peak = float(torch.linalg.vector_norm(target, torch.inf))
            self._scale = (
                1.0 if peak == 0 or 1e-8 < peak < 1e8 else 1 / peak
            )  # so that squares fit the type
        if self._scale != 1.0:
            target *= self._scale
        if not whole:
            self._grams[start] = _gram(target)
        self._taken.add(start)

    def summarise(self) -> Summary | str:
        """Return the model's summary, or why there is nothing to compare."""
        try:
            return self._summary()
        except NoValue as reason:
            return str(reason)

    def _summary(self) -> Summary:
        n = self._places[-1][1] if self._places else 0
        check_rows(n, "samples", 3 if self._estimator == "full" else LEAST)
        if self.fault:
            raise NoValue(self.fault)
        if self._taken != {start for start, _ in self._places}:
            raise NoValue("not computed in every forward pass")
        if self._estimator == "minibatch":
            return self._minibatch(n)
        linear = self._bandwidth is None
        width = len(self._reference)
        if linear and self._models is not None and width * (self._models + 1) / 2 < n:
            x = self._buffer.double()
            x -= x.mean(0)
            norm = self._check_kernel(torch.linalg.vector_norm(x).square(), n).sqrt()
            return Summary(features=x / norm)
        gram = _centre(_gram(self._buffer))
        total = self._check_kernel(gram.diagonal().sum(dtype=torch.float64), n)
        if self._bandwidth is not None:
            gram = _centre(_radial(gram, self._bandwidth))
            total = gram.diagonal().sum(dtype=torch.float64)
        return Summary(gram=gram.div_(total.to(gram.dtype)).reshape(-1))

    def _minibatch(self, n: int) -> Summary:
        grams = list(self._grams.values())
        total = self._check_kernel(
            torch.stack([g.diagonal().sum(dtype=torch.float64) for g in grams]).sum(), n
        )
        if self._bandwidth is not None:
            grams = [_radial(g, self._bandwidth) for g in grams]
            total = total.new_tensor(n)
        gram = torch.cat(
            [
                _u_centred(g.div_(total.to(g.dtype)), self._eps).reshape(-1)
                for g in grams
            ]
        )
        if not bool(gram.any()):
            raise NoValue("constant within every batch")
        return Summary(gram=gram)

    def _check_kernel(self, total: Tensor, n: int) -> Tensor:
        offset = (
            torch.linalg.vector_norm(self._reference, dtype=torch.float64)
            .mul(self._scale)
            .square()
            * n
        )
        return check_features(total, offset, self._eps)


def hsic(summaries: Sequence[Summary]) -> Tensor:
    """Return inner products of all pairs, [M, M] in float64, exactly symmetric."""
    m = len(summaries)
    features = [s.features for s in summaries if s.features is not None]
    if features:
        x = torch.stack(features, 1)  # [n, M, d]
        h = torch.stack(
            [
                torch.einsum("nd,nme->dme", x[:, k], x).square().sum((0, 2))
                for k in range(m)
            ]
        )
    else:
        grams = [s.gram for s in summaries if s.gram is not None]
        h = torch.zeros(m, m, dtype=torch.float64, device=grams[0].device)
        for start in range(0, len(grams[0]), _CHUNK):
            part = torch.stack(
                [gram[start : start + _CHUNK] for gram in grams]
            ).double()
            h += part @ part.T
    return h.triu() + h.triu(1).T


def _gram(x: Tensor) -> Tensor:
    """Return x x^T, exactly symmetric, computed from the blocks on and above the diagonal."""
    n = len(x)
    gram = x.new_empty(n, n)
    for start in range(0, n, _PANEL):
        stop = min(start + _PANEL, n)
        gram[start:stop, start:] = x[start:stop] @ x[start:].T
        gram[stop:, start:stop] = gram[start:stop, stop:].T
        block = gram[start:stop, start:stop]
        block.copy_((block + block.T) / 2)
    return gram


def _centre(gram: Tensor) -> Tensor:
    """Centre rows and columns of a Gram matrix, in place."""
    means = gram.mean(0, dtype=torch.float64)
    shift = (means - means.mean() / 2).to(gram.dtype)
    gram -= shift
    gram -= shift[:, None]
    return gram


def _radial(gram: Tensor, bandwidth: float) -> Tensor:
    """Return the radial kernel's matrix from the linear one.

    Its width is a fraction of the median distance.
    """
    n = len(gram)
    squares = gram.diagonal()
    distances = (squares + squares[:, None] - 2 * gram).clamp_(min=0)
    apart = distances[~torch.eye(n, dtype=torch.bool, device=gram.device)]
    median = apart.median()
    if not bool(median > 0):
        raise NoValue(
            "identical in more than half of the pairs of samples, so that the median distance is 0"
        )
    return distances.div_(-2 * bandwidth**2 * median).exp_()


def _u_centred(gram: Tensor, eps: float) -> Tensor:
    """U-centre a Gram matrix [b, b] in place and divide by sqrt(b (b - 3)): inner products are then HSIC_1.

    This form is the U-centring of Szekely and Rizzo 2014. It equals Song's estimator. The diagonal is left out. The
    other entries of each row and column add up to 0.
    """
    b = len(gram)
    before = torch.linalg.vector_norm(gram)
    gram.fill_diagonal_(0)
    rows = gram.sum(0, dtype=torch.float64)
    shift = (rows / (b - 2) - rows.sum() / (2 * (b - 1) * (b - 2))).to(gram.dtype)
    gram -= shift
    gram -= shift[:, None]
    gram.fill_diagonal_(0)
    if bool(torch.linalg.vector_norm(gram) <= 16 * eps * before):
        gram.zero_()  # nothing but rounding
    return gram.div_((b * (b - 3)) ** 0.5)
