"""Hessian traces by the packages PyHessian and curvlinops, to cross-check this package's own.

Each package receives a layer as a module of its own, with the layer's parameters only, and the mean loss. It never
receives the model itself. The probes are drawn and averaged in a way that gives a standard error. This module works
around the following faults:

* PyHessian 0.1 stops by a rule that does not measure its error. It stops after two probes if the trace is negative.
  Here it runs all probes.
* PyHessian leaves a reference cycle from ``backward(create_graph=True)``. It is broken after use.
* PyHessian forces eval mode. Train mode is refused, not ignored.
* PyHessian computes only in the parameters' own floating type.
* The package curvlinops gives no standard error with its trace. Here its operator is multiplied with the probes.
* The forward-mode product of curvlinops does not exist for every operation. This becomes a status.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fl_core.errors import UsageError
from fl_core.seeds import seed_of, torch_generator
from fl_core.training.losses import Loss

from ..capture import Batch, Data, batches
from .model import Differentiable, rademacher

BACKENDS = ("fedlayers", "pyhessian", "curvlinops")


class _Block(nn.Module):
    """A module with only one layer's parameters. The rest of the model is constant."""

    def __init__(self, run: Differentiable, names: Sequence[str]) -> None:
        super().__init__()
        self._run, self._names = run, tuple(names)
        self._rest = {
            name: p.detach() for name, p in run.parameters.items()
        } | run.buffers
        for position, name in enumerate(names):
            self.register_parameter(
                f"p{position}", nn.Parameter(run.parameters[name].detach())
            )

    def forward(self, x: Tensor) -> Tensor:
        own = {
            name: getattr(self, f"p{position}")
            for position, name in enumerate(self._names)
        }
        logits: Tensor = functional_call(self._run.model, {**self._rest, **own}, (x,))
        return logits


class _MeanLoss(nn.Module):
    reduction = "mean"

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self._loss = loss

    def forward(self, logits: Tensor, y: Tensor) -> Tensor:
        return self._loss(logits, y)


class _Typed:
    """The batches, converted to the floating type of the computation."""

    def __init__(self, run: Differentiable, data: Data, batch: int) -> None:
        self._run, self._data, self._batch = run, data, batch

    def __iter__(self) -> Iterator[Batch]:
        for x, y in batches(self._data, self._batch, self._run.model):
            yield (
                (
                    x.to(self._run.dtype)
                    if self._run.dtype and x.is_floating_point()
                    else x
                ),
                y,
            )


def check(backend: str, estimator: str, mode: str) -> None:
    """Refuse options that a backend does not support.

    Raises:
        UsageError: the mode is train, or the estimator does not use weight-space probes.
    """
    if backend == "fedlayers":
        return
    if estimator not in ("auto", "hutchinson"):
        raise UsageError(
            f"estimator must be one of weight-space probes with backend {backend!r}; got {estimator!r}."
        )
    if mode != "eval":
        raise UsageError(
            f"mode must be 'eval' with backend {backend!r}; got {mode!r}. Use backend 'fedlayers'."
        )


def trace(
    backend: str,
    run: Differentiable,
    data: Data,
    layer: str,
    names: Sequence[str],
    batch: int,
    probes: int,
) -> tuple[float, float, str]:
    """Return value and standard error of one layer's trace, and a status.

    The status is "ok", or why the backend has no value.
    """
    draw = _pyhessian if backend == "pyhessian" else _curvlinops
    block, source = _Block(run, names), _Typed(run, data, batch)
    try:
        estimates = torch.tensor(
            draw(run, block, source, layer, probes), dtype=torch.float64
        )
    except (RuntimeError, NotImplementedError) as error:
        return (
            math.nan,
            math.nan,
            f"{backend} gives no value for layer {layer!r}: {str(error).splitlines()[0]}",
        )
    finally:
        for parameter in block.parameters():
            parameter.grad = None  # the cycle: a gradient with a graph that leads back to its parameter
    return float(estimates.mean()), float(estimates.std()) / math.sqrt(probes), "ok"


def _pyhessian(
    run: Differentiable, block: _Block, source: Any, layer: str, probes: int
) -> list[float]:
    from pyhessian import hessian

    device = next(block.parameters()).device.type
    if device not in ("cpu", "cuda"):
        raise UsageError(
            f"device must be cpu or cuda with backend 'pyhessian'; got {device}."
        )
    torch.manual_seed(seed_of(run.seed, "pyhessian probes", layer))
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "Using backward\\(\\) with create_graph=True", UserWarning
        )
        measured = hessian(
            block, _MeanLoss(run.loss), dataloader=source, cuda=device == "cuda"
        )
        return [
            float(value) for value in measured.trace(maxIter=probes, tol=-math.inf)
        ]  # never stops before the end


def _curvlinops(
    run: Differentiable, block: _Block, source: Any, layer: str, probes: int
) -> list[float]:
    from curvlinops import HessianLinearOperator

    parameters = list(block.parameters())
    generator = torch_generator(run.seed, "curvlinops probes", layer)
    operator = HessianLinearOperator(
        block, _MeanLoss(run.loss), parameters, source, check_deterministic=False
    )
    like = torch.cat([p.detach().reshape(-1) for p in parameters])
    drawn = []
    for _ in range(probes):
        v = rademacher(like, generator)
        drawn.append(float((v * (operator @ v)).double().sum()))
    return drawn
