"""Helpers of figures that measure layers. They measure after one epoch, and compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn

from diagnostics import measure, select
from diagnostics.curve import both_ways
from diagnostics.diagnosis import measure_models
from diagnostics.plots.drawing import weighted_mean
from diagnostics.request import Request
from diagnostics.sensitivity import recorded_rows
from figures import items
from figures.items import Finding
from figures.page import markdown
from figures.verdicts import beyond
from fl_core import rows
from fl_core.run import runner
from fl_core.run.restore import load_models
from fl_core.seeds import torch_generator
from fl_core.statistics import share_interval

SENSITIVITY = measure.SENSITIVITY


@dataclass(frozen=True)
class Definition:
    """One definition of federation sensitivity, with the mean over clients: plain, or by training samples."""

    run: str
    variant: str
    label: str
    weighted: bool
    colour: str

    def rows(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Return the clients' rows by this definition."""
        is_of_definition = (
            (frame["run"] == self.run)
            & (frame["metric"] == SENSITIVITY)
            & (frame["variant"] == self.variant)
        )
        return frame[is_of_definition & (frame["client"] != "")]

    def combined(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Return the federation sensitivity of all clients together, seeds x layers."""
        rows = self.rows(frame)
        rows = rows if self.weighted else rows.assign(n_train=1)
        return weighted_mean(rows, ["seed", "layer"]).unstack("layer")[
            list(rows["layer"].unique())
        ]


# --- measuring -------------------------------------------------------------------------------------------------


class Sites:
    """Every client's locally trained model of one round, to be diagnosed; ``round`` 0 is that of the common start."""

    def __init__(
        self, task: runner.Task, models: Mapping[str, nn.Module], round: int
    ) -> None:
        self.task, self.models, self.round = task, models, round
        self.all = {
            client.name: (client.train.x, client.train.y)
            for client in task.data.clients
        }
        self.context = {
            "seed": task.config.execution.seed,
            "round": round,
            "model": "local",
            "split": "train",
        }

    def subset(self, size: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Draw at most ``size`` training samples of each client without replacement; return (x, y) by client."""
        samples_by_client = {}
        for client, (x, y) in self.all.items():
            sample_order = torch.randperm(
                len(y),
                generator=torch_generator(
                    self.task.config.execution.seed, "figure subset", client
                ),
            )
            samples_by_client[client] = (x[sample_order[:size]], y[sample_order[:size]])
        return samples_by_client

    def frame(
        self,
        metric: str | Sequence[str],
        data: Any = None,
        batch: int = 256,
        **options: Any,
    ) -> pd.DataFrame:
        """Return rows of one metric, or of several that share a pass and the options, on the clients' own data."""
        config, metrics = (
            self.task.config,
            [metric] if isinstance(metric, str) else metric,
        )
        arguments: dict[str, Any] = {
            "loss": self.task.criterion,
            "batch": batch,
            "seed": config.execution.seed,
            "options": {
                **{metric_name.rpartition(":")[2]: options for metric_name in metrics},
                "by": config.model.layer_granularity,
                "n_train": dict(zip(self.models, self.task.data.weights, strict=True)),
                "context": self.context,
            },
            "progress": False,
        }
        # not diagnose, which also scores every model on every client's samples for its first sentence
        report = measure_models(
            self.models,
            self.all if data is None else data,
            Request.of(metrics, arguments),
        )
        return report.frame


class Epoch(Sites):
    """Every client after one local epoch from the common start."""

    def __init__(self, task: runner.Task) -> None:
        models, self.recorded = runner.train_first_round(
            task, measure.instruments().observers
        )
        super().__init__(task, models, 0)

    def sensitivity(self, variant: str) -> pd.DataFrame:
        """Return rows of every client's sensitivity by one definition: ``training``, ``figure`` or ``after``."""
        if variant == "figure":
            frame = self.frame(f"figures.player_fl.released:{SENSITIVITY}")
        elif variant == "training":
            client_weights = dict(zip(self.models, self.task.data.weights, strict=True))
            step_rows = recorded_rows(
                self.recorded, self.task.layers, n_train=client_weights
            )
            frame = rows.frame({**row, **self.context} for row in step_rows)
        else:
            frame = self.frame(SENSITIVITY)
        return frame[(frame["variant"] == variant) & (frame["client"] != "")]


def after_run(task: runner.Task) -> Sites:
    """Return every client's model of a run's last round, after local training and before aggregation.

    The run is kept in a temporary folder while it lasts.
    """
    with TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        engine = runner.run(
            task.config,
            path,
            loaded=task.data,
            instruments=measure.instruments,
            progress=False,
        )
        models, _ = load_models(path, "last", "local")
    return Sites(task, models, engine.done)


# --- curves ----------------------------------------------------------------------------------------------------


def curves(
    frame: pd.DataFrame, metric_name: str, variant: str, relative_to: str = ""
) -> pd.DataFrame:
    """Return curves of all clients and seeds, layers x (seed, client).

    Args:
        relative_to: divide each curve by its ``first`` or its smallest (``min``) value; empty for neither.

    A curve whose reference is not above 0 has no values.
    """
    rows = frame[
        (frame["metric"] == metric_name)
        & (frame["variant"] == variant)
        & (frame["client"] != "")
    ]
    layers = list(rows["layer"].unique())
    curve_table = (
        rows.pivot(index="layer", columns=["seed", "client"], values="value")
        .loc[layers]
        .astype(float)
    )
    if relative_to:
        reference = curve_table.iloc[0] if relative_to == "first" else curve_table.min()
        curve_table = curve_table / reference.where(reference > 0)
    return curve_table


def dissimilarity(frame: pd.DataFrame, metric_name: str = "cka") -> pd.DataFrame:
    """Return the mean distance of each client to the others by 1 - CKA or ``"procrustes"`` angles.

    The table is layers x (seed, client).
    """
    pair_rows = frame[(frame["metric"] == metric_name) & (frame["client_b"] != "")]
    pairs_by_seed = {
        seed: both_ways(seed_pairs.assign(value=seed_pairs["value"].astype(float)))
        for seed, seed_pairs in pair_rows.groupby("seed")
    }
    distances_by_seed = {
        seed: (1 - seed_pairs["value"] if metric_name == "cka" else seed_pairs["value"])
        .groupby([seed_pairs["layer"], seed_pairs["client"]])
        .mean(skipna=False)
        .unstack()
        for seed, seed_pairs in pairs_by_seed.items()
    }
    return pd.concat(distances_by_seed, axis=1).loc[list(pair_rows["layer"].unique())]


# --- published and measured ------------------------------------------------------------------------------------


def read_off(
    dataset: str, quantity: str, layers: Sequence[str], place: str = "Fig"
) -> pd.DataFrame:
    """Return the published range over clients, layers x (low, high, how), empty without one. ``attrs`` names the place.

    Args:
        place: how the place begins, of which there is one at most.
    """
    published_rows = items.published("player_fl")
    published_rows = published_rows[
        (published_rows["dataset"] == dataset)
        & (published_rows["quantity"] == quantity)
        & published_rows["place"].str.startswith(place)
    ]
    ranges = published_rows.set_index("layer").reindex(layers)[["low", "high", "how"]]
    place_texts = published_rows["place"] + ", " + published_rows["how"]
    ranges.attrs["where"] = "".join(place_texts.head(1))
    return ranges


def lines_beside(
    quantity: str,
    definition: str,
    reference: pd.DataFrame,
    values: pd.DataFrame,
    population: str,
    whole_range: bool = False,
) -> list[dict[str, Any]]:
    """Return table rows of curves (layers x curves) with a reference. ``population`` names what the medians are over.

    The measured bounds are the 5th and 95th percentile of the curves, or the least and greatest value.
    """
    if whole_range:
        low, high, bounds_name = (0.0, 1.0, "range")
    else:
        low, high, bounds_name = (0.05, 0.95, "5-95 % range")
    return [
        {
            "quantity": quantity,
            "definition": definition,
            "layer": layer,
            "published_low": reference.loc[layer, "low"],
            "published_high": reference.loc[layer, "high"],
            "published_where": reference.attrs["where"],
            "measured": values.loc[layer].median(),
            "measured_low": values.loc[layer].quantile(low),
            "measured_high": values.loc[layer].quantile(high),
            "measured_what": f"median and {bounds_name} over {population}",
        }
        for layer in values.index
    ]


def cuts(
    combined: pd.DataFrame, thresholds: Sequence[float] = select.THRESHOLDS
) -> pd.DataFrame:
    """Count the seeds in which each layer is the last shared one, thresholds x layers, from S (seeds x layers).

    A seed in which a value is missing decides nothing and is counted under ``no decision``.
    """
    column_names = [*combined.columns[:-1], "no decision"]
    seed_counts = pd.DataFrame(0, index=list(thresholds), columns=column_names)
    for seed_values in combined.to_numpy(dtype=np.float64):
        for threshold in thresholds:
            is_finite = bool(np.isfinite(seed_values).all())
            last_shared = "no decision"
            if is_finite:
                last_shared = column_names[
                    select.sensitivity_ratio(seed_values.tolist(), threshold) - 1
                ]
            seed_counts.loc[threshold, last_shared] += 1
    if seed_counts["no decision"].any():
        return seed_counts
    return seed_counts.drop(columns="no decision")


def cut_lines(
    definition: Definition, counts: pd.DataFrame, place_text: str
) -> list[dict[str, Any]]:
    """Return table rows of :func:`cuts`; ``place_text`` says what the paper has."""
    seed_count = int(counts.iloc[0].sum())
    return [
        {
            "quantity": CUTS,
            "definition": definition.label,
            "layer": layer,
            "threshold": threshold,
            "published_where": place_text,
            "measured": cut_count,
            "measured_what": f"of {seed_count} seeds",
        }
        for (threshold, layer), cut_count in counts.stack().items()
    ]


CUTS = "seeds with this last shared layer"
"""The quantity of :func:`cut_lines`."""
BY_LAYER = "Medians by layer, with the published range in brackets:"


def by_layer(curve_rows: pd.DataFrame, headings: Mapping[str, str]) -> str:
    """Return a Markdown table of medians by layer, with the published range in brackets.

    Args:
        curve_rows: rows of :func:`lines_beside`.
        headings: columns of ``curve_rows`` that name a row of the table, and their headings.
    """
    layers = list(dict.fromkeys(curve_rows["layer"]))
    columns: dict[str, list[str]] = {
        heading: [] for heading in (*headings.values(), *layers)
    }
    for group_key, group_rows in curve_rows.groupby(
        list(headings), sort=False, dropna=False
    ):
        cell_by_layer = {
            row.layer: _with_range(row.measured, row.published_low, row.published_high)
            for row in group_rows.itertuples()
        }
        for heading, cell in zip(
            columns,
            (*group_key, *(cell_by_layer.get(layer, "–") for layer in layers)),
            strict=True,
        ):
            columns[heading].append(cell)
    return markdown(columns)


def _with_range(value: float, low: float, high: float) -> str:
    if pd.isna(low):
        return f"{value:.3g}"
    if low == high:
        return f"{value:.3g} ({low:g})"
    return f"{value:.3g} ({low:g}-{high:g})"


def decides(
    definition: Definition,
    counts: pd.DataFrame,
    threshold: float,
    layer: str,
    least_share: float,
) -> Finding:
    """Return whether ``layer`` is the last shared one in more than ``least_share`` of the seeds, by its interval."""
    n, layer_count = int(counts.loc[threshold].sum()), int(counts.loc[threshold, layer])
    counts_text = ", ".join(
        f"{counted_layer} in {seed_count}"
        for counted_layer, seed_count in counts.loc[threshold].items()
        if seed_count
    )
    share = share_interval(layer_count, n)
    return Finding(
        f"{definition.label}: threshold {threshold:g} makes {layer} the last shared layer in more than "
        f"{least_share:.0%} of "
        "the seeds",
        f"of {n} seeds {counts_text}; 95 % interval of {layer}'s share {share.low:.0%} to {share.high:.0%}",
        beyond(share, least_share),
    )


def settings(header: Mapping[str, Any], run: str) -> str:
    """Describe in words how a run was trained."""
    config = header["runs"][run]["config"]
    optimizer_text = config["optimizer"] + (" (amsgrad)" if config["amsgrad"] else "")
    loss_name = config["loss"].replace("_", " ")
    return (
        f"{loss_name} and {optimizer_text} (lr {config['lr']:g}, "
        f"weight decay {config['weight_decay']:g}, batch {config['batch_size']})"
    )
