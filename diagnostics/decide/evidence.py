"""How certain a plan is, by nulls and resampled clients, and the plan in words."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd

from fl_core.display import MANY, in_order, printable
from fl_core.errors import RunError, UsageError, listing
from fl_core.plan import LayerPlan
from fl_core.seeds import numpy_generator

from ..metrics.base import metric_or_placeholder
from ..null import NULLS, kept_in, nulls_in
from .curve import Curve
from .rules import Rule


def against_nulls(
    plan: LayerPlan, table: pd.DataFrame, decide: Callable[[pd.DataFrame], LayerPlan]
) -> LayerPlan:
    """Return the plan with the decisions of ``decide`` on each null's rows in its evidence.

    The plan stays as it is if there are no such rows. The evidence's ``detail["null"]`` has these keys for each null:

    * ``same``: whether every draw gives the same plan
    * ``same_draws``, ``draws``: number of draws with the same plan, and of all draws
    * ``kept``: whether models of the real data were measured on the null

    These keys describe the first draw with a plan:

    * ``shared``: the layers that it would share
    * ``values``, ``variant``: the curve in the plan's order, empty if the rule reads several, and its variant
    * ``decided``: whether there is a plan
    * ``status``: the plan's, or why there is no plan
    """
    nulls = {
        null: [_decision(rows, decide) for rows in draws]
        for null, draws in nulls_in(table).items()
    }
    if not nulls:
        return plan
    detail, kept = {}, kept_in(table)
    for null, draws in nulls.items():
        same = sum(
            each["decided"] and each["shared"] == list(plan.shared) for each in draws
        )
        first = next((each for each in draws if each["decided"]), draws[0])
        about = {
            "same": same == len(draws),
            "same_draws": same,
            "draws": len(draws),
            "kept": null in kept,
        }
        detail[null] = {**about, **first}
    return replace(
        plan, why=replace(plan.why, detail={**plan.why.detail, "null": detail})
    )


def _decision(
    rows: pd.DataFrame, decide: Callable[[pd.DataFrame], LayerPlan]
) -> dict[str, Any]:
    shared: list[str] = []
    values: list[float | None] = []
    variant, decided = "", False
    try:
        plan = decide(rows)
    except (RunError, UsageError) as error:
        status = str(error)  # such as for an untrained model, which has no updates
    else:
        why = plan.why
        shared, values = list(plan.shared), list(why.values)
        variant, decided, status = why.variant, True, why.status
    return {
        "shared": shared,
        "values": values,
        "variant": variant,
        "decided": decided,
        "status": status,
    }


def in_words(
    nulls: Mapping[str, Mapping[str, Any]], variant: str = "", full: bool = False
) -> str:
    """Describe for each null whether it gives the same plan, in one line or in one line per null.

    Args:
        nulls: the evidence's ``detail["null"]``.
        variant: variant of the metric behind the plan. The text mentions a null that was measured by another variant.
        full: use one line per null, with the conclusion.
    """
    lines = [_line(null, each, variant, full) for null, each in nulls.items()]
    if not full:
        return f"Null: {'; '.join(lines)}"
    head = "Held against nulls, measured in the same way:"
    return "\n".join([head, *(f"  {line}" for line in lines)])


def _line(null: str, each: Mapping[str, Any], variant: str, full: bool) -> str:
    kept = bool(each.get("kept"))
    title = NULLS[null].title + " (models trained on the real data)" * kept
    if each["variant"] not in ("", variant):
        title += f" (variant {each['variant']})"
    if not each["decided"]:
        return f"no plan comes from {title}" + f": {each['status']}" * full
    if each["same_draws"] and not each["same"]:
        return f"the same plan comes from {each['same_draws']} of {each['draws']} draws of {title}"
    if not full:
        return f"{'the same' if each['same'] else 'another'} plan comes from {title}"
    title += f" in all of {each['draws']} draws" * (each["same"] and each["draws"] > 1)
    title += f" ({each['status']})" * (each["status"] != "ok")
    if not each["same"]:
        return f"another plan comes from {title}: it shares {listing(each['shared']) or 'nothing'}"
    follows = (
        "measuring on other samples changes nothing; what training made of yours may"
    )
    return f"the same plan comes from {title}: {follows if kept else NULLS[null].same}"


RESAMPLES = 500


def stability(
    curve: Curve,
    rule: Rule,
    threshold: float,
    chosen: int,
    seed: int,
    resamples: int = RESAMPLES,
) -> dict[str, Any]:
    """Return how often the decision stays the same when clients and their batches are drawn again.

    The bootstrap has two stages. Each resample first draws the number of all clients, with replacement. Then it draws
    one of the resamples of their batches (:mod:`diagnostics.null`). If the rows have no resamples, it adds
    independent normal errors of the rows' standard errors, as far as they are known. It combines the values and
    decides. A pair of clients counts as often as both were drawn. A client has no pair with itself.

    Returns:
        A dict with these keys:

        * ``status``
        * ``resamples``: their number
        * ``of``: what was resampled. It names the clients with resampled batches, unless all have them.
        * ``cuts``: layer -> share of the resamples in which it is the last one shared
        * ``agreement``: share of the resamples that decide as all clients do, 0 to 1
        * ``undecided``: share without a decision, because a value was not above 0 or no pair of clients was drawn
    """
    clients = list(curve.clients)
    of = ["clients"] * (len(clients) > 1)
    if curve.redrawn:
        own = [client for client in clients if (client,) in curve.redrawn]
        of.append("batches" if own == clients else f"batches of {listing(own)}")
    of += ["measurement errors"] * curve.noisy
    if not of:
        return {
            "status": "one client and no measurement errors or resampled batches: nothing to resample"
        }
    random = numpy_generator(seed, "stability")
    counts = random.multinomial(
        len(clients), [1 / len(clients)] * len(clients), size=resamples
    )
    tally: Counter[int] = Counter()
    for drawn in counts.tolist():
        times = dict(zip(clients, drawn, strict=True))
        at = random.random() if curve.redrawn else 0.0
        values = curve.resample(times, random, at)
        if values is not None and np.isfinite(values).all() and (values > 0).all():
            tally[rule.cut(values.tolist(), threshold)] += 1
    return {
        "status": "ok",
        "resamples": resamples,
        "of": " and ".join([", ".join(of[:-1]), of[-1]] if of[:-1] else of),
        "cuts": {
            curve.names[count - 1]: tally[count] / resamples for count in sorted(tally)
        },
        "agreement": tally[chosen] / resamples,
        "undecided": 1 - sum(tally.values()) / resamples,
    }


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
    if why.race:
        parts.append("\n".join(map(printable, why.race)))
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
    width = max(map(len, choices.values()))
    lines = []
    for name in plan.names:
        who = [each for each, choice in choices.items() if choice == name]
        if who and unit:  # thresholds stand as they grow
            said = f"{len(who)} of {len(choices)} {unit}: {listing(in_order(who))}"
        else:
            said = listing(who)
        if who:
            lines.append(f"  {name.ljust(width)}  {said}")
    return "\n".join(lines)


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
