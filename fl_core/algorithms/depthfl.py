"""The first residual blocks for each client, with classifiers after some of them that teach each other."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fl_core import models
from fl_core.algorithms import Context, Round, Shape, register
from fl_core.algorithms.contract import Count
from fl_core.algorithms.fedra import LimitedDepth
from fl_core.models.blocks import paths_of_blocks, tensors_below
from fl_core.models.exits import Exits


@register
class DepthFL(LimitedDepth):
    """The first blocks for each client, with classifiers after some of them that teach each other (Kim et al. 2023).

    A client has m classifiers with logits z_k. Its loss is

        sum_k CE(z_k) + w_t / (m - 1) sum_k sum_{j != k} KL(softmax z_j || softmax z_k)

    where z_j has no gradient. The weight is w_t = exp(-5 (1 - min(t, R) / R)^2) with the 0-based round t.

    As in FedRA's comparison, the model's own classifier follows the client's last block, whatever its depth. The client
    also has the exits after its earlier blocks. Every tensor is averaged over its holders with equal weights. FedDyn's
    terms in the authors' experiments are not included.

    - ``ramp``: R, by default 300. FedRA's code has 500.
    - ``distillation``: a factor of w_t. With 0 the classifiers do not teach each other.
    - ``exits``: the blocks that a classifier follows. The default is each quarter of the model. FedRA's text has 3,6,9
      of 12, and its code 4,7,10.
    - ``ensemble``: predict by the mean of all classifiers' logits (the paper) or by the last (FedRA's code).
    """

    name = "depthfl"
    needs_logits = True
    paper = "Kim et al. 2023 (DepthFL)"
    trains = "adapters and classifiers"
    added_modules: ClassVar = {"exits": "shared"}

    @dataclass(frozen=True)
    class Config(LimitedDepth.Config):
        weighted: bool = False
        exits: tuple[int, ...] | None = None
        ensemble: bool = True
        distillation: float = 1.0
        ramp: Count = 300

    @classmethod
    def wrap_model(
        cls, model: nn.Module, config: Any, *, shape: Shape, n_classes: int, seed: int
    ) -> nn.Module:
        built = super().wrap_model(
            model, config, shape=shape, n_classes=n_classes, seed=seed
        )
        total = len(paths_of_blocks(built))
        quarters = {math.ceil(total * k / 4) for k in (1, 2, 3)} - {total}
        after = sorted(quarters) if config.exits is None else config.exits
        return Exits(
            built,
            after,
            ensemble=config.ensemble,
            seed=seed,
            example=models.example(shape),
        )

    def submodel(self, rnd: Round, client: int) -> frozenset[str]:
        everything, depth = super().submodel(rnd, client), self.depth(rnd, client)
        numbers = {
            name: name.split(".")[1] for name in tensors_below(everything, "exits")
        }
        return everything - {
            name for name, number in numbers.items() if int(number) >= depth
        }

    def loss(
        self, params: Mapping[str, Tensor], batch: tuple[Tensor, Tensor], ctx: Context
    ) -> Tensor:
        x, y = batch
        logits = ctx.forward(params, x, every=True)
        total = torch.stack([ctx.criterion(each, y) for each in logits]).sum()
        if len(logits) < 2 or not self.config.distillation:
            return total
        learning = F.log_softmax(logits, dim=-1)
        teaching = learning.detach()
        # KL(j || k) of every pair; it is 0 without a gradient for j = k
        pairs = (teaching.exp() * teaching).sum(-1)[:, None] - torch.einsum(
            "jnc,knc->jkn", teaching.exp(), learning
        )
        weight = self.config.distillation * math.exp(
            -5 * (1 - min(ctx.round / self.config.ramp, 1)) ** 2
        )
        return total + weight * pairs.mean(-1).sum() / (len(logits) - 1)
