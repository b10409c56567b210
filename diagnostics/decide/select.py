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
from torch import nn

from fl_core import __version__
from fl_core.bounds import ABOVE_0, check_value
from fl_core.errors import RunError, UsageError, check_known, listing
from fl_core.layers import Layer
from fl_core.plan import Evidence, LayerPlan, frozen_in
from fl_core.rows import frame

from ..gradients.sensitivity import recorded_rows
from ..metrics.base import DEFAULT, metric_or_placeholder
from ..resampling import split_resamples
from .budget import Costs, bytes_of, flops_of
from .curve import SENSITIVITY, Curve, Rows, curve_of, layers_in, open_diagnosis
from .explain import explain  # noqa: F401
from .null_comparison import against_nulls
from .rules.base import RULES, THRESHOLD, Rule, curve_rule
from .rules.jumps import largest_jump, sensitivity_ratio
from .stability import Opinion, agreement, stability

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
    metrics: Sequence[str] | Mapping[str, str] | None = None,
    budget: float | None = None,
    model: nn.Module | None = None,
    costs: bool = False,
) -> LayerPlan:
    """Choose by a rule which layers to federate, from measured rows or from a budget; return the plan.

    The curve is the mean over clients weighted by their training samples, sum_c p_c v^c. It is computed again from the
    clients' own rows. For federation sensitivity v^c is S^c, relative to the client's first layer. For a metric of
    pairs (cka) v^c is the mean of 1 - value over the pairs of client c. So it too grows with the difference. Every
    client then weighs the same.

    Layers outside the forward pass are not in the curve and stay local. Frozen layers are not in it either. They are
    shared, because they have the same values everywhere. They are sent and cost what any shared layer does, so a budget
    pays for them first. Nothing is shared if the budget does not also cover the first layer that trains.

    The evidence's ``detail`` reports how often the decision stays over resamples of the clients. It includes resamples
    of their batches if the rows have some (:func:`~.stability.stability`). It also reports what each metric votes and
    the decisions on nulls, if the rows have some (:func:`~.against.against_nulls`). On request it gives the layers'
    costs.

    >>> import fedlayers as fl
    >>> report = fl.measure.diagnose_task(fl.assemble(fl.RunConfig(dataset="heart")), ["federation_sensitivity"])
    >>> select(report, "sensitivity_ratio", threshold=1.2)
    LayerPlan([fc1] fc2 fc3 fc4; [] = shared, by sensitivity_ratio t=1.2)
    >>> select(report, "manual", layers=["fc1", "fc2"]).shared
    ('fc1', 'fc2')

    Args:
        rows: a rows file, a report, or (header, frame), which may be filtered.
        rule: one of :data:`RULES`, or ``package.module:function``. The plan then has that name.
        metric: the metric whose values make the curve. Default: federation sensitivity. With the rules ``manual`` and
            ``budget_*`` the curve is only evidence, and there is none unless you name a metric.
        threshold: above 0, for the rules that have one.
        layers: for rule ``manual``: exact names of the layers to share, as a sequence or separated by commas.
        variant: the metric's variant. Default: its first that was measured. For federation sensitivity it is
            ``"training"`` if the rows hold it. PLayer-FL decides on that one.
        metrics: for rule ``vote``: names, each ``"METRIC"`` or ``"METRIC=RULE"``, or {metric: rule}. Default: the
            metrics of :data:`~diagnostics.metrics.base.DEFAULT` that the rows hold. Without a rule, federation
            sensitivity votes by ``sensitivity_ratio`` and any other metric by ``largest_jump``.
        budget: for ``budget_bytes``, bytes that one client may upload a round. For ``budget_flops``, FLOPs that one
            training sample may cost in the shared layers, forward and backward.
        costs: also put into the evidence what a client uploads a round, for shared layers and for all, if known.
        model: gives the layers' exact sizes for costs and budgets. Default: the sizes in the rows.

    Raises:
        UsageError: a rule, metric, variant or layer is unknown; rows have no layers, or come from several rounds,
            models or seeds; a layer in use can have no value; costs are unknown.
        RunError: a value could not be computed, or is not above 0 so that its ratio means nothing; of several metrics,
            none can vote.
    """
    _check_asked(rule, threshold, layers=layers, metrics=metrics, budget=budget, metric=metric, variant=variant)
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
    own, _ = split_resamples(table)
    sent = bytes_of(every, own, model, header.get("bytes")) if costs or chosen.reads == "bytes" else None

    def decided(table: pd.DataFrame) -> LayerPlan:
        if chosen.reads == "curves":
            return _joint_plan(every, table, chosen, metrics, threshold, why, pairs)
        return _cut(every, curve_of(every, table, metric or SENSITIVITY, variant, pairs), chosen, threshold, why)

    if chosen.reads == "curves" or chosen.decides:
        return _with_costs(against_nulls(decided(table), table, decided), sent)
    if chosen.reads == "names":
        names = [name.strip() for name in layers.split(",")] if isinstance(layers, str) else list(layers or ())
        plan = LayerPlan(every, chosen.choose([name for name in names if name]), why)
    else:
        sent = sent if chosen.reads == "bytes" else flops_of(every, own)
        assert sent is not None
        plan = _affordable(every, chosen, sent, float(budget or 0), why)
    if metric is not None or variant is not None:
        curve = curve_of(every, table, metric or SENSITIVITY, variant, pairs)
        plan = replace(plan, why=_evidence(plan.why, every, curve))
    return _with_costs(plan, sent)


def _check_asked(rule: str, threshold: float, **given: Any) -> None:
    """Refuse missing arguments of :func:`select`, and arguments that the rule does not read.

    Raises:
        UsageError: the message names the rule and the argument.
    """
    chosen = RULES[rule]
    check_value("threshold", threshold, ABOVE_0)
    if chosen.reads == "names" and given["layers"] is None:
        raise UsageError(f"rule {rule!r} must have the names of the layers to share; got none. Add --layers.")
    if chosen.reads != "names" and given["layers"] is not None:
        raise UsageError(f"Rule {rule!r} chooses the layers itself. Only rule 'manual' takes their names.")
    if chosen.reads != "curves" and given["metrics"] is not None:
        raise UsageError(f"Rule {rule!r} reads one metric. Only rule 'vote' takes several.")
    if chosen.reads == "curves" and (given["metric"] is not None or given["variant"] is not None):
        raise UsageError(f"Rule {rule!r} reads several metrics. Name them with metrics.")
    if not chosen.takes_budget and given["budget"] is not None:
        raise UsageError(f"Rule {rule!r} has no budget. Use budget_bytes or budget_flops.")
    if chosen.takes_budget and given["budget"] is None:
        raise UsageError(f"rule {rule!r} must have a budget in {chosen.reads}; got none. Add --budget.")
    if chosen.takes_budget:
        check_value("budget", given["budget"], ABOVE_0)


# --- the kinds of rules ----------------------------------------------------------------------------------------


def _cut(every: Sequence[Layer], curve: Curve, rule: Rule, threshold: float, why: Evidence) -> LayerPlan:
    """Return the plan of a rule that reads one curve."""
    count = rule.cut(_sound(curve.combined, curve, "combined over clients"), threshold)
    votes, notes = _votes(curve, rule, threshold)
    lacking = rule.lacks(curve.combined, threshold) if rule.lacks else ""
    notes = [f"{lacking}: all but the last layer are shared", *notes] if lacking else notes
    why = _evidence(why, every, curve, rule)
    detail = {"stability": stability([Opinion(curve, rule, threshold)], count, why.seed or 0)}
    return LayerPlan(
        tuple(every),
        (*curve.names[:count], *frozen_in(every)),
        replace(why, votes=votes, detail=detail, status="; ".join(notes) or "ok"),
    )


def _joint_plan(
    every: Sequence[Layer],
    table: pd.DataFrame,
    joint: Rule,
    metrics: Sequence[str] | Mapping[str, str] | None,
    threshold: float,
    why: Evidence,
    pairs: Mapping[str, str],
) -> LayerPlan:
    """Return the plan of a joint rule, from the cuts by several metrics' own rules.

    The rule decides for all clients together and for each client.
    """
    opinions: dict[str, Opinion] = {}
    voters, notes, votes_by_metric = _voters(metrics, table), [], {}
    own, _ = split_resamples(table)
    for name, by in voters.items():
        rule = curve_rule(by)
        rows = own[(own["metric"] == name) & (own["layer"] != "")]
        if (rows["client"] == "").all() and (rows["status"] != "ok").all():  # a metric of pairs, on one client
            notes.append(f"{name} has no vote: {listing(rows['status'].unique())}")
            continue
        try:
            curve = curve_of(every, table, name, pairs=pairs)
            count = rule.cut(_sound(curve.combined, curve, "combined over clients"), threshold)
        except RunError as error:
            notes.append(f"{name} has no vote: {error}")
            continue
        opinions[name] = Opinion(curve, rule, threshold)
        limit = threshold if rule.takes_threshold else None
        last, values = curve.names[count - 1], dict(zip(curve.names, curve.combined, strict=True))
        votes_by_metric[name] = {
            "rule": by,
            "variant": curve.variant,
            "threshold": limit,
            "last": last,
            "values": values,
        }
        votes_by_metric[name]["stability"] = stability([opinions[name]], count, why.seed or 0)
    if not opinions:
        raise RunError("; ".join(notes))
    names = next(iter(opinions.values())).curve.names
    cuts = {name: names.index(opinion["last"]) + 1 for name, opinion in votes_by_metric.items()}
    count = joint.choose(list(cuts.values()))
    votes: dict[str, list[int]] = {}
    for opinion in opinions.values():
        for client, last in _votes(opinion.curve, opinion.rule, threshold)[0].items():
            votes.setdefault(client, []).append(names.index(last) + 1)
    seeds = {opinion.curve.seed for opinion in opinions.values()} - {None}
    seed = why.seed if len(seeds) != 1 else seeds.pop()
    detail = {
        "metrics": votes_by_metric,
        "agreement": agreement(cuts, count),
        "stability": stability(list(opinions.values()), count, seed or 0, joint=joint.choose),
    }
    return LayerPlan(
        tuple(every),
        (*names[:count], *frozen_in(every)),
        replace(
            why,
            votes={client: names[joint.choose(found) - 1] for client, found in votes.items()},
            detail=detail,
            seed=seed,
            status="; ".join(notes) or "ok",
        ),
    )


def _voters(metrics: Sequence[str] | Mapping[str, str] | None, table: pd.DataFrame) -> dict[str, str]:
    """Return each metric that votes, with its rule."""
    measured = list(table.loc[table["layer"] != "", "metric"].unique())
    if metrics is None:
        metrics = [name for name in DEFAULT if name in measured]
    pairs = metrics.items() if isinstance(metrics, Mapping) else (item.partition("=")[::2] for item in metrics)
    voters: dict[str, str] = {}
    for name, by in pairs:
        check_known("metric among the rows", name, measured)
        if name in voters:
            raise UsageError(f"metrics must differ; got {name!r} twice.")
        voters[name] = by or metric_or_placeholder(name).rule
        curve_rule(voters[name])
    if not voters:
        raise UsageError(
            f"metrics must have one to vote; got no metric. Known: {listing(measured) or 'no values of layers'}."
        )
    return voters


def _affordable(every: Sequence[Layer], rule: Rule, costs: Costs, budget: float, why: Evidence) -> LayerPlan:
    """Return the plan of the most first layers that fit the budget, together with the frozen layers."""
    used = [layer for layer in every if layer.used]
    prices = dict(zip((layer.name for layer in used), costs.layer_costs(used), strict=True))
    frozen = frozen_in(every)
    moving = [name for name in prices if name not in frozen]
    count = rule.choose([prices[name] for name in moving], budget - sum(prices[name] for name in frozen))
    shared = (*moving[:count], *frozen) if count else ()
    beside = f", beside the frozen {listing(frozen)}" if frozen else ""
    lacking = f"not even the first layer fits into {budget:g} {costs.unit}{beside}: nothing is shared"
    status = "ok" if count else lacking
    return LayerPlan(tuple(every), shared, replace(why, detail={"budget": budget}, status=status))


def _with_costs(plan: LayerPlan, costs: Costs | None) -> LayerPlan:
    """Return the plan with its costs in the evidence, if the costs of all layers in use are known."""
    if costs is None:
        return plan
    used = [layer for layer in plan.layers if layer.used or layer.name in plan.shared]
    detail = costs.detail(used, plan.shared)
    return plan if not detail else replace(plan, why=replace(plan.why, detail={**plan.why.detail, "cost": detail}))


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
        UsageError, RunError: as :func:`select`. Also: there are no clients, a client is unknown, or the measurements
            are of another model.
    """
    curve_rule(rule)
    results: dict[str, Mapping[str, Any]] = {}
    weights: dict[str, int] = {}
    for item in measured:
        index = item["client"]
        if not 0 <= index < len(names):
            raise UsageError(f"sensitivities must be of clients 0 to {len(names) - 1}; got client {index}.")
        name = names[index]
        if name in results:
            raise UsageError(f"sensitivities of client {name!r} must be given once; got them twice. Leave one out.")
        for layer in item["layers"]:
            check_known("layer", layer, [each.name for each in layers])
        if (given := len(item["importance"])) != (count := len(item["layers"])):
            raise UsageError(f"importances of client {name!r} must be one a layer; got {given} for {count} layers.")
        results[name], weights[name] = item, item["weight"]
    if not results:
        raise UsageError("sensitivities must be of one client or more; got none. Send them first.")
    header = {"layers": [asdict(layer) for layer in layers], "data": data, "seed": seed, "version": __version__}
    rows = frame(recorded_rows(results, layers, n_train=weights))
    return select((header, rows), rule, metric=SENSITIVITY, variant="training", threshold=threshold)


# --- the evidence ----------------------------------------------------------------------------------------------


def _sound(values: Sequence[float], curve: Curve, whose: str) -> Sequence[float]:
    """Return the values, checked to be finite and above 0, so that their ratios mean something."""
    for name, value in zip(curve.names, values, strict=True):
        if not (value > 0 and math.isfinite(value)):
            raise RunError(f"layer {name!r} has a {curve.metric} of {value:.4g}, {whose}; ratios need values above 0")
    return values


def _votes(curve: Curve, rule: Rule, threshold: float) -> tuple[dict[str, str], list[str]]:
    """Return the last shared layer that each client alone would choose, and reasons for clients without a vote."""
    votes, notes = {}, []
    for client, values in curve.clients.items():
        try:
            votes[client] = curve.names[rule.cut(_sound(values, curve, "its own"), threshold) - 1]
        except RunError as error:
            notes.append(f"client {client!r} has no vote: {error}")
    return votes, notes


def _evidence(why: Evidence, layers: Sequence[Layer], curve: Curve, rule: Rule | None = None) -> Evidence:
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
