"""A start of local training between own and global model, learnt entry by entry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from statistics import pstdev
from typing import Annotated

import torch
from torch import Tensor

from fl_core.algorithms import Batch, Context, Message, Round, State, register
from fl_core.algorithms.averaging import OwnModel
from fl_core.bounds import SHARE, at_least
from fl_core.tree import Tree, select

WEIGHTS = "weights"


@register
class FedALA(OwnModel):
    """A client mixes its own and the global model, entry by entry, so that its loss falls (FedALA; Zhang et al. 2023).

    Training starts from own + (received - own) * W (Eq. 3). In the last ``layers`` layers that train, W has one weight
    for every entry. It begins at 1. In all other layers W is 1. Before it trains, the client learns W with both models
    fixed, on a random ``share`` of its training samples (Eq. 4-5):

        W <- clip(W - rate * grad_W loss, 0, 1),  grad_W loss = grad_start loss * (received - own).

    The first time, it makes at most ``first`` passes. It stops when the standard deviation of the loss over the last
    ``window`` passes is below ``threshold``. Later it makes ``later`` passes. W stays with the client. Where the two
    models are equal, as before a client's first training, there is nothing to learn.

    The personal model is the client's own after local training. With first = later = 0 training starts where FedAvg's
    does. The author's code makes at least ``window`` + 1 passes the first time, without an end at ``first``. It
    evaluates a client before local training, where W lets it start.

    Raises:
        UsageError: a share of 0 or above 1, or a window of fewer than 2 passes.
    """

    name = "fedala"
    paper = "Zhang et al. 2023"
    keeps = "its model, and weights of its last layers"

    @dataclass(frozen=True)
    class Config:
        layers: int = 1
        share: Annotated[float, SHARE] = 0.8
        rate: float = 1.0
        first: int = 30
        later: int = 1
        window: Annotated[int, at_least(2)] = 10
        threshold: float = 0.1

    def adaptive(self, rnd: Round, client: int) -> tuple[str, ...]:
        """Names of the parameters with weights for their entries: the last layers' parameters that travel."""
        moving = [
            layer
            for layer in self.task_info.layers
            if layer.used and not layer.is_frozen
        ]
        last = moving[len(moving) - min(self.config.layers, len(moving)) :]
        return tuple(
            sorted(
                self.shared(rnd, client).intersection(
                    name for layer in last for name in layer.parameters
                )
            )
        )

    def client_start(
        self, state: State, message: Message, ctx: Context, rnd: Round, client: int
    ) -> Tree:
        own, received = state.trees["model"], message.trees["model"]
        start, names = {**own, **received}, self.adaptive(rnd, client)
        if all(torch.equal(own[name], received[name]) for name in names):
            return start
        weights = state.trees.get(WEIGHTS) or {
            name: torch.ones_like(own[name]) for name in names
        }
        passes = self.config.first if WEIGHTS not in state.trees else self.config.later
        there = [
            {name: tensor.to(ctx.labels.device) for name, tensor in part.items()}
            for part in (weights, start, select(own, names))
        ]
        weights, fixed = there[0], (there[1], there[2])
        losses: list[float] = []
        batches = (
            list(ctx.batches("adaptive aggregation", self.config.share))
            if passes
            else []
        )
        for _ in range(passes):
            for batch in batches:
                loss, weights = self.learn_step(weights, *fixed, batch, ctx)
            losses.append(loss)
            recent = list(islice(reversed(losses), self.config.window))
            if (
                len(recent) == self.config.window
                and pstdev(recent) < self.config.threshold
            ):
                break
        state.trees[WEIGHTS] = {name: tensor.cpu() for name, tensor in weights.items()}
        return start | {
            n: torch.lerp(own[n], received[n], weight)
            for n, weight in state.trees[WEIGHTS].items()
        }

    def learn_step(
        self,
        weights: Tree,
        received: Mapping[str, Tensor],
        own: Mapping[str, Tensor],
        batch: Batch,
        ctx: Context,
    ) -> tuple[float, Tree]:
        """The loss on a batch at the start that the weights give, and the weights after a gradient step."""
        params = {name: tensor.clone() for name, tensor in received.items()}
        mixed = {
            n: torch.lerp(own[n], received[n], weight).requires_grad_()
            for n, weight in weights.items()
        }
        loss = self.loss(params | mixed, batch, ctx)
        grads = torch.autograd.grad(
            loss, list(mixed.values()), allow_unused=True, materialize_grads=True
        )
        moved = zip(weights.items(), grads, strict=True)
        rate = self.config.rate
        return loss.item(), {
            n: (w - rate * grad * (received[n] - own[n])).clamp(0, 1)
            for (n, w), grad in moved
        }
