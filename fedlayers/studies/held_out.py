"""Held-out samples, unseen by training and by choices: each client's test split, and unused samples of its dataset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from fl_core import data as datasets, statistics, tree
from fl_core.data import Split
from fl_core.scores import CLASSIFICATION
from fl_core.task import Task
from fl_core.training import evaluate


def held_out(task: Task) -> dict[str, Split]:
    """Return each client's test samples, with up to :data:`fl_core.data.loading.MOST` more of a named dataset.

    The further ones come from :func:`fl_core.data.extra_test_samples`, and are distributed like the client's own. There
    are none for your own files, for a regression, or for a dataset without unused samples.

    >>> import fedlayers as fl
    >>> task = fl.assemble(fl.RunConfig(dataset="digits", max_samples=600))
    >>> len(task.data.clients[0].test), len(held_out(task)["client_0"])
    (24, 424)

    Returns:
        The samples by client's name, without clients that have none.
    """
    further = _unused_samples(task)
    found = {}
    for client in task.data.clients:
        samples = concat_splits([client.test, further.get(client.name)])
        if len(samples):
            found[client.name] = samples
    return found


def concat_splits(parts: Sequence[Split | None]) -> Split:
    """Return the samples of all parts that are there."""
    there = [part for part in parts if part is not None]
    return Split(
        torch.cat([part.x for part in there]), torch.cat([part.y for part in there])
    )


def _unused_samples(task: Task) -> dict[str, Split]:
    config = task.config
    named = config.data.dataset in datasets.DATASETS or datasets.is_code(
        config.data.dataset
    )
    if not named or config.own_data is not None or config.data.task != CLASSIFICATION:
        return {}
    whole = datasets.open_named(
        config.data.dataset,
        data_root=config.data.data_root,
        download=config.data.download,
    )
    return datasets.extra_test_samples(
        whole.with_methods(config.data.scale or "none", config.data.impute), task.data
    )


def score_of(
    models: Mapping[str, nn.Module],
    samples: Mapping[str, Split],
    task: Task,
    score: str,
) -> float:
    """Return the score of clients' models on their samples, combined by training samples; NaN if a client's is missing.

    Args:
        models: by client's name, at least for clients with samples.
        score: one of :data:`fl_core.scores.SCORES`.
    """
    weights = dict(
        zip(
            (client.name for client in task.data.clients),
            task.data.weights,
            strict=True,
        )
    )
    values = []
    with tree.one_thread():
        for name, part in samples.items():
            logits = evaluate.predict(models[name], part.x)
            values.append(
                evaluate.scores(
                    logits, part.y, task.criterion, task.data.positive_index
                )[score]
            )
    return statistics.combine(values, [weights[name] for name in samples])
