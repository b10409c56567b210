"""The largest eigenvalues of each layer's diagonal block of the loss's Hessian."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fl_core.layers import Layer
from fl_core.seeds import torch_generator
from fl_core.training.losses import Loss
from fl_core.tree import set_mode

from ..measurement import NO_LIMIT, Clock, Data, NoValue, batches, why_unreadable
from .model import (
    CUT,
    Differentiable,
    curvature,
    differentiable_once,
    twice_differentiable,
)

STEPS = 100
"""The most products with a block, if no more eigenvalues are wanted.

After them the largest values are returned as they are, with their residuals.
"""
FEWEST = 20
"""The fewest products with a block that has an invariant subspace, such as one of zeros."""
AGAIN = 8
"""The fewest products of each new search, which looks for repeated eigenvalues."""


@dataclass(frozen=True)
class SpectrumResult:
    """The largest Hessian eigenvalues of one layer.

    Attributes:
        layer: the layer's name.
        eigenvalues: the eigenvalues in descending order. They may be negative. The list
            is empty without values.
        errors: the norm of each residual H v - lambda v. An eigenvalue of H lies within this distance.
        weights: the weight of each eigenvalue in the spectral density that the first random vector gives.
        estimator: for instance ``"lanczos(tol=0.001), error = residual"``. Empty
            without values.
        n_params, n_samples: number of the layer's parameters, and of samples.
        status: ``"ok"``, or why there are no values. It is also ``"ok"`` if the time
            budget ended before the layer's first product.
    """

    layer: str
    eigenvalues: list[float]
    errors: list[float]
    weights: list[float]
    estimator: str
    n_params: int
    n_samples: int
    status: str = "ok"


class Lanczos:
    """A search for the largest eigenvalues of a symmetric matrix, by its products with orthonormal vectors.

    One random vector finds a repeated eigenvalue once. So when the values are precise, another random vector,
    orthogonal to all before, continues the search. It ends when such a vector has added no value to the largest.

    Args:
        size: number of rows of the matrix.
        k: number of eigenvalues to find.
        tol: relative accuracy of the eigenvalues at which the search ends.
        steps: maximum number of vectors.
        like: a tensor with the device and the type of the computation.
        generator: source of the random vectors.
        repeated: whether to begin again with a new random vector, to find repeated eigenvalues.

    Attributes:
        basis: the vectors so far, [vectors, size]. :meth:`add` expects the product with
            the last. The attribute is deleted when ``done`` becomes True.
        values, errors: the largest eigenvalues so far in descending order, and bounds
            on the norms of their residuals.
        weights: the squared components of the first vector along the eigenvectors.
        done: whether the values are precise enough, or the largest number of vectors is reached.
        products: the number of products so far.
    """

    def __init__(
        self,
        size: int,
        k: int,
        tol: float,
        steps: int,
        like: Tensor,
        generator: torch.Generator,
        repeated: bool = True,
    ) -> None:
        self._k, self._tol, self._steps, self._generator = k, tol, steps, generator
        self._repeated, self._first_values = repeated, np.zeros(0)
        self._least, self.done, self.products = k + 1, False, 0
        self.basis = like.new_zeros(0, size)
        self._projected = np.zeros((0, 0))
        self._lost = np.zeros(0)
        self.values = self.errors = self.weights = np.zeros(0)
        self._extend(self._random())

    def _random(self) -> Tensor:
        vector = torch.randn(self.basis.shape[1], generator=self._generator)
        return self._orthogonal(vector.to(self.basis))

    def _orthogonal(self, vector: Tensor) -> Tensor:
        return vector - (self.basis @ vector) @ self.basis

    def _extend(self, vector: Tensor) -> None:
        """Add a vector to the basis, with its part orthogonal to the basis scaled to length 1."""
        for _ in range(
            2
        ):  # a small vector has mostly rounding, which the first pass enlarges
            vector = self._orthogonal(vector)
            vector = vector / torch.linalg.vector_norm(vector)
        self.basis = torch.cat([self.basis, vector.unsqueeze(0)])

    def add(self, product: Tensor) -> None:
        """Add the product with the last vector, and compute the eigenvalues so far again.

        The product's part orthogonal to the basis becomes the next vector. If there is
        no such part, or the search begins again, the next vector is random. No vector
        follows when ``done`` becomes True.

        Args:
            product: the matrix times the last vector of ``basis``, [size].
        """
        self.products += 1
        column = self.basis @ product
        remainder = product - column @ self.basis
        norm = float(torch.linalg.vector_norm(remainder))
        # the products in the coordinates of the basis: the upper triangle has all of them
        projected = np.pad(self._projected, (0, 1))
        projected[:, -1] = column.cpu()
        self._projected = projected
        all_values, vectors = np.linalg.eigh(projected, UPLO="U")
        self.values, top_vectors = (
            all_values[-self._k :][::-1],
            vectors[:, -self._k :][:, ::-1],
        )
        self.weights = top_vectors[0] ** 2
        # what the products have outside of the basis: of this one, and of the last before each new start
        self.errors = np.abs(top_vectors[-1]) * norm + self._lost @ np.abs(
            top_vectors[:-1]
        )
        gaps = np.abs(self.values[:, None] - all_values)
        gaps[gaps == 0] = math.inf
        scale = np.abs(all_values).max()
        deviations = np.minimum(self.errors, self.errors**2 / gaps.min(1))
        limit = self._tol * np.maximum(np.abs(self.values), scale / 1000)
        n_vectors, size = self.basis.shape
        is_precise = n_vectors >= self._least and bool((deviations <= limit).all())
        is_complete = n_vectors >= min(self._steps, size)
        is_invariant = norm <= 10 * torch.finfo(product.dtype).eps * scale
        searches_again = is_precise and self._repeated and self._changed(limit)
        self.done = is_complete or (is_precise and not searches_again)
        self._lost = np.append(self._lost, norm if searches_again else 0.0)
        if self.done:
            del self.basis
        elif searches_again:
            self._first_values, self._least = self.values, n_vectors + AGAIN
            self._extend(self._random())
        elif is_invariant:
            self._least = max(self._least, FEWEST)
            self._extend(self._random())
        else:
            self._extend(remainder)

    def _changed(self, limit: NDArray[Any]) -> bool:
        """Return True if a value changed since the search last began again, or it never did.

        Args:
            limit: for each value, the largest difference that is no change, [k].
        """
        values_before = self._first_values
        if values_before.shape != self.values.shape:
            return True
        return bool((np.abs(self.values - values_before) > limit).any())


def _gradients(
    run: Differentiable, data: Data, batch: int
) -> Iterator[dict[str, Tensor | None]]:
    """Yield the gradients of each batch's summed loss, with their graph, by parameter.

    A gradient is None if the loss does not depend on the parameter.
    """
    tensors = {name: t for name, t in run.parameters.items() if t.requires_grad}
    for index, x, y in run.batches(data, batch):
        _, losses = run.forward(x, y, index)
        gradients = torch.autograd.grad(
            losses.sum(), [*tensors.values()], create_graph=True, allow_unused=True
        )
        yield dict(zip(tensors, gradients, strict=True))


def hessian_spectrum(
    model: nn.Module,
    data: Data,
    layers: Sequence[Layer],
    *,
    loss: Loss,
    k: int = 3,
    tol: float = 1e-3,
    density: bool = False,
    batch: int = 256,
    seed: int = 0,
    mode: str = "eval",
    dtype: torch.dtype | None = None,
    clock: Clock = NO_LIMIT,
) -> list[SpectrumResult]:
    """Return the ``k`` algebraically largest eigenvalues of each layer's block, over weights and biases.

    A small block has fewer. The method is Lanczos's, with full orthogonalisation, on
    Hessian-vector products. To find repeated eigenvalues, the search begins again until
    it finds no further value. With ``density`` it does not. It ends after :data:`STEPS`
    products, or ``k`` if these are more. With several batches all layers take their
    steps together, so each batch is differentiated once a step for all of them. A
    single batch is differentiated once, and one layer follows another. A layer ends
    with the product after which its values are precise enough. A layer that cannot have
    values has the reason as its status.

    Args:
        model, data: as in :func:`~diagnostics.curvature.trace.hessian_trace`.
        k: number of eigenvalues.
        tol: relative accuracy at which the method stops. The error of a value is
            estimated by r^2 / gap, but r at most. Here r is its residual, and gap the
            distance to the next value.
        density: take ``k`` steps and return all values of the Lanczos matrix, whatever their errors. With their weights
            they are a spectral density: the mean of f over all eigenvalues is about sum_i weight_i f(value_i)
            (stochastic Lanczos quadrature, Ghorbani et al. 2019). Other seeds give independent estimates.
        batch, seed, mode, dtype, layers, loss: as in :func:`~diagnostics.curvature.trace.hessian_trace`. The seed sets
            the first Lanczos vector and dropout. A single batch is faster than several, because its graph is reused.
        clock: the time budget. When it is spent, the values so far are returned with
            their residuals, and a result's ``estimator`` notes it. A layer without a
            product by then has no eigenvalues.

    Raises:
        UsageError: as in :func:`~.trace.hessian_trace`.
    """
    run = Differentiable(model, loss, dtype, seed)
    steps = k if density else max(k, STEPS)
    blocks: dict[str, dict[str, Tensor]] = {}
    searches: dict[str, Lanczos] = {}
    failures: dict[str, str] = {}
    with set_mode(model, mode), twice_differentiable(model), torch.enable_grad():
        sizes = [len(y) for _, y in batches(data, batch, model)]
        try:
            clock.check()
            first_gradients = next(_gradients(run, data, batch))
            for layer in layers:
                reached_names = [
                    e for e in layer.parameters if first_gradients.get(e) is not None
                ]
                if not reached_names:
                    failures[layer.name] = why_unreadable(layer, "all", False)
                elif differentiable_once(
                    first_gradients[name] for name in reached_names
                ):
                    failures[layer.name] = CUT
                else:
                    block = blocks[layer.name] = {
                        e: run.parameters[e] for e in reached_names
                    }
                    size = sum(tensor.numel() for tensor in block.values())
                    generator = torch_generator(seed, "lanczos", layer.name)
                    searches[layer.name] = Lanczos(
                        size,
                        k,
                        tol,
                        steps,
                        block[reached_names[0]],
                        generator,
                        repeated=not density,
                    )
            one_block = None
            if len(sizes) == 1:
                one_block = [first_gradients]
            del first_gradients
            # of a graph that is kept, one layer after another, for the memory
            groups = [[name] for name in searches] if one_block else [[*searches]]
            for group in clock.turns(groups, share=True):
                running_searches = {name: searches[name] for name in group}
                while running_searches and not clock.over:
                    products = {
                        name: 0 * search.basis[-1]
                        for name, search in running_searches.items()
                    }
                    for gradients in one_block or _gradients(run, data, batch):
                        for name, product in products.items():
                            tensors = [*blocks[name].values()]
                            parts = (
                                running_searches[name]
                                .basis[-1]
                                .split([t.numel() for t in tensors])
                            )
                            v = [
                                p.view_as(t)
                                for p, t in zip(parts, tensors, strict=True)
                            ]
                            try:
                                curvatures = curvature(
                                    [gradients[e] for e in blocks[name]], v, tensors
                                )
                            except NoValue as error:
                                failures[name] = str(error)
                            else:
                                product += torch.cat([h.flatten() for h in curvatures])
                    for name, product in products.items():
                        if not product.isfinite().all():
                            failures[name] = "a product with the Hessian is not finite"
                        elif name not in failures:
                            running_searches[name].add(product / sum(sizes))
                    running_searches = {
                        name: search
                        for name, search in running_searches.items()
                        if not search.done and name not in failures
                    }
        except NoValue as error:
            failures = {layer.name: str(error) for layer in layers}
    results = []
    for layer in layers:
        status = failures.get(layer.name, "ok")
        numbers, label = [np.zeros(0)] * 3, ""
        if status == "ok":
            search = searches[layer.name]
            numbers = [search.values, search.errors, search.weights]
            label = f"tol={tol:g}"
            if not search.done:
                label = f"ended after {search.products} products"
            label = f"lanczos({label}), error = residual"
        values, errors, weights = (column.tolist() for column in numbers)
        results.append(
            SpectrumResult(
                layer.name,
                values,
                errors,
                weights,
                label,
                run.size(layer),
                sum(sizes),
                status,
            )
        )
    return results
