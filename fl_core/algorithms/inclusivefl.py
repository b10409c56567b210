"""Algorithms whose clients have only the first blocks: InclusiveFL and DepthFL.

In InclusiveFL a client's last block also learns from clients with more blocks. In
DepthFL classifiers at several depths of a client's model teach each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fl_core import models, tree
from fl_core.algorithms import Batch, Context, Round, State, Tree, Update, register
from fl_core.algorithms.fedra import LimitedDepth
from fl_core.errors import Count, Share
from fl_core.models.extended import Exits, paths_of_blocks, tensors_below

CHANGE = "change/"


@register
class InclusiveFL(LimitedDepth):
    """The first blocks for each client, whose last block also learns from deeper clients (Liu et al. 2022).

    Clients of one depth form a group and are averaged first. Then each tensor is averaged over the groups that have it,
    weighted as their clients.

    - ``momentum``: move a group's last block by the formula below, with beta = ``beta``. D_s is the change that group s
      gives the server's model. D'_r is the change that the next deeper group r gave in the round before.

        (1 - beta) D_s + beta mean of D'_r over the blocks from that one to the last of r, both included

    Without momentum, or without a deeper group in the round before, the group's plain mean is used. Running statistics
    always take the plain mean.

    The last layer is common to all groups, as in FedRA's comparison. The paper gives every depth its own.

    Raises:
        UsageError: momentum between blocks that are not alike.
    """

    name = "inclusivefl"
    paper = "Liu et al. 2022 (InclusiveFL)"

    @dataclass(frozen=True)
    class Config(LimitedDepth.Config):
        momentum: bool = True
        beta: Share = 0.2

    @classmethod
    def wrap_model(cls, model: nn.Module, config: Any, **given: Any) -> nn.Module:
        built_model = super().wrap_model(model, config, **given)
        if config.momentum:
            first_path, *other_paths = paths_of_blocks(built_model)
            for other_path in other_paths:
                first_state, other_state = (
                    tree.state_dict(built_model.get_submodule(path))
                    for path in (first_path, other_path)
                )
                tree.check_same(first_state, other_state, first_path, other_path)
        return built_model

    def mix(self, server: State, updates: Iterable[Update], rnd: Round) -> None:
        if not self.config.momentum:
            super().mix(server, updates, rnd)
            return
        groups: dict[int, tree.Mean] = {}
        weights: dict[int, int] = {}
        for update in updates:
            depth = self.depth(rnd, update.client)
            groups.setdefault(depth, tree.Mean(self.task_info.buffers)).add(
                update.message.trees["model"], update.weight
            )
            weights[depth] = weights.get(depth, 0) + update.weight
        mean = tree.Mean(self.task_info.buffers)
        server_trees = {
            name: entry
            for name, entry in server.trees.items()
            if not name.startswith(CHANGE)
        }
        for depth in sorted(groups):
            group_mean = groups[depth].result()
            group_before = tree.select(server.trees["model"], group_mean)
            change = server_trees[_slot(depth)] = tree.subtract(
                group_mean, group_before
            )
            moved_block = self._distil_last_block(server, depth, group_mean, change)
            mean.add(group_mean | moved_block, weights[depth])
        server_trees["model"].update(mean.result())
        server.trees = server_trees

    def _distil_last_block(
        self, server: State, depth: int, group_mean: Tree, change: Tree
    ) -> Tree:
        """Return the last block of a depth's group, moved by the deeper clients' mean change of the round before.

        Args:
            server: the server's state, with the changes of the round before.
            depth: number of blocks of the group's clients.
            group_mean: the mean of the group's models, by tensor name.
            change: the group's mean minus the server's model, by tensor name.

        Returns:
            The block's parameters by name. Without a deeper group there are none.
        """
        deeper_depths = [
            r
            for r in range(depth + 1, len(self.task_info.blocks) + 1)
            if _slot(r) in server.trees
        ]
        if not deeper_depths:
            return {}
        change_before = server.trees[_slot(deeper_depths[0])]
        block_paths = self.task_info.blocks[depth - 1 : deeper_depths[0]]
        moved_block = {}
        for name in sorted(
            tensors_below(group_mean, block_paths[0]) & self.task_info.parameters
        ):
            name_in_block = name.removeprefix(block_paths[0])
            momentum = torch.stack(
                [change_before[path + name_in_block].double() for path in block_paths]
            ).mean(0)
            moved_block[name] = (
                group_mean[name].double()
                + self.config.beta * (momentum - change[name].double())
            ).to(group_mean[name].dtype)
        return moved_block


def _slot(depth: int) -> str:
    return f"{CHANGE}{depth}"


@register
class DepthFL(LimitedDepth):
    """The first blocks for each client, with classifiers after some of them that teach each other (Kim et al. 2023).

    A client has m classifiers with logits z_k. Its objective is

        sum_k loss(z_k) + w_t / (m - 1) sum_k sum_{j != k} KL(softmax z_j || softmax z_k)

    where z_j has no gradient. The weight is w_t = exp(-5 (1 - min(t, R) / R)^2) with the 0-based round t. With a single
    classifier the second sum is left out.

    As in FedRA's comparison, the model's own classifier follows the client's last
    block, whatever its depth. The client also has the exits after its earlier blocks.
    Every tensor is averaged over the clients that have it, by default with equal
    weights. FedDyn's terms in the authors' experiments are not included.

    - ``ramp``: R, by default 300. FedRA's code has 500.
    - ``distillation``: a factor of w_t. With 0 the classifiers do not teach each other.
    - ``exits``: the blocks that a classifier follows. The default is each quarter of the model. FedRA's text has 3,6,9
      of 12, and its code 4,7,10.
    - ``ensemble``: predict by the mean of all classifiers' logits (the paper) or by the last (FedRA's code).

    Raises:
        UsageError: ``exits`` names no block, or the last one. Or as :class:`LimitedDepth`.
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
    def wrap_model(cls, model: nn.Module, config: Any, **given: Any) -> nn.Module:
        built_model = super().wrap_model(model, config, **given)
        n_blocks = len(paths_of_blocks(built_model))
        quarter_blocks = {math.ceil(n_blocks * k / 4) for k in (1, 2, 3)} - {n_blocks}
        exits = config.exits
        if exits is None:
            exits = sorted(quarter_blocks)
        return Exits(
            built_model,
            exits,
            ensemble=config.ensemble,
            seed=given["seed"],
            example=models.example(given["shape"]),
        )

    def submodel(self, rnd: Round, client: int) -> frozenset[str]:
        all_tensors = super().submodel(rnd, client)
        depth = self.depth(rnd, client)
        exit_numbers = {
            name: name.split(".")[1] for name in tensors_below(all_tensors, "exits")
        }
        return all_tensors - {
            name for name, number in exit_numbers.items() if int(number) >= depth
        }

    def loss(self, params: Tree, batch: Batch, ctx: Context) -> Tensor:
        x, y = batch
        logits = ctx.forward(params, x, every=True)
        total_loss = torch.stack([ctx.criterion(output, y) for output in logits]).sum()
        if len(logits) < 2 or not self.config.distillation:
            return total_loss
        log_probabilities = F.log_softmax(logits, dim=-1)
        teacher_log_probabilities = log_probabilities.detach()
        # KL(j || k) of every pair; it is 0 without a gradient for j = k
        divergences = (teacher_log_probabilities.exp() * teacher_log_probabilities).sum(
            -1
        )[:, None] - torch.einsum(
            "jnc,knc->jkn", teacher_log_probabilities.exp(), log_probabilities
        )
        weight = self.config.distillation * math.exp(
            -5 * (1 - min(ctx.round / self.config.ramp, 1)) ** 2
        )
        return total_loss + weight * divergences.mean(-1).sum() / (len(logits) - 1)
