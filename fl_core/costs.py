"""What a round costs: FLOPs of local training, counted on the operations that really run."""

from __future__ import annotations

import torch
from torch.utils.flop_counter import FlopCounterMode

from fl_core.local import Workspace


def training_flops(workspace: Workspace, shape: tuple[int, ...], trained: frozenset[str]) -> float:
    """Floating-point operations of one training sample, forward and backward, when exactly ``trained`` moves.

    Counted by PyTorch's own counter (matrix products, convolutions and attention; a multiply-add is two) on a batch
    of two, halved. Freezing early layers saves their weight gradients and everything below them; freezing late ones
    saves their weight gradients only.
    """
    dtype = next(iter(workspace.params.values())).dtype
    x = torch.zeros((2, *shape), device=workspace.device, dtype=dtype)
    buffers = [(buffer, buffer.clone()) for buffer in workspace.model.buffers()]
    counter = FlopCounterMode(display=False)
    with torch.random.fork_rng(), workspace.trains(trained) as names, counter:
        logits = workspace.forward(workspace.params, x)
        if logits.requires_grad:
            torch.autograd.grad(logits.sum(), [workspace.params[name] for name in names], allow_unused=True)
    with torch.no_grad():
        for buffer, kept in buffers:
            buffer.copy_(kept)
    return counter.get_total_flops() / 2
