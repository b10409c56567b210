"""The global model's prediction, mixed with that of a client's most similar training samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from fl_core import models
from fl_core.algorithms import Algorithm, Batch, Context, Phase, Shape, Steps, register
from fl_core.algorithms.contract import Count, Positive, Share
from fl_core.models.heads import split_head
from fl_core.models.neighbours import WithNeighbours


@register
class KNNPer(Algorithm):
    """FedAvg whose clients also ask their own most similar training samples (kNN-Per; Marfoq et al. 2022).

    Let z be the input of the last layer. After training a client stores z and the label of at most ``capacity`` of its
    training samples. For a new sample it finds the ``k`` nearest of them by Euclidean distance d. The personal
    prediction is

        lam kNN + (1 - lam) softmax(global),  kNN_c = sum_{neighbours of class c} exp(-d / scale) / sum exp(-d / scale)

    With lam = 0 it is the global model's. The global model is FedAvg's bit for bit. The authors choose lam on
    validation samples. Their released code has exp(-d^2 / (size of z x scale)).

    Nothing but the global model travels. Under a stopping rule samples are stored after each evaluated round.
    """

    name = "knn_per"
    needs_logits = True
    paper = "Marfoq et al. 2022"
    trains, keeps, cost = (
        "all",
        "features of its training samples, at the end",
        "2P; P at the end",
    )
    evaluates = "global"
    added_modules: ClassVar[Mapping[str, str]] = {"memory": "personal"}

    @dataclass(frozen=True)
    class Config:
        lam: Share = 0.5
        k: Count = 10
        scale: Positive = 1.0
        capacity: Count = 1000

    @classmethod
    def wrap_model(
        cls, model: nn.Module, config: Any, *, shape: Shape, n_classes: int, seed: int
    ) -> nn.Module:
        body, head = split_head(model, models.example(shape))
        return WithNeighbours(
            body, head, config.lam, config.k, config.scale, config.capacity
        )

    def finetuning(self, done: int, client: int) -> tuple[Phase, ...]:
        if not self.task_info.may_end(done):
            return ()
        names = frozenset(
            name
            for name in self.task_info.tensors
            if name.startswith(("head.", "memory."))
        )
        return (Phase("remember", names, 1, batch_stream="finetune", step="remember"),)

    def remember(self, steps: Steps, batch: Batch, ctx: Context) -> None:
        """Store features and labels of a batch; nothing trains."""
        x, y = batch
        keys, values = steps.live["memory.keys"], steps.live["memory.values"]
        used = int(values.sum())
        room = len(keys) - used
        if room > 0:
            features = ctx.infer(steps.live, x[:room], features=True)
            keys[used : used + len(features)] = features
            values[used : used + len(features), :] = torch.nn.functional.one_hot(
                y[:room], values.shape[1]
            ).float()
