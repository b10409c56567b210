"""The first residual blocks for each client, whose last block learns from clients with more of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fl_core import tree
from fl_core.algorithms import Message, Round, Shape, State, Tree, Update, register
from fl_core.algorithms.contract import Share
from fl_core.algorithms.fedra import LimitedDepth
from fl_core.errors import UsageError, listing
from fl_core.models.blocks import paths_of_blocks, tensors_below
from fl_core.plan import LayerPlan

CHANGE = "change/"


@register
class InclusiveFL(LimitedDepth):
    """The first blocks for each client, whose last block also learns from deeper clients (Liu et al. 2022).

    Clients of one depth form a group and are averaged first. Then each tensor is averaged over the groups that have it,
    weighted as their clients.

    - ``momentum``: move a group's last block by the formula below. D_s is the change that group s gives the server's
      model. D'_r is the change that the next deeper group r gave in the round before.

        (1 - beta) D_s + beta mean of D'_r over the blocks from that one to the last of r, both included

    Without momentum, or without a deeper group in the round before, the group's plain mean is used. Running statistics
    always take the plain mean.

    - ``own_heads``: give every depth its own last layer, averaged over its clients alone (the paper). By default the
      last layer is common to all groups, as in FedRA's comparison. The global model has the deepest group's own head.
      With ``random_depths`` it has the head of all blocks. The other heads stay on the server.

    Raises:
        UsageError: momentum between blocks that are not alike; own heads of a model that ends in a block.
    """

    name = "inclusivefl"
    paper = "Liu et al. 2022 (InclusiveFL)"

    @dataclass(frozen=True)
    class Config(LimitedDepth.Config):
        momentum: bool = True
        beta: Share = 0.2
        own_heads: bool = False

    @classmethod
    def wrap_model(
        cls, model: nn.Module, config: Any, *, shape: Shape, n_classes: int, seed: int
    ) -> nn.Module:
        built = super().wrap_model(
            model, config, shape=shape, n_classes=n_classes, seed=seed
        )
        if config.momentum:
            first, *others = paths_of_blocks(built)
            for other in others:
                here, there = (
                    tree.state_dict(built.get_submodule(path))
                    for path in (first, other)
                )
                tree.check_same(here, there, first, other)
        return built

    def setup(self) -> None:
        super().setup()
        last = LayerPlan.last(self.task_info.layers)
        last_layer = (
            last.body_tensors - self.task_info.frozen - self.task_info.never_sent
        )
        self.heads = last_layer if self.config.own_heads else frozenset[str]()
        if not self.heads <= self.always:
            raise UsageError(
                f"inclusivefl: the last layer must follow all blocks with own_heads; "
                f"got {listing(last.shared)} inside one."
            )
        depths = (
            range(1, len(self.task_info.blocks) + 1)
            if self.config.random_depths
            else self.fixed
        )
        self.deepest, self.shallower = max(depths), sorted({*depths} - {max(depths)})

    def server_state(self, initial: Tree) -> State:
        server = super().server_state(initial)
        if self.heads:
            server.trees |= {
                _head(depth): tree.clone(tree.select(initial, self.heads))
                for depth in self.shallower
            }
        return server

    def server_message(self, server: State, client: int, rnd: Round) -> Message:
        head = server.trees.get(_head(self.depth(rnd, client)), {})
        return Message(
            {
                "model": {
                    **super().server_message(server, client, rnd).trees["model"],
                    **head,
                }
            }
        )

    def mix(self, server: State, updates: Iterable[Update], rnd: Round) -> None:
        if not (self.config.momentum or self.heads):
            super().mix(server, updates, rnd)
            return
        groups: dict[int, tree.Mean] = {}
        weights: dict[int, int] = {}
        for update in updates:
            depth = self.depth(rnd, update.client)
            groups.setdefault(depth, tree.Mean()).add(
                update.message.trees["model"], update.weight
            )
            weights[depth] = weights.get(depth, 0) + update.weight
        mean = tree.Mean()
        trees = {
            name: each
            for name, each in server.trees.items()
            if not name.startswith(CHANGE)
        }
        for depth in sorted(groups):
            group_mean = groups[depth].result()
            common = {
                name: tensor
                for name, tensor in group_mean.items()
                if name not in self.heads
            }
            if self.heads:
                trees["model" if depth == self.deepest else _head(depth)].update(
                    tree.select(group_mean, self.heads)
                )
            if self.config.momentum:
                change = tree.subtract(
                    common, tree.select(server.trees["model"], common)
                )
                trees[_slot(depth)] = change
                common |= self._distil_last_block(server, depth, common, change)
            mean.add(common, weights[depth])
        trees["model"].update(mean.result())
        server.trees = trees

    def _distil_last_block(
        self, server: State, depth: int, group_mean: Tree, change: Tree
    ) -> Tree:
        """Return the last block of a depth's group, moved by the deeper clients' mean change of the round before."""
        deeper = [
            r
            for r in range(depth + 1, len(self.task_info.blocks) + 1)
            if _slot(r) in server.trees
        ]
        if not deeper:
            return {}
        before, above = (
            server.trees[_slot(deeper[0])],
            self.task_info.blocks[depth - 1 : deeper[0]],
        )
        moved = {}
        for name in sorted(
            tensors_below(group_mean, above[0]) & self.task_info.parameters
        ):
            rest = name.removeprefix(above[0])
            momentum = torch.stack(
                [before[path + rest].double() for path in above]
            ).mean(0)
            moved[name] = (
                group_mean[name].double()
                + self.config.beta * (momentum - change[name].double())
            ).to(group_mean[name].dtype)
        return moved


def _slot(depth: int) -> str:
    return f"{CHANGE}{depth}"


def _head(depth: int) -> str:
    return f"head/{depth}"
