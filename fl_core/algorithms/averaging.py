"""One model for all: FedAvg, its relatives, and its opposite, no federation at all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fl_core.algorithms.base import Algorithm, Round, register
from fl_core.training.local import Context, Phase


@register
class Local(Algorithm):
    """Every client trains alone, from the common initial model, whenever it is sampled."""

    name = "local"
    paper = "the baseline without federation"
    travels, keeps, cost = "nothing", "its model", "0"
    evaluates = "personal"

    def shared(self, rnd: Round, client: int) -> frozenset[str]:
        return frozenset()


@register
class FedAvg(Algorithm):
    """The average of locally trained copies, weighted by training samples (McMahan et al. 2017)."""

    name = "fedavg"
    paper = "McMahan et al. 2017"


@register
class FedProx(Algorithm):
    """FedAvg with a pull to the received model: loss + (mu / 2) ||w - w_received||^2 (Li et al. 2020).

    Only trainable parameters are pulled. mu = 0 is FedAvg, bit for bit.
    """

    name = "fedprox"
    paper = "Li et al. 2020"
    trains = "all, with a pull to the received model"

    @dataclass(frozen=True)
    class Config:
        mu: float = 0.1

    def phases(self, rnd: Round, client: int) -> tuple[Phase, ...]:
        return with_term(super().phases(rnd, client), "pulled_loss", self.config.mu)

    def pulled_loss(self, params: Mapping[str, Tensor], batch: tuple[Tensor, Tensor], ctx: Context) -> Tensor:
        """The local objective with the pull."""
        return self.loss(params, batch, ctx) + half_pull(self.config.mu, params, ctx)


class FineTuned(Algorithm):
    """Every client fine-tunes all layers of a copy of its model after the last round.

    Under a stopping rule each round with an evaluation may be the last, and copies are fine-tuned there.

    ``finetune_epochs``: 5 by default, FedBABU's own; layer scheduling does not state its number.
    ``finetune_at``: rounds completed after which copies are fine-tuned and evaluated as well, if clients are evaluated
    then. The run itself and its recorded costs stay what they are.
    """

    @dataclass(frozen=True)
    class Config:
        finetune_epochs: int = 5
        finetune_at: tuple[int, ...] = ()

    def finetuning(self, done: int, client: int) -> tuple[Phase, ...]:
        if not self.task_info.may_end(done) and done not in self.config.finetune_at:
            return ()
        return (Phase("finetune", self.task_info.tensors, self.config.finetune_epochs, batch_stream="finetune"),)


@register
class LocalAdaptation(FineTuned):
    """FedAvg, then every client fine-tunes a copy of the final global model (Yu et al. 2020)."""

    name = "local_adaptation"
    paper = "Yu et al. 2020"
    trains, cost = "all; at the end a copy", "2P; P at the end"


def with_term(phases: tuple[Phase, ...], objective: str, strength: float) -> tuple[Phase, ...]:
    """Let phases minimise an objective that adds a term of this strength to the loss.

    Without strength they stay as they are, so that the trainer that serves FedAvg serves them too. A gradient of 0
    would also hand tensors that no forward pass reaches to weight decay, and 0 times an overflow is not 0.
    """
    return phases if strength == 0 else tuple(replace(phase, loss=objective) for phase in phases)


def half_pull(strength: float, params: Mapping[str, Tensor], ctx: Context) -> Tensor:
    """(strength / 2) ||w - w_received||^2 over trainable parameters, a scalar that can be differentiated."""
    gaps = [(param - ctx.reference[name]).square().sum() for name, param in params.items() if param.requires_grad]
    return 0.5 * strength * torch.stack(gaps).sum()
