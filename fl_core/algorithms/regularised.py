"""Personal models close to the global model, to the mean of all clients, or to the client's own earlier model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import kl_div

from fl_core import tree
from fl_core.algorithms import (
    Algorithm,
    Context,
    Message,
    Phase,
    Round,
    State,
    Tree,
    register,
)
from fl_core.algorithms.averaging import PersonalCopy, ProximalTerm, with_term
from fl_core.algorithms.contract import Positive


@register
class Ditto(ProximalTerm, PersonalCopy):
    """FedAvg's global model with a personal model next to it that is pulled to the global one (Li et al. 2021).

    The personal objective is loss(v) + (lam / 2) ||v - w_received||^2. Only the global copies are averaged. The global
    model is FedAvg's bit for bit. With lam = 0 the personal models are Local's. The default ``lam`` of 0.1 is
    PLayer-FL's. The authors' own code has 1 and searches from 0.05 to 2.
    """

    name = "ditto"
    paper = "Li et al. 2021"
    trains, travels, keeps = (
        "a global and a personal copy",
        "the global copy",
        "its personal copy",
    )

    @dataclass(frozen=True)
    class Config:
        lam: float = 0.1
        personal_epochs: int | None = None

    def phases(self, rnd: Round, client: int) -> tuple[Phase, ...]:
        epochs = (
            self.task_info.epochs
            if self.config.personal_epochs is None
            else self.config.personal_epochs
        )
        personal = (
            Phase("personal", self.task_info.tensors, epochs, state_key="personal"),
        )
        return (
            Phase("global", self.task_info.tensors, self.task_info.epochs),
            *with_term(personal, "pulled_loss", self.config.lam),
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

    def distilled_loss(
        self, params: Mapping[str, Tensor], batch: tuple[Tensor, Tensor], ctx: Context
    ) -> Tensor:
        """Return the local objective with the distance to the teacher's predictions."""
        teacher, warmth = ctx.trees.get(TEACHER), self.config.temperature
        if teacher is None:
            return self.loss(params, batch, ctx)
        x, y = batch
        logits = ctx.forward(params, x)
        taught, learnt = (
            softened / warmth for softened in (ctx.infer(teacher, x), logits)
        )
        gap = kl_div(
            learnt.log_softmax(1),
            taught.log_softmax(1),
            reduction="batchmean",
            log_target=True,
        )
        return ctx.criterion(logits, y) + self.config.lam * warmth**2 * gap

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
        personal = client.trees.get(TEACHER) or client.trees[UNTRAINED]
        return {**super().models(server, client, rnd), "personal": personal}
