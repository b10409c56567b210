"""The curve of layers that a rule reads, and checks of how certain its decision is.

The checks repeat the decision on nulls, and on resampled clients.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from statistics import fmean
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fl_core.display import natural
from fl_core.errors import RunError, UsageError, check_known, listing, read_as
from fl_core.plan import Layer, LayerPlan
from fl_core.seeds import numpy_generator

from .metrics import facts_of, known_metrics
from .null import kept_in, nulls_in, resamples_of, split_resamples

SENSITIVITY = "federation_sensitivity"


@dataclass(frozen=True)
class Curve:
    """Values of each client and their weighted mean, for the layers in use that are not frozen, input to output.

    Attributes:
        metric, variant: the metric and the variant of the values.
        names: the names of the L layers.
        clients: client -> its values [L]. For a metric of pairs they are the means over
            the client's pairs.
        weights: client -> its weight: training samples, or 1 for a metric of pairs.
        combined: sum_c p_c v^c, [L], with p_c = w_c / sum w.
        seed: seed of the measurement, if the rows have one.
        measured: (client,) or both clients of a pair -> the measured values [L]. Those
            of a pair are distances.
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

    def resample(
        self,
        times: Mapping[str, NDArray[np.int64]],
        random: np.random.Generator,
        at: NDArray[np.float64],
    ) -> NDArray[np.float64]:
        """Return the weighted mean of clients' values in each of R resamples, [R, L].

        Values are NaN for a resample in which no client or pair counts.

        Each client counts ``times`` times. Its values are those of one resample of its batches, which the fraction
        ``at`` selects. Without resamples, normal errors are added to its measured values. A pair weighs as the product
        of its two clients' numbers.

        Args:
            times: client -> its number in each resample, [R].
            random: source of the normal errors.
            at: a fraction for each resample, [R], 0 to below 1.
        """
        total, weights = np.zeros((len(at), len(self.names))), np.zeros(len(at))
        for clients, measured_values in self.measured.items():
            weight = self.weights[clients[0]] * np.prod(
                [times[name] for name in clients], 0
            )
            if clients in self.redrawn:
                curves = np.array(self.redrawn[clients])
                values = curves[(at * len(curves)).astype(int)]
            else:
                values = np.tile(measured_values, (len(at), 1))
                errors = self.errors.get(clients, ())
                if any(errors):
                    values = random.normal(values, errors)
            values[weight == 0] = 0.0  # where it is not finite
            total += weight[:, None] * values
            weights += weight
        with np.errstate(invalid="ignore"):
            return total / weights[:, None]


_CONTEXT = ("run", "algorithm", "seed", "round", "model", "split")
_KEY = ["client", "client_b", "layer"]
_RESULT = ["value", "status", "n_train"]


def both_ways(rows: pd.DataFrame) -> pd.DataFrame:
    """Return all rows, and those of pairs of clients once more with the columns ``client`` and ``client_b`` swapped."""
    swapped_names = {"client": "client_b", "client_b": "client"}
    pairs = rows[rows["client_b"] != ""].rename(columns=swapped_names)
    return pd.concat([rows, pairs], ignore_index=True)


def layers_in(header: Mapping[str, Any]) -> tuple[Layer, ...]:
    """Return the model's layers as the rows' header lists them.

    Raises:
        UsageError: the header has no layers, or they are damaged.
    """
    if not header.get("layers"):
        raise UsageError(
            "rows must be of a diagnosis, which has layers; got a header without, such as of a run's scores. Measure "
            "the run's layers first: fedlayers diagnose RUN."
        )
    return read_as(tuple[Layer, ...], header["layers"], "a report")


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
    metric's own: its first that was measured. For federation sensitivity, it is
    PLayer-FL's variant, measured in training, if the rows have it.

    Args:
        layers: all layers of the model, from input to output.
        table: rows of a diagnosis. Rows of nulls are not read.
        metric: name of the metric.
        variant: the variant of the metric. Default: see above.
        pairs: for metrics whose code is missing here: name -> ``distance`` or ``similarity`` of two clients, as in a
            diagnosis's header. A metric that is not listed is a similarity.

    Raises:
        UsageError: the metric or variant does not exist, there are several variants, rounds, models or seeds, rows or
            sizes are missing, fewer than two layers are in use, or a layer without weights has no value.
        RunError: another layer has no value at a client. The message gives the row's status.
    """
    whole_network = metric in {*table["metric"]}
    table, resamples = split_resamples(table[table["layer"] != ""])
    if table.empty and whole_network:
        raise UsageError(
            f"the metric must have values of layers for a rule; got {metric}, which has one of the whole network. "
            "Choose another metric."
        )
    if table.empty:
        raise UsageError(
            "rows must be of a diagnosis, with values of layers; got none, as in a run's scores. "
            "Measure the run's layers first: fedlayers diagnose RUN."
        )
    if metric in known_metrics() and metric not in {*table["metric"]}:
        raise UsageError(
            f"the rows must hold {metric}, which the rule reads; got {listing(table['metric'].unique())}. "
            f"Measure it: metrics=[{metric!r}]."
        )
    table = table[
        table["metric"]
        == check_known("metric among the rows", metric, table["metric"].unique())
    ]
    variant = _variant(table, metric, variant)
    table = table[table["variant"] == variant]
    client_rows = table[table["client"] != ""]
    if client_rows.empty:
        raise UsageError(
            f"the rows hold no {metric} of single clients (status: {listing(table['status'].unique())})"
        )
    client_rows = _one_measurement(client_rows)
    is_paired = bool((client_rows["client_b"] != "").any())
    metric_facts = facts_of(metric)
    if metric not in known_metrics():
        metric_facts = replace(
            metric_facts, distance=(pairs or {}).get(metric) == "distance"
        )
    used_layers = [layer for layer in layers if layer.used and not layer.is_frozen]
    if len(used_layers) < 2:
        raise UsageError(
            f"layers that train must be at least 2 for a rule to choose between; got {len(used_layers)} layer. "
            "Use a deeper model."
        )
    names = tuple(layer.name for layer in used_layers)
    measured_values: dict[tuple[str, ...], list[float]] = {}
    errors: dict[tuple[str, ...], list[float]] = {}
    rows: dict[tuple[str, ...], dict[str, Mapping[Any, Any]]] = {}
    for row in client_rows[[*_KEY, *_RESULT, "stderr"]].to_dict("records"):
        pair = row["client"], row["client_b"]
        rows.setdefault(pair if pair[1] else pair[:1], {})[row["layer"]] = row
    for client_key, by_layer in rows.items():
        values = [
            _value(by_layer.get(e.name), e, client_key[0], metric) for e in used_layers
        ]
        if len(client_key) == 1:
            measured_values[client_key] = values
        else:
            measured_values[client_key] = [*map(metric_facts.to_distance, values)]
        errors_of_client = np.array([by_layer[name]["stderr"] for name in names], float)
        errors[client_key] = np.nan_to_num(errors_of_client).tolist()
    clients, weights = {}, {}
    for client in dict.fromkeys(chain.from_iterable(measured_values)):
        own_pairs = [
            values
            for client_key, values in measured_values.items()
            if client in client_key
        ]
        clients[client] = [fmean(values) for values in zip(*own_pairs, strict=True)]
        rows_of_client = client_rows[client_rows["client"] == client]
        if is_paired:
            weights[client] = 1.0
        else:
            weights[client] = _weight(rows_of_client, client)
    from .sensitivity import combine  # with torch, which pictures go without

    combined = combine(np.array([*clients.values()]), [*weights.values()]).tolist()
    seeds = client_rows["seed"].dropna()
    if seeds.empty:
        seed = None
    else:
        seed = int(seeds.iloc[0])
    resamples = resamples_of(resamples[resamples["metric"] == metric], variant)
    return Curve(
        metric,
        variant,
        names,
        clients,
        weights,
        combined,
        seed,
        measured_values,
        errors,
        _resampled_values(resamples, names),
    )


def _resampled_values(
    resample_rows: pd.DataFrame, names: Sequence[str]
) -> dict[tuple[str, ...], list[list[float]]]:
    """Return each client's values in B resamples of its batches, {(client,): [B, L]}.

    A value is NaN if a resample lacks it.
    """
    values_of: dict[tuple[str, ...], list[list[float]]] = {}
    for client, client_rows in resample_rows.drop_duplicates(
        ["client", "layer", "resample"]
    ).groupby("client", sort=False):
        values = client_rows.pivot(index="resample", columns="layer", values="value")
        values_of[(str(client),)] = (
            values.reindex(columns=list(names)).to_numpy(float).tolist()
        )
    return values_of


def _variant(table: pd.DataFrame, metric: str, variant: str | None) -> str:
    measured_variants = list(table["variant"].unique())
    if variant is not None:
        return check_known(f"variant of {metric}", variant, measured_variants)
    preferred = facts_of(metric).preferred
    chosen_variant = next(
        (name for name in preferred if name in measured_variants), measured_variants[0]
    )
    if chosen_variant not in preferred and len(measured_variants) > 1:
        raise UsageError(
            f"The rows hold several variants of {metric}: {listing(measured_variants)}. Name one."
        )
    return chosen_variant


def _one_measurement(table: pd.DataFrame) -> pd.DataFrame:
    """Return the rows, checked to hold each client (or pair) and layer once.

    Equal rows count once. Rounds, models or seeds with equal values count as one, too.

    Raises:
        UsageError: runs, algorithms, rounds, models, seeds or splits have different
            values, or a layer has two values at one client or pair.
    """
    varying = [name for name in _CONTEXT if table[name].nunique(dropna=False) > 1]
    if varying:
        parts = [
            table_part
            for _, table_part in table.groupby(varying, dropna=False, sort=False)
        ]
        contents = [
            table_part[[*_KEY, *_RESULT]].reset_index(drop=True) for table_part in parts
        ]
        if not all(content.equals(contents[0]) for content in contents):
            differences = []
            for name in varying:
                values = listing(map(str, table[name].unique()), 6)
                differences.append(f"{name} ({values})")
            columns = ", ".join(differences)
            raise UsageError(
                f"The rows hold more than one {columns}. Keep the rows of one of them."
            )
        table = parts[0]
    table = table.drop_duplicates([*_KEY, *_RESULT])
    repeated_rows = table[table.duplicated(_KEY)]
    if not repeated_rows.empty:
        client, client_b, layer = repeated_rows.iloc[0][_KEY]
        if client_b:
            client_text = f"clients {client!r} and {client_b!r}"
        else:
            client_text = f"client {client!r}"
        raise UsageError(
            f"The rows hold two different values of layer {layer!r} at {client_text}. Keep one of them."
        )
    return table


def _value(
    row: Mapping[Any, Any] | None, layer: Layer, client: str, metric: str
) -> float:
    """Return the value of a client's row of a layer, checked to be there.

    Raises:
        UsageError: there is no row, or no value for a layer without trainable weights.
        RunError: another layer has no value. The message gives the row's status.
    """
    if row is None:
        raise UsageError(
            f"the rows hold no {metric} of layer {layer.name!r} at client {client!r}"
        )
    value, reason = float(row["value"]), row["status"]
    if reason == "ok" and math.isfinite(value):
        return value
    if reason == "ok":
        reason = "the value is not finite"
    message = f"layer {layer.name!r} has no {metric} at client {client!r}: {reason}"
    if set(layer.weights) - set(layer.frozen):
        raise RunError(message)
    raise UsageError(
        f"{message}. Group it with another layer, or name the shared layers (rule 'manual')."
    )


def _weight(rows: pd.DataFrame, client: str) -> float:
    sizes = rows["n_train"].unique()
    if len(sizes) > 1 or bool(pd.isna(sizes[0])):
        raise UsageError(
            f"The rows of client {client!r} must have its number of training samples (n_train). Measure again."
        )
    return float(sizes[0])


# --- how certain a decision is ---------------------------------------------------------------------------------


def against_nulls(
    plan: LayerPlan, table: pd.DataFrame, decide: Callable[[pd.DataFrame], LayerPlan]
) -> LayerPlan:
    """Return the plan, with the decisions on each null's rows added to its evidence.

    The plan stays as it is if there are no such rows. The evidence's ``detail["null"]`` has these keys for each null:

    * ``same``: whether every draw gives the same plan
    * ``same_draws``, ``draws``: number of draws with the same plan, and of all draws
    * ``kept``: whether models of the real data were measured on the null

    These keys describe the first draw with a plan, or the first draw if none has one:

    * ``shared``: the layers that it would share
    * ``values``, ``variant``: the curve in the plan's order, and its variant. Both are
      empty without a plan, and a layer outside the curve has None.
    * ``decided``: whether there is a plan
    * ``status``: the plan's, or why there is no plan

    Args:
        plan: the plan from the rows of the measurement itself.
        table: all rows, also those of nulls.
        decide: a function that makes a plan of rows. It is called for each draw.
    """
    nulls = {
        null: [_decision(rows, decide) for rows in draws]
        for null, draws in nulls_in(table).items()
    }
    if not nulls:
        return plan
    detail, kept_nulls = {}, kept_in(table)
    for null, draws in nulls.items():
        n_same = sum(
            draw["decided"] and draw["shared"] == list(plan.shared) for draw in draws
        )
        first_draw = next((draw for draw in draws if draw["decided"]), draws[0])
        null_detail = {
            "same": n_same == len(draws),
            "same_draws": n_same,
            "draws": len(draws),
            "kept": null in kept_nulls,
        }
        detail[null] = {**null_detail, **first_draw}
    return replace(
        plan, why=replace(plan.why, detail={**plan.why.detail, "null": detail})
    )


def _decision(
    rows: pd.DataFrame, decide: Callable[[pd.DataFrame], LayerPlan]
) -> dict[str, Any]:
    shared: list[str] = []
    values: list[float | None] = []
    variant, has_plan = "", False
    try:
        plan = decide(rows)
    except (RunError, UsageError) as error:
        status = str(error)  # such as for an untrained model, which has no updates
    else:
        evidence = plan.why
        shared, values = list(plan.shared), list(evidence.values)
        variant, has_plan, status = evidence.variant, True, evidence.status
    return {
        "shared": shared,
        "values": values,
        "variant": variant,
        "decided": has_plan,
        "status": status,
    }


RESAMPLES = 500


def stability(
    curve: Curve,
    cut: Callable[[Sequence[float], float], int],
    threshold: float,
    chosen: int,
    seed: int,
    resamples: int = RESAMPLES,
) -> dict[str, Any]:
    """Return how often the decision stays the same when clients and their batches are drawn again.

    The bootstrap has two stages. Each resample first draws the number of all clients,
    with replacement. Then it draws one of the resamples of their batches
    (:mod:`diagnostics.null`). If the rows have no resamples, it adds independent normal
    errors of the rows' standard errors, as far as they are known. It combines the
    values and decides. A pair of clients counts as the product of their counts. A
    client has no pair with itself.

    Args:
        curve: the curve of all clients.
        cut: the rule: (values, threshold) -> number of shared layers.
        threshold: the rule's threshold.
        chosen: the number of shared layers that all clients together give.
        seed: seed of the resamples.
        resamples: their number.

    Returns:
        A dict with these keys:

        * ``status``: ``ok``, or why nothing was resampled. Without ``ok`` there is no other key.
        * ``resamples``: their number
        * ``of``: what was resampled, in words. It names the clients with resampled batches, unless all have them.
        * ``cuts``: layer -> share of the resamples in which it is the last one shared
        * ``agreement``: share of the resamples that decide as all clients do, 0 to 1
        * ``undecided``: share without a decision, because a value was not finite or not
          above 0, or no pair of clients was drawn
    """
    clients = sorted(curve.clients, key=natural)  # their order changes no draw
    resampled_kinds = ["clients"] * (len(clients) > 1)
    if curve.redrawn:
        redrawn_clients = [client for client in clients if (client,) in curve.redrawn]
        resampled_kinds.append(
            "batches"
            if redrawn_clients == clients
            else f"batches of {listing(redrawn_clients)}"
        )
    uncertain_errors = [
        v for client_key, v in curve.errors.items() if client_key not in curve.redrawn
    ]
    resampled_kinds += ["measurement errors"] * any(map(any, uncertain_errors))
    if not resampled_kinds:
        return {
            "status": "one client and no measurement errors or resampled batches: nothing to resample"
        }
    random = numpy_generator(seed, "stability")
    counts = random.multinomial(
        len(clients), [1 / len(clients)] * len(clients), size=resamples
    )
    fractions = np.zeros(resamples)
    if curve.redrawn:
        fractions = random.random(resamples)
    averages = curve.resample(
        dict(zip(clients, counts.T, strict=True)), random, fractions
    )
    has_decision = (np.isfinite(averages) & (averages > 0)).all(1)
    tally = Counter(
        cut(values, threshold) for values in averages[has_decision].tolist()
    )
    return {
        "status": "ok",
        "resamples": resamples,
        "of": " and ".join(
            [", ".join(resampled_kinds[:-1]), resampled_kinds[-1]]
            if resampled_kinds[:-1]
            else resampled_kinds
        ),
        "cuts": {
            curve.names[count - 1]: tally[count] / resamples for count in sorted(tally)
        },
        "agreement": tally[chosen] / resamples,
        "undecided": 1 - sum(tally.values()) / resamples,
    }
