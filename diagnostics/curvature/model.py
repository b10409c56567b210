"""A model as a function of its parameters that can be differentiated twice, and what its modules add to a trace.

**Squared norms of per-sample gradients**, without forming the gradients. Take a layer with input a and a gradient delta
at its output. The weight gradient of sample n is a sum of outer products sum_t delta_nt a_nt^T. Its squared Frobenius
norm is computed from delta and a in the cheaper of two ways.

**Random perturbations of a module's output** for each sample, caused by those of its parameters. A module's output for
sample n is linear in its parameters, z_n = A_n theta + c_n. A draw u_n = A_n w_n with random signs w_n has
E u_n u_n^T = A_n A_n^T, so that E u_n^T H u_n = tr(A_n^T H A_n).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from fl_core.errors import UsageError
from fl_core.layers import Layer
from fl_core.run.costs import nodes, unfused
from fl_core.seeds import seed_of
from fl_core.training.losses import Loss
from fl_core.tree import Hook, Tree, with_hooks

from ..measurement import NO_LIMIT, Clock, Data, NoValue, batches, call_with

CUT = "no second derivative: an operation on the way is marked as differentiable once"


class Estimate(NamedTuple):
    """The trace of one layer's block.

    Attributes:
        value, stderr: the trace and its standard error; 0 if it is exact.
        passes: the smallest number of random probes in any batch, or of passes if
            exact.
        n: number of samples that were read.
        ended: whether the budget ended before the last batch or probe.
    """

    value: float
    stderr: float
    passes: int
    n: int
    ended: bool = False


Estimates = dict[str, Estimate]
"""The :class:`Estimate` of each layer, by the layer's name."""


class Differentiable:
    """A model as a function of detached parameters and copied buffers.

    The model's own tensors get no gradient.

    Args:
        model: the model.
        loss: the loss of its outputs.
        dtype: the type of the computation. None means the model's own.
        seed: seed of the model's random draws, such as dropout.
        clock: the metric's time budget.

    Attributes:
        parameters: tensors by exact name, in the type of the computation. All floating ones require gradients, also
            frozen ones.
        buffers: copies, by exact name.
        clock: the metric's time budget.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        dtype: torch.dtype | None,
        seed: int,
        clock: Clock = NO_LIMIT,
    ) -> None:
        def cast(tensor: Tensor) -> Tensor:
            if dtype and tensor.is_floating_point():
                return tensor.detach().to(dtype)
            return tensor.detach()

        self.model, self.loss, self.dtype, self.seed = model, loss, dtype, seed
        self.clock = clock
        self.parameters = {name: cast(p) for name, p in model.named_parameters()}
        for parameter in self.parameters.values():
            parameter.requires_grad_(parameter.is_floating_point())
        self.buffers = {name: cast(b).clone() for name, b in model.named_buffers()}

    def size(self, layer: Layer) -> int:
        """Return the number of a layer's parameters."""
        return sum(self.parameters[name].numel() for name in layer.parameters)

    def __call__(self, x: Tensor, index: int) -> Tensor:
        """Return the model's output for the samples x [n, ...] of batch number ``index``.

        The number also seeds torch's global generator, from which dropout draws.
        """
        torch.manual_seed(seed_of(self.seed, "curvature masks", index))
        if self.dtype and x.is_floating_point():
            x = x.to(self.dtype)
        with _FromParts():
            return call_with(self.model, {**self.parameters, **self.buffers}, x)

    def forward(self, x: Tensor, y: Tensor, index: int) -> tuple[Tensor, Tensor]:
        """Return logits [n, C] and each sample's loss [n].

        Args:
            x, y: the samples of a batch [n, ...] and their labels [n, ...].
            index: number of the batch, which seeds dropout.

        Raises:
            UsageError: as :meth:`fl_core.training.losses.Loss.check_batch`.
            NoValue: a sample's loss is NaN or infinite.
        """
        logits = self(x, index)
        self.loss.check_batch(logits, y)
        losses = self.loss.per_sample(logits, y)
        if not torch.isfinite(losses).all():
            raise NoValue("the loss is not finite")
        return logits, losses

    def batches(
        self, data: Data, batch: int | None
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield (number of the batch, x, y) of the data, ``batch`` samples at a time, until the budget ends.

        Raises:
            NoValue: the budget ends before the first batch.
            UsageError: as :func:`diagnostics.measurement.batches`.
        """
        for index, (x, y) in enumerate(batches(data, batch, self.model)):
            if not index:
                self.clock.check()
            elif self.clock.over:
                break
            yield index, x, y


@contextmanager
def twice_differentiable(model: nn.Module) -> Iterator[None]:
    """Use only kernels with second derivatives in the ``with`` block, and no TF32.

    Kernels of fused attention and recurrence have no second derivatives.
    """
    with sdpa_kernel(SDPBackend.MATH), unfused(model, allow_tf32=False):
        yield


class _FromParts(TorchFunctionMode):
    """A mode in which torch computes some functions by operations with right second derivatives.

    In a second derivative, torch's own weight norm g v / ||v|| treats ||v|| as a
    constant. Torch's own hard sigmoid has no second derivative.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return _PARTS.get(func, func)(*args, **(kwargs or {}))


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    return v * (g / torch.norm_except_dim(v, 2, dim))


def _hardsigmoid(x: Tensor, inplace: bool = False) -> Tensor:
    """Return the hard sigmoid as a piecewise linear function, whose second derivative is 0.

    With ``inplace`` the result is also written to ``x``.

    >>> x = torch.tensor([1.0, 5.0], requires_grad=True)
    >>> with _FromParts():
    ...     y = F.hardsigmoid(x)
    >>> (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    >>> y.tolist() == F.hardsigmoid(x).tolist(), [round(6 * each, 6) for each in slope.tolist()]
    (True, [1.0, 0.0])
    >>> torch.autograd.grad((slope * x).sum(), x)[0].tolist() == slope.tolist()
    True
    """
    value = F.relu6(x + 3) / 6
    if inplace:
        return x.copy_(value)
    return value


_PARTS: dict[Any, Any] = {torch._weight_norm: _weight_norm, F.hardsigmoid: _hardsigmoid}


def curvature(
    gradients: Sequence[Tensor | None], v: Sequence[Tensor], tensors: Sequence[Any]
) -> list[Tensor]:
    """Return the product H v of the Hessian's block of some tensors with v.

    Args:
        gradients: the loss's gradients in ``tensors``, with their graph. None counts as 0.
        v: a vector for each of the tensors, in its shape.
        tensors: tensors, or edges of the graph.

    Returns:
        A tensor for each of ``tensors``, in its shape.

    Raises:
        NoValue: an operation cannot be differentiated twice.
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
        second_gradients = torch.autograd.grad(
            total, list(tensors), retain_graph=True, allow_unused=True
        )
    except RuntimeError as error:
        raise NoValue(no_second_derivative(error)) from error
    return [
        torch.zeros_like(w) if h is None else h
        for w, h in zip(v, second_gradients, strict=True)
    ]


def differentiable_once(gradients: Iterable[Tensor | None]) -> bool:
    """Return True if the graph of some gradient ends at a custom function that is differentiable only once.

    Differentiating such a gradient with respect to chosen tensors raises no error. It leaves out whatever is behind the
    cut. The gradients' common graph is read once.
    """
    roots = [g.grad_fn for g in gradients if g is not None and g.grad_fn is not None]
    return any(node.name() == "torch::autograd::Error" for node in nodes(*roots))


def no_second_derivative(error: RuntimeError) -> str:
    """Return a status if the error means that an operation has no second derivative; else raise the error again."""
    text = str(error)
    if "not implemented" in text:
        return f"no second derivative: {text.splitlines()[0]}"
    raise error


Norms = Callable[[Tensor], Tree]
"""A function from output gradients delta to squared norms of a module's parameters.

delta has the shape of the module's output. The result has a norm for each sample, [n],
by the parameter's name in the module.
"""


@dataclass(frozen=True)
class Tap:
    """The record of one call of a module, for per-sample gradients.

    Attributes:
        norms: the module's formula for squared norms of per-sample gradients.
        edge: the edge of the module's output in the autograd graph.
        a: the module's input, [n, ...].
    """

    norms: Norms
    edge: GradientEdge
    a: Tensor


@contextmanager
def record_calls(
    model: nn.Module, paths: Sequence[str], n: int, passes: int
) -> Iterator[dict[str, Tap | None]]:
    """Record the calls of some modules in one forward pass within the ``with`` block.

    Args:
        model: the model.
        paths: the modules' paths in the model.
        n: number of samples of the batch.
        passes: number of backward passes that will follow. For many of them, more is computed in advance.

    Yields:
        {path: record}, which the forward pass fills. The record is None for a module
        that is called twice or in a way without a formula. A module that is not called
        has none.
    """
    taps: dict[str, Tap | None] = {}

    @torch.no_grad()
    def tap(module: nn.Module, inputs: tuple[Any, ...], output: object) -> Tap | None:
        a = None
        if len(inputs) == 1:
            a = inputs[0]
        if not isinstance(a, Tensor) or a.ndim == 0 or len(a) != n:
            return None
        if not isinstance(output, Tensor) or not output.requires_grad:
            return None
        formula, a = formula_of(module), a.detach()
        try:
            norms = None
            if formula:
                norms = formula(module, a, passes)
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
            norms = None  # a subclass may use its input in another way
        # the edge, not the tensor: an in-place operation may take the tensor further
        if norms is None:
            return None
        return Tap(norms, get_gradient_edge(output), a)

    def hook_for(path: str) -> Hook:
        def hook(module: nn.Module, inputs: tuple[Any, ...], output: object) -> None:
            taps[path] = None if path in taps else tap(module, inputs, output)

        return hook

    with with_hooks(model, {path: hook_for(path) for path in paths}):
        yield taps


def owner(name: str) -> str:
    """Return the path of the module that has the parameter ``name``; "" for the model itself."""
    return name.rpartition(".")[0]


def parameter_name(path: str, local: str) -> str:
    """Return the name of the parameter ``local`` of the module at ``path``; the model itself has the path ""."""
    if path:
        return f"{path}.{local}"
    return local


def usable(taps: Mapping[str, Tap | None], index: int) -> dict[str, Tap]:
    """Return the recorded calls ``taps`` of batch number ``index``, by path, if none is missing.

    Raises:
        UsageError: this batch uses a module in another way than the first did.
    """
    recorded = {path: tap for path, tap in taps.items() if tap is not None}
    if len(recorded) < len(taps):
        missing_path = next(path for path in taps if path not in recorded)
        raise UsageError(
            f"module {missing_path!r} must be used alike in each batch; got another use in batch {index}. "
            "Choose estimator 'hutchinson'."
        )
    return recorded


def are_coupled(run: Differentiable, x: Tensor, y: Tensor) -> bool:
    """Return True if a sample's loss depends on other samples of its batch, such as by batch statistics.

    It is tested whether the losses of the first half depend on the second half. A
    single sample gives False.

    Args:
        run: the model as a function of its tensors.
        x, y: a batch of samples and their labels.

    Raises:
        NoValue: the loss is not finite.
    """
    leaf = x.detach().clone()
    leaf.requires_grad_(leaf.is_floating_point())
    paths = [path for path, module in run.model.named_modules() if path]
    with record_calls(run.model, paths, len(x), passes=1) as taps:
        # times one: the network may change its input in place, which a leaf would refuse
        _, losses = run.forward(leaf * 1, y, 0)
    targets: list[Any] = [tap.edge for tap in taps.values() if tap is not None]
    if leaf.requires_grad:
        targets += [leaf]
    half_size = -(-len(x) // 2)
    gradients = torch.autograd.grad(
        losses[:half_size].sum(), targets, allow_unused=True
    )
    gradients_reached = gradients
    if leaf.requires_grad:
        gradients_reached = gradients[-1:]
    return any(
        bool(gradient[half_size:].any())
        for gradient in gradients_reached
        if gradient is not None
    )


def squares(
    logits: Tensor,
    cotangent: Tensor,
    taps: Mapping[str, Tap],
    tensors: Mapping[str, Tensor] = MappingProxyType({}),
) -> Tree:
    """Return squared norms of gradients of sum(cotangent * logits), by parameter.

    Parameters of the tapped modules have one norm for each sample, [n]. Each of ``tensors`` has one norm for the whole
    batch.

    Args:
        logits: the logits [n, C] with their autograd graph.
        cotangent: weights of the logits, [n, C].
        taps: the recorded calls of modules by path.
        tensors: further parameters by name.
    """
    targets: list[Any] = [tap.edge for tap in taps.values()]
    targets += tensors.values()
    # a cotangent as an argument would import sympy
    gradients = torch.autograd.grad(
        (logits * cotangent).sum(), targets, retain_graph=True, allow_unused=True
    )
    return squared_norms(dict(zip([*taps, *tensors], gradients, strict=True)), taps)


def squared_norms(
    gradients: Mapping[str, Tensor | None], taps: Mapping[str, Tap]
) -> Tree:
    """Return squared norms of gradients by parameter: for each sample [n] in tapped modules, else one number.

    Args:
        gradients: gradients at the outputs of tapped modules, by path, and gradients of other parameters, by name.
            None is left out.
        taps: the recorded calls of modules by path.
    """
    squares = {}
    for key, gradient in gradients.items():
        if gradient is not None and key in taps:
            for local, norms in taps[key].norms(gradient).items():
                squares[parameter_name(key, local)] = norms
        elif gradient is not None:
            squares[key] = gradient.square().sum()
    return squares


# --- formulas of modules ---------------------------------------------------------------------------------------

LARGEST = 1 << 25
"""The most elements of an intermediate that is stored for a module.

For a larger one the samples are processed in pieces.
"""
CACHED = 1 << 19
"""The most elements of patches that are formed at a time, if there is a single backward pass.

So few stay in the processor's cache. This is three times as fast as all patches of a
batch.
"""


def rademacher(like: Tensor, generator: torch.Generator) -> Tensor:
    """Draw independent random signs, +1 or -1, with the shape, device and type of ``like``.

    The generator must be on the CPU.
    """
    count = like.numel()
    random_bytes = torch.randint(
        0, 256, (-(-count // 8),), generator=generator, dtype=torch.uint8
    )
    # eight a byte: drawing is what takes the time
    bits = torch.from_numpy(np.unpackbits(random_bytes.numpy())[:count])
    return bits.to(like.device).to(like.dtype).mul_(2).sub_(1).reshape(like.shape)


Patches = Callable[[slice], Tensor]
"""A function from a slice of the samples to their patches [n, groups, i, L].

A patch is the i inputs that the weight [out, i] of a group multiplies at one of L
positions.
"""


def _shared(module: Any, a: Tensor, passes: int) -> Norms | None:
    """Return the :data:`Norms` of a weight that all positions share: of a convolution or linear module.

    The result is None if the input lacks a batch dimension.

    Args:
        module: the module.
        a: its input, [n, ...].
        passes: number of backward passes that will follow.
    """
    if a.ndim < 2 or (a.ndim != 2 + len(getattr(module, "kernel_size", a.shape[2:]))):
        return None  # a single sample without a batch dimension
    patches, shape, out, _ = patches_of(module, a)
    product = _outer_norm(patches, shape, out, passes)

    def norms(delta: Tensor) -> Tree:
        if isinstance(module, nn.Linear):
            delta = delta.reshape(len(a), -1, out).mT
        delta = delta.reshape(len(a), shape[1], out, -1)
        return {"weight": product(delta), "bias": delta.sum(3).square().sum((1, 2))}

    return norms


def patches_of(
    module: Any, a: Tensor
) -> tuple[Patches, tuple[int, ...], int, tuple[int, ...]]:
    """Return the patches of a module's input that its weight multiplies.

    Args:
        module: a linear layer or a convolution.
        a: its input, [n, ...].

    Returns:
        A function from a slice of the samples to their patches [samples, groups, entries, positions], the shape of the
        patches of all samples, the output channels of a group, and the shape of the positions.
    """
    if isinstance(module, nn.Linear):
        tokens = a.reshape(len(a), 1, -1, a.shape[-1]).mT
        return (
            lambda rows: tokens[rows],
            tokens.shape,
            module.out_features,
            a.shape[1:-1],
        )
    spatial = len(module.kernel_size)
    # "same", circular, reflecting or replicating, too
    mode = module.padding_mode
    if module.padding_mode == "zeros":
        mode = "constant"
    a = F.pad(a, module._reversed_padding_repeated_twice, mode=mode)

    def windows_of(rows: slice) -> Tensor:
        windows = a[rows]
        for dim in range(spatial):
            step = module.dilation[dim]
            windows = windows.unfold(
                2 + dim, step * (module.kernel_size[dim] - 1) + 1, module.stride[dim]
            )
            windows = windows[..., ::step]
        return windows

    def patches(rows: slice) -> Tensor:
        windows = windows_of(rows)
        positions = windows.permute(
            0, 1, *range(2 + spatial, 2 + 2 * spatial), *range(2, 2 + spatial)
        )
        return positions.reshape(len(positions), module.groups, -1, grid.numel())

    grid = windows_of(slice(0, 1)).shape[2 : 2 + spatial]
    shape = len(a), *patches(slice(0, 1)).shape[1:]
    return patches, shape, module.out_channels // module.groups, grid


def _outer_norm(
    patches: Patches, shape: tuple[int, ...], out: int, passes: int
) -> Callable[[Tensor], Tensor]:
    """Return a function from output gradients to ||delta u^T||_F^2 per sample.

    The gradients have the shape [n, g, out, L]. The patches u have the shape [n, g, i, L]. The function computes either
    the product itself, or <delta^T delta, u^T u> with the second Gram matrix computed once.

    Args:
        patches: the function that returns the patches u of some samples.
        shape: the shape of all patches, (n, g, i, L).
        out: number of output channels of a group.
        passes: number of backward passes that will follow.
    """
    n, groups, inner, length = shape
    work = length * length * (out + 1 + inner / passes)
    if work < 1.25 * out * inner * length and n * groups * length * length <= LARGEST:
        chunk_size = max(1, LARGEST // (8 * groups * inner * length))
        rows = (slice(start, start + chunk_size) for start in range(0, n, chunk_size))
        gram = torch.cat([u.mT @ u for u in map(patches, rows)])
        return lambda delta: ((delta.mT @ delta) * gram).sum((1, 2, 3))
    keeps_patches = passes > 1 and n * groups * inner * length <= LARGEST
    u_kept = None
    if keeps_patches:
        u_kept = patches(slice(0, n))
    # read once, so few patches are formed at a time that they stay in the cache
    gram_limit = CACHED
    if passes > 1:
        gram_limit = LARGEST
    chunk_size = max(1, gram_limit // (groups * inner * max(length, out)))

    def direct(delta: Tensor) -> Tensor:
        squares = []
        for start in range(0, n, chunk_size):
            rows = slice(start, start + chunk_size)
            u = patches(rows) if u_kept is None else u_kept[rows]
            squares.append((u @ delta[rows].mT).square().sum((1, 2, 3)))
        return torch.cat(squares)

    return direct


def normalised_input(module: Any, a: Tensor) -> tuple[Tensor, Collection[int]]:
    """Return a normalisation's normalised input, and which of its dimensions the weight has.

    The module multiplies this input by its weight.

    Args:
        module: a batch, layer, group or RMS normalisation.
        a: its input, [n, ...].
    """
    if isinstance(module, nn.LayerNorm):
        return F.layer_norm(a, module.normalized_shape, eps=module.eps), _last(
            module, a
        )
    if isinstance(module, nn.RMSNorm):
        return F.rms_norm(a, module.normalized_shape, eps=module.eps), _last(module, a)
    if isinstance(module, nn.GroupNorm):
        return F.group_norm(a, module.num_groups, eps=module.eps), (1,)
    if module.training or module.running_mean is None:
        return F.batch_norm(a, None, None, training=True, eps=module.eps), (1,)
    # the model may compute in another type than its own; float32 statistics also serve inputs of half precision
    dtype = torch.promote_types(a.dtype, torch.float32)
    mean, variance = module.running_mean.to(dtype), module.running_var.to(dtype)
    return F.batch_norm(a, mean, variance, eps=module.eps), (1,)


def _last(module: Any, a: Tensor) -> Collection[int]:
    return range(a.ndim - len(module.normalized_shape), a.ndim)


def _norm(module: object, a: Tensor, passes: int) -> Norms:
    """Return the :data:`Norms` of a normalisation: normalised values times a weight, plus a bias."""
    values, keep = normalised_input(module, a)
    dims = [dim for dim in range(1, values.ndim) if dim not in keep]

    def squares(gradient: Tensor) -> Tensor:
        return (gradient.sum(dims) if dims else gradient).flatten(1).square().sum(1)

    return lambda delta: {"weight": squares(delta * values), "bias": squares(delta)}


def _embedding(module: Any, a: Tensor, passes: int) -> Norms | None:
    if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
        return None
    index = a.reshape(len(a), -1)
    equal_ids = index.unsqueeze(1) == index.unsqueeze(2)
    if module.padding_idx is not None:  # this row has no gradient
        equal_ids &= (index != module.padding_idx).unsqueeze(1)

    def embedding(delta: Tensor) -> Tree:
        rows = delta.reshape(*index.shape, -1)
        return {"weight": ((rows @ rows.mT) * equal_ids).sum((1, 2))}

    return embedding


_Build = Callable[[Any, Tensor, int], Norms | None]

_NORMS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.LayerNorm,
    nn.RMSNorm,
    nn.GroupNorm,
)
_FORMULAS: dict[type[nn.Module], _Build] = {
    **dict.fromkeys((nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d), _shared),
    **dict.fromkeys(_NORMS, _norm),
    nn.Embedding: _embedding,
}


def formula_of(module: nn.Module) -> _Build | None:
    """Return the formula for squared norms of a module's per-sample gradients; None if it has none.

    The formula takes the module, its input [n, ...] and the number of backward passes that will follow. It returns the
    function ``norms`` of a :class:`Tap`, or None if it does not hold for this module and input. A subclass has its
    parent's formula. :func:`diagnostics.curvature.exact.decide` compares it with autograd.
    """
    return next((b for kind, b in _FORMULAS.items() if isinstance(module, kind)), None)


Draw = Callable[[torch.Generator], Tensor]
"""A function from a generator to a new draw u, in the shape of the module's output."""


def draw_of(module: nn.Module, a: Tensor, weight: bool, bias: bool) -> Draw:
    """Return a function that draws random perturbations of a module's output, from a generator.

    A draw has the output's shape, and its samples are independent. The covariance of a
    sample is that of its output if the parameters had independent random signs.

    Args:
        module: a module with a formula (:func:`formula_of`).
        a: the module's input, [n, ...].
        weight, bias: which of the module's parameters are perturbed.
    """
    a = a.detach()
    if isinstance(module, nn.Embedding):
        return _draw_embedding(module, a)
    if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return _draw_shared(module, a, weight, bias)
    return _draw_scaled(module, a, weight, bias)


def _draw_shared(module: nn.Module, a: Tensor, weight: bool, bias: bool) -> Draw:
    """Return a function that draws for a weight that all positions share, and for a bias.

    The bias is the weight of a constant entry of each patch.

    Where a patch has more entries than there are positions, the patches' triangular factor [L, L] takes their place. It
    has the same covariance and needs fewer signs.
    """
    patches, (n, groups, inner, length), out, grid = patches_of(module, a)
    chunk_size = max(1, LARGEST // (groups * inner * max(length, out)))
    chunks = [slice(start, start + chunk_size) for start in range(0, n, chunk_size)]

    def covering(rows: slice) -> Tensor:
        parts = [patches(rows)] if weight else []
        if bias:
            parts.append(torch.ones_like(patches(rows)[:, :, :1]))
        patch_entries = torch.cat(parts, 2)
        if patch_entries.shape[2] > length:
            return torch.linalg.qr(patch_entries, "r").R
        return patch_entries

    factors = [covering(rows) for rows in chunks] if length < inner else []

    def by_signs(generator: torch.Generator) -> Tensor:
        parts = []
        for patch_entries in factors or map(covering, chunks):
            signs = patch_entries.new_empty(
                len(patch_entries), groups, out, patch_entries.shape[2]
            )
            parts.append(rademacher(signs, generator) @ patch_entries)
        u = torch.cat(parts)
        if isinstance(module, nn.Linear):
            return u.mT.reshape(n, *grid, out)
        return u.reshape(n, groups * out, *grid)

    return by_signs


def _draw_scaled(module: object, a: Tensor, weight: bool, bias: bool) -> Draw:
    """Return a function that draws for a module that scales and shifts its normalised input."""
    values, keep = normalised_input(module, a)
    shape = [size if dim in keep or dim == 0 else 1 for dim, size in enumerate(a.shape)]

    def draw(generator: torch.Generator) -> Tensor:
        if weight:
            u = values * rademacher(a.new_empty(shape), generator)
        else:
            u = torch.zeros_like(values)
        if bias:
            return u + rademacher(a.new_empty(shape), generator)
        return u

    return draw


def _draw_embedding(module: nn.Embedding, a: Tensor) -> Draw:
    """Return a function that draws for an embedding table.

    Equal tokens of a sample share a row. Padding tokens have draws of 0.
    """
    index = a.reshape(len(a), -1)
    first_positions = (
        (index.unsqueeze(2) == index.unsqueeze(1)).to(torch.uint8).argmax(2)
    )
    if module.padding_idx is None:
        is_first = torch.ones_like(index)
    else:
        is_first = index != module.padding_idx

    def draw(generator: torch.Generator) -> Tensor:
        rows = rademacher(
            module.weight.new_empty(*index.shape, module.embedding_dim), generator
        )
        rows = rows.gather(
            1, first_positions.unsqueeze(2).expand_as(rows)
        ) * is_first.unsqueeze(2)
        return rows.reshape(*a.shape, module.embedding_dim)

    return draw
