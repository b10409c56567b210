"""Personal models around a global one: mixed with it by a learnt share, or adapted from it as a learnt start."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from statistics import pstdev
from typing import Annotated

import torch
from torch import Tensor

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
from fl_core.algorithms.averaging import OwnModel, PersonalCopy
from fl_core.errors import SHARE, Count, Positive, Share, at_least
from fl_core.plan import parameters_in
from fl_core.tree import assign, clone, select

PERSONAL, MIXTURE = "personal", "share"


@register
class APFL(PersonalCopy):
    """Each client predicts with a mixture of its own and the global model (APFL; Deng et al. 2020, Algorithm 1).

    The mixture is m = alpha v + (1 - alpha) w. For each batch the copy w of the global model follows grad f(w), as in
    FedAvg. The client's own model v follows grad_v f(m) = alpha grad f(m). Both gradients are taken before either step.
    With ``adapt`` the client also learns its share: alpha <- alpha - lr <v - w, grad f(m)>, within 0 and 1. It starts
    at ``alpha``. Only w is sent.

    The global model equals FedAvg's for every alpha, unless modules such as dropout draw random numbers. Without
    ``adapt``, alpha = 0 gives every client the global model, and alpha = 1 is local training. The personal model has
    the running statistics of the mixture's own passes.

    The authors' code mixes outputs instead of parameters. It moves w before it takes the gradient of v. It learns alpha
    once a round, with a decay of 0.02 alpha.
    """

    name = "apfl"
    paper = "Deng et al. 2020"
    trains = "a global and a personal copy"
    travels = "the global copy"
    keeps = "its personal copy, and its share"
    evaluates = "personal"
    step = "mixed_step"

    @dataclass(frozen=True)
    class Config:
        alpha: Share = 0.5
        adapt: bool = True

    def client_state(self, initial: Tree, client: int) -> State:
        state = super().client_state(initial, client)
        state.trees[MIXTURE] = {"alpha": torch.tensor(self.config.alpha)}
        return state

    def mixed_step(self, steps: Steps, batch: Batch, ctx: Context) -> None:
        """Take one step of the global model's copy w and of the client's model v.

        With ``adapt`` the share alpha takes a step too. Without it, alpha = 0 leaves v
        unchanged.
        """
        v = ctx.scratch.setdefault(PERSONAL, clone(ctx.trees[PERSONAL]))
        share = ctx.scratch.setdefault(MIXTURE, clone(ctx.trees[MIXTURE]))
        alpha = float(share["alpha"])
        grads = steps.gradients(batch)
        if alpha or self.config.adapt:
            w = _copy(steps.live)
            assign(steps.live, self.mixture(w, v, alpha))
            mixture_grads = steps.gradients(batch)
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
                    for name, grad in mixture_grads.items()
                )
                share["alpha"].fill_(
                    min(max(alpha - steps.training.lr * slope, 0.0), 1.0)
                )
            steps.descend_copy(
                PERSONAL,
                v,
                {name: alpha * grad for name, grad in mixture_grads.items()},
            )
        steps.descend(grads)

    def mixture(self, w: Tree, v: Tree, alpha: float) -> Tree:
        """Return alpha v + (1 - alpha) w of the client's model v and the shared w, with running statistics of v.

        Args:
            w: the tensors of the global model, or of the client's copy, by name.
            v: the tensors of the client's own model, by name.
            alpha: the share of v, from 0 to 1.
        """
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

    The first time, the client makes at most ``first`` passes, and later at most
    ``later``. The loss of a pass is that of its last batch. Passes end when the
    standard deviation of this loss over the last ``window`` passes is below
    ``threshold``. W stays with the client. Where the two models are equal, as before a
    client's first training, there is nothing to learn.

    The personal model is the client's own after local training. With first = later = 0 training starts where FedAvg's
    does. The author's code makes at least ``window`` + 1 passes the first time, and has no limit ``first``. It
    evaluates a client at the mixed start, before local training.

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
        """Return the names of the parameters with weights for their entries, sorted.

        These are the parameters of the last ``layers`` layers that train, as far as
        they travel.
        """
        trained_layers = [
            layer
            for layer in self.task_info.layers
            if layer.used and not layer.is_frozen
        ]
        last_layers = trained_layers[
            len(trained_layers) - min(self.config.layers, len(trained_layers)) :
        ]
        return tuple(sorted(self.shared(rnd, client) & {*parameters_in(last_layers)}))

    def client_start(
        self, state: State, message: Message, ctx: Context, rnd: Round, client: int
    ) -> Tree:
        own_model = state.trees["model"]
        received_model = message.trees["model"]
        start = {**own_model, **received_model}
        names = self.adaptive(rnd, client)
        if all(torch.equal(own_model[name], received_model[name]) for name in names):
            return start
        weights = state.trees.get(WEIGHTS) or {
            name: torch.ones_like(own_model[name]) for name in names
        }
        passes = self.config.later
        if WEIGHTS not in state.trees:
            passes = self.config.first
        device_trees = [
            {name: tensor.to(ctx.labels.device) for name, tensor in model.items()}
            for model in (weights, start, select(own_model, names))
        ]
        weights, fixed_trees = device_trees[0], (device_trees[1], device_trees[2])
        losses: list[float] = []
        if passes:
            batches = list(ctx.batches("adaptive aggregation", self.config.share))
        else:
            batches = []
        for _ in range(passes):
            for batch in batches:
                loss, weights = self.learn_step(weights, *fixed_trees, batch, ctx)
            losses.append(loss)
            recent_losses = list(islice(reversed(losses), self.config.window))
            if (
                len(recent_losses) == self.config.window
                and pstdev(recent_losses) < self.config.threshold
            ):
                break
        state.trees[WEIGHTS] = {name: tensor.cpu() for name, tensor in weights.items()}
        return start | {
            n: torch.lerp(own_model[n], received_model[n], weight)
            for n, weight in state.trees[WEIGHTS].items()
        }

    def learn_step(
        self, weights: Tree, received: Tree, own_model: Tree, batch: Batch, ctx: Context
    ) -> tuple[float, Tree]:
        """Take one gradient step on the mixing weights W.

        Args:
            weights: the present W by tensor name.
            received: the whole model by tensor name, with the received tensors where
                there are any, and the client's own elsewhere.
            own_model: the client's own tensors that W mixes.
            batch: samples and labels.
            ctx: the client's context.

        Returns:
            The loss on the batch before the step, and the new W.
        """
        params = {name: tensor.clone() for name, tensor in received.items()}
        mixed_params = {
            n: torch.lerp(own_model[n], received[n], weight).requires_grad_()
            for n, weight in weights.items()
        }
        loss = self.loss(params | mixed_params, batch, ctx)
        grads = torch.autograd.grad(
            loss, list(mixed_params.values()), allow_unused=True, materialize_grads=True
        )
        weights_with_grads = zip(weights.items(), grads, strict=True)
        rate = self.config.rate
        return loss.item(), {
            n: (w - rate * grad * (received[n] - own_model[n])).clamp(0, 1)
            for (n, w), grad in weights_with_grads
        }


@register
class PerFedAvg(Algorithm):
    """A common start that is good after one step of local descent (Fallah et al. 2020).

    The objective is F(w) = f(w - alpha grad f(w)). For each batch D2 of the usual pass, D1 is drawn
    independently:

        w' = w - alpha grad f(w; D1),  v = grad f(w'; D2)

    A step of the run's optimiser along v with rate beta follows. The paper's optimiser is SGD. This is the paper's
    first-order approximation, FO. It leaves out the factor I - alpha H(w) of v. With alpha = 0 this is FedAvg of rate
    beta.

    The personal model is the global one after one step of plain descent with rate
    alpha. It uses a batch of the client's training samples and is repeated at every
    evaluation. By default alpha is the run's learning rate.

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
        step = "meta_step"
        if self.config.alpha == 0:
            step = ""
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
        """Take one optimiser step on the loss after one adaptation step.

        The adaptation step uses another batch of the client. The optimiser then starts
        from the parameters before it.
        """
        start_params, alpha = _copy(steps.params), self._alpha(steps)
        if alpha:
            _move(steps.params, steps.gradients(steps.draw("inner")), -alpha)
        adaptation_grads = steps.gradients(batch)
        assign(steps.params, start_params)
        steps.descend(adaptation_grads)

    def adapt_step(self, steps: Steps, batch: Batch, ctx: Context) -> None:
        """Take one step of plain gradient descent with rate alpha."""
        _move(steps.params, steps.gradients(batch), -self._alpha(steps))

    def _alpha(self, steps: Steps) -> float:
        if self.config.alpha is None:
            return steps.training.lr
        return self.config.alpha


@register
class PFedMe(PersonalCopy):
    """Personal models as proximal points of the global one (Dinh et al. 2020).

    For each batch ``inner_steps`` steps are taken on theta, with

        theta <- theta - personal_lr (grad f(theta) + lam (theta - w) + decay theta)

    Then the run's optimiser takes a step along lam (w - theta), the gradient of the Moreau envelope at w. In each round
    theta starts at the received model. It carries over from batch to batch, as in the authors' released code. That code
    has a ``decay`` of 0.001, and the paper does not mention one. The server then sets the model to (1 - beta) w + beta
    mean(w_i).

    The personal model is theta and the global one w. With lam = 0 and no weight decay
    the global model's parameters never change.

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
        """Take several steps of the personal model, then one of the global model.

        All use the same batch. The personal model takes ``inner_steps`` steps. Of the
        global model the client trains a copy.
        """
        config = self.config
        w = _copy(steps.params)
        grads = dict[str, Tensor]()
        start_tensors = ctx.scratch.setdefault("personal", {})
        if start_tensors:
            assign(steps.params, start_tensors)
        for _ in range(config.inner_steps):
            grads = steps.gradients(batch)
            with torch.no_grad():
                for name, grad in grads.items():
                    theta = steps.params[name]
                    theta.sub_(
                        grad + config.lam * (theta - w[name]) + config.decay * theta,
                        alpha=config.personal_lr,
                    )
        start_tensors.update(_copy(steps.live))
        assign(steps.params, w)
        steps.descend(
            {name: config.lam * (w[name] - start_tensors[name]) for name in grads}
        )

    def aggregate(self, server: State, updates: Iterable[Update], rnd: Round) -> None:
        model_before = dict(server.trees["model"])
        beta = self.config.beta
        super().aggregate(server, updates, rnd)
        if beta != 1:
            for layer in self.task_info.layers:  # running statistics are only averaged
                for name in layer.parameters:
                    mean = server.trees["model"][name]
                    server.trees["model"][name] = model_before[name] + beta * (
                        mean - model_before[name]
                    )


def _copy(params: Tree) -> Tree:
    return {name: param.detach().clone() for name, param in params.items()}


@torch.no_grad()
def _move(params: Tree, directions: Tree, scale: float) -> None:
    for name, direction in directions.items():
        params[name].add_(direction, alpha=scale)
