"""An optimiser's state as a tree. A client may keep it from round to round.

An entry's name has the client's tree, the phase, the tensor and the optimiser's key:
``model/train/fc1.weight#exp_avg``. So algorithms with several models or phases keep one state for each. SGD with
momentum keeps as much as the tensors have, Adam and AdamW twice that, with amsgrad three times, and a count of steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fl_core.training.phases import Phase
from fl_core.tree import Tree, copy_to_cpu

MOMENTUM = "momentum_buffer"
Entries = dict[
    str, dict[str, Tensor]
]  # name of a tensor -> key of the optimiser -> value


def entries_of(kept: Tree, phase: Phase) -> Entries:
    """The entries of a phase in a kept tree, by the tensor's name."""
    prefix, found = _prefix(phase), Entries()
    for slot, value in kept.items():
        if slot.startswith(prefix):
            name, _, key = slot.removeprefix(prefix).rpartition("#")
            found.setdefault(name, {})[key] = value
    return found


def to_tree(entries: Mapping[str, Mapping[str, Tensor]], phase: Phase) -> Tree:
    """The tree that keeps these entries of a phase: contiguous copies on the CPU."""
    prefix = _prefix(phase)
    return copy_to_cpu(
        {
            f"{prefix}{n}#{key}": each
            for n, values in entries.items()
            for key, each in values.items()
        }
    )


def read(
    optimizer: torch.optim.Optimizer, names: Sequence[str], params: Sequence[Tensor]
) -> Entries:
    """The optimiser's own state of these tensors, not copied."""
    return {
        name: {
            key: value
            for key, value in optimizer.state[param].items()
            if isinstance(value, Tensor)
        }
        for name, param in zip(names, params, strict=True)
    }


def restore(
    optimizer: torch.optim.Optimizer,
    names: Sequence[str],
    params: Sequence[Tensor],
    entries: Mapping[str, Mapping[str, Tensor]],
) -> None:
    """Put copies of the entries into a new optimiser of these tensors. Tensors without an entry begin fresh."""
    for name, param in zip(names, params, strict=True):
        for key, value in entries.get(name, {}).items():
            optimizer.state[param][key] = _like(value, param)
    if any(
        MOMENTUM in state for state in optimizer.state.values()
    ):  # then a fused step wants one for each,
        for param in params:  # also for what trains for the first time
            optimizer.state[param].setdefault(MOMENTUM, torch.zeros_like(param))


def _prefix(phase: Phase) -> str:
    return f"{phase.state_key}/{phase.name}/"


def _like(value: Tensor, param: Tensor) -> Tensor:
    """A copy on the parameter's device, in its memory layout if it has the same shape."""
    if value.shape != param.shape:
        return value.to(param.device, copy=True)
    return torch.empty_like(param, dtype=value.dtype, requires_grad=False).copy_(value)
