"""Two heads on one extractor: a generic and a personal classifier."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fl_core import models, tree
from fl_core.algorithms import Algorithm, Context, Round, Shape, State, Tree, register
from fl_core.models.extended import TwoHeads, split_head


@register
class FedRoD(Algorithm):
    """A generic head trained against the client's class frequencies, and a personal head for the rest.

    The method is FedRoD (Chen and Chao 2022). Let z be the features, G the generic head and P the personal head. The
    client has c_k training samples of class k. The objective is the sum of two losses:

    - loss(G(z) + gamma log c, y), the balanced softmax, for extractor and generic head.
    - loss(sg(G(z)) + P(sg(z)), y) for the personal head alone, where sg stops gradients.

    The personal model predicts by G + P and the global one by G. P starts at zero, so a client's first prediction is
    the generic head's.
    """

    name = "fedrod"
    needs_logits = True
    trains, travels, keeps = (
        "all, and a personal head",
        "all but the personal head",
        "the personal head",
    )
    cost = "2P, of the model with one head"
    paper = "FedRoD (Chen and Chao 2022)"
    evaluates = "personal"
    added_modules: ClassVar[Mapping[str, str]] = {"personal": "personal"}

    @dataclass(frozen=True)
    class Config:
        gamma: float = 1.0

    @classmethod
    def wrap_model(
        cls, model: nn.Module, config: Any, *, shape: Shape, n_classes: int, seed: int
    ) -> nn.Module:
        return TwoHeads(*split_head(model, models.example(shape)))

    def loss(
        self, params: Mapping[str, Tensor], batch: tuple[Tensor, Tensor], ctx: Context
    ) -> Tensor:
        x, y = batch
        generic, personal = ctx.forward(params, x, both=True)
        counts = torch.bincount(ctx.labels, minlength=generic.shape[-1]).to(
            generic.dtype
        )
        prior = self.config.gamma * counts.clamp(min=1).log()
        if (
            self.config.gamma
        ):  # losses other than cross-entropy have no derivative at minus infinity
            prior[counts == 0] = math.log(torch.finfo(generic.dtype).tiny)
        return ctx.criterion(generic + prior, y) + ctx.criterion(personal, y)

    def models(self, server: State, client: State, rnd: Round) -> dict[str, Tree]:
        trees = super().models(server, client, rnd)
        unused = tree.select(
            server.trees["model"],
            [name for name in trees["personal"] if name.startswith("personal.")],
        )
        return {
            **trees,
            "global": {**trees["personal"], **unused},
        }  # the server's personal head stays at zero
