"""From rows to a plan: a named rule decides which layers are federated, and the plan keeps the evidence.

A rule reads one curve. It has a value for each layer in use, from input to output, combined over the clients. The rule
shares the first layers up to the curve's jump. The layers after the jump serve each client's own task and stay local.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import pandas as pd

from fl_core import __version__
from fl_core.bounds import ABOVE_0, check_value
from fl_core.errors import RunError, UsageError, check_known
from fl_core.layers import Layer
from fl_core.plan import Evidence, LayerPlan, frozen_in
from fl_core.rows import frame

from ..gradients.sensitivity import recorded_rows
from .curve import SENSITIVITY, Curve, Rows, curve_of, layers_in, open_diagnosis
from .evidence import (
    against_nulls,
    explain,  # noqa: F401
    stability,
)
from .rules import RULES, THRESHOLD, Rule, curve_rule, largest_jump, sensitivity_ratio

THRESHOLDS = (1.05, 1.1, 1.2, 1.3, 1.5, 1.75, 2.0, 2.5, 3.0)
"""Thresholds whose decision stands in every plan's evidence, to show how much hangs on the one that was used."""


# --- a decision ------------------------------------------------------------------------------------------------


def select(
    rows: Rows,
    rule: str = "sensitivity_ratio",
    *,
    metric: str | None = None,
    threshold: float = THRESHOLD,
    layers: Sequence[str] | str | None = None,
    variant: str | None = None,
) -> LayerPlan:
    """Choose by a rule which layers to federate, from measured rows; return the plan.

    The curve is the mean over clients weighted by their training samples, sum_c p_c v^c. It is computed again from the
    clients' own rows. For federation sensitivity v^c is S^c, relative to the client's first layer. For a metric of
    pairs (cka) v^c is the mean of 1 - value over the pairs of client c. So it too grows with the difference. Every
    client then weighs the same.

    Layers outside the forward pass are not in the curve and stay local. Frozen layers are not in it either. They are
    shared, because they have the same values everywhere. They are sent and cost what any shared layer does.

    The evidence's ``detail`` reports how often the decision stays over resamples of the clients. It includes resamples
    of their batches if the rows have some (:func:`~.evidence.stability`). It also reports the decisions on nulls, if
    the rows have some (:func:`~.evidence.against_nulls`). It gives what a client uploads a round, if the rows
    say it.

    >>> import fedlayers as fl
    >>> report = fl.measure.diagnose_task(fl.assemble(fl.RunConfig(dataset="heart")), ["federation_sensitivity"])
    >>> select(report, "sensitivity_ratio", threshold=1.2)
    LayerPlan([fc1] fc2 fc3 fc4; [] = shared, by sensitivity_ratio t=1.2)
    >>> select(report, "manual", layers=["fc1", "fc2"]).shared
    ('fc1', 'fc2')

    Args:
        rows: a rows file, a report, or (header, frame), which may be filtered.
        rule: one of :data:`RULES`, or ``package.module:function``. The plan then has that name.
        metric: the metric whose values make the curve. Default: federation sensitivity. With the rule ``manual`` the
            curve is only evidence, and there is none unless you name a metric.
        threshold: above 0, for the rules that have one.
        layers: for rule ``manual``: exact names of the layers to share, as a sequence or separated by commas.
        variant: the metric's variant. Default: its first that was measured. For federation sensitivity it is
            ``"training"`` if the rows hold it. PLayer-FL decides on that one.

    Raises:
        UsageError: a rule, metric, variant or layer is unknown; rows have no layers, or come from several rounds,
            models or seeds; a layer in use can have no value.
        RunError: a value could not be computed, or is not above 0 so that its ratio means nothing.
    """
    _check_asked(rule, threshold, layers)
    chosen = RULES[rule]
    header, table = open_diagnosis(rows)
    every = layers_in(header)
    why = Evidence(
        rule=rule,
        threshold=threshold if chosen.takes_threshold else None,
        data=str(header.get("data") or ""),
        checkpoint=str(header.get("checkpoint") or ""),
        seed=header.get("seed"),
        version=str(header.get("version") or ""),
    )
    pairs = header.get("pairs") or {}

    def decided(table: pd.DataFrame) -> LayerPlan:
        return _cut(
            every,
            curve_of(every, table, metric or SENSITIVITY, variant, pairs),
            chosen,
            threshold,
            why,
        )

    if chosen.decides:
        plan = against_nulls(decided(table), table, decided)
    else:
        names = (
            [name.strip() for name in layers.split(",")]
            if isinstance(layers, str)
            else list(layers or ())
        )
        plan = LayerPlan(every, chosen.choose([name for name in names if name]), why)
        if metric is not None or variant is not None:
            curve = curve_of(every, table, metric or SENSITIVITY, variant, pairs)
            plan = replace(plan, why=_evidence(plan.why, every, curve))
    return _with_bytes(plan, header.get("bytes") or {})


def _check_asked(
    rule: str, threshold: float, layers: Sequence[str] | str | None
) -> None:
    """Refuse missing arguments of :func:`select`, and arguments that the rule does not read.

    Raises:
        UsageError: the message names the rule and the argument.
    """
    by_hand = RULES[rule].reads == "names"
    check_value("threshold", threshold, ABOVE_0)
    if by_hand and layers is None:
        raise UsageError(
            f"rule {rule!r} must have the names of the layers to share; got none. Add --layers."
        )
    if not by_hand and layers is not None:
        raise UsageError(
            f"Rule {rule!r} chooses the layers itself. Only rule 'manual' takes their names."
        )


def _cut(
    every: Sequence[Layer], curve: Curve, rule: Rule, threshold: float, why: Evidence
) -> LayerPlan:
    """Return the plan of a rule that reads one curve."""
    count = rule.cut(_sound(curve.combined, curve, "combined over clients"), threshold)
    votes, notes = _votes(curve, rule, threshold)
    lacking = rule.lacks(curve.combined, threshold) if rule.lacks else ""
    notes = (
        [f"{lacking}: all but the last layer are shared", *notes] if lacking else notes
    )
    why = _evidence(why, every, curve, rule)
    detail = {"stability": stability(curve, rule, threshold, count, why.seed or 0)}
    return LayerPlan(
        tuple(every),
        (*curve.names[:count], *frozen_in(every)),
        replace(why, votes=votes, detail=detail, status="; ".join(notes) or "ok"),
    )


def _with_bytes(plan: LayerPlan, sizes: Mapping[str, int]) -> LayerPlan:
    """Return the plan with the bytes of its layers in the evidence, if those of all layers in use are known."""
    used = [
        layer.name for layer in plan.layers if layer.used or layer.name in plan.shared
    ]
    if not all(name in sizes for name in used):
        return plan
    layers = {name: float(sizes[name]) for name in used}
    cost = {
        "layers": layers,
        "shared": sum(layers[name] for name in plan.shared),
        "all": sum(layers.values()),
    }
    return replace(
        plan, why=replace(plan.why, detail={**plan.why.detail, "cost": cost})
    )


# --- in mid-run ------------------------------------------------------------------------------------------------


def decide(
    layers: Sequence[Layer],
    measured: Iterable[Mapping[str, Any]],
    *,
    names: Sequence[str],
    rule: str = "sensitivity_ratio",
    threshold: float = THRESHOLD,
    seed: int | None = None,
    data: str = "",
) -> LayerPlan:
    """Choose a plan during a run, from what the clients' accumulators recorded while training.

    The result is the same as that of :func:`select` on rows of the same numbers (variant ``"training"``).

    Args:
        layers: all layers of the model, in order.
        measured: for each client ``{"client": index, "weight": training samples}`` with the ``layers``, ``importance``
            and ``steps`` of :meth:`~diagnostics.gradients.importance.SensitivityAccumulator.result`.
        names: client names by index.
        rule: a rule that decides by itself, with its ``threshold``.
        seed, data: the run's seed and the data's digest, for the evidence.

    Raises:
        UsageError, RunError: as :func:`select`. Also: there are no clients, or the measurements are of another model.
    """
    curve_rule(rule)
    results: dict[str, Mapping[str, Any]] = {}
    weights: dict[str, int] = {}
    for item in measured:
        for layer in item["layers"]:
            check_known("layer", layer, [each.name for each in layers])
        name = names[item["client"]]
        results[name], weights[name] = item, item["weight"]
    if not results:
        raise UsageError(
            "sensitivities must be of one client or more; got none. Send them first."
        )
    header = {
        "layers": [asdict(layer) for layer in layers],
        "data": data,
        "seed": seed,
        "version": __version__,
    }
    rows = frame(recorded_rows(results, layers, n_train=weights))
    return select(
        (header, rows),
        rule,
        metric=SENSITIVITY,
        variant="training",
        threshold=threshold,
    )


# --- the evidence ----------------------------------------------------------------------------------------------


def _sound(values: Sequence[float], curve: Curve, whose: str) -> Sequence[float]:
    """Return the values, checked to be finite and above 0, so that their ratios mean something."""
    for name, value in zip(curve.names, values, strict=True):
        if not (value > 0 and math.isfinite(value)):
            raise RunError(
                f"layer {name!r} has a {curve.metric} of {value:.4g}, {whose}; ratios need values above 0"
            )
    return values


def _votes(
    curve: Curve, rule: Rule, threshold: float
) -> tuple[dict[str, str], list[str]]:
    """Return the last shared layer that each client alone would choose, and reasons for clients without a vote."""
    votes, notes = {}, []
    for client, values in curve.clients.items():
        try:
            votes[client] = curve.names[
                rule.cut(_sound(values, curve, "its own"), threshold) - 1
            ]
        except RunError as error:
            notes.append(f"client {client!r} has no vote: {error}")
    return votes, notes


def _evidence(
    why: Evidence, layers: Sequence[Layer], curve: Curve, rule: Rule | None = None
) -> Evidence:
    """Return the evidence with the curve, and the decisions by other thresholds and by the largest jump."""
    cut = rule.cut if rule is not None and rule.takes_threshold else sensitivity_ratio

    def placed(values: Sequence[float]) -> tuple[float | None, ...]:
        at = dict(zip(curve.names, values, strict=True))
        return tuple(at.get(layer.name) for layer in layers)

    last: dict[str, str] = {}
    if all(value > 0 for value in curve.combined):
        last = {f"{t:g}": curve.names[cut(curve.combined, t) - 1] for t in THRESHOLDS}
        last["largest_jump"] = curve.names[largest_jump(curve.combined) - 1]
    return replace(
        why,
        metric=curve.metric,
        variant=curve.variant,
        values=placed(curve.combined),
        clients={client: placed(values) for client, values in curve.clients.items()},
        weights=curve.weights,
        alternatives=last,
        seed=why.seed if curve.seed is None else curve.seed,
    )
