"""What a dataset is trained with unless something else is asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Recipe:
    """Defaults of one dataset: how it is dealt to clients, and what trains on it.

    Attributes:
        clients: number of clients; None = as many as there are natural clients.
        partition: one of :data:`fl_core.data.partitions.KINDS`.
        alpha: concentration of the Dirichlet partition; smaller = clients differ more.
        samples: size of the pool that is dealt; None = all samples.
        model: registry name of the model.
        batch: samples a batch. epochs: local epochs a round. rounds: rounds of a run.
        lr, optimizer, optimizer_options: local optimiser.
        loss, loss_options: training criterion.
        mean, std: per-channel normalisation of images after scaling to 0..1; empty = none.
        note: where the values come from.
    """

    clients: int | None = 5
    partition: str = "dirichlet"
    alpha: float = 0.5
    samples: int | None = None
    model: str = "cifar_cnn"
    batch: int = 128
    epochs: int = 1
    rounds: int = 100
    lr: float = 1e-3
    optimizer: str = "adamw"
    optimizer_options: dict[str, Any] = field(default_factory=lambda: {"amsgrad": True, "weight_decay": 1e-4})
    loss: str = "cross_entropy"
    loss_options: dict[str, Any] = field(default_factory=dict)
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    note: str = ""


def general(shape: tuple[int, ...], has_clients: bool) -> Recipe:
    """The recipe of data that have none of their own.

    Natural clients where the data name them, otherwise Dirichlet(0.5) over 5 clients; a convolutional network for
    images, a multilayer perceptron for everything else.

    Args:
        shape: shape of one sample.
        has_clients: whether the data name natural clients.
    """
    model = "mlp" if len(shape) != 3 else "fmnist_cnn" if shape[0] == 1 else "cifar_cnn"
    deal: dict[str, Any] = {"clients": None, "partition": "natural"} if has_clients else {}
    return Recipe(**deal, model=model, batch=32, rounds=50, note="general values for data without a recipe")
