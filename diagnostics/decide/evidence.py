"""How certain a plan is: nulls, and resampled clients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from fl_core.errors import RunError, UsageError, listing
from fl_core.plan import LayerPlan
from fl_core.seeds import numpy_generator

from ..null import NULLS, kept_in, nulls_in
from .curve import Curve
from .rules.base import Rule


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
    try:
        plan = decide(rows)
    except (
        RunError,
        UsageError,
    ) as error:  # a null may have no values to decide on: an untrained model has no updates
        return {
            "shared": [],
            "values": [],
            "variant": "",
            "decided": False,
            "status": str(error),
        }
    why = plan.why
    shared, values = list(plan.shared), list(why.values)
    return {
        "shared": shared,
        "values": values,
        "variant": why.variant,
        "decided": True,
        "status": why.status,
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
