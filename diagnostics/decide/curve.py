"""From rows to the curve that a rule reads: one value per layer, for each client and averaged over clients."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fl_core.errors import RunError, UsageError, check_known, listing
from fl_core.layers import Layer
from fl_core.plan import layer_from_json
from fl_core.rows import read

from ..gradients.sensitivity import combine
from ..metrics.base import METRICS, metric_or_placeholder
from ..null import resamples_of, split_resamples

if TYPE_CHECKING:
    from ..report import Report

SENSITIVITY = "federation_sensitivity"


Rows: TypeAlias = "Path | str | Report | tuple[Mapping[str, Any], pd.DataFrame]"
"""A diagnosis: its file, its report, or its header and all rows, resamples included."""


@dataclass(frozen=True)
class Curve:
    """Values of each client and their weighted mean, for the layers in use that are not frozen, input to output.

    Attributes:
        metric, variant: what was measured.
        names: the layers, L of them.
        clients: client -> its values [L].
        weights: client -> its weight: training samples, or 1 for a metric of pairs.
        combined: sum_c p_c v^c, [L], with p_c = w_c / sum w.
        seed: seed of the measurement, if the rows have one.
        measured: (client,) or both clients of a pair -> the measured values [L].
        errors: the same keys -> standard errors [L]. 0 means exact or unknown.
        redrawn: the same keys -> the values in each resample of the batches, [B, L]. Empty without resamples.
    """

    metric: str
    variant: str
    names: tuple[str, ...]
    clients: dict[str, list[float]]
    weights: dict[str, float]
    combined: list[float]
    seed: int | None
    measured: dict[tuple[str, ...], list[float]] = field(default_factory=dict)
    errors: dict[tuple[str, ...], list[float]] = field(default_factory=dict)
    redrawn: dict[tuple[str, ...], list[list[float]]] = field(default_factory=dict)

    @property
    def noisy(self) -> bool:
        """True if a value has a standard error and no resamples replace it."""
        return any(
            any(errors)
            for who, errors in self.errors.items()
            if who not in self.redrawn
        )

    def resample(
        self, times: Mapping[str, int], random: np.random.Generator, at: float = 0.0
    ) -> NDArray[np.float64] | None:
        """Return the averaged values [L] of a resample; None without any value.

        Each client counts ``times`` times, with its values measured again. They come from the resample of its batches
        at the fraction ``at`` (0 to below 1), the same for all clients. Without resamples, normal errors are added to
        its values. A pair weighs as the product of its two clients' numbers.
        """
        weights, values = [], []
        for who, v in self.measured.items():
            weight = math.prod(times[client] for client in who)
            if weight:
                weights.append(weight * self.weights[who[0]])
                errors = self.errors.get(who)
                if who in self.redrawn:
                    v = self.redrawn[who][int(at * len(self.redrawn[who]))]
                    values.append(np.asarray(v))
                else:
                    values.append(
                        random.normal(v, errors)
                        if errors and any(errors)
                        else np.asarray(v)
                    )
        return None if not weights else np.average(values, axis=0, weights=weights)


_CONTEXT = ("run", "algorithm", "seed", "round", "model", "split")
_KEY = ["client", "client_b", "layer"]
_RESULT = ["value", "status", "n_train"]


def open_diagnosis(rows: Rows) -> tuple[Mapping[str, Any], pd.DataFrame]:
    """Return header and rows of a diagnosis, read from a file if a path is given."""
    if isinstance(rows, (str, Path)):
        return read(Path(rows))
    if isinstance(rows, tuple):
        header, table = rows
        return header, table
    if isinstance(rows, pd.DataFrame):
        raise UsageError(
            "rows must have a header with the layers; got a table alone. Pass the report or its file."
        )
    return rows.header, rows.table


def both_ways(rows: pd.DataFrame) -> pd.DataFrame:
    """Return rows of pairs of clients, doubled so that each client of a pair comes first once.

    Pairs that were measured in both directions (layers ``against`` another) stay as they are, because their values
    differ.
    """
    two = (rows["client_b"] != "") & (rows["client"] != rows["client_b"])
    turned = rows[two].rename(columns={"client": "client_b", "client_b": "client"})
    pairs, turned_pairs = (
        set(zip(table["client"], table["client_b"], strict=True))
        for table in (rows, turned)
    )
    return (
        rows
        if any(a != b for a, b in pairs & turned_pairs)
        else pd.concat([rows, turned], ignore_index=True)
    )


def layers_in(header: Mapping[str, Any]) -> tuple[Layer, ...]:
    """Return the model's layers as the rows' header lists them.

    Raises:
        UsageError: the header has no layers, or they are damaged.
    """
    if not header.get("layers"):
        raise UsageError(
            "The rows' header has no layers. A plan cannot be made from it."
        )
    if not isinstance(header["layers"], list):
        raise UsageError(
            f"layers of the rows' header must be a list; got {type(header['layers']).__name__}."
        )
    return tuple(layer_from_json(item) for item in header["layers"])


def curve_of(
    layers: Sequence[Layer],
    table: pd.DataFrame,
    metric: str,
    variant: str | None = None,
    pairs: Mapping[str, str] | None = None,
) -> Curve:
    """Return the curve of a metric over the layers in use that are not frozen, from the single clients' rows.

    A metric of pairs gives each client the mean over its pairs. A distance is used as it is, a similarity (cka) as 1 -
    value. So both grow with the difference. The clients of such a metric weigh the same. The default variant is the
    metric's own: its first that was measured. For federation sensitivity, it is PLayer-FL's variant, measured in
    training.

    Args:
        pairs: for metrics whose code is missing here: name -> ``distance`` or ``similarity`` of two clients, as in a
            diagnosis's header. A metric that is not listed is a similarity.

    Raises:
        UsageError: the metric or variant does not exist, there are several variants, rounds, models or seeds, rows or
            sizes are missing, fewer than two layers are in use, or a layer without weights has no value.
        RunError: another layer has no value at a client. The message gives the row's status.
    """
    table, again = split_resamples(table[table["layer"] != ""])
    if table.empty:
        raise UsageError(
            "The rows hold no values of layers. Diagnose the models first."
        )
    if metric in METRICS and metric not in {*table["metric"]}:
        raise UsageError(
            f"the rows must hold {metric}, which the rule reads; got {listing(table['metric'].unique())}. "
            f"Measure it: --metrics {metric}."
        )
    table = table[
        table["metric"]
        == check_known("metric among the rows", metric, table["metric"].unique())
    ]
    variant = _variant(table, metric, variant)
    table = table[table["variant"] == variant]
    of_clients = table[(table["client"] != "") & (table["client"] != table["client_b"])]
    if of_clients.empty:
        raise UsageError(
            f"the rows hold no {metric} of single clients (status: {listing(table['status'].unique())})"
        )
    of_clients = _one_measurement(of_clients)
    paired = bool((of_clients["client_b"] != "").any())
    apart = _distance_function(metric, pairs or {})
    used = [layer for layer in layers if layer.used and not layer.is_frozen]
    if len(used) < 2:
        raise UsageError(
            f"layers that train must be at least 2 for a rule to choose between; got {len(used)} layer. "
            "Use a deeper model."
        )
    rows: dict[tuple[str, str], list[dict[Any, Any]]] = {}
    for row in both_ways(of_clients).to_dict("records"):
        rows.setdefault((row["client"], row["layer"]), []).append(row)
    names = dict.fromkeys(client for client, _ in rows)
    values = {
        c: [
            _value(rows.get((c, layer.name), []), layer, c, metric, apart)
            for layer in used
        ]
        for c in names
    }
    weights = (
        dict.fromkeys(names, 1.0)
        if paired
        else {c: _weight(of_clients[of_clients["client"] == c], c) for c in names}
    )
    combined = combine(np.array(list(values.values())), list(weights.values())).tolist()
    seeds = of_clients["seed"].dropna()
    seed = None if seeds.empty else int(seeds.iloc[0])
    layer_names = tuple(layer.name for layer in used)
    measured, errors = _measured_values(of_clients, layer_names, apart)
    redrawn = _resampled_values(
        resamples_of(again[again["metric"] == metric], variant), layer_names
    )
    return Curve(
        metric,
        variant,
        layer_names,
        values,
        weights,
        combined,
        seed,
        measured,
        errors,
        redrawn,
    )


def _resampled_values(
    again: pd.DataFrame, names: Sequence[str]
) -> dict[tuple[str, ...], list[list[float]]]:
    """Return each client's resampled values, [B, L].

    A value is NaN if a resample lacks it.
    """
    values_of: dict[tuple[str, ...], list[list[float]]] = {}
    for client, part in again.drop_duplicates(["client", "layer", "resample"]).groupby(
        "client", sort=False
    ):
        values = part.pivot(index="resample", columns="layer", values="value")
        values_of[(str(client),)] = (
            values.reindex(columns=list(names)).to_numpy(float).tolist()
        )
    return values_of


def _measured_values(
    of_clients: pd.DataFrame, names: Sequence[str], apart: Callable[[float], float]
) -> tuple[dict[tuple[str, ...], list[float]], dict[tuple[str, ...], list[float]]]:
    """Return values and standard errors behind a curve, layer by layer, by client or by pair.

    Similarities become distances.
    """
    values: dict[tuple[str, ...], list[float]] = {}
    errors: dict[tuple[str, ...], list[float]] = {}
    for (client, other), part in of_clients.groupby(["client", "client_b"], sort=False):
        who = (client, other) if other else (client,)
        by_layer = part.set_index("layer")
        if set(names) <= set(by_layer.index):
            chosen = by_layer.loc[list(names)]
            values[who] = [
                apart(v) if other else v for v in chosen["value"].astype(float)
            ]
            errors[who] = chosen["stderr"].astype(float).fillna(0.0).tolist()
    return values, errors


def _variant(table: pd.DataFrame, metric: str, variant: str | None) -> str:
    measured = list(table["variant"].unique())
    if variant is not None:
        return check_known(f"variant of {metric}", variant, measured)
    preferred = metric_or_placeholder(metric).preferred
    chosen = next((name for name in preferred if name in measured), measured[0])
    if chosen not in preferred and len(measured) > 1:
        raise UsageError(
            f"The rows hold several variants of {metric}: {listing(measured)}. Name one."
        )
    return chosen


def _one_measurement(table: pd.DataFrame) -> pd.DataFrame:
    """Return the rows, checked to hold each client (or pair) and layer once.

    Several rounds, models or seeds are refused.
    """
    varying = [name for name in _CONTEXT if table[name].nunique(dropna=False) > 1]
    if varying:
        parts = [part for _, part in table.groupby(varying, dropna=False, sort=False)]
        contents = [part[[*_KEY, *_RESULT]].reset_index(drop=True) for part in parts]
        if not all(content.equals(contents[0]) for content in contents):
            differing = (
                f"{name} ({listing(map(str, table[name].unique()), 6)})"
                for name in varying
            )
            raise UsageError(
                f"The rows hold more than one {', '.join(differing)}. Keep the rows of one of them."
            )
        table = parts[0]
    table = table.drop_duplicates([*_KEY, *_RESULT])
    twice = table[table.duplicated(_KEY)]
    if not twice.empty:
        client, other, layer = twice.iloc[0][_KEY]
        who = f"clients {client!r} and {other!r}" if other else f"client {client!r}"
        raise UsageError(
            f"The rows hold two different values of layer {layer!r} at {who}. Keep one of them."
        )
    return table


def _value(
    rows: Sequence[Mapping[Any, Any]],
    layer: Layer,
    client: str,
    metric: str,
    apart: Callable[[float], float],
) -> float:
    """Return a client's value of a layer: the value of its row, or the mean distance over its pairs."""
    if not rows:
        raise UsageError(
            f"the rows hold no {metric} of layer {layer.name!r} at client {client!r}"
        )
    values = []
    for row in rows:
        if row["status"] != "ok" or not math.isfinite(row["value"]):
            reason = (
                row["status"] if row["status"] != "ok" else "the value is not finite"
            )
            message = (
                f"layer {layer.name!r} has no {metric} at client {client!r}: {reason}"
            )
            if set(layer.weights) - set(layer.frozen):
                raise RunError(message)
            raise UsageError(
                f"{message}. Group it with another layer, or name the shared layers (rule 'manual')."
            )
        values.append(apart(row["value"]) if row["client_b"] else row["value"])
    return math.fsum(values) / len(values)


def _distance_function(
    metric: str, pairs: Mapping[str, str]
) -> Callable[[float], float]:
    """Return the function from a metric's value for a pair of clients to their distance."""
    kind = metric_or_placeholder(metric)
    return (
        kind.to_distance
        if metric in METRICS
        else replace(kind, distance=pairs.get(metric) == "distance").to_distance
    )


def _weight(rows: pd.DataFrame, client: str) -> float:
    sizes = rows["n_train"].unique()
    if len(sizes) > 1 or bool(pd.isna(sizes[0])):
        raise UsageError(
            f"The rows of client {client!r} must have its number of training samples (n_train). Measure again."
        )
    return float(sizes[0])
