"""FLOPs of a training step, counted on executed operations."""

from __future__ import annotations

import torch
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.module_tracker import ModuleTracker

from fl_core import models
from fl_core.training.workspace import Workspace
from fl_core.untouched import untouched


class _Everything(ModuleTracker):
    """A tracker that counts all operations together, without hooks on modules."""

    def __enter__(self) -> _Everything:
        return self

    def __exit__(self, *error: object) -> None:
        pass


class FlopCounter(FlopCounterMode):
    """PyTorch's counter of FLOPs without its sums by module.

    Its hooks fail for modules that take a parameter. Such modules compute parametrised weights
    (``torch.nn.utils.parametrizations``).
    """

    def __init__(self) -> None:
        super().__init__(display=False)
        self.mod_tracker = _Everything()


def training_flops(
    workspace: Workspace, shape: tuple[int, ...], trained: frozenset[str], held: frozenset[str] | None = None
) -> float:
    """Return the floating-point operations for one training sample, forward and backward.

    Only the tensors in ``trained`` are trained.

    PyTorch's own counter runs on a batch of two, and the result is halved. It counts matrix products, convolutions and
    attention. A multiply-add is two operations. Freezing early layers saves their weight gradients and the backward
    pass below them. Freezing late layers saves their weight gradients only. Blocks that are not ``held`` cost nothing.
    An algorithm's computations outside the model's own pass are not counted, such as views and keys of a second task or
    a teacher.
    """
    workspace.hold(held)
    x = models.example(shape).to(workspace.device)
    if x.is_floating_point():
        x = x.to(next(iter(workspace.params.values())).dtype)
    counter = FlopCounter()
    with untouched(workspace.model), workspace.trains(trained) as names, counter:
        logits = workspace.forward(workspace.params, x)
        if logits.requires_grad:
            torch.autograd.grad(logits.sum(), [workspace.params[name] for name in names], allow_unused=True)
    return counter.get_total_flops() / 2
