"""Records the layers' outputs in the autograd graph, and reads per-sample gradients there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fl_core.errors import UsageError
from fl_core.model_contexts import Hook, with_hooks

from .norms import Norms, norms_of


@dataclass(frozen=True)
class Tap:
    """The record of one call of a module, for per-sample gradients.

    Attributes:
        norms: its formula for squared per-sample gradients.
        edge: the edge of its output in the graph.
        a: its input.
    """

    norms: Norms
    edge: GradientEdge
    a: Tensor


@contextmanager
def record_calls(
    model: nn.Module, paths: Sequence[str], n: int, passes: int
) -> Iterator[dict[str, Tap | None]]:
    """Record calls of the modules at ``paths``.

    The record is None for a module that is called twice or in a way without a formula.
    """
    taps: dict[str, Tap | None] = {}

    @torch.no_grad()
    def tap(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Tap | None:
        a = inputs[0] if len(inputs) == 1 else None
        if not isinstance(a, Tensor) or a.ndim == 0 or len(a) != n:
            return None
        if not isinstance(output, Tensor) or not output.requires_grad:
            return None
        norms = norms_of(module, a, passes)
        # the edge, not the tensor: an in-place operation may take the tensor further
        return (
            None if norms is None else Tap(norms, get_gradient_edge(output), a.detach())
        )

    def hook_for(path: str) -> Hook:
        def hook(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            taps[path] = None if path in taps else tap(module, inputs, output)

        return hook

    with with_hooks(model, {path: hook_for(path) for path in paths}):
        yield taps


def owner(name: str) -> str:
    """Return the path of the module that holds the parameter ``name``."""
    return name.rpartition(".")[0]


def parameter_name(path: str, local: str) -> str:
    """Return the name of the parameter ``local`` of the module at ``path``; the model itself has the path ""."""
    return f"{path}.{local}" if path else local


def usable(taps: Mapping[str, Tap | None], index: int) -> dict[str, Tap]:
    """Return the taps of batch number ``index``; refuse if one is missing.

    Raises:
        UsageError: this batch uses a module in another way than the first did.
    """
    recorded = {path: tap for path, tap in taps.items() if tap is not None}
    if len(recorded) < len(taps):
        odd = next(path for path in taps if path not in recorded)
        raise UsageError(
            f"module {odd!r} must be used alike in each batch; got another use in batch {index}. "
            "Choose estimator 'hutchinson'."
        )
    return recorded


def squares(
    logits: Tensor, cotangent: Tensor, taps: Mapping[str, Tap]
) -> dict[str, Tensor]:
    """Return per sample, [n], the squared norm of every tapped parameter's gradient of sum(cotangent * logits)."""
    edges = [tap.edge for tap in taps.values()]
    deltas = torch.autograd.grad(
        logits, edges, cotangent, retain_graph=True, allow_unused=True
    )
    return {
        parameter_name(path, local): values
        for (path, tap), delta in zip(taps.items(), deltas, strict=True)
        if delta is not None
        for local, values in tap.norms(delta).items()
    }
