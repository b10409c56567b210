"""What a round costs: FLOPs of local training, counted on the operations that really run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch.utils.flop_counter import FlopCounterMode

from fl_core import models
from fl_core.errors import check_known
from fl_core.local import Workspace


def training_flops(
    workspace: Workspace, shape: tuple[int, ...], trained: frozenset[str], held: frozenset[str] | None = None
) -> float:
    """Floating-point operations of one training sample, forward and backward, when exactly ``trained`` moves.

    Counted by PyTorch's own counter (matrix products, convolutions and attention; a multiply-add is two) on a batch
    of two, halved. Freezing early layers saves their weight gradients and everything below them; freezing late ones
    saves their weight gradients only; blocks that are not ``held`` cost nothing.
    """
    workspace.hold(held)
    x = models.example(shape).to(workspace.device)
    if x.is_floating_point():
        x = x.to(next(iter(workspace.params.values())).dtype)
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


PFEDLA_BYTES = 3000
"""What pFedLA's Table 3 counts for a parameter sent one way in its run of 600 rounds with 10 clients.

A float for each of them would be 24,000 bytes: the table is an eighth of that.
"""


def retention_ledger(parameters: Mapping[str, int], retained: Iterable[str] = ()) -> float:
    """MiB that a run of HeurpFedLA moves, as pFedLA's Table 3 counts them (Ma et al. 2022).

    u (2 P - sum of |l| over the retained layers) with u = :data:`PFEDLA_BYTES` / 2^20: retained layers are not
    downloaded, always the same ones. What a run really moves is in its rows ``bytes_down`` and ``bytes_up``.

    Args:
        parameters: scalars of each layer.
        retained: names of the layers that the clients keep.

    Raises:
        UsageError: a layer that is not among them.
    """
    kept = sum(parameters[check_known("layer", name, parameters)] for name in retained)
    return PFEDLA_BYTES * (2 * sum(parameters.values()) - kept) / 2**20
