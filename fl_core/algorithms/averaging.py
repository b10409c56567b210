"""One global model, local training, and personal models that are pulled to another.

They stay close to the global model, to the clients' mean, or to their own past.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import kl_div

from fl_core import tree
from fl_core.algorithms import (
    Algorithm,
    Batch,
    Context,
    Message,
    Phase,
    Round,
    State,
    Tree,
    register,
)
from fl_core.errors import Positive


class ProximalTerm(Algorithm):
    """Base of algorithms with a pull to the received model: loss + (pull / 2) ||w - w_received||^2.

    Only trainable parameters are pulled. With a pull of 0 training is the same as
    without the term, bit for bit.
    """

    def pull(self, index: int) -> float:
        """Return the strength of the pull in a round, counted from 0. Default: the option ``lam``."""
        return float(self.config.lam)

    def phases(self, rnd: Round, client: int) -> tuple[Phase, ...]:
        return with_term(
            super().phases(rnd, client), "pulled_loss", self.pull(rnd.index)
        )

    def pulled_loss(self, params: Tree, batch: Batch, ctx: Context) -> Tensor:
        """Return the loss of a batch plus the pull to the received model, a scalar."""
        return self.loss(params, batch, ctx) + half_pull(
            self.pull(ctx.round), params, ctx
        )


class PersonalCopy(Algorithm):
    """Base of algorithms whose clients keep a personal model next to their copy of the global one.

    It begins as the initial model, and is evaluated as ``personal``.
    """

    def client_state(self, initial: Tree, client: int) -> State:
        state = super().client_state(initial, client)
        state.trees["personal"] = tree.clone(initial)
        return state

    def models(self, server: State, client: State, rnd: Round) -> dict[str, Tree]:
        return {
            **super().models(server, client, rnd),
            "personal": client.trees["personal"],
        }


class OwnModel(Algorithm):
    """Base of algorithms whose clients keep their whole model between rounds. It is the one that is evaluated."""

    evaluates = "personal"

    def local_tensors(self, rnd: Round, client: int) -> frozenset[str]:
        return self.task_info.tensors

    def models(self, server: State, client: State, rnd: Round) -> dict[str, Tree]:
        return {self.evaluates: client.trees["model"]}


class ServerMade(Algorithm):
    """Base of algorithms whose server makes a model for each client. The model that it would send next is evaluated."""

    evaluates = "personal"

    def model_for(self, server: State, client: int, rnd: Round) -> Tree:
        """Return the tensors that the server makes for a client and sends to it, by name.

        An algorithm must define it; here it raises NotImplementedError.
        """
        raise NotImplementedError

    def server_message(self, server: State, client: int, rnd: Round) -> Message:
        return Message({"model": self.model_for(server, client, rnd)})

    def client_state(self, initial: Tree, client: int) -> State:
        state = super().client_state(initial, client)
        state.meta["client"] = client
        return state

    def models(self, server: State, client: State, rnd: Round) -> dict[str, Tree]:
        personal_tensors = self.model_for(server, client.meta["client"], rnd)
        return {self.evaluates: {**client.trees["model"], **personal_tensors}}


@register
class Local(Algorithm):
    """Local training of every client from the common initial model, in the rounds for which it is sampled."""

    name = "local"
    paper = "the baseline without federation"
    travels, keeps, cost = "nothing", "its model", "0"
    evaluates = "personal"

    def shared(self, rnd: Round, client: int) -> frozenset[str]:
        return frozenset()


@register
class FedAvg(Algorithm):
    """The average of locally trained copies, weighted by training samples (McMahan et al. 2017).

    If the run's ``weights`` is ``uniform``, all clients have the same weight.
    """

    name = "fedavg"
    paper = "McMahan et al. 2017"


@register
class FedProx(ProximalTerm):
    """FedAvg with a pull to the received model: loss + (mu / 2) ||w - w_received||^2 (Li et al. 2020).

    Only trainable parameters are pulled. With mu = 0 this is FedAvg, bit for bit.
    """

    name = "fedprox"
    paper = "Li et al. 2020"
    trains = "all, with a pull to the received model"

    @dataclass(frozen=True)
    class Config:
        mu: float = 0.1

    def pull(self, index: int) -> float:
        return float(self.config.mu)


class FineTuned(Algorithm):
    """Base of algorithms whose clients fine-tune all layers of a copy of their model after the last round.

    Under a stopping rule each round with an evaluation may be the last, and copies are fine-tuned there.

    - ``finetune_epochs``: 5 by default, as in FedBABU. Layer scheduling does not state its number.
    - ``finetune_at``: numbers of completed rounds after which copies are fine-tuned and evaluated as well, if clients
      are evaluated then. This changes neither the run nor its recorded costs of training.
    """

    @dataclass(frozen=True)
    class Config:
        finetune_epochs: int = 5
        finetune_at: tuple[int, ...] = ()

    def finetuning(self, done: int, client: int) -> tuple[Phase, ...]:
        if not self.task_info.may_end(done) and done not in self.config.finetune_at:
            return ()
        return (
            Phase(
                "finetune",
                self.task_info.tensors,
                self.config.finetune_epochs,
                batch_stream="finetune",
            ),
        )


@register
class LocalAdaptation(FineTuned):
    """FedAvg after which every client fine-tunes a copy of the final global model (Yu et al. 2020)."""

    name = "local_adaptation"
    paper = "Yu et al. 2020"
    trains, cost = "all; at the end a copy", "2P; P at the end"


def with_term(
    phases: tuple[Phase, ...], objective: str, strength: float
) -> tuple[Phase, ...]:
    """Return phases that minimise ``objective``, which adds a term of this strength to the loss.

    With a strength of 0 the phases are returned unchanged. A term times 0 would not be
    the same. It would apply weight decay to tensors that no forward pass reaches, and
    an overflow times 0 would be NaN.

    Args:
        phases: the phases of local training.
        objective: name of the algorithm's method that gives the loss with the term.
        strength: the factor of the term.
    """
    if strength == 0:
        return phases
    return tuple(replace(phase, loss=objective) for phase in phases)


def half_pull(strength: float, params: Tree, ctx: Context) -> Tensor:
    """Return (strength / 2) ||w - w_received||^2 over trainable parameters, as a differentiable scalar.

    Args:
        strength: the strength of the pull.
        params: the parameters w by name.
        ctx: the client's context, whose ``reference`` is w_received.
    """
    gaps = [
        (param - ctx.reference[name]).square().sum()
        for name, param in params.items()
        if param.requires_grad
    ]
    return 0.5 * strength * torch.stack(gaps).sum()


@register
class Ditto(ProximalTerm, PersonalCopy):
    """FedAvg's global model with a personal model next to it that is pulled to the global one (Li et al. 2021).

    The personal objective is loss(v) + (lam / 2) ||v - w_received||^2. Only the global copies are averaged. The global
    model is FedAvg's bit for bit. With lam = 0 the personal models are Local's. The default ``lam`` of 0.1 is
    PLayer-FL's. The authors' own code has 1 and searches from 0.05 to 2.
    """

    name = "ditto"
    paper = "Li et al. 2021"
    trains = "a global and a personal copy"
    travels = "the global copy"
    keeps = "its personal copy"

    @dataclass(frozen=True)
    class Config:
        lam: float = 0.1

    def phases(self, rnd: Round, client: int) -> tuple[Phase, ...]:
        names = self.task_info.tensors
        epochs = self.task_info.epochs
        personal_phases = (Phase("personal", names, epochs, state_key="personal"),)
        return (
            Phase("global", names, epochs),
            *with_term(personal_phases, "pulled_loss", self.config.lam),
        )


@register
class MRMTL(ProximalTerm):
    """One model a client, pulled to the mean of all clients' models (MR-MTL; Liu et al. 2022, Algorithm A1).

    A client continues from its own model w. It minimises loss(w) + (lam / 2) ||w - mean||^2. The server averages what
    the clients send, weighted by training samples. With lam = 0 this is Local, bit for bit. Unlike Ditto there is no
    second model: the mean is that of the personal models.
    """

    name = "mr_mtl"
    paper = "Liu et al. 2022"
    trains, keeps = "all, with a pull to the mean", "its model"
    evaluates = "personal"

    @dataclass(frozen=True)
    class Config:
        lam: float = 0.1

    def local_tensors(self, rnd: Round, client: int) -> frozenset[str]:
        return self.submodel(rnd, client) - self.task_info.not_yet_trained(rnd)

    def client_start(
        self, state: State, message: Message, ctx: Context, rnd: Round, client: int
    ) -> Tree:
        return {**message.trees["model"], **state.trees["model"]}


TEACHER = "teacher"
UNTRAINED = "untrained"  # a client's personal model before its first round


@register
class PFedSD(Algorithm):
    """FedAvg whose clients distil from the model that they trained last (pFedSD; Jin et al. 2022).

    The local objective, averaged over the batch, is

        loss + lam T^2 KL(softmax(teacher / T) || softmax(student / T))

    The teacher is the client's model after its last local training, in evaluation mode. A client's first round has no
    teacher. The personal model is the local one, before aggregation. With lam = 0 the global model is FedAvg's.
    """

    name = "pfedsd"
    needs_logits = True
    paper = "Jin et al. 2022"
    trains = "all, taught by the client's last model"
    keeps = "its last local model"

    @dataclass(frozen=True)
    class Config:
        lam: float = 0.5
        temperature: Positive = 3.0

    def client_state(self, initial: Tree, client: int) -> State:
        state = super().client_state(initial, client)
        state.trees[UNTRAINED] = tree.clone(initial)
        return state

    def phases(self, rnd: Round, client: int) -> tuple[Phase, ...]:
        return with_term(super().phases(rnd, client), "distilled_loss", self.config.lam)

    def distilled_loss(self, params: Tree, batch: Batch, ctx: Context) -> Tensor:
        """Return the loss of a batch plus the divergence from the teacher's predictions, a scalar.

        Without a teacher, as in a client's first round, it is the loss alone.
        """
        teacher = ctx.trees.get(TEACHER)
        temperature = self.config.temperature
        if teacher is None:
            return self.loss(params, batch, ctx)
        x, y = batch
        logits = ctx.forward(params, x)
        teacher_logits, client_logits = (
            softened / temperature for softened in (ctx.infer(teacher, x), logits)
        )
        gap = kl_div(
            client_logits.log_softmax(1),
            teacher_logits.log_softmax(1),
            reduction="batchmean",
            log_target=True,
        )
        return ctx.criterion(logits, y) + self.config.lam * temperature**2 * gap

    def client_update(
        self,
        state: State,
        trained: dict[str, Tree],
        ctx: Context,
        rnd: Round,
        client: int,
    ) -> Message:
        message = super().client_update(state, trained, ctx, rnd, client)
        state.trees[UNTRAINED] = {}  # a state keeps the names of its trees
        state.trees[TEACHER] = tree.clone(trained["model"])
        return message

    def models(self, server: State, client: State, rnd: Round) -> dict[str, Tree]:
        personal_model = client.trees.get(TEACHER) or client.trees[UNTRAINED]
        return {**super().models(server, client, rnd), "personal": personal_model}
