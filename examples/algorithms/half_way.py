"""An algorithm from outside: a start between a client's own model and the received one.

fedlayers run --dataset heart --algorithm examples.algorithms.half_way:HalfWay --option share=0.25 --out runs/half_way
fedlayers resume runs/half_way --allow-code examples.algorithms.half_way:HalfWay
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fl_core.algorithms import Algorithm, Context, Message, Round, State, register
from fl_core.errors import Share
from fl_core.tree import Tree


@register
class HalfWay(Algorithm):
    """Local training starts at share * own + (1 - share) * received, and all is sent and averaged.

    With share = 0 the global model is FedAvg's. With share = 1 the personal model is Local's.
    """

    name = "half_way"
    paper = "an example"
    keeps = "its model"
    evaluates = "personal"

    @dataclass(frozen=True)
    class Config:
        share: Share = 0.5

    def local_tensors(self, rnd: Round, client: int) -> frozenset[str]:
        return self.task_info.tensors

    def client_start(
        self, state: State, message: Message, ctx: Context, rnd: Round, client: int
    ) -> Tree:
        own, received = state.trees["model"], message.trees["model"]
        mixed = {
            n: torch.lerp(received[n], own[n], self.config.share)
            for n in self.task_info.parameters & received.keys()  # frozen ones stay
        }
        return {**own, **received, **mixed}

    def models(self, server: State, client: State, rnd: Round) -> dict[str, Tree]:
        return {"global": server.trees["model"], "personal": client.trees["model"]}
