"""Data that engine and algorithms exchange: states, messages, updates, rounds, and facts about the task."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from fl_core import tree
from fl_core.layers import Layer
from fl_core.tree import Tree


@dataclass
class _Trees:
    """Base of what consists of trees and plain data."""

    trees: dict[str, Tree] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)

    def clone(self) -> Self:
        """Return a deep copy that shares no tensor with the original, as after a transfer between machines."""
        return type(self)(
            {name: tree.clone(each) for name, each in self.trees.items()},
            copy.deepcopy(self.meta),
        )


@dataclass
class State(_Trees):
    """State of the server or a client between rounds: trees and plain JSON data.

    >>> import torch
    >>> client = State({"model": {"head.weight": torch.zeros(3, 8)}}, {"rounds_trained": 1})
    >>> client.meta["rounds_trained"] += 1
    >>> client.trees["model"]["head.weight"].shape
    torch.Size([3, 8])

    Attributes:
        trees: tensors by name in each tree: ``model``, and others that an algorithm stores.
        meta: numbers, texts, lists and dictionaries.
    """


@dataclass
class Message(_Trees):
    """A message between server and client, in either direction. The costs count its :attr:`bytes`.

    >>> import torch
    >>> Message({"model": {"fc.weight": torch.zeros(3, 8)}}, {"loss": 0.7}).bytes  # 24 floats, and a number
    100

    Attributes:
        trees, meta: as of :class:`State`.
    """

    @property
    def bytes(self) -> int:
        """Return the bytes of the tensors, plus 4 for every number in the meta data (numbers travel as float32)."""
        return sum(tree.n_bytes(t) for t in self.trees.values()) + 4 * _count_numbers(
            self.meta
        )


def _count_numbers(value: Any) -> int:
    if isinstance(value, Mapping):
        return sum(_count_numbers(v) for v in value.values())
    if isinstance(value, (list, tuple)):
        return sum(_count_numbers(v) for v in value)
    return int(isinstance(value, (int, float)) and not isinstance(value, bool))


@dataclass(frozen=True)
class Update:
    """One client's reply on the server. Its ``weight`` counts in weighted means (:meth:`TaskInfo.weight`)."""

    client: int
    weight: int
    message: Message


@dataclass(frozen=True)
class Round:
    """A position in a run: the 0-based ``index`` of the round, its exchange, and its sampled clients."""

    index: int
    exchange: str = "train"
    sampled: tuple[int, ...] = ()


@dataclass(frozen=True)
class Observation:
    """One number about an algorithm's behaviour, such as a mixing weight. It becomes a row of the run.

    Attributes:
        client, client_b: positions of the clients that it describes, or None for all of them.
    """

    metric: str
    value: float
    client: int | None = None
    client_b: int | None = None
    layer: str = ""
    variant: str = ""


@dataclass(frozen=True)
class TaskInfo:
    """Facts of the task for an algorithm: the model's layers, the clients' sizes, the local epochs."""

    layers: tuple[Layer, ...]
    never_sent: frozenset[
        str
    ]  # tensors that never travel: buffers (bn="local") and added personal modules
    n_train: tuple[int, ...]
    epochs: int
    seed: int
    norms: frozenset[str] = (
        frozenset()
    )  # parameters and buffers of the batch normalisations
    rounds: int = 0  # of the whole run; 0 = not known
    mean: tuple[float, ...] = ()  # by channel, for the normalisation of images in 0..1
    std: tuple[float, ...] = ()
    blocks: tuple[
        str, ...
    ] = ()  # paths of the residual blocks that a client may lack, input to output
    unfreeze_at: tuple[
        tuple[str, int], ...
    ] = ()  # tensors and the 0-based round from which they train and travel
    uniform: bool = False  # whether averages weigh clients equally
    may_stop_every: int = 0  # rounds between those after which a stopping rule may end the run; 0 = no such rule

    def weight(self, client: int) -> int:
        """Return a client's weight in a weighted mean: its training samples, or 1."""
        return 1 if self.uniform else self.n_train[client]

    def may_end(self, done: int) -> bool:
        """Return whether training may end after this many rounds: after all, or where a stopping rule decides."""
        return done == self.rounds or (
            self.may_stop_every > 0 and done > 0 and done % self.may_stop_every == 0
        )

    @property
    def parameters(self) -> frozenset[str]:
        """Return the names of all parameters."""
        return frozenset(name for layer in self.layers for name in layer.parameters)

    @property
    def tensors(self) -> frozenset[str]:
        """Return the names of all tensors of the model, buffers included."""
        return frozenset(name for layer in self.layers for name in layer.tensors)

    @property
    def frozen(self) -> frozenset[str]:
        """Return the names of the parameters that no training changes."""
        return frozenset(name for layer in self.layers for name in layer.frozen)

    def not_sent(self, rnd: Round) -> frozenset[str]:
        """Return the names of the tensors that are not sent in this round: local ones, and layers not trained yet."""
        return self.never_sent | self.not_yet_trained(rnd)

    def not_yet_trained(self, rnd: Round) -> frozenset[str]:
        """Return the tensors of layers that are not trained yet. They keep the initial value and do not travel."""
        return frozenset(name for name, since in self.unfreeze_at if rnd.index < since)
