"""Comparison of a plan with nulls: whether the rule decides the same after the data lose information."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pandas as pd

from fl_core.errors import RunError, UsageError, listing
from fl_core.plan import LayerPlan

from ..null import NULLS, kept_in, nulls_in


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
    if full:
        lines = [
            f"  {_line(_title(null, each), _follows(null, each), each, variant)}"
            for null, each in nulls.items()
        ]
        return "\n".join(["Held against nulls, measured in the same way:", *lines])
    sources: dict[str, list[str]] = {}
    for null, each in nulls.items():
        draws = (
            f" {each['same_draws']} of {each['draws']} draws of"
            if _is_partial(each)
            else ""
        )
        sources.setdefault(f"{_result(each)} comes from{draws}", []).append(
            _title(null, each) + _variant(each, variant)
        )
    return f"Null: {'; '.join(f'{result} {listing(found)}' for result, found in sources.items())}"


def _result(each: Mapping[str, Any]) -> str:
    if each["same_draws"]:
        return "the same plan"
    return "another plan" if each["decided"] else "no plan"


def _is_partial(each: Mapping[str, Any]) -> bool:
    return bool(each["same_draws"]) and not each["same"]


def _variant(each: Mapping[str, Any], variant: str) -> str:
    return (
        f" (variant {each['variant']})"
        if each["variant"] and each["variant"] != variant
        else ""
    )


def _title(null: str, each: Mapping[str, Any]) -> str:
    return NULLS[null].title + " (models trained on the real data)" * bool(
        each.get("kept")
    )


def _follows(null: str, each: Mapping[str, Any]) -> str:
    kept = "measuring on other samples changes nothing; what training made of yours may"
    return kept if each.get("kept") else NULLS[null].same


def _line(title: str, follows: str, each: Mapping[str, Any], variant: str) -> str:
    if not each["decided"]:
        return f"no plan comes from {title}: {each['status']}"
    by = _variant(each, variant) + (
        f" ({each['status']})" if each["status"] != "ok" else ""
    )
    if each["same"]:
        draws = f" in all of {each['draws']} draws" if each["draws"] > 1 else ""
        return f"the same plan comes from {title}{draws}{by}: {follows}"
    if _is_partial(each):
        return f"the same plan comes from {each['same_draws']} of {each['draws']} draws of {title}{by}"
    return f"another plan comes from {title}{by}: it shares {listing(each['shared']) or 'nothing'}"
