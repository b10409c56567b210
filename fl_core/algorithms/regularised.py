"""Personal models that a penalty keeps close to a global one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from fl_core import tree
from fl_core.algorithms.averaging import half_pull, with_term
from fl_core.algorithms.base import Algorithm, Round, State, register
from fl_core.training.context import Context
from fl_core.training.phases import Phase
from fl_core.tree import Tree


@register
class Ditto(Algorithm):
    """FedAvg's global model with a personal model next to it that is pulled to the global one (Li et al. 2021).

    The personal objective is loss(v) + (lam / 2) ||v - w_received||^2. Only the global copies are averaged. The global
    model is FedAvg's bit for bit. With lam = 0 the personal models are Local's. The default ``lam`` of 0.1 is
    PLayer-FL's. The authors' own code has 1 and searches from 0.05 to 2.
    """

    name = "ditto"
    needs = "sum"
    paper = "Li et al. 2021"
    trains, travels, keeps = "a global and a personal copy", "the global copy", "its personal copy"

    @dataclass(frozen=True)
    class Config:
        lam: float = 0.1
        personal_epochs: int | None = None

    def client_state(self, initial: Tree, client: int) -> State:
        state = super().client_state(initial, client)
        state.trees["personal"] = tree.clone(initial)
        return state

    def phases(self, rnd: Round, client: int) -> tuple[Phase, ...]:
        epochs = self.task_info.epochs if self.config.personal_epochs is None else self.config.personal_epochs
        personal = (Phase("personal", self.task_info.tensors, epochs, state_key="personal"),)
        return (
            Phase("global", self.task_info.tensors, self.task_info.epochs),
            *with_term(personal, "personal_loss", self.config.lam),
        )

    def personal_loss(self, params: Mapping[str, Tensor], batch: tuple[Tensor, Tensor], ctx: Context) -> Tensor:
        """Return the personal objective on one batch."""
        return self.loss(params, batch, ctx) + half_pull(self.config.lam, params, ctx)

    def models(self, server: State, client: State, rnd: Round) -> dict[str, Tree]:
        return {**super().models(server, client, rnd), "personal": client.trees["personal"]}
