"""How far classes stand apart in the features of FedPFT and FedAvg, after more rounds than Fig. 2 has.

After the 12 rounds of :mod:`figures.fedpft.insides` FedAvg has learned too little to compare it with the paper's.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd

from diagnostics.plots.drawing import COLOURS, style
from diagnostics.representation.embedding import pool
from figures import items
from figures.fedpft import insides
from figures.fedpft.pictures import by_run, compared, far, runs_page, setting
from figures.items import Drawing, Item, set_apart
from figures.page import missing_runs, seeds_behind, seeds_in_words
from figures.planes import CLUSTERED, scored
from figures.recipe import final_models, labels, tested, trained
from fl_core import rows, runner
from fl_core.models.extended import PROMPTS, Prompted

NAME = "fedpft.separation"
ROUNDS = 40
RUNS = {
    run: insides.RUNS[run].with_keys(
        rounds=ROUNDS, eval_every=ROUNDS, checkpoint_every=ROUNDS
    )
    for run in ("fedavg", "no_contrast")
}


def _measure(task: runner.Task, run: str, folder: Path) -> pd.DataFrame:
    """Record accuracy, and how far classes and clients stand apart in the inputs of the classifiers."""
    engine, frame = trained(task)
    accuracy = tested(frame)
    final = accuracy[
        (accuracy["round"] == task.config.federation.rounds)
        & accuracy["model"].isin(["global", "personal"])
    ]
    models = {
        name: insides.behind(model, PROMPTS[0])
        if isinstance(model, Prompted)
        else model
        for name, model in final_models(engine, task.model).items()
    }
    data = {client.name: client.test for client in task.data.clients}
    pooled = pool(
        models,
        data,
        classes=task.data.classes,
        samples=insides.POOLED,
        seed=task.config.execution.seed,
    )
    named = {"round": task.config.federation.rounds, "split": "test", **labels(task)}
    return pd.concat(
        [final, rows.frame(list(scored(pooled, named)))], ignore_index=True
    )


def _draw(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    shown = [run for run in RUNS if header["had"].get(run)]
    table, silhouettes = by_run(frame, shown)
    with style():
        figure = plt.figure(figsize=(6.6, 2.7), layout="constrained")
        for ax, metric in zip(
            figure.subplots(1, 2), ("silhouette_class", "purity_class"), strict=True
        ):
            values = insides.of_runs(frame, metric).loc[shown]
            for at, run in enumerate(shown):
                own = values.loc[run].dropna()
                ax.plot(
                    [at] * len(own),
                    own,
                    "o",
                    color=COLOURS[at],
                    markersize=4,
                    alpha=0.7,
                )
                ax.plot(
                    [at - 0.2, at + 0.2],
                    [own.mean()] * 2,
                    color=COLOURS[at],
                    linewidth=1.6,
                )
            ax.set_xticks(range(len(shown)), [insides.TITLES[run] for run in shown])
            ax.set(xlim=(-0.6, len(shown) - 0.4), ylabel=CLUSTERED[metric])
            ax.grid(axis="x", visible=False)
    caption = (
        "How far classes stand apart in the classifier's inputs. A dot is a seed and a line the mean. "
        f"{setting(header)} The split is Dirichlet(0.1). {seeds_in_words(seeds_behind(header)).capitalize()}."
        f"{missing_runs(header)}"
    )
    findings = compared(
        f"after {ROUNDS} rounds classes stand further apart in the features of FedPFT w/o contrast than in FedAvg's "
        "(silhouette)",
        silhouettes,
        "no_contrast",
        "fedavg",
        insides.TITLES,
    )
    return Drawing(
        figure, table, caption, set_apart(findings, far(frame, shown)), runs_page(table)
    )


STUDY = items.register(Item(
    NAME, "How far classes stand apart in the features of FedPFT and FedAvg, CIFAR-10", RUNS, seeds=5,
    budget="about one hour of one core; a run takes 4 to 8 minutes", measure=_measure, draw=_draw,
))  # fmt: skip
