"""Algorithms for clients that can hold only some of the model's residual blocks: FedRA and its baselines.

FedRA is by Su et al. 2024. By default all train low-rank adapters and the last layer of a model, which should be
pretrained. With ``lora_targets=none`` they train everything. Each client has the frozen tensors from the start.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated, Any, Literal

from torch import nn

from fl_core import models, seeds, tree
from fl_core.algorithms.base import (
    Algorithm,
    Message,
    Observation,
    Round,
    Shape,
    State,
    Update,
    register,
)
from fl_core.errors import BELOW_1, Count, UsageError
from fl_core.models.extended import (
    head_path,
    last_layers,
    tensors_below,
    with_optional_blocks,
)
from fl_core.models.lora import Lora, adapt
from fl_core.training.phases import Context
from fl_core.tree import Tree

LAST = "last"  # stands for the last linear layers of a block's parts
HELD = "held"  # the metric of rows that record which layers a client had
LATEST = "latest"


class Blockwise(Algorithm):
    """FedAvg over the trainable part of a model of residual blocks: adapters and the last layer, or everything.

    - ``lora_targets``: the layers that get adapters, as the targets of ``--adapt``
      (:class:`fl_core.models.lora.Lora`). FedRA's Table 6 has ``attn.proj``, ``mlp.fc2`` and both. The default ``last``
      is the last linear or 2D convolutional layer of each part of a block, so both in a ViT.
    - ``rank``, ``lora_alpha``, ``lora_dropout``: of the adapters, as in the paper's code.
    - ``weighted``: weight clients by their training samples (FedRA's text) instead of equally (its released code). That
      code also clips gradients at 10, the run's ``max_grad_norm=10``.

    Raises:
        UsageError: the model has no residual blocks, or ``lora_targets`` names no
            layer.
    """

    needs_blocks = True
    trains, travels = (
        "adapters and the last layer",
        "what trains of the blocks that it holds",
    )
    cost = "2 x trained of what is held"

    @dataclass(frozen=True)
    class Config:
        lora_targets: tuple[str, ...] | None = (LAST,)
        rank: Count = 8
        lora_alpha: Count = 8
        lora_dropout: Annotated[float, BELOW_1] = 0.1
        weighted: bool = True

    @classmethod
    def wrap_model(
        cls, model: nn.Module, config: Any, *, shape: Shape, n_classes: int, seed: int
    ) -> nn.Module:
        example = models.example(shape)
        model = with_optional_blocks(model, example)
        if config.lora_targets is None:
            return model
        if not config.lora_targets:
            raise UsageError(
                "lora_targets must name a layer; got none. Use lora_targets=none to train without adapters."
            )
        targets: list[str] = []
        for target in config.lora_targets:
            targets += last_layers(model) if target == LAST else [target]
        adapters = Lora(
            config.rank, tuple(targets), config.lora_alpha, config.lora_dropout
        )
        return adapt(model, adapters, head_path(model, example), seed)

    def aggregate(self, server: State, updates: Iterable[Update], rnd: Round) -> None:
        self.mix(
            server,
            updates
            if self.config.weighted
            else (replace(update, weight=1) for update in updates),
            rnd,
        )

    def mix(self, server: State, updates: Iterable[Update], rnd: Round) -> None:
        """Aggregate replies with their final weights. Default: average each tensor over the clients that hold it.

        A tensor that no client held stays unchanged (FedRA, Eq. 2).
        """
        super().aggregate(server, updates, rnd)


@register
class AllLarge(Blockwise):
    """FedAvg with every client training the whole model: the reference without a depth limit."""

    name = "alllarge"
    paper = "Su et al. 2024 (FedRA)"


@register
class AllSmall(Blockwise):
    """FedAvg on a model cut to its first ``depth`` blocks. The default is a quarter: FedRA's 3 of 12.

    A quarter is rounded up to whole blocks.

    Raises:
        UsageError: ``depth`` is below 1 or above the number of the model's blocks.
    """

    name = "allsmall"
    paper = "Su et al. 2024 (FedRA)"
    removes_layers = True
    travels = "the first blocks down, what trains of them up"
    cost = "the small model + trained of it"

    @dataclass(frozen=True)
    class Config(Blockwise.Config):
        depth: int | None = None

    @classmethod
    def wrap_model(
        cls, model: nn.Module, config: Any, *, shape: Shape, n_classes: int, seed: int
    ) -> nn.Module:
        cut_model: Any = with_optional_blocks(model, models.example(shape))
        depth = config.depth
        if depth is None:
            depth = math.ceil(len(cut_model.blocks) / 4)
        if not 1 <= depth <= len(cut_model.blocks):
            raise UsageError(
                f"allsmall: depth must be from 1 to {len(cut_model.blocks)}, "
                f"the number of the model's blocks; got {depth}."
            )
        cut_model.blocks = cut_model.blocks[:depth]
        return super().wrap_model(
            cut_model, config, shape=shape, n_classes=n_classes, seed=seed
        )


class LimitedDepth(Blockwise):
    """Base of algorithms whose clients hold different numbers of the model's blocks.

    - ``depths``: how many blocks clients can hold (see :func:`fl_core.algorithms.fedra.fixed_depths`).
    - ``random_depths``: draw every client's depth again each round, uniform from 1 to all blocks (FedRA, Table 4).

    Raises:
        UsageError: a depth is below 1 or above the number of blocks, there are more
            depths than clients, both options are given, or the model has no residual
            blocks.
    """

    @dataclass(frozen=True)
    class Config(Blockwise.Config):
        depths: tuple[int, ...] = ()
        random_depths: bool = False

        def __post_init__(self) -> None:
            if self.depths and self.random_depths:
                raise UsageError(
                    "depths must be left out with random_depths; got both. Choose one."
                )

    def setup(self) -> None:
        tensors = self.task_info.tensors
        blocks = self.task_info.blocks
        if not blocks:
            raise UsageError(
                f"{self.name}: the model must have residual blocks; got none. Use a model such as vit or mixer."
            )
        self.fixed = fixed_depths(
            self.config.depths, len(self.task_info.clients), len(blocks)
        )
        self.always = tensors.difference(
            *(tensors_below(tensors, path) for path in blocks)
        )

    def depth(self, rnd: Round, client: int) -> int:
        """Return how many blocks the client can hold in this round."""
        if self.config.random_depths:
            generator = seeds.numpy_generator(
                self.task_info.seed, "depth", rnd.index, client
            )
            return int(generator.integers(1, len(self.task_info.blocks) + 1))
        return self.fixed[client]

    def blocks_of(self, rnd: Round, client: int) -> tuple[int, ...]:
        """Return the ascending positions of the client's blocks. Default: the first blocks."""
        return tuple(range(self.depth(rnd, client)))

    def submodel(self, rnd: Round, client: int) -> frozenset[str]:
        paths = (self.task_info.blocks[k] for k in self.blocks_of(rnd, client))
        return self.always.union(
            *(tensors_below(self.task_info.tensors, path) for path in paths)
        )

    def client_state(self, initial: Tree, client: int) -> State:
        state = super().client_state(initial, client)
        # also of blocks that it gets later
        state.trees["model"] = tree.select(initial, self.task_info.never_sent)
        return state

    def client_start(
        self, state: State, message: Message, ctx: Context, rnd: Round, client: int
    ) -> Tree:
        return tree.select(
            super().client_start(state, message, ctx, rnd, client),
            self.submodel(rnd, client),
        )

    def client_update(
        self,
        state: State,
        trained: dict[str, Tree],
        ctx: Context,
        rnd: Round,
        client: int,
    ) -> Message:
        model_before = state.trees.get("model", {})
        message = super().client_update(state, trained, ctx, rnd, client)
        state.trees["model"] = {**model_before, **state.trees["model"]}
        return message

    def aggregate(self, server: State, updates: Iterable[Update], rnd: Round) -> None:
        super().aggregate(server, updates, rnd)
        server.meta[LATEST] = {"index": rnd.index, "sampled": list(rnd.sampled)}

    def observations(self, server: State, rnd: Round) -> Iterator[Observation]:
        """Yield ``held`` for layers that can be missing: 1 if a client of the latest round had the layer, else 0.

        There is one number for each such layer and each sampled client of that round.
        Before the first aggregation there are none.
        """
        if LATEST not in server.meta:
            return
        latest_round = Round(
            server.meta[LATEST]["index"], sampled=tuple(server.meta[LATEST]["sampled"])
        )
        for client in latest_round.sampled:
            submodel = self.submodel(latest_round, client)
            for layer in self.task_info.layers:
                optional_tensors = set(layer.tensors) - self.always
                if optional_tensors:
                    yield Observation(
                        HELD,
                        float(optional_tensors <= submodel),
                        client,
                        layer=layer.name,
                    )


@register
class FedRA(LimitedDepth):
    """Random blocks for every client in every round, up to its capacity (Su et al. 2024).

    The client's blocks run in the model's order. Each passes its output to the next block that is present. An adapter
    is averaged over the clients that held its block.

    - ``allocation``: ``keep`` draws for every client alone. A block without a client stays unchanged (Eq. 2, the better
      one in Table 5). With ``cover`` the clients of a round together hold every block, if their depths suffice for
      that. This is Eq. 3, drawn as in a comment of the authors' released code.

    Raises:
        UsageError: ``cover`` with fixed depths, although all clients together can hold
            fewer than all blocks.
    """

    name = "fedra"
    paper = "Su et al. 2024 (FedRA)"

    @dataclass(frozen=True)
    class Config(LimitedDepth.Config):
        allocation: Literal["keep", "cover"] = "keep"

    def setup(self) -> None:
        super().setup()
        if (
            self.covers
            and not self.config.random_depths
            and sum(self.fixed) < len(self.task_info.blocks)
        ):
            raise UsageError(
                f"fedra: the depths must sum to at least {len(self.task_info.blocks)} blocks with allocation=cover; "
                f"got {sum(self.fixed)}. Use allocation=keep."
            )

    @property
    def covers(self) -> bool:
        """Return whether a round's clients draw blocks so that together they hold all.

        Few clients in a round, or small random depths, may still leave blocks out.
        """
        return bool(self.config.allocation == "cover")

    def blocks_of(self, rnd: Round, client: int) -> tuple[int, ...]:
        n_blocks = len(self.task_info.blocks)
        seed = self.task_info.seed
        if not self.covers:
            return draw_depths(
                self.depth(rnd, client), n_blocks, seed, rnd.index, client
            )
        round_clients = rnd.sampled if client in rnd.sampled else (*rnd.sampled, client)
        depths = tuple((peer, self.depth(rnd, peer)) for peer in round_clients)
        return draw_cover(depths, n_blocks, seed, rnd.index)[client]


TWELFTHS = (12, 10, 8, 6, 4, 3)
"""Depths of FedRA's six kinds of clients, in twelfths of the whole model."""


def fixed_depths(
    given_depths: Sequence[int], clients: int, blocks: int
) -> tuple[int, ...]:
    """Return the number of blocks that each client can hold.

    The clients are split in their order into one group for each depth, as evenly as possible. All clients of a group
    have the same depth. Without given depths the paper's are used, in proportion to the model's and rounded up.

    >>> fixed_depths((), 6, 12), fixed_depths((), 6, 3), fixed_depths((), 1, 12)
    ((12, 10, 8, 6, 4, 3), (3, 3, 2, 2, 1, 1), (12,))
    >>> fixed_depths((3, 1), 5, 3), fixed_depths((2,), 3, 3), fixed_depths((), 12, 12)[:5]
    ((3, 3, 3, 1, 1), (2, 2, 2), (12, 12, 10, 10, 8))

    Args:
        given_depths: number of blocks of each group's clients, or nothing.
        clients: number of clients.
        blocks: number of the model's blocks.

    Raises:
        UsageError: a depth outside 1..blocks, or more depths than clients.
    """
    depths = tuple(given_depths) or tuple(
        math.ceil(twelfth * blocks / 12) for twelfth in TWELFTHS
    )
    for depth in given_depths:
        if not 1 <= depth <= blocks:
            raise UsageError(
                f"depths must be from 1 to {blocks}, the number of the model's blocks; got {depth}."
            )
    if len(given_depths) > clients:
        raise UsageError(
            f"depths must have at most one value for each of the {clients} clients; got {len(given_depths)} values."
        )
    return tuple(depths[client * len(depths) // clients] for client in range(clients))


def draw_depths(
    depth: int, blocks: int, seed: int, index: int, client: int
) -> tuple[int, ...]:
    """Draw the positions of a client's blocks in a round: uniform without replacement, ascending.

    Args:
        depth: number of the client's blocks.
        blocks: number of the model's blocks.
        seed: the run's seed.
        index: the round, counted from 0.
        client: the client's position.
    """
    generator = seeds.numpy_generator(seed, "allocation", index, client)
    positions = generator.choice(blocks, depth, replace=False)
    return tuple(sorted(int(position) for position in positions))


@lru_cache(maxsize=8)
def draw_cover(
    depths: tuple[tuple[int, int], ...], blocks: int, seed: int, index: int
) -> dict[int, tuple[int, ...]]:
    """Draw the clients' blocks of a round so that together they hold every block (FedRA, Eq. 3).

    Clients draw in random order. Each first draws from the blocks that no client has
    yet. If it can hold more, it draws the rest from the other blocks. If the clients
    together cannot hold every block, no block is drawn twice.

    Args:
        depths: (client, number of its blocks) pairs of the round's clients.
        blocks: number of the model's blocks.
        seed: the run's seed.
        index: the round, counted from 0.

    Returns:
        Ascending positions of the blocks by client.
    """
    generator = seeds.numpy_generator(seed, "covering allocation", index)
    missing_blocks = set(range(blocks))
    positions = {}
    for position in generator.permutation(len(depths)):
        client, depth = depths[position]
        new_blocks = generator.permutation(sorted(missing_blocks))[:depth]
        further_blocks = generator.permutation(
            sorted(set(range(blocks)).difference(new_blocks))
        )[: depth - len(new_blocks)]
        positions[client] = tuple(
            sorted(int(k) for k in (*new_blocks, *further_blocks))
        )
        missing_blocks.difference_update(positions[client])
    return positions
