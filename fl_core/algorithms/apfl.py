"""Personal models between the own and the global one: mixed by a learnt share, or from a learnt start."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from statistics import pstdev
from typing import Annotated

import torch

from fl_core.algorithms import (
    Algorithm,
    Batch,
    Context,
    Message,
    Round,
    State,
    Steps,
    register,
)
from fl_core.algorithms.averaging import OwnModel
from fl_core.errors import SHARE, Share, at_least
from fl_core.tree import Tree, assign, clone, select

PERSONAL, MIXTURE = "personal", "share"


@register
class APFL(Algorithm):
    """Each client predicts with a mixture of its own and the global model (APFL; Deng et al. 2020, Algorithm 1).

    The mixture is m = alpha v + (1 - alpha) w. For each batch the copy w of the global model follows grad f(w), as in
    FedAvg. The client's own model v follows grad_v f(m) = alpha grad f(m). Both gradients are taken before either step.
    With ``adapt`` the client also learns its share: alpha <- alpha - lr <v - w, grad f(m)>, within 0 and 1. It starts
    at ``alpha``. Only w is sent.

    The global model equals FedAvg's for every alpha. Without ``adapt``, alpha = 0 gives every client the global model.
    alpha = 1 is training alone. The personal model has the running statistics of the mixture's own passes.

    The authors' code mixes outputs instead of parameters. It moves w before it takes the gradient of v. It learns alpha
    once a round, with a decay of 0.02 alpha.
    """

    name = "apfl"
    paper = "Deng et al. 2020"
    trains, travels, keeps = (
        "a global and a personal copy",
        "the global copy",
        "its personal copy, and its share",
    )
    evaluates = "personal"
    step = "mixed_step"

    @dataclass(frozen=True)
    class Config:
        alpha: Share = 0.5
        adapt: bool = True

    def client_state(self, initial: Tree, client: int) -> State:
        state = super().client_state(initial, client)
        state.trees |= {
            PERSONAL: clone(initial),
            MIXTURE: {"alpha": torch.tensor(self.config.alpha)},
        }
        return state

    def mixed_step(self, steps: Steps, batch: Batch, ctx: Context) -> None:
        """One step of both models, and of the client's share."""
        v = ctx.scratch.setdefault(PERSONAL, clone(ctx.trees[PERSONAL]))
        share = ctx.scratch.setdefault(MIXTURE, clone(ctx.trees[MIXTURE]))
        alpha = float(share["alpha"])
        grads = steps.gradients(batch)
        if alpha or self.config.adapt:
            w = {name: tensor.detach().clone() for name, tensor in steps.live.items()}
            assign(steps.live, self.mixture(w, v, alpha))
            along = steps.gradients(batch)
            v.update(
                {
                    name: steps.live[name].clone()
                    for name in v
                    if name not in self.task_info.parameters
                }
            )
            assign(steps.live, w)
            if self.config.adapt:
                slope = sum(
                    float(((v[name] - w[name]) * grad).sum())
                    for name, grad in along.items()
                )
                share["alpha"].fill_(
                    min(max(alpha - steps.training.lr * slope, 0.0), 1.0)
                )
            steps.descend_copy(
                PERSONAL, v, {name: alpha * grad for name, grad in along.items()}
            )
        steps.descend(grads)

    def mixture(self, w: Tree, v: Tree, alpha: float) -> Tree:
        """Alpha v + (1 - alpha) w of the parameters, with running statistics of v."""
        parameters = self.task_info.parameters
        return {
            name: torch.lerp(w[name], v[name], alpha) if name in parameters else v[name]
            for name in v
        }

    def models(self, server: State, client: State, rnd: Round) -> dict[str, Tree]:
        w = {**server.trees["model"], **client.trees["model"]}
        alpha = float(client.trees[MIXTURE]["alpha"])
        return {
            "global": w,
            "personal": self.mixture(w, client.trees[PERSONAL], alpha) if alpha else w,
        }


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
        received: Tree,
        own: Tree,
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
