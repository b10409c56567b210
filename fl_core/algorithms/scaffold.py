"""Algorithms for one global model that correct each client's gradient against drift.

Every client keeps a *variate*. The server keeps their mean over all N clients, sampled or not:

    s <- s + (1 / N) sum_{i replied} (new variate_i - old variate_i)

As in the papers, means weigh all clients equally. Buffers are averaged in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from fl_core import tree
from fl_core.algorithms import (
    Algorithm,
    Batch,
    Context,
    Message,
    Round,
    State,
    Steps,
    Tree,
    Update,
    register,
)
from fl_core.algorithms.averaging import half_pull
from fl_core.errors import Positive

VARIATE = "variate"  # at a client: its own; in a reply: the change of it; at the server: the mean
MEAN, TOTAL = "mean_variate", "total_gradient"


class ControlVariates(Algorithm):
    """Base of algorithms with control variates: zero at first for each client, with their mean at the server."""

    keeps = "its variate"

    def variate_names(self, rnd: Round, client: int) -> frozenset[str]:
        """Return the names of the tensors that have a variate in this round: the parameters that travel."""
        return self.shared(rnd, client) & self.task_info.parameters

    def client_state(self, initial: Tree, client: int) -> State:
        state = super().client_state(initial, client)
        state.trees[VARIATE] = _zeros(tree.select(initial, self.task_info.parameters))
        return state

    def server_state(self, initial: Tree) -> State:
        server = super().server_state(initial)
        server.trees[VARIATE] = _zeros(tree.select(initial, self.task_info.parameters))
        return server

    def take(self, server: State, changes: Tree, replies: int) -> None:
        """Update the server's mean variate by the change of the clients that replied.

        Args:
            server: the server's state, which is changed.
            changes: the mean change of their variates, by tensor name.
            replies: number of these clients.
        """
        mean = server.trees[VARIATE]
        fraction = replies / len(self.task_info.clients)
        new_mean = {
            name: mean[name] + (fraction * change.double()).to(change.dtype)
            for name, change in changes.items()
        }
        server.trees[VARIATE] = {**mean, **new_mean}


@register
class Scaffold(ControlVariates):
    """Stochastic controlled averaging with option II (SCAFFOLD; Karimireddy et al. 2020).

    A step follows grad f_i(y) - c_i + c. After K steps from x to y_i the client's variate becomes c_i - c + (x - y_i) /
    (K lr). Under plain SGD this is the mean of the K gradients grad f_i(y) on the way. The implementation stores that
    mean. So K is the number of steps taken, and any optimiser can be used. Weight decay belongs to the optimiser and is
    in no variate. The server sets x <- x + ``server_lr`` mean_i (y_i - x), for parameters only.

    The server sends x and c. The client sends y_i and the change of c_i. It equals FedAvg with one local step of plain
    SGD, clients of equal size, a server rate of 1 and full participation.

    Raises:
        UsageError: server_lr is 0, so that the model would never change.
    """

    name = "scaffold"
    paper = "Karimireddy et al. 2020"
    travels = "all, and as many variates"
    cost = "4P"
    step = "corrected_step"

    @dataclass(frozen=True)
    class Config:
        server_lr: Positive = 1.0

    def server_message(self, server: State, client: int, rnd: Round) -> Message:
        message = super().server_message(server, client, rnd)
        message.trees[MEAN] = tree.select(
            server.trees[VARIATE], self.variate_names(rnd, client)
        )
        return message

    def corrected_step(self, steps: Steps, batch: Batch, ctx: Context) -> None:
        """Take one step along the gradient minus the client's variate plus the mean variate.

        The uncorrected gradient is added to a sum in ``ctx.scratch``, for the new
        variate.
        """
        grads = steps.gradients(batch)
        total_grads = ctx.scratch.setdefault(TOTAL, {})
        for name, grad in grads.items():
            total_grads[name] = (
                total_grads[name].add_(grad) if name in total_grads else grad.clone()
            )
            grad.add_(ctx.trees[MEAN][name]).sub_(ctx.trees[VARIATE][name])
        steps.descend(grads)

    def client_update(
        self,
        state: State,
        trained: dict[str, Tree],
        ctx: Context,
        rnd: Round,
        client: int,
    ) -> Message:
        message = super().client_update(state, trained, ctx, rnd, client)
        old_variate = state.trees[VARIATE]
        total_grads = state.trees.pop(TOTAL, {})
        steps = ctx.work["train/steps"]
        new_variate = {
            n: total_grads[n] / steps if n in total_grads else old_variate[n]
            for n in sorted(self.variate_names(rnd, client))
        }
        message.trees[VARIATE] = {
            name: new_variate[name] - old_variate[name] for name in new_variate
        }
        state.trees[VARIATE] = {**old_variate, **new_variate}
        return message

    def aggregate(self, server: State, updates: Iterable[Update], rnd: Round) -> None:
        model_mean, change_mean = tree.Mean(self.task_info.buffers), tree.Mean()
        replies = 0
        for update in updates:
            replies += 1
            model_mean.add(update.message.trees["model"], 1)
            change_mean.add(update.message.trees[VARIATE], 1)
        mean_model, model = model_mean.result(), server.trees["model"]
        rate = self.config.server_lr
        parameters = self.task_info.parameters
        self.take(server, change_mean.result(), replies)
        model.update(
            {
                n: model[n] + rate * (mean_tensor - model[n])
                if n in parameters
                else mean_tensor
                for n, mean_tensor in mean_model.items()
            }
        )


@register
class FedDyn(ControlVariates):
    """Dynamic regularisation that bends local optima towards a common stationary point (FedDyn; Acar et al. 2021).

    The local objective is loss(w) - <g_i, w> + (alpha / 2) ||w - w_received||^2. Then the client sets g_i <- g_i -
    alpha (w_i - w_received). The server sets s <- s - (alpha / N) sum_i (w_i - w_received), the mean of all g_i.
    Parameters become w <- mean_i w_i - s / alpha. Buffers take the mean.

    As alpha approaches 0 the first round moves twice as far as FedAvg's, for clients of equal size that all reply. The
    value 0 itself would divide 0 by 0. The authors' code clips gradients at 10. The run's ``max_grad_norm=10`` is
    nearly the same. Their norm leaves out alpha w, added by the optimiser as weight decay.

    Raises:
        UsageError: alpha is 0.
    """

    name = "feddyn"
    paper = "Acar et al. 2021"
    trains = "all, with a pull to the received model"

    @dataclass(frozen=True)
    class Config:
        alpha: Positive = 0.01  # the server divides by it

    def loss(self, params: Tree, batch: Batch, ctx: Context) -> Tensor:
        inner_products = [
            (ctx.trees[VARIATE][name] * param).sum()
            for name, param in params.items()
            if param.requires_grad
        ]
        pulled_loss = super().loss(params, batch, ctx) + half_pull(
            self.config.alpha, params, ctx
        )
        if inner_products:
            return pulled_loss - torch.stack(inner_products).sum()
        return pulled_loss

    def client_update(
        self,
        state: State,
        trained: dict[str, Tree],
        ctx: Context,
        rnd: Round,
        client: int,
    ) -> Message:
        message = super().client_update(state, trained, ctx, rnd, client)
        for name in self.variate_names(rnd, client):
            change = trained["model"][name] - ctx.reference[name].to("cpu")
            state.trees[VARIATE][name] = (
                state.trees[VARIATE][name] - self.config.alpha * change
            )
        return message

    def aggregate(self, server: State, updates: Iterable[Update], rnd: Round) -> None:
        model_mean = tree.Mean(self.task_info.buffers)
        alpha = self.config.alpha
        replies = 0
        for update in updates:
            replies += 1
            model_mean.add(update.message.trees["model"], 1)
        mean_model, model = model_mean.result(), server.trees["model"]
        parameters = mean_model.keys() & self.task_info.parameters
        self.take(
            server,
            {name: -alpha * (mean_model[name] - model[name]) for name in parameters},
            replies,
        )
        dual = server.trees[VARIATE]
        model.update(
            {
                n: mean_tensor - dual[n] / alpha if n in parameters else mean_tensor
                for n, mean_tensor in mean_model.items()
            }
        )


def _zeros(like: Tree) -> dict[str, Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in like.items()}
