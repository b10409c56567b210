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
    samples_per_client, classes = POOLED // len(task.data.clients), task.data.classes
    token_parts, class_names, client_names, sample_places = [], [], [], []
    for client in task.data.clients:
        features = collect(
            model,
            [path],
            (client.test.x, client.test.y),
            samples=samples_per_client,
            seed=task.config.execution.seed,
        )
        token_parts.append(features.at(path)[:, :width])
        class_names += [classes[k] for k in features.y]
        client_names += [client.name] * len(features.y)
        sample_places.append(features.sample)
    return Pool(
        np.concatenate(token_parts),
        np.array(class_names, dtype=object),
        np.array(client_names, dtype=object),
        np.concatenate(sample_places),
    )


def measure(task: runner.Task, run: str, folder: Path) -> pd.DataFrame:
    """Return the global model's accuracy at every client; scores of its features, and with seed 0 their plane."""
    engine, frame = trained(task)
    accuracy_rows = tested(frame)
    model = final_models(engine, task.model)[engine.names[0]]
    pooled = attended(model, task)
    label_columns = {
        "round": task.config.federation.rounds,
        "split": "test",
        "layer": last_attention(model),
        **labels(task),
    }
    table_rows = list(scored(pooled, label_columns))
    if task.config.execution.seed == 0:
        table_rows += placed(pooled, 0, label_columns)
    return pd.concat(
        [accuracy_rows[accuracy_rows["model"] == "global"], rows.frame(table_rows)],
        ignore_index=True,
    )


# --- drawing ---------------------------------------------------------------------------------------------------


def values(frame: pd.DataFrame, metric_name: str) -> pd.DataFrame:
    """Return a metric after the last round, runs x seeds; of the clients' accuracies the mean."""
    metric_rows = frame[frame["metric"] == metric_name]
    metric_rows = metric_rows[
        metric_rows["round"]
        == metric_rows.groupby(["run", "seed"])["round"].transform("max")
    ]
    mean_values = metric_rows.groupby(["run", "seed"])["value"].mean().unstack("seed")
    return mean_values.reindex(list(RUNS))


def _draw(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    planes_by_title = {title(run): plane(frame, run) for run in RUNS}
    silhouettes = {
        metric_name: values(frame, metric_name) for metric_name in (CLASS, CLIENT)
    }
    kinds = []
    for k, (metric_name, metric_scores) in enumerate(silhouettes.items()):
        label = CLUSTERED[metric_name].removeprefix("silhouette ")
        kinds.append(
            with_intervals(over_seeds(metric_scores, RUNS), label, 0.24 * (k - 0.5))
        )
    with sheet(9.2, 5.6) as figure:
        plane_axes = list(figure.subplots(2, 3).flat)
        ax = plane_axes.pop(0)  # the last panel has the legend of all beside it
        marks(
            ax,
            kinds,
            list(map(title, RUNS)),
            level=0,
            xlabel="silhouette (higher = further apart)",
            title="how far the features stand apart",
        )
        ax.legend(fontsize=7)
        planes(planes_by_title, plane_axes)
    first_plane = next(iter(planes_by_title.values()))
    seeds_text = span(silhouettes[CLASS].notna().sum(axis=1))
    setting_text = described(header)
    missing_text = missing_runs(header)
    caption = (
        f"t-SNE of the features of {len(first_plane)} test images. Colours are classes and markers are styles. "
        f"The panels' axes are not related. Above left: silhouettes with 95 % intervals over {seeds_text} seeds. "
        "A feature is what the last attention layer of the global model gives to the class token. "
        f"The t-SNE is of seed 0 with perplexity {first_plane.attrs['perplexity']:.3g}. {setting_text} "
        f"AllSmall's last layer is in its third block.{missing_text}"
    )
    metric_scores = _table(frame)
    return Drawing(
        figure,
        metric_scores,
        caption,
        set_apart(
            [_finding(silhouettes[CLASS])], far(values(frame, "accuracy"), "fedra")
        ),
        _page(metric_scores),
    )


def _finding(silhouettes: pd.DataFrame) -> Finding:
    """Return whether FedRA separates classes better than the methods for unequal clients do."""
    gaps = {
        other_method: difference(silhouettes, "fedra", other_method)
        for other_method in ("depthfl", "inclusivefl")
    }
    verdict = judged(
        {title(other_method): gap for other_method, gap in gaps.items()}, show=_half
    )
    return verdict.finding(
        "FedRA's features set the classes further apart than DepthFL's and InclusiveFL's (silhouette)",
        "more than ",
    )


def _half(interval: Interval) -> str:
    """A score with half its interval."""
    return f"{interval.value:+.3f} ± {(interval.high - interval.low) / 2:.3f}"


def _table(frame: pd.DataFrame) -> pd.DataFrame:
    """Accuracy and every score, a row for each run and quantity."""
    table_rows = []
    for metric_name in ("accuracy", *CLUSTERED):
        for run, score in values(frame, metric_name).iterrows():
            interval = mean_interval(score.dropna())._asdict()
            columns = {"run": run, "quantity": metric_name, **interval}
            table_rows.append({**columns, "seeds": int(score.notna().sum())})
    return pd.DataFrame(table_rows)


def _page(table: pd.DataFrame) -> str:
    def cell_text(run: str, metric_name: str) -> str:
        row = where(table, run=run, quantity=metric_name).iloc[0]
        interval = Interval(row["value"], row["low"], row["high"])
        if metric_name == "accuracy":
            return percent(*interval)
        return _half(interval)

    runs = list(table["run"].unique())
    table_text = markdown({
        "method": [title(run) for run in runs],
        "accuracy %": [cell_text(run, "accuracy") for run in runs],
        **{heading: [cell_text(run, metric_name) for run in runs] for metric_name, heading in CLUSTERED.items()},
    })  # fmt: skip
    return f"{table_text}\n\n± is half the 95 % interval over seeds. {MEANING}"


items.register(Item(
    NAME, "t-SNE of the global model's features, PACS (FedRA, Fig. 5)", RUNS, seeds=3,
    budget="some two and a half hours of one core, ten minutes of pretraining among them",
    prepare=shared_start, measure=measure, draw=_draw,
))  # fmt: skip
