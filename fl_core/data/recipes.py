"""A dataset's default settings: how it is partitioned, and the model and training used unless others are asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fl_core.scores import CLASSIFICATION, REGRESSION
from fl_core.tokens import TokenShape

SHARES = (0.64, 0.16, 0.20)
"""Of each client's samples: for training, validation and test."""


@dataclass(frozen=True)
class Recipe:
    """Default settings of a dataset: how it is partitioned over clients, and which model is trained on it and how.

    >>> from fl_core.data import datasets
    >>> recipe = datasets()["fashion_mnist"]
    >>> recipe.model, recipe.partition, recipe.alpha, recipe.max_samples
    ('fmnist_cnn', 'dirichlet', 0.5, 10000)

    Attributes:
        clients: number of clients; None = as many as there are natural clients.
        partition: one of :data:`fl_core.data.PARTITIONS`.
        alpha: concentration of the Dirichlet partition; smaller = clients differ more.
        samples: size of the pool that is partitioned; None = all samples.
        model: registry name of the model. model_options: its own options, when it is this one.
        batch: samples a batch. epochs: local epochs a round. rounds: rounds of a run.
        lr, optimizer, optimizer_options: local optimiser.
        loss, loss_options: training criterion.
        mean, std: per-channel normalisation of images after scaling to 0..1; empty = none.
        note: where the values come from.
    """

    clients: int | None = 5
    partition: str = "dirichlet"
    alpha: float = 0.5
    max_samples: int | None = None
    model: str = "cifar_cnn"
    model_options: dict[str, Any] = field(default_factory=dict)
    batch_size: int = 128
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


TEXT: dict[str, Any] = {"model": "text_transformer", "model_options": {"width": 128}, "batch_size": 64, "lr": 1e-3}
"""PLayer-FL's model, batch and FedAvg's rate for Sent-140, at a sixth of its width: the paper starts from a language
model's table of 768 columns, and a fresh one learns as well in fewer."""


def general(shape: tuple[int, ...], has_clients: bool, task: str = CLASSIFICATION) -> Recipe:
    """The default settings for data that come without any of their own.

    Natural clients where the data name them, otherwise Dirichlet(0.5) over 5 clients; a convolutional network for
    images, a small transformer for texts, a multilayer perceptron for everything else. Where numbers are to be
    predicted, the loss is ``mse``, and the partition without natural clients ``iid``.

    Args:
        shape: shape of one sample.
        has_clients: whether the data name natural clients.
        task: of :data:`fl_core.scores.TASKS`.
    """
    own: dict[str, Any] = {"loss": "mse", "partition": "iid"} if task == REGRESSION else {}
    own |= {"clients": None, "partition": "natural"} if has_clients else {}
    if isinstance(shape, TokenShape):
        return Recipe(**own, **TEXT, rounds=50, note="general values for texts without a recipe")
    model = "mlp" if len(shape) != 3 else "fmnist_cnn" if shape[0] == 1 else "cifar_cnn"
    return Recipe(**own, model=model, batch_size=32, rounds=50, note="general values for data without a recipe")
