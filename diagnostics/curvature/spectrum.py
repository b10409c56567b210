"""The largest eigenvalues of each layer's diagonal block of the loss's Hessian.

Checks on a few samples that products with the Hessian are the derivatives of the loss's gradient.

Autograd's second derivatives can be wrong without an error. Torch's kernel for weight normalisation has such a fault.
A test finds it for each layer: Hv is the derivative of the gradient along v, approximated by a central difference.

The test computes in float64 where the model can. A step of eps^(1/3) gives a central difference its least error, about
eps^(2/3). The tolerance eps^(1/4) is far above that error and far below a wrong formula's: 1e-4 in float64. Rounding
divided by the step comes on top of it. Where two steps disagree, the gradient jumps between the points, as at a kink of
ReLU. The difference then proves nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from scipy.sparse.linalg import ArpackError, ArpackNoConvergence, LinearOperator, eigsh
from torch import Tensor, nn

from fl_core.layers import Layer
from fl_core.seeds import numpy_generator, torch_generator
from fl_core.training.losses import Loss
from fl_core.tree import set_mode

from ..measurement import Batch, Data, batches
from .exact import verdicts
from .model import (
    CUT,
    Differentiable,
    LossNotFinite,
    NoProduct,
    curvature,
    differentiable_once,
    rademacher,
    scale_of,
    twice_differentiable,
)

SAMPLES = 2
"""Samples of the check."""
ROUNDING = 100
"""Rounding errors of a gradient, in units of the type's resolution."""
FINER = 16
"""The ratio of the two steps."""


def wrong_products(
    run: Differentiable, first: Batch, layers: Mapping[str, Sequence[str]]
) -> dict[str, str]:
    """Return the layers whose Hessian-vector products are wrong, each with the reason.

    Args:
        first: the first batch; the check uses a few of its samples.
        layers: names of the parameters of each layer. Their products must exist.
    """
    if not layers:
        return {}
    x, y = first[0][:SAMPLES], first[1][:SAMPLES]
    try:
        return _wrong(
            Differentiable(run.model, run.loss, torch.float64, run.seed), x, y, layers
        )
    except (
        RuntimeError,
        TypeError,
    ):  # the model has constants of another type, or the device has no float64
        return _wrong(run.at({}), x, y, layers)


def _wrong(
    run: Differentiable, x: Tensor, y: Tensor, layers: Mapping[str, Sequence[str]]
) -> dict[str, str]:
    """Return the layers along which differences of gradients converge to something else than the product."""
    every = [name for name, tensor in run.parameters.items() if tensor.requires_grad]
    gradients = _gradients(run, x, y, every, create_graph=True)
    size = float(_flat([g.detach() for g in gradients.values()]).norm())
    generator = torch_generator(run.seed, "product check")
    wrong = []
    for layer, names in layers.items():
        own = [gradients[name] for name in names]
        tensors = [run.parameters[name] for name in names]
        # an entry without a gradient stays as it is: an embedding's padding is a constant to autograd
        scales = [
            scale_of(tensor) * (gradient.detach() != 0).to(gradient)
            for tensor, gradient in zip(tensors, own, strict=True)
        ]
        v = [rademacher(scale, generator) * scale for scale in scales]
        hv = _flat(curvature(own, v, tensors))
        eps = torch.finfo(v[0].dtype).eps
        coarse = eps ** (1 / 3)
        fine = coarse / FINER

        def apart(one: Tensor, other: Tensor, step: float, eps: float = eps) -> bool:
            length = max(float(one.norm()), float(other.norm()))
            tolerance = eps**0.25 * length + ROUNDING * eps / step * size
            return not float((one - other).norm()) <= tolerance

        first = _difference(run, x, y, names, v, coarse)
        if apart(first, hv, coarse):
            second = _difference(run, x, y, names, v, fine)
            if apart(second, hv, fine) and not apart(second, first, fine):
                wrong.append(layer)
    reason = "the second derivative of an operation is wrong: Hv is not the derivative of the gradient"
    return dict.fromkeys(wrong, reason)


def _difference(
    run: Differentiable,
    x: Tensor,
    y: Tensor,
    names: Sequence[str],
    v: Sequence[Tensor],
    step: float,
) -> Tensor:
    """Return the central difference of the gradients along v, as one vector."""
    ends = []
    for way in (step, -step):
        moved = {
            name: run.parameters[name].detach() + way * w
            for name, w in zip(names, v, strict=True)
        }
        found = _gradients(run.at(moved), x, y, names)
        ends.append(_flat([*found.values()]))
    return (ends[0] - ends[1]) / (2 * step)


def _gradients(
    run: Differentiable,
    x: Tensor,
    y: Tensor,
    names: Sequence[str],
    *,
    create_graph: bool = False,
) -> dict[str, Tensor]:
    """Return gradients of the summed loss, with zeros for a parameter that does not reach it."""
    tensors = [run.parameters[name] for name in names]
    _, losses = run.forward(x, y, 0)
    found = torch.autograd.grad(
        losses.sum(),
        tensors,
        create_graph=create_graph,
        allow_unused=True,
        materialize_grads=True,
    )
    return dict(zip(names, found, strict=True))


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors]).double()


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
            if index == 0 and any(
                differentiable_once(gradient) for gradient in gradients
            ):
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
                    values = _largest(block, k, tol, seed, layer.name)
                    for wrong in wrong_products(run, first, {"": names}).values():
                        raise NoProduct(wrong)
                    found = values
                elif not layer.parameters:
                    status = "no parameters"
                elif not lost:
                    status = "unused in the forward pass"
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
