"""Two heads on one extractor: the algorithm that builds a second classifier."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fl_core import models, tree
from fl_core.algorithms.base import Algorithm, Round, State, register
from fl_core.models.heads import TwoHeads, split_head
from fl_core.training.context import Context
from fl_core.tree import Tree


@register
class FedRoD(Algorithm):
    """A generic head trained against the client's class frequencies, and a personal one for what is left.

    FedRoD (Chen and Chao 2022). With z the features, G the generic and P the personal head and c_k the client's
    training samples of class k, the objective is loss(G(z) + gamma log c, y) (balanced softmax) for extractor and
    generic head, plus loss(sg(G(z)) + P(sg(z)), y) for the personal head alone; sg stops gradients, so one sum of both
    serves. The personal model predicts by G + P, the global one by G. P starts at zero, so that a client's first
    prediction is the generic head's.
    """

    name = "fedrod"
    needs_logits = True
    trains, travels, keeps = "all, and a personal head", "all but the personal head", "the personal head"
    cost = "2P, of the model with one head"
    paper = "FedRoD (Chen and Chao 2022)"
    evaluates = "personal"
    added_modules: ClassVar[Mapping[str, str]] = {"personal": "personal"}

    @dataclass(frozen=True)
    class Config:
        gamma: float = 1.0

    @classmethod
    def wrap_model(
        cls, model: nn.Module, config: Any, *, shape: tuple[int, ...], n_classes: int, seed: int
    ) -> nn.Module:
        return TwoHeads(*split_head(model, models.example(shape)))

    def loss(self, params: Mapping[str, Tensor], batch: tuple[Tensor, Tensor], ctx: Context) -> Tensor:
        x, y = batch
        generic, personal = ctx.forward(params, x, both=True)
        counts = torch.bincount(ctx.labels, minlength=generic.shape[-1]).to(generic.dtype)
        prior = self.config.gamma * counts.clamp(min=1).log()
        if self.config.gamma:  # minus infinity is exact, but losses other than cross-entropy have no derivative there
            prior[counts == 0] = math.log(torch.finfo(generic.dtype).tiny)
        return ctx.criterion(generic + prior, y) + ctx.criterion(personal, y)

    def models(self, server: State, client: State, rnd: Round) -> dict[str, Tree]:
        trees = super().models(server, client, rnd)
        unused = tree.select(
            server.trees["model"], [name for name in trees["personal"] if name.startswith("personal.")]
        )
        return {**trees, "global": {**trees["personal"], **unused}}  # the server's personal head is at its start, zero
