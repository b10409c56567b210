"""One temperature for a model's probabilities, fitted on validation samples."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fl_core import tree
from fl_core.scores import CLASSIFICATION, MULTILABEL
from fl_core.training import evaluate

if TYPE_CHECKING:
    from fl_core.task import Task

LARGEST = 50.0
"""The largest temperature; the least is its inverse."""


def log_losses(outputs: Tensor, y: Tensor, temperature: float = 1.0) -> Tensor:
    """Return each sample's log loss of logits divided by a temperature, float64 [n].

    Args:
        outputs: logits of classes or labels, [n, C].
        y: classes [n], or labels of 0 and 1 [n, C], whose losses are averaged.
    """
    logits = outputs.double() / temperature
    if y.ndim == 1:
        return nn.functional.cross_entropy(logits, y.long(), reduction="none")
    return nn.functional.binary_cross_entropy_with_logits(
        logits, y.double(), reduction="none"
    ).mean(dim=1)


def fit(outputs: Tensor, y: Tensor, weights: Tensor) -> float:
    """Return the temperature with the least weighted mean log loss (Guo et al. 2017).

    It changes no order of predictions. The loss is convex in the inverse temperature, so a bounded search finds the
    least.

    >>> sure = torch.tensor([[0.0, 9.0], [0.0, 9.0], [9.0, 0.0], [9.0, 0.0]])
    >>> round(fit(sure, torch.tensor([1, 0, 0, 0]), torch.ones(4)), 1)
    8.2
    """
    from scipy.optimize import minimize_scalar  # a study prints its first lines before

    found = minimize_scalar(
        lambda inverse: float((weights * log_losses(outputs * inverse, y)).sum()),
        bounds=(1 / LARGEST, LARGEST),
        method="bounded",
        options={"xatol": 1e-4},
    )
    return float(1 / found.x)


def temperature_of(task: Task, models: Mapping[str, nn.Module]) -> float:
    """Return the temperature of clients' models on their validation samples.

    It is 1 if the task has no probabilities, or no client with a model has validation samples.
    """
    clients = [
        client
        for client in task.data.clients
        if client.name in models and len(client.validation)
    ]
    if task.data.task not in (CLASSIFICATION, MULTILABEL) or not clients:
        return 1.0
    with tree.one_thread():
        outputs = [
            task.criterion.logits(
                evaluate.predict(models[client.name], client.validation.x)
            )
            for client in clients
        ]
    sizes = [len(client.validation) for client in clients]
    weights = [
        torch.full((n,), len(client.train) / n, dtype=torch.float64)
        for client, n in zip(clients, sizes, strict=True)
    ]
    whole, y = torch.cat(outputs), torch.cat([c.validation.y for c in clients])
    found = fit(whole, y, torch.cat(weights)) if torch.isfinite(whole).all() else 1.0
    return found if math.isfinite(found) else 1.0
