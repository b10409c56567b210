"""A cache of the outputs of frozen first layers, computed once per client for every epoch and later phase."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

CHUNK = 64  # samples computed at a time, whatever the batch, so that bits depend on model and data alone
KEPT = 1 << 28  # bytes of outputs that one process keeps

_SAMPLEWISE: tuple[type[nn.Module], ...] = (
    *(
        nn.Linear,
        nn.Conv1d,
        nn.Conv2d,
        nn.Conv3d,
        nn.Flatten,
        nn.Unflatten,
        nn.Identity,
    ),
    *(
        nn.ReLU,
        nn.ReLU6,
        nn.LeakyReLU,
        nn.ELU,
        nn.SELU,
        nn.GELU,
        nn.SiLU,
        nn.Mish,
        nn.Hardswish,
    ),
    *(nn.Sigmoid, nn.Tanh, nn.Softplus),
    *(
        nn.MaxPool1d,
        nn.MaxPool2d,
        nn.MaxPool3d,
        nn.AvgPool1d,
        nn.AvgPool2d,
        nn.AvgPool3d,
    ),
    *(
        nn.AdaptiveAvgPool1d,
        nn.AdaptiveAvgPool2d,
        nn.AdaptiveAvgPool3d,
        nn.AdaptiveMaxPool2d,
    ),
    *(nn.LayerNorm, nn.GroupNorm),
)
_QUIET_IN_EVALUATION = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
)
_WORK = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class Cut:
    """A chain of modules in two parts.

    The outputs of ``first`` are the same in every epoch, but not always those of ``rest``.
    """

    first: tuple[nn.Module, ...]
    rest: tuple[nn.Module, ...]

    def outputs(self, x: Tensor) -> Tensor:
        """Return the outputs of the first part for samples [n, *shape]."""
        with torch.no_grad():
            return torch.cat([_through(self.first, part) for part in x.split(CHUNK)])

    def logits(self, outputs: Tensor) -> Tensor:
        """Return logits [b, C] from outputs of the first part [b, ...]."""
        return _through(self.rest, outputs)


def cut(model: nn.Module) -> Cut | None:
    """Split a model after the layers whose outputs stay the same, or return None if there is no gain or no certainty.

    The model must be an ``nn.Sequential`` without hooks. It may contain further ones. Then each module's input is the
    output of the one before it. The first part ends before the first module with one of these properties:

    - It has a tensor that trains.
    - It draws random numbers, uses other samples, or updates statistics. Dropout and batch normalisation do so in
      training mode.
    - Its type is not on the list of PyTorch modules whose behaviour is known.
    """
    parts = chain(model)
    if parts is None or any(has_hooks(module) for module in model.modules()):
        return None
    count = next(
        (k for k, module in enumerate(parts) if not _is_fixed(module)), len(parts)
    )
    first = parts[:count]
    if not any(type(module) in _WORK for module in first):
        return None
    return Cut(tuple(first), tuple(parts[count:]))


@dataclass(frozen=True)
class _Kept:
    samples: Tensor
    modules: tuple[nn.Module, ...]
    values: list[Tensor]
    outputs: Tensor

    def fits(self, modules: tuple[nn.Module, ...], tensors: list[Tensor]) -> bool:
        return self.modules == modules and all(map(torch.equal, self.values, tensors))


class FrozenPrefixCache:
    """A cache of the first parts' outputs by client: the most recently used, up to :data:`KEPT` bytes."""

    def __init__(self) -> None:
        self._kept: OrderedDict[int, _Kept] = OrderedDict()

    def outputs(
        self, client: int, where: Cut, samples: Tensor, x: Tensor
    ) -> Tensor | None:
        """Return the first part's outputs for a client's samples, from the cache if nothing has changed.

        Args:
            samples: the client's tensor of samples, recognised by its identity.
            x: the same on the device of the modules.

        Returns:
            The outputs [n, ...], or None if they have more than :data:`KEPT` bytes.
        """
        tensors = [
            tensor
            for module in where.first
            for tensor in (*module.parameters(), *module.buffers())
        ]
        cached = self._kept.pop(client, None)
        if (
            cached is None
            or cached.samples is not samples
            or not cached.fits(where.first, tensors)
        ):
            if where.outputs(x[:1]).nbytes * len(x) > KEPT:
                return None
            latest = next(reversed(self._kept.values()), None)
            same = latest is not None and latest.fits(
                where.first, tensors
            )  # shared by a round's clients
            values = (
                latest.values
                if latest and same
                else [tensor.detach().clone() for tensor in tensors]
            )
            cached = _Kept(samples, where.first, values, where.outputs(x))
        self._kept[client] = cached
        while sum(each.outputs.nbytes for each in self._kept.values()) > KEPT:
            self._kept.popitem(last=False)
        return cached.outputs


def chain(module: nn.Module) -> list[nn.Module] | None:
    """Return the modules that a sequential model calls one after the other."""
    if type(module).forward is not nn.Sequential.forward:
        return None
    parts: list[nn.Module] = []
    for child in module._modules.values():  # children() leaves out repeated modules
        assert child is not None
        parts += chain(child) or [child]
    return parts


def has_hooks(module: nn.Module) -> bool:
    """Return whether a module has hooks. They may read or change its inputs and outputs."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
    )


def _is_fixed(module: nn.Module) -> bool:
    """Return whether a module's output for a sample stays the same in every epoch."""
    if any(param.requires_grad for param in module.parameters()):
        return False
    if type(module) in _QUIET_IN_EVALUATION:
        uses_batch = (
            isinstance(module, nn.modules.batchnorm._BatchNorm)
            and module.running_mean is None
        )
        return not module.training and not uses_batch
    return type(module) in _SAMPLEWISE


def _through(modules: Iterable[nn.Module], x: Tensor) -> Tensor:
    for module in modules:
        x = module(x)
    return x
