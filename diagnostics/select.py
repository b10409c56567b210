"""From measured layers to a decision: a named rule says which layers are federated, and the plan carries its evidence.

A rule reads one curve, a value for each layer in use from input to output, combined over the clients; it shares the
first layers up to where the curve jumps. The layers after the jump serve each client's own task and stay local.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

from diagnostics.curve import SENSITIVITY, Curve, Rows, curve_of, layers_in, opened
from diagnostics.metrics import METRICS
from diagnostics.sensitivity import recorded_rows
from fl_core import __version__
from fl_core.errors import RunError, UsageError, check_known, listing
from fl_core.layers import Layer
from fl_core.plan import Evidence, LayerPlan
from fl_core.rows import frame

THRESHOLD = 1.2
THRESHOLDS = (1.05, 1.1, 1.2, 1.3, 1.5, 1.75, 2.0, 2.5, 3.0)
"""Thresholds whose decision stands in every plan's evidence, to show how much hangs on the one that was used."""


# --- the rules -------------------------------------------------------------------------------------------------


def ratios(values: Sequence[float]) -> list[float]:
    """S_{l+1} / S_l for l = 1 .. L-1, from values that are all above 0."""
    return [after / before for before, after in pairwise(values)]


def sensitivity_ratio(values: Sequence[float], threshold: float = THRESHOLD) -> int:
    """l* = min {l : S_{l+1} / S_l > t}, the number of layers shared; L - 1 if no ratio exceeds t (PLayer-FL, Eq. 3).

    A higher threshold never shares fewer layers. The paper gives no number for t: by the ratios in its Fig. 4, 1.2
    makes the splits of its Table A.2 on six of its seven datasets, and the seventh (Heart) takes about 1.9.
    """
    return next((count for count, ratio in enumerate(ratios(values), 1) if ratio > threshold), len(values) - 1)


def largest_jump(values: Sequence[float], threshold: float = THRESHOLD) -> int:
    """l* = argmax S_{l+1} / S_l, the number of layers shared; the first of equals. No threshold is used."""
    steps = ratios(values)
    return steps.index(max(steps)) + 1


@dataclass(frozen=True)
class Rule:
    """How a decision is made.

    Attributes:
        summary: one line.
        cut: (values [L], threshold) -> number of layers shared, 1 .. L-1; None where the user names the layers.
        thresholded: whether the threshold matters.
    """

    summary: str
    cut: Callable[[Sequence[float], float], int] | None = None
    thresholded: bool = False


RULES: dict[str, Rule] = {
    "sensitivity_ratio": Rule(
        "share the layers before the first jump S_{l+1}/S_l above the threshold (PLayer-FL)", sensitivity_ratio, True
    ),
    "largest_jump": Rule("share the layers before the largest jump S_{l+1}/S_l", largest_jump),
    "manual": Rule("share exactly the layers that are named"),
}


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
    """The plan that a rule makes of measured rows; the rows' header names the layers and their tensors.

    The curve is the mean over clients weighted by their training samples, sum_c p_c v^c, recomputed from the clients'
    own rows; for federation sensitivity v^c is S^c, relative to the client's first layer. For a metric of pairs (cka)
    v^c is the mean of 1 - value over the pairs of client c, so that it too grows with the difference, and every client
    weighs the same. Layers outside the forward pass are not in the curve and stay local.

    Args:
        rows: a rows file, a report, or (header, frame), which may be filtered.
        rule: one of :data:`RULES`.
        metric: whose values make the curve; default federation sensitivity. With rule ``"manual"`` the curve is only
            evidence, and there is none unless a metric is named.
        threshold: of rule ``"sensitivity_ratio"``, above 0.
        layers: for rule ``"manual"``: exact names of the layers to share, as a sequence or separated by commas.
        variant: which variant of the metric. Default: its first that was measured; of federation sensitivity
            ``"training"`` where the rows hold it, on which PLayer-FL decides.

    Raises:
        UsageError: an unknown rule, metric, variant or layer; rows without layers, or of several rounds, models or
            seeds; a layer in use that can have no value.
        RunError: a value could not be computed, or is not above 0 so that its ratio means nothing.
    """
    chosen = RULES[check_known("rule", rule, RULES)]
    if not (math.isfinite(threshold) and threshold > 0):
        raise UsageError(f"a threshold of {threshold}; it must be above 0")
    if chosen.cut is None and layers is None:
        raise UsageError(f"rule {rule!r} needs the names of the layers to share")
    if chosen.cut is not None and layers is not None:
        raise UsageError(f"rule {rule!r} chooses the layers itself; only rule 'manual' takes their names")
    header, table = opened(rows)
    every = layers_in(header)
    why = Evidence(
        rule=rule,
        threshold=threshold if chosen.thresholded else None,
        data=str(header.get("data") or ""),
        checkpoint=str(header.get("checkpoint") or ""),
        seed=header.get("seed"),
        version=str(header.get("version") or ""),
    )
    if chosen.cut is None:
        names = [name.strip() for name in layers.split(",")] if isinstance(layers, str) else list(layers or ())
        plan = LayerPlan(every, tuple(name for name in names if name), why)
        if metric is None and variant is None:
            return plan
        return replace(plan, why=_evidence(why, every, curve_of(every, table, metric or SENSITIVITY, variant)))

    curve = curve_of(every, table, metric or SENSITIVITY, variant)
    count = chosen.cut(_sound(curve.combined, curve, "combined over clients"), threshold)
    votes, notes = _votes(curve, chosen.cut, threshold)
    if chosen.thresholded and max(ratios(curve.combined)) <= threshold:
        notes = [f"no ratio exceeds {threshold:g}: all but the last layer are shared", *notes]
    why = replace(_evidence(why, every, curve), votes=votes, status="; ".join(notes) or "ok")
    return LayerPlan(every, curve.names[:count], why)


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
    """The plan that a rule makes, in mid-run, of what the clients' accumulators recorded while training.

    The same as :func:`select` on rows of the same numbers (variant ``"training"``).

    Args:
        layers: all layers of the model, in order.
        measured: for each client ``{"client": index, "weight": training samples}`` with the ``layers``,
            ``importance`` and ``steps`` of :meth:`~diagnostics.sensitivity.SensitivityAccumulator.result`.
        names: client names by index.
        rule: a rule that decides by itself, with its ``threshold``.
        seed, data: the run's seed and the data's digest, for the evidence.

    Raises:
        UsageError, RunError: as :func:`select`; also measurements of no client, an unknown client, or another model.
    """
    check_known("rule that decides by itself", rule, [name for name, each in RULES.items() if each.cut])
    results: dict[str, Mapping[str, Any]] = {}
    weights: dict[str, int] = {}
    for item in measured:
        index = item["client"]
        if not 0 <= index < len(names):
            raise UsageError(f"sensitivities of client {index}, but there are {len(names)} clients")
        name = names[index]
        if name in results:
            raise UsageError(f"sensitivities of client {name!r} were given twice")
        for layer in item["layers"]:
            check_known("layer", layer, [each.name for each in layers])
        if len(item["layers"]) != len(item["importance"]):
            raise UsageError(f"client {name!r}: {len(item['layers'])} layers, {len(item['importance'])} importances")
        results[name], weights[name] = item, item["weight"]
    if not results:
        raise UsageError("no client has sent its sensitivities")
    header = {"layers": [asdict(layer) for layer in layers], "data": data, "seed": seed, "version": __version__}
    rows = frame(recorded_rows(results, layers, n_train=weights))
    return select((header, rows), rule, metric=SENSITIVITY, variant="training", threshold=threshold)


# --- the evidence ----------------------------------------------------------------------------------------------


def _sound(values: Sequence[float], curve: Curve, whose: str) -> Sequence[float]:
    """The values, if ratios of them mean something."""
    for name, value in zip(curve.names, values, strict=True):
        if not (value > 0 and math.isfinite(value)):
            raise RunError(f"layer {name!r} has a {curve.metric} of {value:.4g}, {whose}; ratios need values above 0")
    return values


def _votes(
    curve: Curve, cut: Callable[[Sequence[float], float], int], threshold: float
) -> tuple[dict[str, str], list[str]]:
    """The last shared layer each client alone would choose, and why the others have no vote."""
    votes, notes = {}, []
    for client, values in curve.clients.items():
        try:
            votes[client] = curve.names[cut(_sound(values, curve, "its own"), threshold) - 1]
        except RunError as error:
            notes.append(f"client {client!r} has no vote: {error}")
    return votes, notes


def _evidence(why: Evidence, layers: Sequence[Layer], curve: Curve) -> Evidence:
    """The evidence with the curve in it, and with what other thresholds and the largest jump would decide."""

    def placed(values: Sequence[float]) -> tuple[float | None, ...]:
        at = dict(zip(curve.names, values, strict=True))
        return tuple(at.get(layer.name) for layer in layers)

    last: dict[str, str] = {}
    if all(value > 0 for value in curve.combined):
        last = {f"{t:g}": curve.names[sensitivity_ratio(curve.combined, t) - 1] for t in THRESHOLDS}
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


# --- for readers -----------------------------------------------------------------------------------------------


def explain(plan: LayerPlan) -> str:
    """A plan in words: its curve as a table, what each client alone would choose, and other thresholds' decisions."""
    why = plan.why
    subject = f" on {why.metric}" if why.metric else ""
    subject += f" ({why.variant})" if why.variant else ""
    limit = f", threshold {why.threshold:g}" if why.threshold is not None else ""
    parts = [f"{why.rule}{subject}{limit}: {len(plan.shared)} of {len(plan.layers)} layers are federated", _table(plan)]
    if why.votes:
        parts.append("Last shared layer by each client's own values:\n" + _tally(why.votes, plan, "clients"))
    if why.alternatives:
        parts.append("Last shared layer by another threshold or rule:\n" + _tally(why.alternatives, plan))
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
    values = dict(zip(plan.names, plan.why.values, strict=False))
    known = [(name, value) for name, value in values.items() if value is not None]
    steps = {name: after / this for (name, this), (_, after) in pairwise(known) if this != 0}
    limit = plan.why.threshold
    above = next((name for name, step in steps.items() if limit is not None and step > limit), None)
    width = max(len(name) for name in (*plan.names, "layer"))
    metric = plan.why.metric
    pairs = metric in METRICS and METRICS[metric].pairs
    symbol = "S" if metric == SENSITIVITY else f"1 - {metric}" if pairs else "value"
    lines = [f"  {'layer':<{width}}  {symbol:>9}  {'next/this':>9}"] if known else []
    for layer in plan.layers:
        value = "" if values.get(layer.name) is None else f"{values[layer.name]:.4g}"
        step = f"{steps[layer.name]:.3f}" if layer.name in steps else ""
        numbers = f"  {value:>9}  {step:>9}" if known else ""
        shared = "federated" if layer.name in plan.shared else "local"
        note = f"first above {limit:g}" if layer.name == above else "" if layer.used else "not in the forward pass"
        lines.append(f"  {layer.name:<{width}}{numbers}  {shared:<9}  {note}".rstrip())
    return "\n".join(lines)


def _tally(choices: Mapping[str, str], plan: LayerPlan, unit: str = "") -> str:
    """Who chooses which layer, one line a layer in the plan's order."""
    groups = {name: [who for who, choice in choices.items() if choice == name] for name in plan.names}
    width = max(len(name) for name, who in groups.items() if who)
    count = {name: f"{len(who)} of {len(choices)} {unit}: " if unit else "" for name, who in groups.items()}
    return "\n".join(f"  {name.ljust(width)}  {count[name]}{listing(who)}" for name, who in groups.items() if who)
