"""Parameters that matter to a client, exchanged with like clients only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fl_core import tree
from fl_core.algorithms.base import Algorithm, Message, Round, State, Update, register
from fl_core.errors import UsageError
from fl_core.training.context import Context
from fl_core.tree import Tree

NEGLIGIBLE = 1e-10
COLLABORATORS = "collaborators"
CHUNK = 2**20  # entries of a tensor that are compared at once


@register
class FedCAC(Algorithm):
    """Critical parameters are averaged among clients whose own lie in the same places (FedCAC; Wu et al. 2023).

    After local training from w_start a client marks, in every tensor, the fraction ``critical`` of its parameters with
    the largest |(w - w_start) w| (:func:`critical_mask`) and sends model and mask. The server keeps both for every
    client, takes the overlap O_ij = 1 - ||M_i - M_j||_1 / (2 ||M_i||_1) of all it knows, and lets client i collaborate
    with those whose overlap reaches mean + min(t / ``until``, 1) (max - mean), t counting rounds from 1: more and more
    selective, after ``until`` rounds only the closest. Client i receives one merged model, M_i * (mean of its
    collaborators, itself among them, each counting alike) + (1 - M_i) * (mean of this round's clients, weighted by
    training samples). Buffers come from the latter.

    The evaluated model is the merged one; a client that never took part has the global one.
    """

    name = "fedcac"
    paper = "Wu et al. 2023"
    travels = "all, and a mask of one bit a parameter up"
    cost = "2P + P/32"
    evaluates = "personal"

    @dataclass(frozen=True)
    class Config:
        critical: float = 0.5
        until: int = 100

        def __post_init__(self) -> None:
            if not 0 < self.critical < 1:
                raise UsageError(f"fedcac: critical must be a fraction between 0 and 1, not {self.critical}")
            if self.until < 1:
                raise UsageError(f"fedcac: until must be at least 1 round, not {self.until}")

    def client_state(self, initial: Tree, client: int) -> State:
        state = super().client_state(initial, client)
        state.meta["client"] = client
        return state

    def server_message(self, server: State, client: int, rnd: Round) -> Message:
        return Message({"model": tree.select(self.merged(server, client), self.shared(rnd, client))})

    def client_update(self, state: State, trained: dict[str, Tree], ctx: Context, rnd: Round, client: int) -> Message:
        message = super().client_update(state, trained, ctx, rnd, client)
        message.trees["mask"] = {
            name: critical_mask(trained["model"][name], ctx.reference[name].to("cpu"), self.config.critical)
            for name in sorted(self.shared(rnd, client) & self.task_info.parameters)
        }
        return message

    def aggregate(self, server: State, updates: Iterable[Update], rnd: Round) -> None:
        replies = list(updates)  # what is stored must not change while clients are still being sent theirs
        super().aggregate(server, replies, rnd)
        for update in replies:
            server.trees |= {f"{kind}/{update.client}": each for kind, each in update.message.trees.items()}
        masks = {
            c: server.trees[f"mask/{c}"] for c in range(len(self.task_info.n_train)) if f"mask/{c}" in server.trees
        }
        progress = min((rnd.index + 1) / self.config.until, 1.0)
        server.meta[COLLABORATORS] = {str(c): with_ for c, with_ in collaborators(masks, progress).items()}

    def merged(self, server: State, client: int) -> Tree:
        """The model that the server sends to one client: critical parameters from similar clients, others from all."""
        average, mask = server.trees["model"], server.trees.get(f"mask/{client}")
        if mask is None:
            return average
        others = [server.trees[f"model/{c}"] for c in server.meta[COLLABORATORS][str(client)]]
        near = tree.mean([tree.select(each, mask.keys() & each.keys()) for each in others], [1] * len(others))
        return {**average, **{name: torch.where(where, near[name], average[name]) for name, where in mask.items()}}

    def models(self, server: State, client: State, rnd: Round) -> dict[str, Tree]:
        merged = State({"model": self.merged(server, client.meta["client"])})
        return super().models(merged, client, rnd)


def critical_mask(after: Tensor, before: Tensor, fraction: float) -> Tensor:
    """Mark the parameters that moved most for their size: |(after - before) after| in its largest ``fraction``; bool.

    Ties with the last of these are marked too. Where that one is at most 1e-10 everything that moved at all is marked.
    """
    moved = ((after - before) * after).abs()
    count = round(fraction * moved.numel())
    if count == 0:
        return torch.zeros_like(moved, dtype=torch.bool)
    least = moved.flatten().topk(count).values[-1]
    return moved >= least if least > NEGLIGIBLE else moved > 0


def collaborators(masks: Mapping[int, Tree], progress: float) -> dict[int, list[int]]:
    """For each client the clients whose critical parameters overlap enough with its own, itself included; ascending.

    Args:
        masks: bool trees by client; overlaps are taken over all ordered pairs of different clients.
        progress: 0 puts the threshold at the mean overlap, 1 at the largest.
    """
    clients = list(masks)
    overlap = _overlaps(list(masks.values()))
    pairs = overlap[~torch.eye(len(clients), dtype=torch.bool)]
    if not len(pairs):
        return {client: [client] for client in clients}
    most = pairs.max()
    mean = pairs.mean().clamp(max=most)  # the mean of equal overlaps may round to more than they are
    least = most if progress >= 1 else mean + progress * (most - mean)
    chosen = (overlap >= least) | torch.eye(len(clients), dtype=torch.bool)
    return {client: [clients[k] for k in row.nonzero().flatten()] for client, row in zip(clients, chosen, strict=True)}


def _overlaps(masks: list[Tree]) -> Tensor:
    """Overlap of critical parameters: 1 - ||M_i - M_j||_1 / (2 ||M_i||_1), [n, n] in float64; 0 where M_i is empty."""
    common = torch.zeros((len(masks), len(masks)), dtype=torch.float64)
    for name in sorted({name for mask in masks for name in mask}):
        nothing = torch.zeros_like(next(mask[name] for mask in masks if name in mask))
        flat = torch.stack([mask.get(name, nothing).flatten() for mask in masks])
        for part in flat.split(CHUNK, dim=1):
            ones = part.float()  # counts below 2^24 are exact
            common += (ones @ ones.T).double()
    count = common.diagonal()
    apart = count[:, None] + count[None, :] - 2 * common
    return torch.where(count[:, None] > 0, 1 - apart / (2 * count[:, None]).clamp(min=1), 0.0)
