"""Squared norms of single samples' gradients, summed during a pass, by formulas if they exist."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fl_core.model_contexts import Hook, with_hooks
from fl_core.seeds import seed_of, torch_seeded
from fl_core.training.losses import Loss

from ..curvature.formulas import has_formula, norms_of
from ..curvature.model import parameter_name
from ..measurement import logits

ESTIMATORS = ("auto", "ghost", "single")
CHECKED = 4
"""Samples on which the formulas are checked."""
CACHED = 1 << 19
"""Elements of a convolution's patches at a time on a CPU: three times as fast as 250 samples of a 32-channel 5x5."""
COUPLED = "the samples of a batch are coupled, so that none has a gradient of its own"


@dataclass(frozen=True)
class _Tap:
    """The record of one call of a module: its input, and the edge of its output in the graph."""

    module: nn.Module
    a: Tensor
    edge: GradientEdge

    def norms(self, delta: Tensor) -> dict[str, Tensor]:
        """Return the squared norm of each sample's gradient [n], for each of the module's tensors."""
        n, size = len(self.a), len(self.a)
        if (
            isinstance(self.module, nn.modules.conv._ConvNd)
            and delta.device.type == "cpu"
        ):
            # a convolution's patches are formed for so few samples at a time that they stay in the cache
            patches = (
                self.module.weight[0].numel() * self.module.groups * delta[0, 0].numel()
            )
            size = max(1, CACHED // patches)
        parts = []
        for start in range(0, n, size):
            rows = slice(start, start + size)
            norms = norms_of(self.module, _single(self.a[rows]), passes=1)
            parts.append(norms(_single(delta[rows])) if norms else {})
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


class NoiseMeter:
    """Sums of gradients and of their squared norms over samples, for each tensor.

    Args:
        names: the tensors.
        estimator: how the norms are found, one of :data:`ESTIMATORS`.
    """

    def __init__(self, names: set[str], estimator: str) -> None:
        self._names, self._estimator = names, estimator
        self.reached: dict[str, int] = {}
        self.ways: dict[str, str] = {}
        self.faults: dict[str, str] = {}
        self.squares: dict[str, Tensor] = {}
        self.sums: dict[str, Tensor] = {}
        self._taps: dict[str, _Tap | None] = {}
        self._recording = True
        self._index = 0

    def update(
        self, params: Mapping[str, Tensor], grads: Mapping[str, Tensor], n: int = 1
    ) -> None:
        self.reached |= {
            name: grads[name].numel() for name in grads if name in self._names
        }

    @contextmanager
    def watch(
        self,
        model: nn.Module,
        params: Mapping[str, Tensor],
        loss: Loss,
        x: Tensor,
        y: Tensor,
        seed: int,
    ) -> Iterator[None]:
        self._model, self._loss, self._seed = model, loss, seed
        self._params = {
            name: tensor for name, tensor in params.items() if name in self._names
        }
        modules = dict(model.named_modules(remove_duplicate=False))
        ghosts = (
            {}
            if self._estimator == "single"
            else {n: n.rpartition(".")[0] for n in self._params}
        )
        paths = [
            path
            for path in dict.fromkeys(ghosts.values())
            if has_formula(modules[path])
        ]

        def hook_for(path: str) -> Hook:
            def hook(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
                if self._recording:
                    self._taps[path] = (
                        None if path in self._taps else _tap(module, inputs, output)
                    )

            return hook

        def begin(module: nn.Module, inputs: Any) -> None:
            if self._recording:
                self._taps.clear()

        with (
            with_hooks(model, {path: hook_for(path) for path in paths}),
            ExitStack() as stack,
        ):
            stack.callback(model.register_forward_pre_hook(begin).remove)
            self._survey(x[:CHECKED], y[:CHECKED])
            yield
            self._taps.clear()

    def edges(self) -> dict[str, GradientEdge]:
        wanted = {
            name.rpartition(".")[0] for name, way in self.ways.items() if way == "ghost"
        }
        return {
            path: tap.edge
            for path, tap in self._taps.items()
            if tap is not None and path in wanted
        }

    @torch.no_grad()
    def samples(
        self,
        x: Tensor,
        y: Tensor,
        grads: Mapping[str, Tensor],
        deltas: Mapping[str, Tensor],
    ) -> None:
        n, others = len(y), []
        squares = self._squares(deltas)
        for name in self._params:
            if name not in grads or name in self.faults:
                continue
            if self.ways[name] != "ghost":
                others.append(name)
            elif (
                name in squares
            ):  # of the mean loss: a sample's own gradient is n times as long
                self._add(
                    name, squares[name].double().sum() * n**2, grads[name].double() * n
                )
            else:
                self.faults[name] = (
                    f"{name}: its module is used differently in batch {self._index}"
                )
        if others:
            self._recording = False
            with (
                torch_seeded(seed_of(self._seed, "noise", self._index)),
                torch.enable_grad(),
            ):
                self._each(x, y, others)
            self._recording = True
        self._index += 1

    def _squares(self, deltas: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return squared gradient norms [n] of each tapped tensor, from the gradients at the modules' outputs."""
        return {
            parameter_name(path, local): values
            for path, delta in deltas.items()
            if (tap := self._taps.get(path)) is not None
            for local, values in tap.norms(delta).items()
        }

    def _add(self, name: str, squares: Tensor, total: Tensor) -> None:
        self.squares[name] = (
            self.squares[name] + squares if name in self.squares else squares
        )
        self.sums[name] = self.sums[name] + total if name in self.sums else total

    # --- which way for which tensor ---

    def _survey(self, x: Tensor, y: Tensor) -> None:
        """Check the formulas on two samples' own gradients, and whether these depend on other samples."""
        with torch_seeded(seed_of(self._seed, "noise survey")):
            # times one: the network may change its input in place, which a leaf would refuse
            leaf = (
                x.detach().clone().requires_grad_() if x.is_floating_point() else None
            )
            losses = self._loss.per_sample(
                logits(self._model, x if leaf is None else leaf * 1, y, self._loss), y
            )
        if not bool(losses.isfinite().all()):
            self._params = {}  # nothing will have a value
        names, coupled = list(self._params), False
        sound: dict[str, bool] = {}
        taps = {path: tap for path, tap in self._taps.items() if tap is not None}
        tolerance = math.sqrt(torch.finfo(losses.dtype).eps)
        targets: list[Any] = [
            *self._params.values(),
            *(tap.edge for tap in taps.values()),
            *([] if leaf is None else [leaf]),
        ]
        for sample in range(min(2, len(x)) if losses.requires_grad else 0):
            gradients = torch.autograd.grad(
                losses[sample], targets, retain_graph=True, allow_unused=True
            )
            at = dict(zip(taps, gradients[len(names) :], strict=False))
            squares = self._squares(
                {path: delta for path, delta in at.items() if delta is not None}
            )
            for name, gradient in zip(names, gradients[: len(names)], strict=True):
                if gradient is None:
                    continue
                exact = torch.zeros(len(x), dtype=torch.float64, device=losses.device)
                exact[sample] = gradient.double().square().sum()
                by_formula = (
                    squares[name].double() if name in squares else exact * torch.nan
                )
                sound[name] = sound.get(name, True) and bool(
                    ((by_formula - exact).abs() <= tolerance * exact.sum()).all()
                )
            # indices (tokens) have no gradient of their own
            reach = [*at.values()] if leaf is None else [gradients[-1]]
            coupled = coupled or any(
                bool(delta[k].any())
                for delta in reach
                if delta is not None
                for k in range(len(x))
                if k != sample
            )
        for name in names:
            self.ways[name] = "ghost" if sound.get(name) else "single"
            if not sound.get(name) and coupled:
                self.faults[name] = COUPLED
            elif not sound.get(name) and self._estimator == "ghost" and name in sound:
                self.faults[name] = (
                    f"{name}: no formula for per-sample gradients in this use of its module"
                )
        self._taps.clear()

    def _each(self, x: Tensor, y: Tensor, names: Sequence[str]) -> None:
        params = [self._params[name] for name in names]
        for k in range(len(y)):
            value = self._loss.per_sample(self._model(x[k : k + 1]), y[k : k + 1]).sum()
            found = torch.autograd.grad(value, params, allow_unused=True)
            for name, gradient in zip(names, found, strict=True):
                if gradient is not None:
                    exact = gradient.double()
                    self._add(name, exact.square().sum(), exact)


def _single(tensor: Tensor) -> Tensor:
    """Return a tensor of half precision in float32, since squares of small gradients would vanish."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


@torch.no_grad()
def _tap(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> _Tap | None:
    a = inputs[0] if len(inputs) == 1 else None
    if (
        not isinstance(a, Tensor)
        or not isinstance(output, Tensor)
        or not a.ndim
        or not output.ndim
    ):
        return None
    if len(a) != len(output) or not output.requires_grad:
        return None
    # the edge, not the tensor: an in-place operation may take the output further; none can have changed the input,
    # which the weights' gradient needs
    return _Tap(module, a.detach(), get_gradient_edge(output))
