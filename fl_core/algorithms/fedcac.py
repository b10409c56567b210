"""Exchange of each client's critical parameters with similar clients only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from fl_core import tree
from fl_core.algorithms import (
    Context,
    Message,
    Round,
    State,
    Tree,
    Update,
    register,
)
from fl_core.algorithms.averaging import ServerMade
from fl_core.bounds import INSIDE, Count

NEGLIGIBLE = 1e-10
COLLABORATORS = "collaborators"
CHUNK = 2**20  # entries of a tensor that are compared at once


@register
class FedCAC(ServerMade):
    """Averages of critical parameters among clients that have them in the same places (FedCAC; Wu et al. 2023).

    After training from w_start a client marks its critical parameters (:func:`critical_mask`). In every tensor these
    are the fraction ``critical`` with the largest ``|(w - w_start) w|``. It sends model and mask, and the server stores
    both.

    The server computes the overlap O_ij = 1 - ||M_i - M_j||_1 / (2 ||M_i||_1) of all known masks. Client i collaborates
    with the clients whose overlap reaches

        mean + min(t / until, 1) (max - mean)

    where t counts rounds from 1. The choice grows stricter. After ``until`` rounds only the closest clients remain.

    Client i receives one merged model. Its critical parameters are the mean over its collaborators and itself, with
    equal weights. The other parameters and the buffers are the mean of this round's clients, weighted by training
    samples. The evaluated model is the merged one. A client that never took part has the global model.
    """

    name = "fedcac"
    paper = "Wu et al. 2023"
    travels = "all, and a mask of one bit a parameter up"
    cost = "2P + P/32"

    @dataclass(frozen=True)
    class Config:
        critical: Annotated[float, INSIDE] = 0.5
        until: Count = 100

    def server_message(self, server: State, client: int, rnd: Round) -> Message:
        return Message(
            {
                "model": tree.select(
                    self.merge_model(server, client), self.shared(rnd, client)
                )
            }
        )

    def client_update(
        self,
        state: State,
        trained: dict[str, Tree],
        ctx: Context,
        rnd: Round,
        client: int,
    ) -> Message:
        message = super().client_update(state, trained, ctx, rnd, client)
        message.trees["mask"] = {
            name: critical_mask(
                trained["model"][name],
                ctx.reference[name].to("cpu"),
                self.config.critical,
            )
            for name in sorted(self.shared(rnd, client) & self.task_info.parameters)
        }
        return message

    def aggregate(self, server: State, updates: Iterable[Update], rnd: Round) -> None:
        replies = list(
            updates
        )  # the stored models must not change before every client has received its own
        super().aggregate(server, replies, rnd)
        for update in replies:
            server.trees |= {
                f"{kind}/{update.client}": each
                for kind, each in update.message.trees.items()
            }
        masks = {
            c: server.trees[f"mask/{c}"]
            for c in range(len(self.task_info.n_train))
            if f"mask/{c}" in server.trees
        }
        progress = min((rnd.index + 1) / self.config.until, 1.0)
        server.meta[COLLABORATORS] = {
            str(c): with_ for c, with_ in collaborators(masks, progress).items()
        }

    def merge_model(self, server: State, client: int) -> Tree:
        """Return a client's merged model: critical parameters from similar clients, the others from all."""
        average, mask = server.trees["model"], server.trees.get(f"mask/{client}")
        if mask is None:
            return average
        others = [
            server.trees[f"model/{c}"] for c in server.meta[COLLABORATORS][str(client)]
        ]
        near = tree.mean(
            [tree.select(each, mask.keys() & each.keys()) for each in others],
            [1] * len(others),
        )
        return {
            **average,
            **{
                name: torch.where(where, near[name], average[name])
                for name, where in mask.items()
            },
        }


def critical_mask(after: Tensor, before: Tensor, fraction: float) -> Tensor:
    """Mark the parameters that changed most for their size, as a bool tensor.

    These are the largest ``fraction`` of ``|(after - before) after|``. Ties with the last one are marked too. If the
    last one is at most 1e-10, every parameter that changed is marked.
    """
    moved = ((after - before) * after).abs()
    count = round(fraction * moved.numel())
    if count == 0:
        return torch.zeros_like(moved, dtype=torch.bool)
    least = moved.flatten().topk(count).values[-1]
    return moved >= least if least > NEGLIGIBLE else moved > 0


def collaborators(masks: Mapping[int, Tree], progress: float) -> dict[int, list[int]]:
    """Return the clients whose critical parameters overlap enough with each client's own. Each list is ascending.

    Every client is in its own list.

    Args:
        masks: bool trees by client. Overlaps are taken over all ordered pairs of different clients.
        progress: 0 puts the threshold at the mean overlap, 1 at the largest.
    """
    clients = list(masks)
    overlap = _overlaps(list(masks.values()))
    pairs = overlap[~torch.eye(len(clients), dtype=torch.bool)]
    if not len(pairs):
        return {client: [client] for client in clients}
    most = pairs.max()
    mean = pairs.mean().clamp(
        max=most
    )  # rounding can lift the mean of equal overlaps above them
    least = most if progress >= 1 else mean + progress * (most - mean)
    chosen = (overlap >= least) | torch.eye(len(clients), dtype=torch.bool)
    return {
        client: [clients[k] for k in row.nonzero().flatten()]
        for client, row in zip(clients, chosen, strict=True)
    }


def _overlaps(masks: list[Tree]) -> Tensor:
    """Return the overlaps 1 - ||M_i - M_j||_1 / (2 ||M_i||_1), [n, n] in float64; 0 for an empty M_i."""
    common = torch.zeros((len(masks), len(masks)), dtype=torch.float64)
    for name in sorted({name for mask in masks for name in mask}):
        nothing = torch.zeros_like(next(mask[name] for mask in masks if name in mask))
        flat = torch.stack([mask.get(name, nothing).flatten() for mask in masks])
        for part in flat.split(CHUNK, dim=1):
            ones = part.float()  # counts below 2^24 are exact
            common += (ones @ ones.T).double()
    count = common.diagonal()
    apart = count[:, None] + count[None, :] - 2 * common
    return torch.where(
        count[:, None] > 0, 1 - apart / (2 * count[:, None]).clamp(min=1), 0.0
    )
