"""FedRA's Fig. 5 on PACS: t-SNE of what the last attention layer of each method's global model gives."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from torch import nn

from diagnostics.representation.embedding import Pool
from diagnostics.representation.features import collect
from figures import items
from figures.differences import difference
from figures.fedra.depth import DEPTHS, PACS, described, far
from figures.fedra.further import shared_start
from figures.forms import marks, over_seeds, planes, sheet, with_intervals
from figures.items import Drawing, Finding, Item, set_apart
from figures.names import title
from figures.page import markdown, missing_runs, percent, span
from figures.planes import CLUSTERED, MEANING, placed, plane, scored
from figures.recipe import (
    by_method,
    final_models,
    labels,
    scored_at_end,
    tested,
    trained,
    where,
)
from figures.verdicts import judged
from fl_core import rows
from fl_core.run import runner
from fl_core.statistics import Interval, mean_interval

NAME = "fedra.fig5"
POOLED = 400
"""Test images in a plane, of all styles together."""
LIMITED: dict[str, Any] = {"options": {"depths": DEPTHS}}
METHODS = ("alllarge", "fedra", "depthfl", "inclusivefl", "allsmall")
RUNS = by_method(
    scored_at_end(PACS), METHODS, {method: LIMITED for method in METHODS if not method.startswith("all")}
)  # fmt: skip
"""As long as the runs of :mod:`figures.fedra.depth`, of which no models are kept; from a shorter pretraining."""
CLASS, CLIENT = "silhouette_class", "silhouette_client"


# --- measuring -------------------------------------------------------------------------------------------------


def last_attention(model: nn.Module) -> str:
    """Return the path of the attention in a transformer's last block, also of one with early exits."""
    return [path for path, _ in model.named_modules() if path.endswith(".attn")][-1]


def attended(model: nn.Module, task: runner.Task) -> Pool:
    """Return the class token as the last attention layer leaves it, of the clients' test images, equally many of each.

    Attention is a part of a layer, so that :func:`diagnostics.representation.embedding.pool` cannot name it.
    """
    path, width = (
        last_attention(model),
        int(task.config.model.model_options["embed_dim"]),
    )
    share, classes = POOLED // len(task.data.clients), task.data.classes
    parts, named, clients, places = [], [], [], []
    for client in task.data.clients:
        features = collect(
            model,
            [path],
            (client.test.x, client.test.y),
            samples=share,
            seed=task.config.execution.seed,
        )
        parts.append(features.at(path)[:, :width])
        named += [classes[k] for k in features.y]
        clients += [client.name] * len(features.y)
        places.append(features.sample)
    return Pool(
        np.concatenate(parts),
        np.array(named, dtype=object),
        np.array(clients, dtype=object),
        np.concatenate(places),
    )


def measure(task: runner.Task, run: str, folder: Path) -> pd.DataFrame:
    """Return the global model's accuracy at every client; scores of its features, and with seed 0 their plane."""
    engine, frame = trained(task)
    accuracy = tested(frame)
    model = final_models(engine, task.model)[engine.names[0]]
    pooled = attended(model, task)
    named = {
        "round": task.config.federation.rounds,
        "split": "test",
        "layer": last_attention(model),
        **labels(task),
    }
    lines = list(scored(pooled, named))
    if task.config.execution.seed == 0:
        lines += placed(pooled, 0, named)
    return pd.concat(
        [accuracy[accuracy["model"] == "global"], rows.frame(lines)], ignore_index=True
    )


# --- drawing ---------------------------------------------------------------------------------------------------


def values(frame: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Return a metric after the last round, runs x seeds; of the clients' accuracies the mean."""
    of_metric = frame[frame["metric"] == metric]
    of_metric = of_metric[
        of_metric["round"]
        == of_metric.groupby(["run", "seed"])["round"].transform("max")
    ]
    table = of_metric.groupby(["run", "seed"])["value"].mean().unstack("seed")
    return table.reindex(list(RUNS))


def _draw(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    frames = {title(run): plane(frame, run) for run in RUNS}
    silhouettes = {metric: values(frame, metric) for metric in (CLASS, CLIENT)}
    kinds = []
    for k, (metric, table) in enumerate(silhouettes.items()):
        label = CLUSTERED[metric].removeprefix("silhouette ")
        kinds.append(with_intervals(over_seeds(table, RUNS), label, 0.24 * (k - 0.5)))
    with sheet(9.2, 5.6) as figure:
        grid = list(figure.subplots(2, 3).flat)
        ax = grid.pop(0)  # the last panel has the legend of all beside it
        marks(
            ax,
            kinds,
            list(map(title, RUNS)),
            level=0,
            xlabel="silhouette (higher = further apart)",
            title="how far the features stand apart",
        )
        ax.legend(fontsize=7)
        planes(frames, grid)
    one = next(iter(frames.values()))
    seeds = span(silhouettes[CLASS].notna().sum(axis=1))
    setting_text = described(header)
    missing_text = missing_runs(header)
    caption = (
        f"t-SNE of the features of {len(one)} test images. Colours are classes and markers are styles. "
        f"The panels' axes are not related. Above left: silhouettes with 95 % intervals over {seeds} seeds. "
        "A feature is what the last attention layer of the global model gives to the class token. "
        f"The t-SNE is of seed 0 with perplexity {one.attrs['perplexity']:.3g}. {setting_text} "
        f"AllSmall's last layer is in its third block.{missing_text}"
    )
    table = _table(frame)
    return Drawing(
        figure,
        table,
        caption,
        set_apart(
            [_finding(silhouettes[CLASS])], far(values(frame, "accuracy"), "fedra")
        ),
        _page(table),
    )


def _finding(by_class: pd.DataFrame) -> Finding:
    """Return whether FedRA separates classes better than the methods for unequal clients do."""
    gaps = {
        other: difference(by_class, "fedra", other)
        for other in ("depthfl", "inclusivefl")
    }
    verdict = judged({title(other): gap for other, gap in gaps.items()}, show=_half)
    return verdict.finding(
        "FedRA's features set the classes further apart than DepthFL's and InclusiveFL's (silhouette)",
        "more than ",
    )


def _half(interval: Interval) -> str:
    """A score with half its interval."""
    return f"{interval.value:+.3f} ± {(interval.high - interval.low) / 2:.3f}"


def _table(frame: pd.DataFrame) -> pd.DataFrame:
    """Accuracy and every score, a row for each run and quantity."""
    lines = []
    for metric in ("accuracy", *CLUSTERED):
        for run, score in values(frame, metric).iterrows():
            interval = mean_interval(score.dropna())._asdict()
            line = {"run": run, "quantity": metric, **interval}
            lines.append({**line, "seeds": int(score.notna().sum())})
    return pd.DataFrame(lines)


def _page(table: pd.DataFrame) -> str:
    def told(run: str, metric: str) -> str:
        line = where(table, run=run, quantity=metric).iloc[0]
        interval = Interval(line["value"], line["low"], line["high"])
        if metric == "accuracy":
            return percent(*interval)
        return _half(interval)

    runs = list(table["run"].unique())
    cells = markdown({
        "method": [title(run) for run in runs],
        "accuracy %": [told(run, "accuracy") for run in runs],
        **{words: [told(run, metric) for run in runs] for metric, words in CLUSTERED.items()},
    })  # fmt: skip
    return f"{cells}\n\n± is half the 95 % interval over seeds. {MEANING}"


items.register(Item(
    NAME, "t-SNE of the global model's features, PACS (FedRA, Fig. 5)", RUNS, seeds=3,
    budget="some two and a half hours of one core, ten minutes of pretraining among them",
    prepare=shared_start, measure=measure, draw=_draw,
))  # fmt: skip
