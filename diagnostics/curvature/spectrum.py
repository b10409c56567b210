"""The largest eigenvalues of each layer's diagonal block of the loss's Hessian."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from scipy.sparse.linalg import ArpackError, ArpackNoConvergence, LinearOperator, eigsh
from torch import Tensor, nn

from fl_core.layers import Layer
from fl_core.seeds import numpy_generator
from fl_core.training.losses import Loss
from fl_core.tree import set_mode

from ..measurement import Data, batches, why_unreadable
from .exact import verdicts
from .model import (
    CUT,
    Differentiable,
    LossNotFinite,
    NoProduct,
    curvature,
    differentiable_once,
    twice_differentiable,
)

DENSE = 40
"""Parameters up to which a block is written out whole."""
RESTARTS = 300
"""Restarts of the Lanczos method, after which an eigenvalue counts as not found."""

Vector = Any  # numpy float64 [n]


@dataclass(frozen=True)
class SpectrumResult:
    """The largest Hessian eigenvalues of one layer.

    Attributes:
        eigenvalues: in descending order. They may be negative.
        errors: the norm of each residual H v - lambda v. An eigenvalue of H lies within this distance. 0.0 if the block
            was written out.
        estimator: ``"dense"`` or for instance ``"lanczos(tol=0.001), error = residual"``.
        n_params, n_samples: parameters of the layer, samples of the data.
        status: ``"ok"``, or why there are no values.
    """

    layer: str
    eigenvalues: tuple[float, ...]
    errors: tuple[float, ...]
    estimator: str
    n_params: int
    n_samples: int
    status: str = "ok"


class BlockHessian:
    """One layer's block of the mean loss's Hessian as a linear operator on float64 vectors.

    The graph of a single batch is kept between products. Several batches are differentiated again for each product.
    """

    def __init__(
        self, run: Differentiable, data: Data, names: Sequence[str], batch: int
    ) -> None:
        self._run, self._data, self._batch = run, data, batch
        self._block = [run.parameters[name] for name in names]
        self.size = sum(tensor.numel() for tensor in self._block)
        self.n_samples = 0
        self._kept: list[list[Tensor | None]] | None = None
        if len(list(islice(batches(data, batch, run.model), 2))) == 1:
            self._kept = list(self._gradients())

    def _gradients(self) -> Any:
        self.n_samples = 0
        for index, (x, y) in enumerate(
            batches(self._data, self._batch, self._run.model)
        ):
            _, losses = self._run.forward(x, y, index)
            gradients = torch.autograd.grad(
                losses.sum(), self._block, create_graph=True, allow_unused=True
            )
            if index == 0 and differentiable_once(gradients):
                raise NoProduct(CUT)
            self.n_samples += len(y)
            yield list(gradients)

    def __call__(self, vector: Vector) -> Vector:
        """Return the product H v of the block with a vector v.

        Raises:
            NoProduct: an operation cannot be differentiated twice, or an entry of H v is not finite.
        """
        parts = torch.from_numpy(
            np.asarray(vector, dtype=np.float64).reshape(-1)
        ).split([t.numel() for t in self._block])
        v = [
            part.to(tensor).reshape(tensor.shape)
            for part, tensor in zip(parts, self._block, strict=True)
        ]
        total = torch.zeros(self.size, dtype=torch.float64)
        for gradients in self._kept or self._gradients():
            product = curvature(gradients, v, self._block)
            total += torch.cat([part.reshape(-1) for part in product]).double().cpu()
        if not bool(torch.isfinite(total).all()):
            raise NoProduct("a product with the Hessian is not finite")
        return total.numpy() / self.n_samples

    def dense(self) -> Vector:
        """Return the block as a matrix [n, n], symmetric, float64."""
        matrix = np.stack([self(unit) for unit in np.eye(self.size)])
        return (matrix + matrix.T) / 2


def hessian_spectrum(
    model: nn.Module,
    data: Data,
    layers: Sequence[Layer],
    *,
    loss: Loss,
    k: int = 3,
    tol: float = 1e-3,
    batch: int = 256,
    seed: int = 0,
    mode: str = "eval",
    dtype: torch.dtype | None = None,
) -> list[SpectrumResult]:
    """Return the ``k`` algebraically largest eigenvalues of each layer's block, over weights and biases.

    A small block has fewer. The method is implicitly restarted Lanczos (ARPACK) on Hessian-vector products, as in
    curvlinops. Blocks of up to :data:`DENSE` parameters are written out. The products are exact, so only the method's
    own tolerance is approximate.

    Args:
        tol: relative accuracy at which the Lanczos method stops.
        batch, seed, mode, dtype, layers, loss: as in :func:`~diagnostics.curvature.trace.hessian_trace`. The seed
            sets the first Lanczos vector and dropout. A single batch is faster than several, because its graph is kept.

    Raises:
        UsageError: as in :func:`~.trace.hessian_trace`.
    """
    run = Differentiable(model, loss, dtype, seed)
    with set_mode(model, mode), twice_differentiable(model), torch.enable_grad():
        n = sum(len(y) for _, y in batches(data, batch))
        results = []
        reached, lost = set(), ""
        try:
            first = next(batches(data, batch, run.model))
            reached = set(verdicts(run.forward(*first, 0)[0], run.parameters))
        except LossNotFinite as error:
            lost = str(error)
        for layer in layers:
            names = [name for name in layer.parameters if name in reached]
            found: tuple[Any, Any, str] = (), (), ""
            status = lost or "ok"
            try:
                if names:
                    block = BlockHessian(run, data, names, batch)
                    found = _largest(block, k, tol, seed, layer.name)
                elif not lost:
                    status = why_unreadable(layer, "all", False)
            except NoProduct as error:
                status = f"layer {layer.name!r}: {error}"
            except LossNotFinite as error:
                status = str(error)
            size = run.size(layer)
            results.append(SpectrumResult(layer.name, *found, size, n, status))
        return results


def _largest(
    block: BlockHessian, k: int, tol: float, seed: int, layer: str
) -> tuple[tuple[float, ...], tuple[float, ...], str]:
    if block.size <= max(DENSE, k + 1):
        values = np.linalg.eigvalsh(block.dense())[::-1][:k]
        return tuple(map(float, values)), (0.0,) * len(values), "dense"
    start = numpy_generator(seed, "lanczos", layer).standard_normal(block.size)
    how = f"lanczos(tol={tol:g}), error = residual"
    if not block(
        start
    ).any():  # a block of zeros, on which the method has nothing to start from
        return (0.0,) * k, (0.0,) * k, how
    operator = LinearOperator((block.size, block.size), matvec=block, dtype=np.float64)
    try:
        values, vectors = eigsh(
            operator, k=k, which="LA", tol=tol, v0=start, maxiter=RESTARTS
        )
    except ArpackNoConvergence as error:
        raise NoProduct(
            f"the Lanczos method found {len(error.eigenvalues)} of {k} eigenvalues"
        ) from error
    except ArpackError as error:
        raise NoProduct(f"the Lanczos method failed: {error}") from error
    order = np.argsort(values)[::-1]
    errors = [
        float(np.linalg.norm(block(vectors[:, i]) - values[i] * vectors[:, i]))
        for i in order
    ]
    return tuple(float(values[i]) for i in order), tuple(errors), how
