"""A dataset, a model and a partition from outside, in one file.

fedlayers run --dataset examples.datasets.scales:scales --model examples.datasets.scales:one_hidden --rounds 2
fedlayers run --dataset digits --partition examples.datasets.scales:TakingTurns --clients 3 --rounds 1
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import nn

import fedlayers as fl
from fl_core.data.partitions import Partitioning, partition
from fl_core.data.sources import Source


@fl.dataset("scales", partition="natural", model="mlp", batch_size=8, rounds=5)
def scales() -> dict[str, tuple[NDArray[np.float64], NDArray[np.int64]]]:
    """Coins by weight and width, at two mints whose scales differ."""
    kind, noise = np.arange(80) % 2, np.random.default_rng(0).normal(size=(80, 2))
    return {
        mint: (noise + kind[:, None] + shift, kind)
        for mint, shift in (("north", 0.0), ("south", 0.5))
    }


@fl.model
def one_hidden(shape: tuple[int, ...], n_classes: int, *, width: int = 32) -> nn.Module:
    """One hidden layer of that width; tables."""
    return nn.Sequential(
        nn.Linear(shape[0], width), nn.ReLU(), nn.Linear(width, n_classes)
    )


@partition
@dataclass(frozen=True)
class TakingTurns(Partitioning):
    """Sample after sample to client after client; fields, where there are any, are its options."""

    name = "taking_turns"

    def assign(self, pool: Source, clients: int, seed: int) -> list[NDArray[np.int64]]:
        return [np.arange(len(pool))[client::clients] for client in range(clients)]
