"""MoCo's contrastive learning next to classification in a client's training: views, key branch, queue and loss."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from fl_core import seeds, tree
from fl_core.algorithms import (
    Algorithm,
    Batch,
    Context,
    Message,
    Round,
    State,
    Steps,
    Tree,
)
from fl_core.data.augment import MoCoViews
from fl_core.models.extended import CONTRAST_WIDTH

QUEUE, KEY = "queue", "key"


class ContrastiveBatch(NamedTuple):
    """A batch for both tasks: samples, labels, one view of each sample, and the key [b, 128] of another view."""

    x: Tensor
    y: Tensor
    view: Tensor
    keys: Tensor
    buffers: (
        Tree  # copies, for a pass that leaves the model's running statistics unchanged
    )


class ContrastiveTraining(Algorithm):
    """Base of algorithms that train MoCo with a queue and a key branch at each client (He et al. 2020, version 1)."""

    views: MoCoViews

    def client_state(self, initial: Tree, client: int) -> State:
        state = super().client_state(initial, client)
        size = self.config.queue
        like = next(
            initial[name]
            for name in sorted(initial)
            if initial[name].is_floating_point()
        )
        draw = seeds.torch_generator(self.task_info.seed, QUEUE, client)
        keys = normalize(torch.randn(size, CONTRAST_WIDTH, generator=draw)).to(like)
        state.trees[QUEUE] = {
            "keys": keys,
            "at": torch.tensor(0),
            "filled": torch.tensor(0),
        }
        return state

    def draw_views(self, steps: Steps, batch: Batch, ctx: Context) -> ContrastiveBatch:
        """Move the key branch towards the query branch, as in MoCo, and draw two views of a batch's images."""
        key = ctx.scratch.get(KEY)
        if key is None:
            key = ctx.scratch[KEY] = tree.clone(steps.live)
        ctx.scratch.setdefault(QUEUE, tree.clone(ctx.trees[QUEUE]))
        config, draw = self.config, steps.generator("views")
        x, y = batch
        view, other = (self.views(x, draw) for _ in range(2))
        with torch.no_grad():
            for name in self.task_info.parameters:
                key[name].lerp_(steps.live[name], 1 - config.momentum)
            keys = ctx.forward(key, other, task="contrast")
        buffers = {
            name: t.clone()
            for name, t in steps.live.items()
            if name not in self.task_info.parameters
        }
        return ContrastiveBatch(x, y, view, keys, buffers)

    def enqueue(self, seen: ContrastiveBatch, ctx: Context) -> None:
        """Replace the oldest keys in the queue by the batch's."""
        queue = ctx.scratch[QUEUE]
        size, keys = len(queue["keys"]), seen.keys[-len(queue["keys"]) :]
        places = (int(queue["at"]) + torch.arange(len(keys), device=keys.device)) % size
        queue["keys"][places] = keys
        queue["at"].copy_((queue["at"] + len(keys)) % size)
        queue["filled"].copy_((queue["filled"] + len(keys)).clamp(max=size))

    def contrast_loss(
        self, params: Mapping[str, Tensor], seen: ContrastiveBatch, ctx: Context
    ) -> Tensor:
        """Return MoCo's loss of a batch: -log softmax of the other view's key among the queue's keys (FedPFT, Eq. 4).

        All are unit vectors. The scores are divided by the temperature.
        """
        queue, config = ctx.scratch[QUEUE], self.config
        others = queue["keys"][: int(queue["filled"])]
        queries = ctx.forward(params, seen.view, task="contrast")
        scores = (
            torch.cat(
                [(queries * seen.keys).sum(1, keepdim=True), queries @ others.T], 1
            )
            / config.temperature
        )
        return ctx.part(
            "contrast", (scores.logsumexp(1) - scores[:, 0]).mean(), len(seen.y)
        )

    def contrast_step(self, steps: Steps, batch: Batch, ctx: Context) -> None:
        """Take one optimiser step on a batch together with its views."""
        seen = self.draw_views(steps, batch, ctx)
        steps.descend(steps.gradients(seen))
        self.enqueue(seen, ctx)

    def frozen_statistics(
        self,
        params: Mapping[str, Tensor],
        seen: ContrastiveBatch,
        live: Iterable[str] = (),
    ) -> Tree:
        """Return weights for a pass with gradients for ``live`` only that leaves the running statistics unchanged."""
        return {
            name: p if name in live else p.detach() for name, p in params.items()
        } | seen.buffers

    def client_update(
        self,
        state: State,
        trained: dict[str, Tree],
        ctx: Context,
        rnd: Round,
        client: int,
    ) -> Message:
        trained.pop(KEY, None)  # built again from the next message
        return super().client_update(state, trained, ctx, rnd, client)
