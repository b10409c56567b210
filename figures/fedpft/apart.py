"""How far FedPFT's features set classes apart within one client, and across clients (Sec. 4.5).

A silhouette of all clients' samples together measures clients more than classes, since each client has its own model.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.spatial.distance import cdist
from sklearn.metrics import silhouette_score

from diagnostics.representation.embedding import Pool, pool
from figures import items
from figures.fedpft.insides import (
    LONGER,
    TITLES,
    by_prompts,
    by_run,
    compared,
    far,
    of_runs,
    setting,
)
from figures.forms import marks, seeds_and_mean, sheet
from figures.items import Drawing, Item, set_apart
from figures.page import (
    markdown,
    missing_runs,
    numbers,
    seeds_behind,
    seeds_in_words,
)
from figures.planes import scored
from figures.recipe import final_models, labels, tested, trained
from fl_core import rows
from fl_core.run import runner

NAME = "fedpft.apart"
POOLED = 1000
"""Test samples of all clients together."""
WITHIN, ACROSS = "silhouette_within", "silhouette_across"
MEASURES = {WITHIN: "within a client", ACROSS: "across clients"}


def within(pooled: Pool) -> float | None:
    """Return the silhouette by class among one client's samples, a mean over clients; from -1 to 1.

    A client with one class, or with as many as samples, has none. None if no client has one.
    """
    scores = []
    for client in np.unique(pooled.clients):
        is_client = pooled.clients == client
        classes = pooled.classes[is_client]
        if 1 < len(set(classes)) < len(classes):
            scores.append(
                silhouette_score(pooled.x[is_client].astype(np.float64), classes)
            )
    return float(np.mean(scores)) if scores else None


def across(pooled: Pool) -> float | None:
    """Return the silhouette by class with distances to samples of other clients only, a mean over samples.

    Of a sample, a is the mean distance to its class at other clients, and b the least mean distance to another class
    there. Its silhouette is (b - a) / max(a, b), from -1 to 1, and 0 if both are 0. A sample whose class no other
    client has counts not. None if none counts.
    """
    x = pooled.x.astype(np.float64)
    class_names, class_index = np.unique(pooled.classes, return_inverse=True)
    one_hot = np.eye(len(class_names))[class_index]
    distance_sums, sample_counts = np.zeros((2, len(x), len(class_names)))
    for client in np.unique(pooled.clients):
        is_client = pooled.clients == client
        distance_sums[is_client] = (
            cdist(x[is_client], x[~is_client]) @ one_hot[~is_client]
        )
        sample_counts[is_client] = one_hot[~is_client].sum(axis=0)
    distances = np.full(distance_sums.shape, np.nan)
    np.divide(distance_sums, sample_counts, out=distances, where=sample_counts > 0)
    is_same_class = one_hot == 1
    own_class_distances = distances[is_same_class]
    other_class_distances = np.where(
        is_same_class | np.isnan(distances), np.inf, distances
    ).min(axis=1)
    is_counted = np.isfinite(own_class_distances) & np.isfinite(other_class_distances)
    if not is_counted.any():
        return None
    a, b = own_class_distances[is_counted], other_class_distances[is_counted]
    largest = np.maximum(a, b)
    scores = np.divide(b - a, largest, out=np.zeros_like(a), where=largest > 0)
    return float(scores.mean())


def _measure(task: runner.Task, run: str, folder: Path) -> pd.DataFrame:
    """Record accuracy, and silhouettes and purities of the inputs of the classifiers."""
    engine, frame = trained(task)
    rounds, seed = task.config.federation.rounds, task.config.execution.seed
    final_rows = tested(frame)
    final_rows = final_rows[final_rows["round"] == rounds]
    final_rows = final_rows[final_rows["model"].isin(["global", "personal"])]
    data = {client.name: client.test for client in task.data.clients}
    prompts, models = next(by_prompts(final_models(engine, task.model), run))
    pooled = pool(models, data, classes=task.data.classes, samples=POOLED, seed=seed)
    label_columns: dict[str, Any] = {
        "round": rounds,
        "split": "test",
        "layer": prompts,
        **labels(task),
    }
    table_rows = list(scored(pooled, label_columns))
    for metric_name, score in ((WITHIN, within(pooled)), (ACROSS, across(pooled))):
        label_columns["status"] = (
            "ok" if score is not None else "no client with two classes"
        )
        table_rows.append(
            rows.row(metric_name, score, n_samples=len(pooled.x), **label_columns)
        )
    return pd.concat([final_rows, rows.frame(table_rows)], ignore_index=True)


def _draw(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    runs = list(LONGER)
    silhouettes = {metric_name: of_runs(frame, metric_name) for metric_name in MEASURES}
    titles = [TITLES[run] for run in runs]
    with sheet(6.6, 2.7) as figure:
        for ax, (metric_name, relation) in zip(
            figure.subplots(1, 2), MEASURES.items(), strict=True
        ):
            marks(
                ax,
                seeds_and_mean(silhouettes[metric_name].loc[runs]),
                titles,
                upright=True,
                xlim=(-0.6, len(runs) - 0.4),
                ylabel=f"silhouette by class\n{relation}",
            )
    run_table, pooled_text = by_run(frame, runs)
    columns: dict[str, list[str]] = {"method": titles}
    for metric_name, relation in MEASURES.items():
        run_table[metric_name] = [
            silhouettes[metric_name].loc[run].mean() for run in runs
        ]
        columns[f"silhouette by class {relation}"] = numbers(
            run_table[metric_name], "+.3f"
        )
    findings = [
        compared(
            f"classes stand further apart {relation} in the features of FedPFT w/o contrast than in FedAvg's",
            silhouettes[metric_name],
            "no_contrast",
            "fedavg",
            TITLES,
        )
        for metric_name, relation in MEASURES.items()
    ]
    setting_text, missing_text = setting(header), missing_runs(header)
    seeds_text = seeds_in_words(seeds_behind(header)).capitalize()
    caption = (
        "How far classes stand apart in the classifier's inputs: among one client's samples, and by distances to "
        f"other clients' samples. A dot is a seed and a bar the mean. There are {POOLED:,} test samples of all "
        f"clients together. {setting_text} The split is Dirichlet(0.1). {seeds_text}.{missing_text}"
    )
    note = (
        "Within a client: the silhouette by class among its own samples, a mean over the clients with two classes or "
        "more. Across clients: the same formula with distances to samples of other clients only."
    )
    text = "\n\n".join([markdown(columns), note, "All samples together:", pooled_text])
    return Drawing(
        figure, run_table, caption, set_apart(findings, far(frame, runs)), text
    )


items.register(Item(
    NAME, "How far classes stand apart within a client and across clients, FedPFT and FedAvg, CIFAR-10", LONGER,
    seeds=3, budget="half an hour of one core; a run takes 4 to 6 minutes", measure=_measure, draw=_draw,
))  # fmt: skip
