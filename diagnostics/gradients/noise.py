"""Squared norms of single samples' gradients, by formulas where they hold."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fl_core.model_contexts import set_mode

from ..curvature.exact import CHECKED, check_formulas
from ..curvature.model import (
    Differentiable,
    LossNotFinite,
    owner,
    parameter_name,
    record_calls,
)
from ..measurement import ClientModel, Measurement, batches, place_data

ESTIMATORS = ("auto", "ghost", "single")
COUPLED = "the samples of a batch are coupled, so that none has a gradient of its own"
HALF = (torch.float16, torch.bfloat16)


@dataclass
class Noise:
    """Sums of a client's gradients and of their squared norms over samples, for each tensor.

    Attributes:
        n_samples: of the client.
        sizes: entries of each tensor that reaches the loss.
        ways: how the norms were found, ``ghost`` or ``single``.
        faults: why a tensor has none.
        fault: why no tensor has any.
        squares, sums: float64.
    """

    n_samples: int
    sizes: dict[str, int] = field(default_factory=dict)
    ways: dict[str, str] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)
    fault: str = ""
    squares: dict[str, Tensor] = field(default_factory=dict)
    sums: dict[str, Tensor] = field(default_factory=dict)

    def add(self, name: str, squares: Tensor, total: Tensor) -> None:
        """Add the sums over some samples."""
        self.squares[name] = self.squares.get(name, 0) + squares.double().sum()
        self.sums[name] = self.sums.get(name, 0) + total.double()


def gradient_noise(
    subject: ClientModel, measurement: Measurement, names: Collection[str], way: str
) -> Noise:
    """Return the sums over a client's samples, from one pass.

    Args:
        names: of the tensors.
        way: one of :data:`ESTIMATORS`.
    """
    model, data = subject.model, place_data(subject)
    # squares of small gradients would vanish in half precision
    half = any(p.dtype in HALF for p in model.parameters())
    dtype = torch.float32 if half else None
    run = Differentiable(model, measurement.loss, dtype, measurement.seed)
    names = [name for name in names if run.parameters[name].is_floating_point()]
    with set_mode(model, measurement.mode), torch.enable_grad():
        found = Noise(sum(len(y) for _, y in batches(data, measurement.batch)))
        n = 0
        try:
            for index, (x, y) in enumerate(batches(data, measurement.batch, model)):
                if index == 0:
                    _choose_ways(found, run, x[:CHECKED], y[:CHECKED], names, way)
                _add_batch(found, run, x, y, index, n)
                n += len(y)
        except LossNotFinite:
            found.fault = f"the loss of client {subject.client!r} is not finite"
    return found


def _choose_ways(
    found: Noise,
    run: Differentiable,
    x: Tensor,
    y: Tensor,
    names: Iterable[str],
    way: str,
) -> None:
    """Choose for each tensor how its norms are found, on a few samples."""
    _, graph, doubts = check_formulas(run, x, y, names)
    reached = [name for name in names if name in graph]
    found.sizes = {name: run.parameters[name].numel() for name in reached}
    coupled = _are_coupled(run, x, y) if way == "single" or doubts else False
    for name in reached:
        found.ways[name] = "single" if way == "single" or name in doubts else "ghost"
        if found.ways[name] == "single" and coupled:
            found.faults[name] = COUPLED
        elif way == "ghost" and name in doubts:
            found.faults[name] = doubts[name]


def _are_coupled(run: Differentiable, x: Tensor, y: Tensor) -> bool:
    """Return True if losses depend on other samples: on their input, or for tokens on outputs of modules."""
    leaf = x.detach().clone()
    leaf.requires_grad_(leaf.is_floating_point())
    paths = [path for path, module in run.model.named_modules() if path]
    with record_calls(run.model, paths, len(x), passes=1) as taps:
        # times one: the network may change its input in place, which a leaf would refuse
        _, losses = run.forward(leaf * 1, y, 0)
    targets: list[Any] = [tap.edge for tap in taps.values() if tap is not None]
    targets += [leaf] if leaf.requires_grad else []
    half = -(-len(x) // 2)
    found = torch.autograd.grad(losses[:half].sum(), targets, allow_unused=True)
    reach = found[-1:] if leaf.requires_grad else found
    return any(bool(each[half:].any()) for each in reach if each is not None)


def _add_batch(
    found: Noise, run: Differentiable, x: Tensor, y: Tensor, index: int, n: int
) -> None:
    """Add a batch, after ``n`` samples before it."""
    left = [name for name in found.ways if name not in found.faults]
    ghosts = [name for name in left if found.ways[name] == "ghost"]
    paths = list(dict.fromkeys(map(owner, ghosts)))
    with record_calls(run.model, paths, len(x), passes=1) as recorded:
        _, losses = run.forward(x, y, index)
    taps = {path: tap for path, tap in recorded.items() if tap is not None}
    targets: list[Any] = [tap.edge for tap in taps.values()]
    targets += [run.parameters[name] for name in ghosts]
    gradients: tuple[Any, ...] = ()
    if targets:
        gradients = torch.autograd.grad(losses.sum(), targets, allow_unused=True)
    norms: dict[str, Tensor] = {}
    for (path, tap), delta in zip(taps.items(), gradients, strict=False):
        own = {} if delta is None else tap.norms(delta)
        norms |= {parameter_name(path, local): value for local, value in own.items()}
    for name, gradient in zip(ghosts, gradients[len(taps) :], strict=True):
        if gradient is not None and name in norms:
            found.add(name, norms[name], gradient)
        elif gradient is not None:
            found.faults[name] = f"{name}: its module is used differently in batch {index}"  # fmt: skip
    alone = [name for name in left if found.ways[name] == "single"]
    tensors = [run.parameters[name] for name in alone]
    for k in range(len(y) if alone else 0):
        _, losses = run.forward(x[k : k + 1], y[k : k + 1], n + k)
        gradients = torch.autograd.grad(losses.sum(), tensors, allow_unused=True)
        for name, gradient in zip(alone, gradients, strict=True):
            if gradient is not None:
                found.add(name, gradient.double().square(), gradient)
