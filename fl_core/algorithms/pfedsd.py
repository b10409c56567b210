"""Personal models that learn from the client's own earlier model."""

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
from fl_core.algorithms.averaging import with_term
from fl_core.algorithms.contract import Positive

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
