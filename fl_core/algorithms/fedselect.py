"""Personal entries of a shared model, chosen by how much they changed in local training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fl_core import tree
from fl_core.algorithms import (
    Algorithm,
    Batch,
    Context,
    Message,
    Phase,
    Round,
    State,
    Steps,
    Tree,
    Update,
    register,
)
from fl_core.algorithms.contract import Share

MASK = "personal entries"


@register
class FedSelect(Algorithm):
    """A client keeps the entries that its training changed most, and shares the rest (FedSelect; Tamirisa et al. 2024).

    Each client has a mask m of its personal entries, empty at first. A round has these steps:

    1. Training starts from the client's own values where m is set, and from the received ones elsewhere. 2. The
    personal entries train for the round's epochs, then the shared ones. What does not train stays as it is. 3. The
    server averages each entry over the clients that share it, weighted by training samples. An entry that no client
    shares stays unchanged. 4. In each tensor the fraction ``rate`` of the shared entries with the largest |w - w_start|
    becomes personal. This
       ends where more than the fraction ``limit`` of the tensor is personal.

    With rate = 0 this is FedAvg, bit for bit. With rate = limit = 1 every client trains alone after the first round.
    A message has zeros in the place of personal entries, so they never leave the client.

    The released code keeps biases shared, and weights all clients equally. It compares a round's end with the end of
    the round before. An entry that becomes personal receives the average once more there; here it keeps its value. The
    released code alternates the two trainings by epoch.
    """

    name = "fedselect"
    paper = "Tamirisa et al. 2024"
    trains = "personal entries, then shared ones"
    travels, keeps = (
        "shared entries, and a mask of one bit a parameter up",
        "its model and its mask",
    )
    cost = "2P + P/32"
    evaluates = "personal"

    @dataclass(frozen=True)
    class Config:
        rate: Share = 0.05
        limit: Share = 0.5

    def client_state(self, initial: Tree, client: int) -> State:
        names = (
            self.shared(Round(0), client)
            & self.task_info.parameters - self.task_info.frozen
        )
        mask = {
            name: torch.zeros_like(initial[name], dtype=torch.bool) for name in names
        }
        return State({"model": tree.clone(initial), MASK: mask})

    def local_tensors(self, rnd: Round, client: int) -> frozenset[str]:
        return self.submodel(rnd, client)

    def client_start(
        self, state: State, message: Message, ctx: Context, rnd: Round, client: int
    ) -> Tree:
        return merge_personal(
            state.trees["model"], message.trees["model"], state.trees[MASK]
        )

    def phases(self, rnd: Round, client: int) -> tuple[Phase, ...]:
        everything, epochs = self.submodel(rnd, client), self.task_info.epochs
        personal = Phase("personal", everything, epochs, step="personal_step")
        return (personal, Phase("train", everything, epochs, step="shared_step"))

    def personal_step(self, steps: Steps, batch: Batch, ctx: Context) -> None:
        """Take one step of the personal entries."""
        self._step(steps, batch, ctx.trees[MASK])

    def shared_step(self, steps: Steps, batch: Batch, ctx: Context) -> None:
        """Take one step of the shared entries."""
        self._step(
            steps, batch, {name: ~each for name, each in ctx.trees[MASK].items()}
        )

    def _step(self, steps: Steps, batch: Batch, moves: Mapping[str, Tensor]) -> None:
        moves = {name: each for name, each in moves.items() if name in steps.params}
        if not any(each.any() for each in moves.values()):
            return
        before = {
            name: steps.params[name].detach().clone()
            for name, each in moves.items()
            if not each.all()
        }
        steps.descend(steps.gradients(batch))
        with torch.no_grad():
            for name, value in before.items():
                steps.params[name].copy_(
                    torch.where(moves[name], steps.params[name], value)
                )

    def client_update(
        self,
        state: State,
        trained: dict[str, Tree],
        ctx: Context,
        rnd: Round,
        client: int,
    ) -> Message:
        received = {name: tensor.cpu() for name, tensor in ctx.reference.items()}
        start, own, mask = (
            merge_personal(state.trees["model"], received, state.trees[MASK]),
            trained["model"],
            {},
        )
        message = super().client_update(state, trained, ctx, rnd, client)
        for name, before in state.trees[MASK].items():
            mask[name] = before | self.choose_personal(
                (own[name] - start[name]).abs(), before
            )
        used = {
            name: each
            for name, each in state.trees[MASK].items()
            if name in message.trees["model"]
        }
        message.trees["model"] |= {
            n: own[n].masked_fill(each, 0) for n, each in used.items()
        }
        message.trees[MASK] = used
        state.trees[MASK] = mask
        return message

    def choose_personal(self, change: Tensor, personal: Tensor) -> Tensor:
        """Return the shared entries that become personal, as a bool tensor of the shape of ``change``."""
        free = change[~personal]
        count = (
            0
            if personal.double().mean() > self.config.limit
            else round(self.config.rate * free.numel())
        )
        least = free.sort(descending=True).values[count - 1] if count else torch.inf
        return (change >= least) & ~personal

    def aggregate(self, server: State, updates: Iterable[Update], rnd: Round) -> None:
        values, shares = tree.Mean(), tree.Mean()
        for update in updates:
            values.add(update.message.trees["model"], update.weight)
            shares.add(
                {
                    name: (~each).float()
                    for name, each in update.message.trees[MASK].items()
                },
                update.weight,
            )
        found, shared = values.result(), shares.result()
        for name, part in shared.items():
            found[name] = torch.where(
                part > 0, found[name] / part, server.trees["model"][name]
            )
        server.trees["model"].update(found)

    def models(self, server: State, client: State, rnd: Round) -> dict[str, Tree]:
        travels = self.shared(rnd, 0)
        received = tree.select(
            server.trees["model"], travels & server.trees["model"].keys()
        )
        return {
            self.evaluates: merge_personal(
                client.trees["model"], received, client.trees[MASK]
            )
        }


def merge_personal(
    own: Mapping[str, Tensor],
    received: Mapping[str, Tensor],
    mask: Mapping[str, Tensor],
) -> Tree:
    """Return the received values, with the client's own where its mask is set or nothing was received."""
    return {
        **own,
        **{
            n: torch.where(mask[n], own[n], t) if n in mask else t
            for n, t in received.items()
        },
    }
