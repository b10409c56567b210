"""Default settings of datasets: the partition, the model and the training options."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fl_core.scores import CLASSIFICATION, MULTILABEL, REGRESSION, SURVIVAL
from fl_core.tokens import TokenShape

SHARES = (0.64, 0.16, 0.20)
"""Shares of each client's samples for training, validation and test."""


@dataclass(frozen=True)
class Recipe:
    """Default settings of a dataset: its partition over clients, the model, and its training.

    >>> from fl_core.data import datasets
    >>> recipe = datasets()["fashion_mnist"]
    >>> recipe.model, recipe.partition, recipe.alpha, recipe.max_samples
    ('fmnist_cnn', 'dirichlet', 0.5, 10000)

    Attributes:
        clients: number of clients. None means all natural clients.
        partition: one of :data:`fl_core.data.PARTITIONS`.
        alpha: concentration of the Dirichlet partition. With a smaller one clients differ more.
        max_samples: size of the pool that is partitioned. None means all samples.
        model: registry name of the model. model_options: its own options.
        batch_size: samples per batch. epochs: local epochs per round. rounds: rounds of a run, at most.
        patience: evaluations without a better score after which a run stops; 0: never.
        lr, optimizer, optimizer_options: local optimiser. keep_optimizer: keep its state between rounds.
        loss, loss_options: training criterion.
        mean, std: normalisation of images by channel after scaling to 0..1. Empty means none.
        note: source of the values.
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
    patience: int = 0
    lr: float = 1e-3
    optimizer: str = "adamw"
    optimizer_options: dict[str, Any] = field(
        default_factory=lambda: {"amsgrad": True, "weight_decay": 1e-4}
    )
    keep_optimizer: bool = False
    loss: str = "cross_entropy"
    loss_options: dict[str, Any] = field(default_factory=dict)
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    note: str = ""


TEXT: dict[str, Any] = {
    "model": "text_transformer",
    "model_options": {"width": 128},
    "batch_size": 64,
    "lr": 1e-3,
}
"""PLayer-FL's model, batch size and FedAvg rate for Sent-140, at a sixth of its width.

The paper starts from a language model's table of 768 columns. A fresh table learns as well with fewer."""


PATIENCE = 10
"""Evaluations of your own data without a better score on validation, after which a run stops (``decision.tuned``)."""


LOSS_OF = {REGRESSION: "mse", SURVIVAL: "cox", MULTILABEL: "multilabel_bce"}
"""The default loss of the tasks without classes."""


def general(
    shape: tuple[int, ...],
    has_clients: bool,
    task: str = CLASSIFICATION,
    stops: bool = True,
) -> Recipe:
    """Return the default settings for data without any of their own.

    Data with natural clients use them. Others are partitioned by Dirichlet(0.5) over 5 clients. Images get a
    convolutional network, texts a small transformer, and everything else a multilayer perceptron. Tasks without classes
    have the losses of :data:`LOSS_OF`. Their partition without natural clients is ``iid``.

    Args:
        shape: shape of one sample.
        has_clients: whether the data name natural clients.
        task: of :data:`fl_core.scores.TASKS`.
        stops: whether a run stops when validation no longer improves (:class:`fl_core.stopping.StoppingRule`).
    """
    own: dict[str, Any] = {"patience": PATIENCE} if stops else {"rounds": 50}
    own |= {} if task == CLASSIFICATION else {"loss": LOSS_OF[task], "partition": "iid"}
    own |= {"clients": None, "partition": "natural"} if has_clients else {}
    if isinstance(shape, TokenShape):
        return Recipe(**own, **TEXT, note="general values for texts without a recipe")
    model = "mlp" if len(shape) != 3 else "fmnist_cnn" if shape[0] == 1 else "cifar_cnn"
    return Recipe(
        **own,
        model=model,
        batch_size=32,
        note="general values for data without a recipe",
    )
