"""Personal models that a penalty keeps close to the global model or to the mean of all clients."""

from __future__ import annotations

from dataclasses import dataclass

from fl_core.algorithms import Context, Message, Phase, Round, State, Tree, register
from fl_core.algorithms.averaging import PersonalCopy, ProximalTerm, with_term


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
