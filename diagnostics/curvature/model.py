"""A model as a function of its parameters that can be differentiated twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from fl_core.costs import nodes
from fl_core.errors import UsageError, check_known
from fl_core.layers import Layer
from fl_core.model_contexts import Hook, with_hooks
from fl_core.seeds import seed_of
from fl_core.training.losses import Loss

from ..measurement import call_with, check_outputs
from .formulas import Norms, norms_of

CUT = "no second derivative: an operation on the way is marked as differentiable once"


class NoProduct(RuntimeError):
    """Raised if there is no product with a layer's block of the Hessian. The reason becomes a status."""


class LossNotFinite(Exception):
    """Raised if the loss of some sample is NaN or infinite. It becomes a status."""

    def __init__(self) -> None:
        super().__init__("the loss is not finite")


class Differentiable:
    """A model as a function of detached parameters and copied buffers.

    The model's own tensors get no gradient.

    Attributes:
        parameters: by exact name, in the type of the computation. All require gradients, frozen ones too.
        buffers: copies, by exact name.
    """

    def __init__(
        self, model: nn.Module, loss: Loss, dtype: torch.dtype | None, seed: int
    ) -> None:
        def cast(tensor: Tensor) -> Tensor:
            return (
                tensor.detach().to(dtype)
                if dtype and tensor.is_floating_point()
                else tensor.detach()
            )

        self.model, self.loss, self.dtype, self.seed = model, loss, dtype, seed
        self.parameters = {name: cast(p) for name, p in model.named_parameters()}
        for parameter in self.parameters.values():
            parameter.requires_grad_(parameter.is_floating_point())
        self.buffers = {name: cast(b).clone() for name, b in model.named_buffers()}

    @classmethod
    def of_layers(
        cls,
        model: nn.Module,
        layers: Sequence[Layer],
        loss: Loss,
        dtype: torch.dtype | None,
        seed: int,
    ) -> Differentiable:
        """Return a model as such a function, after a check that it has the layers' parameters."""
        run = cls(model, loss, dtype, seed)
        for layer in layers:
            for name in layer.parameters:
                check_known("parameter", name, run.parameters)
        return run

    def size(self, layer: Layer) -> int:
        """Return the number of a layer's parameters."""
        return sum(self.parameters[name].numel() for name in layer.parameters)

    def __call__(self, x: Tensor, index: int) -> Tensor:
        """Return the model's output for batch number ``index``. The number also seeds the model's random draws."""
        torch.manual_seed(seed_of(self.seed, "curvature masks", index))
        x = x.to(self.dtype) if self.dtype and x.is_floating_point() else x
        return call_with(self.model, {**self.parameters, **self.buffers}, x)

    def at(self, parameters: Mapping[str, Tensor]) -> Differentiable:
        """Return the same function with some parameters replaced, and with copies of all tensors."""
        other = copy(self)
        tensors = {**self.parameters, **parameters}
        other.parameters = {
            name: tensor.detach().clone().requires_grad_(tensor.is_floating_point())
            for name, tensor in tensors.items()
        }
        other.buffers = {name: buffer.clone() for name, buffer in self.buffers.items()}
        return other

    def forward(self, x: Tensor, y: Tensor, index: int) -> tuple[Tensor, Tensor]:
        """Return logits [n, C] and each sample's loss [n].

        Raises:
            UsageError: as :func:`~diagnostics.measurement.check_outputs`.
            LossNotFinite: a sample's loss is NaN or infinite.
        """
        logits = self(x, index)
        check_outputs(self.model, logits, y, self.loss)
        losses = self.loss.per_sample(logits, y)
        if not bool(torch.isfinite(losses).all()):
            raise LossNotFinite
        return logits, losses


@contextmanager
def twice_differentiable(model: nn.Module) -> Iterator[None]:
    """Use only kernels with right second derivatives, without TF32.

    Fused attention and recurrence have none. Weight normalisation has a wrong one, so that its parts are used.
    """
    recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())
    with ExitStack() as stack:
        stack.enter_context(_WeightNormFromParts())
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        stack.enter_context(
            torch.backends.cudnn.flags(enabled=not recurrent, allow_tf32=False)
        )
        if recurrent:
            stack.enter_context(
                torch.backends.mkldnn.flags(enabled=False, allow_tf32=None)
            )
        yield


class _WeightNormFromParts(TorchFunctionMode):
    """Computes g v / ||v|| by operations of its own.

    Torch's backward pass takes ||v|| for a constant.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return (_weight_norm if func is torch._weight_norm else func)(
            *args, **(kwargs or {})
        )


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    return v * (g / torch.norm_except_dim(v, 2, dim))


def curvature(
    gradients: Sequence[Tensor | None], v: Sequence[Tensor], tensors: Sequence[Any]
) -> list[Tensor]:
    """Return the product H v of the Hessian's block of some tensors with v.

    Args:
        gradients: gradients that keep their graph.
        tensors: tensors, or edges of the graph.

    Raises:
        NoProduct: an operation cannot be differentiated twice.
    """
    terms = [
        (g * w).sum()
        for g, w in zip(gradients, v, strict=True)
        if g is not None and g.requires_grad
    ]
    if not terms:
        return [torch.zeros_like(w) for w in v]
    total = torch.stack(terms).sum()
    try:
        second = torch.autograd.grad(
            total, list(tensors), retain_graph=True, allow_unused=True
        )
    except RuntimeError as error:
        raise NoProduct(no_second_derivative(error)) from error
    return [
        torch.zeros_like(w) if h is None else h for w, h in zip(v, second, strict=True)
    ]


def differentiable_once(gradient: Tensor | None) -> bool:
    """Return True if a gradient's graph ends at a custom function that is differentiable only once.

    Differentiating such a gradient with respect to chosen tensors raises no error. It leaves out whatever is behind the
    cut.
    """
    root = None if gradient is None else gradient.grad_fn
    return root is not None and any(
        node.name() == "torch::autograd::Error" for node in nodes(root)
    )


def no_second_derivative(error: RuntimeError) -> str:
    """Return the status for an operation that cannot be differentiated twice; raise any other error again."""
    text = str(error)
    if "not implemented" in text:
        return f"no second derivative: {text.splitlines()[0]}"
    raise error


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
