"""An algorithm that computes with features: clients share the mean features of each class, and predict by the nearest.

fedlayers run --dataset heart --algorithm examples.algorithms.fedproto:FedProto --option strength=0.5 --rounds 2
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear, mse_loss, pad

import fedlayers as fl
from fl_core.training.phases import Batch
from fl_core.tree import Tree


@fl.register
class FedProto(fl.Algorithm):
    """Clients share the mean features of each class, the input of the last linear layer (Tan et al. 2022)."""

    name, evaluates, static_traffic = "my_fedproto", "personal", False
    travels, keeps = "a prototype for each class", "its model"

    @dataclass(frozen=True)
    class Config:
        strength: float = 1.0

    def shared(self, rnd: fl.Round, client: int) -> frozenset[str]:
        return frozenset()

    def server_state(self, initial: Tree) -> fl.State:
        return fl.State({"model": initial, "prototypes": {}})

    def server_message(
        self, server: fl.State, client: int, rnd: fl.Round
    ) -> fl.Message:
        return fl.Message({"prototypes": server.trees["prototypes"]})

    def loss(self, params: Tree, batch: Batch, ctx: fl.Context) -> Tensor:
        x, y = batch
        features = ctx.features(params, x)
        bias, weight = sorted(self.task_info.layers[-1].parameters)
        loss = ctx.criterion(linear(features, params[weight], params[bias]), y)
        for label, mean in ctx.trees["prototypes"].items():
            near = features[y == int(label)]
            distance = mse_loss(near, mean.expand_as(near), reduction="sum")
            loss = loss + self.config.strength * distance / features.numel()
        return loss

    def client_update(
        self,
        state: fl.State,
        trained: dict[str, Tree],
        ctx: fl.Context,
        rnd: fl.Round,
        client: int,
    ) -> fl.Message:
        super().client_update(state, trained, ctx, rnd, client)
        sums: Tree = {}
        for x, y in ctx.batches("prototypes"):
            with torch.no_grad():
                features = ctx.features(trained["model"], x).cpu()
            counted = pad(features, (0, 1), value=1.0)  # the last column counts
            for label, row in zip(y.tolist(), counted, strict=True):
                sums[str(label)] = sums.get(str(label), 0) + row
        return fl.Message({"sums": sums})

    def aggregate(
        self, server: fl.State, updates: Iterable[fl.Update], rnd: fl.Round
    ) -> None:
        sums: Tree = {}
        for update in updates:
            for label, row in update.message.trees["sums"].items():
                sums[label] = sums.get(label, 0) + row
        means = {label: row[:-1] / row[-1] for label, row in sums.items()}
        server.trees["prototypes"].update(means)

    def models(
        self, server: fl.State, client: fl.State, rnd: fl.Round
    ) -> dict[str, Tree]:
        model, means = dict(client.trees["model"]), server.trees["prototypes"]
        if means:
            # -|f - p|^2 = 2 p.f - |p|^2 - |f|^2, whose last part all classes share
            bias, weight = sorted(self.task_info.layers[-1].parameters)
            model[weight] = torch.zeros_like(model[weight])
            model[bias] = torch.full_like(model[bias], -1e9)
            for label, mean in means.items():
                model[weight][int(label)] = 2 * mean
                model[bias][int(label)] = -mean.dot(mean)
        return {self.evaluates: model}
