"""What becomes of a buffer when clients' models are averaged, by the rules of the modules that own the buffers.

A running mean can be averaged. A unit vector, a histogram or a minimum cannot. :data:`RULES` is the one list.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm

from fl_core.errors import UsageError, listing

AVERAGED = "averaged"
LARGEST = "largest"
SMALLEST = "smallest"
OF_LARGEST_CLIENT = "of the largest client"
CONSTANT = "constant"
"""The rule of a buffer that must be equal at all clients. Otherwise the mean is refused."""
RENEWED = "renewed"
"""The rule of a buffer that is averaged, then computed again from the module's other tensors."""

_STATISTICS = {"running_mean": AVERAGED, "running_var": AVERAGED}
_FIXED_SCALE = {"scale": CONSTANT, "zero_point": CONSTANT}
RULES: Mapping[str, Mapping[str, str]] = {
    # torch.nn
    "_NormBase": {**_STATISTICS, "num_batches_tracked": LARGEST},
    "_WeightedLoss": {"weight": CONSTANT},
    "BCEWithLogitsLoss": {"weight": CONSTANT, "pos_weight": CONSTANT},
    "LinearCrossEntropyLoss": {"weight": CONSTANT},
    "FractionalMaxPool2d": {"_random_samples": CONSTANT},
    "FractionalMaxPool3d": {"_random_samples": CONSTANT},
    # torch.nn.utils
    "_SpectralNorm": {"_u": RENEWED, "_v": RENEWED},
    "_Orthogonal": {"base": CONSTANT},
    # torch.ao.quantization
    "UniformQuantizationObserverBase": {"eps": CONSTANT},
    "MinMaxObserver": {"min_val": SMALLEST, "max_val": LARGEST},
    "MovingAverageMinMaxObserver": {"min_val": AVERAGED, "max_val": AVERAGED},
    "PerChannelMinMaxObserver": {"min_val": SMALLEST, "max_val": LARGEST},
    "MovingAveragePerChannelMinMaxObserver": {
        "min_val": AVERAGED,
        "max_val": AVERAGED,
    },
    "HistogramObserver": {
        "min_val": OF_LARGEST_CLIENT,
        "max_val": OF_LARGEST_CLIENT,
        "histogram": OF_LARGEST_CLIENT,
    },
    "FixedQParamsObserver": _FIXED_SCALE,
    "FakeQuantizeBase": {"fake_quant_enabled": CONSTANT, "observer_enabled": CONSTANT},
    "FakeQuantize": {"scale": RENEWED, "zero_point": RENEWED},
    "FixedQParamsFakeQuantize": _FIXED_SCALE,
    # torchvision and timm
    "FrozenBatchNorm2d": {
        **dict.fromkeys(("weight", "bias", "running_mean", "running_var"), CONSTANT)
    },
    "FrozenBatchNormAct2d": {
        **dict.fromkeys(("weight", "bias", "running_mean", "running_var"), CONSTANT)
    },
    "EvoNorm2dB0": {"running_var": AVERAGED},
    "EvoNorm2dB1": {"running_var": AVERAGED},
    "EvoNorm2dB2": {"running_var": AVERAGED},
    "InplaceAbn": _STATISTICS,
}
"""The rules of buffers by their names, in a row for each class name.

A row also holds for subclasses. A subclass's own row comes first.
"""

TOLERANCE = 1e-6
"""Largest change of a weight's entry in the last power iteration, relative to the largest entry."""
MOST_ITERATIONS = 1000
"""Power iterations at most: two singular values that are nearly equal converge slowly."""
_REAL = torch.float64, torch.float32, torch.float16, torch.bfloat16
_ORDERED = torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool


@dataclass(frozen=True, eq=False)
class _Renewal:
    """A copy of a module whose buffers follow from its other tensors, and its path in the model."""

    path: str
    module: nn.Module

    @torch.no_grad()
    def apply(self, tree: dict[str, Tensor]) -> None:
        """Compute the module's buffers again from a tree's tensors, and replace them in it.

        If the tree lacks a tensor of the module, nothing is changed.

        Args:
            tree: tensors by their names in the whole model.
        """
        prefix = ""
        if self.path:
            prefix = f"{self.path}."
        state = self.module.state_dict()
        if not all(f"{prefix}{name}" in tree for name in state):
            return
        for name, tensor in state.items():
            tensor.copy_(tree[f"{prefix}{name}"])
        _recompute(self.module)
        for name, buffer in self.module.named_buffers():
            key = f"{prefix}{name}"
            if key in tree:
                tree[key] = buffer.detach().to(tree[key].device, copy=True)


@dataclass(frozen=True, eq=False)
class BufferRules:
    """The rules of a model's buffers by name, and the buffers that are computed again after a mean.

    Attributes:
        by_name: the rule of each buffer that has one, by its name in the model. A rule
            is one of the words in :data:`RULES`.
        renewals: the modules whose buffers are computed again.
    """

    by_name: Mapping[str, str] = field(default_factory=dict)
    renewals: tuple[_Renewal, ...] = ()

    def rule(self, name: str, tensor: Tensor) -> str:
        """Return a tensor's rule: that of its name, or else the default (:func:`default_rule`).

        Args:
            name: the tensor's name in the model.
            tensor: the tensor. Its type and layout give the default rule.
        """
        rule = self.by_name.get(name)
        if rule is not None:
            return rule
        return default_rule(tensor)

    def renew(self, tree: dict[str, Tensor]) -> None:
        """Compute buffers of the rule :data:`RENEWED` again from a tree's other tensors, and replace them in it.

        Buffers of a module that lacks a tensor in the tree stay unchanged.
        """
        for renewal in self.renewals:
            renewal.apply(tree)


def default_rule(tensor: Tensor) -> str:
    """Return the rule of a tensor without a row in :data:`RULES`.

    Dense floats of 16 bits or more are averaged. Of dense signed integers, unsigned
    bytes and truth values the largest is taken. Any other tensor must be equal at all
    clients.

    >>> default_rule(torch.ones(2)), default_rule(torch.tensor(3)), default_rule(torch.ones(1, dtype=torch.complex64))
    ('averaged', 'largest', 'constant')
    """
    if tensor.layout is not torch.strided:
        return CONSTANT
    if tensor.dtype in _REAL:
        return AVERAGED
    if tensor.dtype in _ORDERED:
        return LARGEST
    return CONSTANT


def rules_of(model: nn.Module) -> BufferRules:
    """Return the rules of a model's buffers: those that its modules' classes have in :data:`RULES`.

    Buffers without a row are left out. Masks of ``torch.nn.utils.prune`` are constant.
    The vectors of the older ``torch.nn.utils.spectral_norm`` are renewed.
    """
    by_name: dict[str, str] = {}
    renewals: list[_Renewal] = []
    for path, module in model.named_modules():
        prefix = ""
        if path:
            prefix = f"{path}."
        rows = {**_rows_of_class(type(module)), **_rows_of_hooks(module)}
        names = [name for name, _ in module.named_buffers(recurse=False)]
        by_name |= {prefix + name: rows[name] for name in names if name in rows}
        if _is_renewed(module, rows):
            renewals.append(_Renewal(path, copy.deepcopy(module).cpu()))
    return BufferRules(by_name, tuple(renewals))


def buffers_without_rule(model: nn.Module) -> list[str]:
    """Return the names of a model's persistent buffers without a rule in :func:`rules_of`.

    >>> net = nn.BatchNorm1d(2)
    >>> net.register_buffer("prototype", torch.zeros(2))
    >>> buffers_without_rule(net)
    ['prototype']
    """
    by_name = rules_of(model).by_name
    persistent_names = model.state_dict(keep_vars=True)
    names = [name for name, _ in model.named_buffers() if name in persistent_names]
    return [name for name in names if name not in by_name]


def training_notes(before: nn.Module, after: nn.Module) -> list[str]:
    """Return a list of at most one note: on buffers without a rule that training changes.

    The note names persistent floating buffers alone, whose default rule is the mean.
    Without such a change the list is empty.

    Args:
        before, after: a model, and a copy of it after a pass in training mode.

    Raises:
        UsageError: training has changed a buffer that has no mean, or has resized one.
    """
    buffers_before, buffers_after = (
        dict(before.named_buffers()),
        dict(after.named_buffers()),
    )
    rules = rules_of(before)
    changed_names = [
        name
        for name in before.state_dict(keep_vars=True)
        if name in buffers_before
        and not equal(buffers_before[name], buffers_after[name])
    ]
    for name in changed_names:
        check_shape(before, name, buffers_before[name], buffers_after[name])
        if rules.rule(name, buffers_before[name]) == CONSTANT:
            type_text = _kind(buffers_before[name])
            raise UsageError(
                f"buffer {name!r} ({type_text}) must not change in training, since it has no mean over clients; "
                "got another value after a pass. Register it with persistent=False."
            )
    names_without_rule = set(buffers_without_rule(before))
    averaged_names = [
        name
        for name in changed_names
        if name in names_without_rule and buffers_before[name].is_floating_point()
    ]
    if not averaged_names:
        return []
    names_text = listing(map(repr, averaged_names), 4)
    return [
        f"buffers {names_text} change in training, and their mean over clients is used: register "
        "them with persistent=False where a mean makes no sense"
    ]


def equal(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same layout, type, shape and values. NaN equals NaN.

    >>> equal(torch.tensor([torch.nan]), torch.tensor([torch.nan])), equal(torch.eye(2).to_sparse(), torch.eye(2))
    (True, False)
    """
    if (a.layout, a.dtype, a.shape) != (b.layout, b.dtype, b.shape):
        return False
    a, b = a.detach(), b.detach()
    if a.layout is not torch.strided:
        return equal(a.to_dense(), b.to_dense())
    if a.is_quantized:
        return torch.equal(a, b)
    if torch.equal(_bytes(a), _bytes(b)):
        return True
    number = a.is_floating_point() or a.is_complex()
    return (
        number
        and a.itemsize > 1
        and bool(torch.isclose(a, b, rtol=0, atol=0, equal_nan=True).all())
    )


def check_constant(name: str, first: Tensor, other: Tensor) -> None:
    """Check that two clients have the same values of a buffer that has no mean.

    Args:
        name: the buffer's name, for the message.
        first, other: the buffer at the two clients.

    Raises:
        UsageError: the values differ.
    """
    if not equal(first, other):
        type_text = _kind(first)
        raise UsageError(
            f"buffer {name!r} ({type_text}) must be equal at all clients, since it has no mean; got two values. "
            "Register it with persistent=False, or keep its layer local."
        )


def check_shape(model: nn.Module, name: str, before: Tensor, after: Tensor) -> None:
    """Check that a forward pass has not resized a buffer of a model.

    Args:
        model: the model, whose class is named in the message.
        name: the buffer's name, for the message.
        before, after: the buffer before and after the pass.

    Raises:
        UsageError: the buffer has another shape. The message names it.
    """
    if before.shape != after.shape:
        shape = tuple(before.shape)
        model_class = type(model).__name__
        got_shape = tuple(after.shape)
        raise UsageError(
            f"buffer {name!r} of {model_class} must keep its shape {shape} in a forward pass; got "
            f"{got_shape}. Call the model on a batch before, or give the buffer its final shape."
        )


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _kind(tensor: Tensor) -> str:
    name = str(tensor.dtype).removeprefix("torch.")
    if tensor.layout is torch.strided:
        return name
    return f"sparse {name}"


def _rows_of_class(kind: type[Any]) -> dict[str, str]:
    rows: dict[str, str] = {}
    for parent in reversed(kind.__mro__):
        rows |= RULES.get(parent.__name__, {})
    return rows


def _rows_of_hooks(module: nn.Module) -> dict[str, str]:
    """Return the rules of buffers that torch.nn.utils adds to a module together with a hook."""
    rows: dict[str, str] = {}
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, SpectralNorm):
            rows |= dict.fromkeys((f"{hook.name}_u", f"{hook.name}_v"), RENEWED)
        elif isinstance(hook, BasePruningMethod):
            rows[f"{hook._tensor_name}_mask"] = CONSTANT
    return rows


def _is_renewed(module: nn.Module, rows: Mapping[str, str]) -> bool:
    if isinstance(module, ParametrizationList):
        rules_of_parts = [_rows_of_class(type(submodule)) for submodule in module]
        return any(RENEWED in submodule.values() for submodule in rules_of_parts)
    is_part = type(module).__name__ == "_SpectralNorm"  # renewed with its list
    return RENEWED in rows.values() and not is_part


def _recompute(module: Any) -> None:
    """Compute a module's renewed buffers from its other tensors, in place."""
    if isinstance(module, ParametrizationList):
        module.train()
        _until_equal(module.forward)
    elif hasattr(module, "calculate_qparams"):
        scale, zero_point = module.calculate_qparams()
        module.scale.copy_(scale)
        module.zero_point.copy_(zero_point)
    else:
        module.train()
        hooks = [
            hook
            for hook in module._forward_pre_hooks.values()
            if isinstance(hook, SpectralNorm)
        ]
        for hook in hooks:
            _until_equal(lambda hook=hook: hook.compute_weight(module, True))


def _until_equal(weight: Any) -> None:
    """Call a power iteration until the weight that it returns stays the same.

    The largest change of an entry is then at most :data:`TOLERANCE` of the largest entry.
    After :data:`MOST_ITERATIONS` further calls it ends in any case.
    """
    weight_before = weight()
    for _ in range(MOST_ITERATIONS):
        weight_after = weight()
        if bool(
            (weight_after - weight_before).abs().max()
            <= TOLERANCE * weight_after.abs().max()
        ):
            return
        weight_before = weight_after
