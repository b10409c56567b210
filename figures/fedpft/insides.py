"""Inside FedPFT: t-SNE of seven methods' features (Figs. 2, 3), and the attention of samples (Fig. 6)."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from torch import nn

from diagnostics.representation.embedding import Pool, pool
from figures import items
from figures.items import Item
from figures.planes import placed, scored
from figures.recipe import (
    PLAIN_SGD,
    by_method,
    final_models,
    labels,
    scored_at_end,
    tested,
    trained,
)
from fl_core import rows, runner
from fl_core.algorithms.fedpft import ATTENTION
from fl_core.config import RunConfig
from fl_core.models.extended import PROMPTS, Prompted

NAME = "fedpft.insides"
COUNT = "samples"
SIMILAR = "class_distance"
SELF, SPREAD, ENTROPY = "attention_self", "attention_spread", "attention_entropy"
POOLED = 300
"""Test samples in a plane, of all clients together."""
PAIRS = (("cat", "dog"), ("automobile", "truck"))
"""Classes of which the paper says that their images are alike."""

BASE = scored_at_end(RunConfig(
    dataset="cifar10", partition="fedpft_dirichlet", alpha=0.1, clients=10, samples_per_client=200,
    model="resnet8", rounds=12, epochs=5, batch_size=25, lr=0.1, **PLAIN_SGD | {"momentum": 0.9},
))  # fmt: skip
"""The paper's federation for these pictures, with a fifth of its 1000 images a client and few of its 1000 rounds."""
SKEWED: dict[str, Any] = {"feature_epochs": 3}
"""Epochs a round for the features where alpha is 0.1, as FedPFT has it; of the other alphas the default, 4."""
FEDPFT, MILD = "fedpft", "fedpft_alpha_1"
RUNS = {
    **by_method(BASE, ("fedavg", "fedper", "fedcac"), {}),
    "no_contrast": BASE.with_keys(
        algorithm="fedpft", options={**SKEWED, "contrast": False}
    ),
    FEDPFT: BASE.with_keys(algorithm="fedpft", options=SKEWED),
    "no_alternating": BASE.with_keys(algorithm="fedpft", options={"alternate": False}),
    "personal_head": BASE.with_keys(
        algorithm="fedpft", options={**SKEWED, "personal_head": True}
    ),
    MILD: BASE.with_keys(algorithm="fedpft", alpha=1.0),
}
"""Figure 2's seven methods in its order, and FedPFT where clients are alike."""
TITLES = {
    "fedavg": "FedAvg",
    "fedper": "FedPer",
    "fedcac": "FedCAC",
    "no_contrast": "FedPFT w/o contrast",
    FEDPFT: "FedPFT",
    "no_alternating": "FedPFT w/o alternating",
    "personal_head": "FedPFT, personal head",
    MILD: "FedPFT, α = 1",
}

# --- models and their features ---------------------------------------------------------------------------------


def behind(model: Prompted, prompts: str) -> Prompted:
    """The same model with other prompts before the classifier, whose inputs FedPFT's Fig. 3 shows.

    Args:
        prompts: one of :data:`fl_core.models.extended.PROMPTS`.
    """
    turned = copy.deepcopy(model)
    turned.prompts, turned.contrast_prompts = getattr(turned, prompts), None
    return turned


def _kinds(
    models: Mapping[str, nn.Module], run: str
) -> Iterator[tuple[str, dict[str, nn.Module]]]:
    """The prompts that features pass through ("" for none), with the models that use them; FedPFT has both kinds."""
    prompted = {
        name: model for name, model in models.items() if isinstance(model, Prompted)
    }
    if not prompted:
        yield "", dict(models)
    for prompts in (PROMPTS if run == FEDPFT else PROMPTS[:1]) if prompted else ():
        yield (
            prompts,
            {name: behind(model, prompts) for name, model in prompted.items()},
        )


def class_distance(pooled: Pool, pair: tuple[str, str]) -> float | None:
    """Distance between the mean features of two classes / the mean of that over all pairs of classes.

    Below 1 these two are closer than usual. None if one of them has no sample, or all means are equal.
    """
    means = {
        name: pooled.x[pooled.classes == name].mean(axis=0, dtype=np.float64)
        for name in set(pooled.classes)
    }
    if not set(pair) <= set(means):
        return None
    every = np.stack(list(means.values()))
    gaps = np.linalg.norm(every[:, None] - every[None], axis=2)[
        np.triu_indices(len(every), 1)
    ]
    return (
        float(np.linalg.norm(means[pair[0]] - means[pair[1]]) / gaps.mean())
        if gaps.any()
        else None
    )


# --- rows ------------------------------------------------------------------------------------------------------


def _measure(task: runner.Task, run: str, folder: Path) -> pd.DataFrame:
    """Record personalised accuracy and class counts. Also record attention weights and the features of test samples."""
    engine, frame = trained(task)
    accuracy = tested(frame)
    final = accuracy[accuracy["round"] == task.config.federation.rounds]
    named = labels(task)
    lines = [
        rows.row(
            COUNT, int(n), client=str(client), variant=str(name), split="train", **named
        )
        for (client, name), n in task.data.class_counts().stack().items()
    ]
    named |= {"round": task.config.federation.rounds, "split": "test"}
    data = {client.name: client.test for client in task.data.clients}
    for prompts, models in _kinds(final_models(engine, task.model), run):
        pooled = pool(
            models,
            data,
            classes=task.data.classes,
            samples=POOLED,
            seed=task.config.execution.seed,
        )
        lines += _features(
            pooled, run != MILD, task.config.execution.seed, {"layer": prompts, **named}
        )
    kept = [final[final["model"].isin(["global", "personal"])]]
    attended = frame[frame["metric"] == ATTENTION]
    if run in (FEDPFT, MILD):
        lines += _attended(attended, named)
        kept.append(attended[attended["client"] == engine.names[0]])
    return pd.concat([*kept, rows.frame(lines)], ignore_index=True)


def _features(
    pooled: Pool, drawn: bool, seed: int, named: Mapping[str, Any]
) -> Iterator[rows.Row]:
    """Scores of one pool of features, and the samples' positions in a plane if it is drawn."""
    n = len(pooled.x)
    yield from scored(pooled, named)
    for pair in PAIRS:
        distance = class_distance(pooled, pair)
        status = (
            "ok"
            if distance is not None
            else "no samples of both classes, or no distances"
        )
        yield rows.row(
            SIMILAR,
            distance,
            variant=" and ".join(pair),
            n_samples=n,
            status=status,
            **named,
        )
    if drawn:
        yield from placed(pooled, seed, named)


def _attended(attention: pd.DataFrame, named: Mapping[str, Any]) -> Iterator[rows.Row]:
    """Summarise each client's attention to each kind of prompts: weight on the feature itself, spread, evenness."""
    for (client, layer), part in attention.groupby(["client", "layer"], sort=False):
        table = weights(part)
        what = {
            "client": str(client),
            "layer": str(layer),
            "n_samples": len(table),
            **named,
        }
        values = table.to_numpy(dtype=np.float64)
        even = -(values * np.log(np.where(values > 0, values, 1.0))).sum(
            axis=1
        ) / np.log(values.shape[1])
        yield rows.row(
            SELF, table["feature"].mean(), estimator="mean over samples", **what
        )
        spread = table.drop(columns="feature").std(axis=0, ddof=0).mean()
        yield rows.row(
            SPREAD,
            spread,
            estimator="deviation over samples, mean over prompts",
            **what,
        )
        yield rows.row(
            ENTROPY,
            even.mean(),
            estimator="mean over samples, 1 = all keys alike",
            **what,
        )


# --- rows back to tables ---------------------------------------------------------------------------------------


def weights(attention: pd.DataFrame) -> pd.DataFrame:
    """Attention of one client to one kind of prompts, samples x keys: ``feature``, then the prompts."""
    named = attention["variant"].str.partition(">")
    split = attention.assign(query=named[0], key=named[2])
    return split.pivot(index="query", columns="key", values="value")[
        list(split["key"].unique())
    ]


def of_runs(frame: pd.DataFrame, metric: str, layer: str | None = None) -> pd.DataFrame:
    """A score of the features, runs x seeds; by default of the inputs of each run's classifier."""
    part = frame[frame["metric"] == metric]
    part = part[part["layer"].isin(["", PROMPTS[0]] if layer is None else [layer])]
    return part.pivot(index="run", columns="seed", values="value").reindex(
        part["run"].unique()
    )


STUDY = items.register(Item(
    NAME, "FedPFT from the inside: features and attention on CIFAR-10", RUNS, seeds=1, more_seeds={FEDPFT: 10},
    budget="about an hour of one idle core; a run takes 1 to 5 minutes", measure=_measure,
))  # fmt: skip
