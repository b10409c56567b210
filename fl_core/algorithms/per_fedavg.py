"""Global models that are meant to be adapted: a start for one gradient step, and the centre of a Moreau envelope."""

from __future__ import annotations

from collections.abc import Iterable
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
    Tree,
    Update,
    register,
)
from fl_core.algorithms.averaging import PersonalCopy
from fl_core.errors import Count, Positive
from fl_core.tree import assign


@register
class PerFedAvg(Algorithm):
    """A common start that is good after one step of local descent (Fallah et al. 2020).

    The objective is F(w) = f(w - alpha grad f(w)). For each batch D2 of the usual pass, D1 is drawn
    independently:

        w' = w - alpha grad f(w; D1),  v = grad f(w'; D2)

    A step of the run's optimiser along v with rate beta follows. The paper's optimiser is SGD. This is the paper's
    first-order approximation, FO. It leaves out the factor I - alpha H(w) of v. With alpha = 0 this is FedAvg of rate
    beta.

    The personal model is the global one after one step of plain descent with rate alpha. It uses a batch of the
    client's training samples and is repeated at every evaluation.

    The paper weighs all clients equally. Here they are weighted by training samples unless the run's ``weights`` is
    ``uniform``.

    Raises:
        UsageError: beta is 0.
    """

    name = "per_fedavg"
    paper = "Per-FedAvg (Fallah et al. 2020)"

    @dataclass(frozen=True)
    class Config:
        alpha: float | None = None  # rate of the adaptation; default the run's
        beta: Positive = 0.01

    def phases(self, rnd: Round, client: int) -> tuple[Phase, ...]:
        step = "" if self.config.alpha == 0 else "meta_step"
        return (
            Phase(
                "train",
                self.task_info.tensors,
                self.task_info.epochs,
                lr=self.config.beta,
                step=step,
            ),
        )

    def finetuning(self, done: int, client: int) -> tuple[Phase, ...]:
        return (
            Phase(
                "adapt",
                self.task_info.tensors,
                epochs=1,
                steps=1,
                batch_stream="adapt",
                step="adapt_step",
            ),
        )

    def meta_step(self, steps: Steps, batch: Batch, ctx: Context) -> None:
        """Take one optimiser step on the loss after one adaptation step."""
        start, alpha = _copy(steps.params), self._alpha(steps)
        if alpha:
            _move(steps.params, steps.gradients(steps.draw("inner")), -alpha)
        along = steps.gradients(batch)
        assign(steps.params, start)
        steps.descend(along)

    def adapt_step(self, steps: Steps, batch: Batch, ctx: Context) -> None:
        """Take one step of plain descent."""
        _move(steps.params, steps.gradients(batch), -self._alpha(steps))

    def _alpha(self, steps: Steps) -> float:
        return steps.training.lr if self.config.alpha is None else self.config.alpha


@register
class PFedMe(PersonalCopy):
    """Personal models as proximal points of the global one (Dinh et al. 2020).

    For each batch ``inner_steps`` steps are taken on theta, with

        theta <- theta - personal_lr (grad f(theta) + lam (theta - w) + decay theta)

    Then the run's optimiser takes a step along lam (w - theta), the gradient of the Moreau envelope at w. In each round
    theta starts at the received model. It carries over from batch to batch, as in the authors' released code. That code
    has a ``decay`` of 0.001, and the paper does not mention one. The server then sets the model to (1 - beta) w + beta
    mean(w_i).

    The personal model is theta and the global one w. With lam = 0 and no weight decay the global model never changes.

    The paper weighs all clients equally. Here they are weighted by training samples unless the run's ``weights`` is
    ``uniform``.

    Raises:
        UsageError: inner_steps or personal_lr is 0, so that nothing would ever change.
    """

    name = "pfedme"
    trains, keeps = "a personal and a local copy", "the personal model"
    paper = "pFedMe (Dinh et al. 2020)"
    step = "envelope_step"

    @dataclass(frozen=True)
    class Config:
        lam: float = 15.0
        personal_lr: Positive = 0.01
        inner_steps: Count = 5
        beta: float = 1.0
        decay: float = 0.0

    def envelope_step(self, steps: Steps, batch: Batch, ctx: Context) -> None:
        """Take several steps of the personal model on a batch, then one step of the received model's copy."""
        config, w, grads = self.config, _copy(steps.params), dict[str, Tensor]()
        personal = ctx.scratch.setdefault("personal", {})
        if personal:
            assign(steps.params, personal)
        for _ in range(config.inner_steps):
            grads = steps.gradients(batch)
            with torch.no_grad():
                for name, grad in grads.items():
                    theta = steps.params[name]
                    theta.sub_(
                        grad + config.lam * (theta - w[name]) + config.decay * theta,
                        alpha=config.personal_lr,
                    )
        personal.update(_copy(steps.live))
        assign(steps.params, w)
        steps.descend({name: config.lam * (w[name] - personal[name]) for name in grads})

    def aggregate(self, server: State, updates: Iterable[Update], rnd: Round) -> None:
        before, beta = dict(server.trees["model"]), self.config.beta
        super().aggregate(server, updates, rnd)
        if beta != 1:
            for layer in self.task_info.layers:  # running statistics are only averaged
                for name in layer.parameters:
                    mean = server.trees["model"][name]
                    server.trees["model"][name] = before[name] + beta * (
                        mean - before[name]
                    )


def _copy(params: Tree) -> Tree:
    return {name: param.detach().clone() for name, param in params.items()}


@torch.no_grad()
def _move(params: Tree, along: Tree, by: float) -> None:
    for name, direction in along.items():
        params[name].add_(direction, alpha=by)
