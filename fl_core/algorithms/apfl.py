"""A personal model mixed with the global one, by a share that each client learns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fl_core.algorithms import (
    Algorithm,
    Batch,
    Context,
    Phase,
    Round,
    State,
    Steps,
    register,
)
from fl_core.algorithms.contract import Share
from fl_core.tree import Tree, assign, clone

PERSONAL, SHARE = "personal", "share"


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

    @dataclass(frozen=True)
    class Config:
        alpha: Share = 0.5
        adapt: bool = True

    def client_state(self, initial: Tree, client: int) -> State:
        state = super().client_state(initial, client)
        state.trees |= {
            PERSONAL: clone(initial),
            SHARE: {"alpha": torch.tensor(self.config.alpha)},
        }
        return state

    def phases(self, rnd: Round, client: int) -> tuple[Phase, ...]:
        return (
            Phase(
                "train",
                self.task_info.tensors,
                self.task_info.epochs,
                step="mixed_step",
            ),
        )

    def mixed_step(self, steps: Steps, batch: Batch, ctx: Context) -> None:
        """One step of both models, and of the client's share."""
        v = ctx.scratch.setdefault(PERSONAL, clone(ctx.trees[PERSONAL]))
        share = ctx.scratch.setdefault(SHARE, clone(ctx.trees[SHARE]))
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

    def mixture(
        self, w: Mapping[str, Tensor], v: Mapping[str, Tensor], alpha: float
    ) -> Tree:
        """Alpha v + (1 - alpha) w of the parameters, with running statistics of v."""
        parameters = self.task_info.parameters
        return {
            name: torch.lerp(w[name], v[name], alpha) if name in parameters else v[name]
            for name in v
        }

    def models(self, server: State, client: State, rnd: Round) -> dict[str, Tree]:
        w = {**server.trees["model"], **client.trees["model"]}
        alpha = float(client.trees[SHARE]["alpha"])
        return {
            "global": w,
            "personal": self.mixture(w, client.trees[PERSONAL], alpha) if alpha else w,
        }
