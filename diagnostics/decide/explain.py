"""A plan in words: the decision, the numbers behind it, and on request its stability and its cost."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import pandas as pd

from fl_core.display import MANY, in_order
from fl_core.errors import listing
from fl_core.plan import LayerPlan

from ..metrics.base import metric_or_placeholder
from .evidence import in_words


def explain(plan: LayerPlan, *, full: bool = False) -> str:
    """Describe a plan: its curve as a table, each client's own choice, and the decisions by other thresholds.

    Args:
        full: also show each client's own curve, how often the decision stays over resamples of the clients and their
            batches, the conclusion from each measured null, and the plan's cost in a round.
    """
    why = plan.why
    subject = f" on {why.metric}" if why.metric else ""
    subject += f" ({why.variant})" if why.variant else ""
    limit = f", threshold {why.threshold:g}" if why.threshold is not None else ""
    parts = [
        f"{why.rule}{subject}{limit}: {len(plan.shared)} of {len(plan.layers)} layers are federated",
        _table(plan),
    ]
    if why.race is not None:
        parts.append("\n".join(why.race.lines()))
    if full and why.clients:
        parts.append("Each client's own values:\n" + _clients(plan))
    if why.votes:
        parts.append(
            "Last shared layer by each client's own values:\n"
            + _tally(why.votes, plan, "clients")
        )
    if why.alternatives:
        parts.append(
            "Last shared layer by another threshold or rule:\n"
            + _tally(why.alternatives, plan)
        )
    if full and why.detail.get("stability"):
        parts.append(_stability(why.detail["stability"]))
    if why.detail.get("null"):
        parts.append(in_words(why.detail["null"], why.variant, full))
    if full and why.detail.get("cost"):
        parts.append(_cost(why.detail["cost"], plan))
    if why.status != "ok":
        parts.append(f"Note: {why.status}")
    origin = [
        f"{what} {value}"
        for what, value in (
            ("seed", "" if why.seed is None else why.seed),
            ("data", why.data[:12]),
            ("checkpoint", why.checkpoint[:12]),
            ("version", why.version),
        )
        if value != ""
    ]
    if origin:
        parts.append("Measured with " + ", ".join(origin))
    return "\n\n".join(parts)


def _table(plan: LayerPlan) -> str:
    why, values = plan.why, dict(zip(plan.names, plan.why.values, strict=False))
    measured = [(name, value) for name, value in values.items() if value is not None]
    steps = {
        name: after / this
        for (name, this), (_, after) in pairwise(measured)
        if this != 0
    }
    limit = math.inf
    if why.rule == "sensitivity_ratio" and why.threshold is not None:
        limit = why.threshold
    above = next((name for name, step in steps.items() if step > limit), None)
    metric = metric_or_placeholder(why.metric)
    similarity = metric.pairs and not metric.distance
    symbol = metric.look.symbol or (f"1 - {metric.name}" if similarity else "value")
    width = max(len(name) for name in (*plan.names, "layer"))
    lines = [f"  {'layer':<{width}}  {symbol:>9}  {'next/this':>9}"] if measured else []
    written = {name: f"{value:.4g}" for name, value in measured}
    for layer in plan.layers:
        step = f"{steps[layer.name]:.3f}" if layer.name in steps else ""
        numbers = f"  {written.get(layer.name, ''):>9}  {step:>9}" if measured else ""
        shared = "federated" if layer.name in plan.shared else "local"
        note = "frozen" if layer.is_frozen else ""
        note = note if layer.used else "not in the forward pass"
        note = f"first above {limit:g}" if layer.name == above else note
        lines.append(f"  {layer.name:<{width}}{numbers}  {shared:<9}  {note}".rstrip())
    return "\n".join(lines)


def _tally(choices: Mapping[str, str], plan: LayerPlan, unit: str = "") -> str:
    """List which clients choose which layer, one line per layer in the plan's order."""
    groups = {
        name: [who for who, choice in choices.items() if choice == name]
        for name in plan.names
    }
    groups = {
        name: in_order(who) if unit else who for name, who in groups.items()
    }  # thresholds stand as they grow
    width = max(len(name) for name, who in groups.items() if who)
    count = {
        name: f"{len(who)} of {len(choices)} {unit}: " if unit else ""
        for name, who in groups.items()
    }
    return "\n".join(
        f"  {name.ljust(width)}  {count[name]}{listing(who)}"
        for name, who in groups.items()
        if who
    )


def _clients(plan: LayerPlan) -> str:
    """Format a table of layers by clients; for many clients the lowest, the median and the highest."""
    columns = {name: plan.why.clients[name] for name in in_order(plan.why.clients)}
    table = pd.DataFrame(columns, index=plan.names, dtype=float).dropna()
    if len(columns) > MANY:
        ends = {"lowest": 0.0, "median": 0.5, "highest": 1.0}
        table = table.quantile(list(ends.values()), axis=1, interpolation="higher").T
        table.columns = pd.Index(ends)
    table.columns.name = "layer"
    lines = table.to_string(float_format="{:.4g}".format).splitlines()
    return "\n".join(f"  {line}".rstrip() for line in lines)


def _stability(stability: Mapping[str, Any]) -> str:
    if stability["status"] != "ok":
        return f"Stability: {stability['status']}"
    shares = [f"{name} {share:.1%}" for name, share in stability["cuts"].items()]
    shares += (
        [f"no decision {stability['undecided']:.1%}"]
        if stability["undecided"] > 1e-9
        else []
    )
    head = f"Last shared layer over {stability['resamples']} resamples of the {stability['of']}"
    lines = [
        f"{head}:",
        f"  the same as here in {stability['agreement']:.1%}",
        f"  {', '.join(shares)}",
    ]
    absent = "batches were not resampled: diagnose --resamples N, with at least 2 batches for each client"
    lines += [f"  ({absent})"] * ("batches" not in stability["of"])
    return "\n".join(lines)


def _cost(cost: Mapping[str, Any], plan: LayerPlan) -> str:
    """Describe the bytes of each layer, then the plan's bytes compared with sharing everything."""
    width = max(map(len, cost["layers"]))
    lines = [
        f"  {name:<{width}}  {value:>14,.0f}  {'federated' if name in plan.shared else 'local'}"
        for name, value in cost["layers"].items()
    ]
    saved = 1 - cost["shared"] / cost["all"] if cost["all"] else 0.0
    total = f"  federated: {cost['shared']:,.0f} of {cost['all']:,.0f} bytes"
    total += f"; saves {saved:.1%} against sharing every layer"
    return "\n".join(
        ["Bytes that a client uploads a round, and as many down:", *lines, total]
    )
