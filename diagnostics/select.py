"""The rules that choose layers, and the plan that a rule makes of measured rows.

A rule says which layers are federated. A function in this module with ``@rule`` above
it is registered by its name.

A rule of one curve takes the layers' values from input to output. Higher values mean
that clients differ more. A metric that declares the other end is turned first, and one
that declares no end is read as it is. A rule returns a number of layers from the input,
or the names of the shared layers. The plan keeps the evidence.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from itertools import chain, pairwise
from typing import Any, TypeVar

import pandas as pd

from fl_core import __version__
from fl_core.errors import (
    ABOVE_0,
    RunError,
    UsageError,
    check_known,
    check_value,
    listing,
    short_value,
    warn,
)
from fl_core.layers import Layer
from fl_core.plan import Evidence, LayerPlan, frozen_in
from fl_core.registry import Registry
from fl_core.rows import frame

from .curve import SENSITIVITY, Curve, against_nulls, curve_of, layers_in, stability
from .metrics import facts_of
from .null import nulls_in
from .regret import benchmark_line
from .report import Rows, open_diagnosis
from .sensitivity import recorded_rows

THRESHOLD = 1.2
GIVEN = ("threshold", "k", "layers", "null")
"""The arguments that a rule may take after the values, by name.

``threshold`` and ``k`` are those of :func:`select`. ``layers`` has the layers' names,
and ``null`` the curves of nulls.
"""
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Rule:
    """A rule: a function that decides which layers are shared, and what it reads.

    Attributes:
        name: the function's name.
        choose: the function. For one curve: values [L], then any of :data:`GIVEN` by name -> the number of layers
            shared, from 1 to L, or their names. For names: (names) -> the same names.
        summary: one line.
        decides: whether it decides from one curve. If not, it takes the user's names.
        lacks: (values, threshold) -> why the rule finds no cut and so shares all but
            the last layer; empty if it finds one. None for rules that always find one.
        ratios: whether it reads ratios, so that all values must be above 0. If not, only their order matters.

    >>> from diagnostics.select import RULES
    >>> RULES["sensitivity_ratio"].cut([1.0, 1.1, 2.0, 2.1], 1.2)
    2
    """

    name: str
    choose: Callable[..., Any]
    summary: str
    decides: bool = True
    lacks: Callable[[Sequence[float], float], str] | None = None
    ratios: bool = True

    @cached_property
    def takes(self) -> tuple[str, ...]:
        """Return the names of the function's parameters after the values."""
        return tuple(inspect.signature(self.choose).parameters)[1:]

    @property
    def takes_threshold(self) -> bool:
        """Return whether the rule decides from a curve and has a parameter ``threshold``."""
        return self.decides and "threshold" in self.takes

    @property
    def cuts(self) -> bool:
        """Return whether the rule cuts the network in two by the values alone."""
        return self.decides and not {*self.takes} - {"threshold"}

    def cut(
        self,
        values: Sequence[float],
        threshold: float = THRESHOLD,
        names: Sequence[str] = (),
    ) -> int:
        """Return the number of shared layers, for a rule that cuts.

        Args:
            values: values of the layers, [L].
            threshold: the threshold, for a rule that takes one.
            names: names of the layers, [L]. Default: their numbers from 0.

        Raises:
            RunError: the rule does not return a number from 1 to the number of layers, or names of the first layers.
        """
        names = list(names) or [str(number) for number in range(len(values))]
        shared = self.shared(names, values, threshold=threshold)
        if list(shared) != names[: len(shared)]:
            raise RunError(
                f"rule {self.name!r} must cut the network in two; got layers {listing(shared)}."
            )
        return len(shared)

    def shared(
        self, names: Sequence[str], values: Sequence[float], **arguments: Any
    ) -> tuple[str, ...]:
        """Return the names of the shared layers.

        Args:
            names, values: names and values of the layers, [L].
            arguments: values for the rule's further parameters (:data:`GIVEN`), except ``layers``.

        Raises:
            RunError: the rule returns no layer, an unknown layer, or a number that is not from 1 to L.
        """
        return self.answer(names, values, **arguments)[0]

    def answer(
        self, names: Sequence[str], values: Sequence[float], **arguments: Any
    ) -> tuple[tuple[str, ...], bool]:
        """Return the result of :meth:`shared`, and whether the rule returned a number of layers.

        The arguments and errors are those of :meth:`shared`.
        """
        arguments |= {"layers": tuple(names)}
        answer = self.choose(
            list(values),
            **{name: arguments[name] for name in self.takes if name in arguments},
        )
        if hasattr(answer, "tolist"):  # of NumPy or torch
            answer = answer.tolist()
        if isinstance(answer, Collection) and not isinstance(answer, str):
            unknown_layers = [name for name in answer if name not in names]
            if not answer or unknown_layers:
                unknown_names = listing(map(str, unknown_layers)) or "none"
                raise RunError(
                    f"rule {self.name!r} must name layers of {listing(names)} to share; "
                    f"got {unknown_names}."
                )
            return tuple(name for name in names if name in answer), False
        if isinstance(answer, bool) or answer not in range(1, len(values) + 1):
            answer_text = short_value(answer)
            raise RunError(
                f"rule {self.name!r} must return a number from 1 to {len(values)} or a list of names; "
                f"got {answer_text}."
            )
        return tuple(names[: int(answer)]), True


def _from_function(function: Any, path: str) -> Rule:
    """Make a rule of a user's function without the decorator.

    It is assumed to read ratios of one curve. A rule is returned as it is.

    Args:
        function: the function. The first line of its docstring becomes the summary.
        path: its ``package.module:name``, for messages.

    Raises:
        UsageError: it is no function, or its arguments are not those of a rule.
    """
    if isinstance(function, Rule):
        return function
    if not inspect.isfunction(function):
        function_type = type(function).__name__
        raise UsageError(f"rule {path!r} must be a function; got {function_type}.")
    return _make(
        function, (inspect.getdoc(function) or function.__name__).partition("\n")[0]
    )


RULES: Registry[Rule] = Registry("rule", "diagnostics.select", _from_function)


def rule(
    *,
    summary: str,
    decides: bool = True,
    lacks: Callable[[Sequence[float], float], str] | None = None,
    ratios: bool = True,
) -> Callable[[Function], Function]:
    """Register a function as a rule under its own name.

    Use it as a decorator. Its keywords are the attributes of :class:`Rule`.

    Raises:
        UsageError: another rule has the name. Or the function takes no argument, or one
            after the first that is not in :data:`GIVEN`.

    >>> from diagnostics.select import RULES, rule
    >>> @rule(summary="share all but the last layer")
    ... def all_but_last(values):
    ...     return len(values) - 1
    >>> RULES["all_but_last"].cut([1.0, 2.0, 3.0])
    2
    """

    def add(function: Function) -> Function:
        RULES.add(
            function.__name__,
            _make(function, summary, decides=decides, lacks=lacks, ratios=ratios),
            function,
        )
        return function

    return add


def _make(function: Callable[..., Any], summary: str, **facts: Any) -> Rule:
    """Make a rule of a function, and check the names of its arguments.

    Raises:
        UsageError: there is no argument, or one after the first is not in :data:`GIVEN`.
    """
    parameters = tuple(inspect.signature(function).parameters)
    for name in parameters[1:]:
        check_known(f"argument of rule {function.__name__!r}", name, GIVEN)
    if not parameters:
        raise UsageError(
            f"rule {function.__name__!r} must take the values; got 0 arguments."
        )
    return Rule(function.__name__, function, summary, **facts)


def curve_rule(name: str) -> Rule:
    """Return the rule of this name. It must decide on its own from one curve.

    Raises:
        UsageError: the rule is unknown, or it reads something else.
    """
    chosen_rule = RULES[name]
    if not chosen_rule.decides:
        deciding_rules = [
            name for name, rule in RULES.members().items() if rule.decides
        ]
        check_known("rule that decides by itself", name, deciding_rules)
    return chosen_rule


def ratios(values: Sequence[float]) -> list[float]:
    """Return the ratio of each value to the one before, S_{l+1} / S_l for l = 1 .. L-1. Values must be above 0."""
    return [next_value / value for value, next_value in pairwise(values)]


@rule(
    summary="share the layers before the first jump S_{l+1}/S_l above the threshold (PLayer-FL)",
    lacks=lambda values, threshold: (
        "" if max(ratios(values)) > threshold else f"no ratio exceeds {threshold:g}"
    ),
)
def sensitivity_ratio(values: Sequence[float], threshold: float = THRESHOLD) -> int:
    """Return the number of layers before the first jump of the values above the threshold (PLayer-FL, Eq. 3).

    With values S and threshold t it is l* = min {l : S_{l+1} / S_l > t}, and L - 1 if no ratio exceeds t. A higher
    threshold never shares fewer layers. The paper gives no number for t. By the ratios in its Fig. 4, 1.2 makes the
    splits of its Table A.2 on six of its seven datasets. The seventh (Heart) takes about 1.9.
    """
    return next(
        (count for count, ratio in enumerate(ratios(values), 1) if ratio > threshold),
        len(values) - 1,
    )


@rule(summary="share the layers before the largest relative rise")
def largest_rise(values: Sequence[float]) -> int:
    """Return the number of layers before the largest relative rise, argmax_l S_{l+1} / S_l of the values S.

    Of equal rises the first counts.
    """
    rises = ratios(values)
    return rises.index(max(rises)) + 1


@rule(summary="keep the k layers local that differ most", ratios=False)
def top(
    values: Sequence[float], k: int = 1, layers: Sequence[str] = ()
) -> tuple[str, ...]:
    """Return all layers but the k with the largest values. Of equal values the last layer counts as larger.

    >>> from diagnostics.select import RULES
    >>> RULES["top"].shared(["a", "b", "c"], [1.0, 3.0, 2.0], k=1)
    ('a', 'c')

    Args:
        values: the layers' values, [L].
        k: number of local layers, from 1 to L - 1.
        layers: names of the layers, [L].

    Raises:
        UsageError: k is out of range.
    """
    if k not in range(1, len(values)):
        raise UsageError(
            f"k must be from 1 to {len(values) - 1} for rule 'top'; got {k!r}."
        )
    order = sorted(range(len(values)), key=lambda place: (values[place], place))
    return tuple(layers[place] for place in sorted(order[:-k]))


@rule(
    summary="keep the layers local whose value is above that of every null",
    ratios=False,
)
def above_null(
    values: Sequence[float],
    null: Sequence[Sequence[float]] = (),
    layers: Sequence[str] = (),
) -> tuple[str, ...]:
    """Return the names of the shared layers: those whose value is not above the highest of the null's draws.

    The result is empty if all values are above. :func:`select` refuses this.

    Args:
        values: value of each layer, [L].
        null: one curve for each draw of each null, [draws, L].
        layers: names of the layers, [L].

    Raises:
        UsageError: ``null`` is empty.
    """
    if not len(null):
        raise UsageError(
            "rows must have a null for rule 'above_null'; got none. Measure one: null=('labels',)."
        )
    highest = [max(curve) for curve in zip(*null, strict=True)]
    return tuple(
        name
        for name, value, null_maximum in zip(layers, values, highest, strict=True)
        if value <= null_maximum
    )


@rule(summary="share exactly the layers that are named", decides=False)
def manual(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the layers to share, as they are given."""
    return tuple(names)


# --- a decision ------------------------------------------------------------------------------------------------

THRESHOLDS = (1.05, 1.1, 1.2, 1.3, 1.5, 1.75, 2.0, 2.5, 3.0)
"""Thresholds whose decisions a plan's evidence lists, next to the used one."""


def select(
    rows: Rows,
    rule: str | None = None,
    *,
    metric: str | None = None,
    threshold: float = THRESHOLD,
    k: int = 1,
    layers: Sequence[str] | str | None = None,
    variant: str | None = None,
) -> LayerPlan:
    """Choose by a rule which layers to federate, from measured rows; return the plan.

    The curve is the mean over clients weighted by their training samples, sum_c p_c v^c. It is computed again from the
    clients' own rows. For federation sensitivity v^c is S^c, relative to the client's first layer. For a metric of
    pairs v^c is the mean distance over the pairs of client c. For a similarity such as
    cka the distance is 1 - value. So it too grows with the difference. Every client
    then weighs the same.

    Layers outside the forward pass are not in the curve and stay local. Frozen layers
    are not in it either. They are shared, because they have the same values everywhere.
    Frozen tensors are not sent and cost no bytes.

    A metric that declares ``differs="low"`` is turned, so that a rule always reads "higher = clients differ more":
    rules of ratios read 1 / value, others -value. The evidence's ``detail["differs"]`` has the declared end.

    The evidence's ``detail`` reports the decisions on nulls, if the rows have some
    (:func:`~.curve.against_nulls`). It gives what a client uploads a round, if the rows
    say it. If the rule returns a number of layers by the values and threshold alone,
    ``detail`` also reports how often the decision stays over resamples of the clients.
    These include resamples of their batches if the rows have some
    (:func:`~.curve.stability`).

    >>> import fedlayers as fl
    >>> report = fl.measure.diagnose_task(fl.assemble(fl.RunConfig(dataset="heart")), ["federation_sensitivity"])
    >>> select(report, "sensitivity_ratio", threshold=1.2)
    LayerPlan([fc1] fc2 fc3 fc4; [] = shared, by sensitivity_ratio t=1.2)
    >>> select(report, "manual", layers=["fc1", "fc2"]).shared
    ('fc1', 'fc2')

    Args:
        rows: a rows file, a report, or (header, frame), which may be filtered.
        rule: one of :data:`RULES`, or ``package.module:function``. The plan then has that name. Default:
            ``sensitivity_ratio`` for federation sensitivity, and else ``largest_rise``. A metric that does not declare
            at which end clients differ (``differs``) has no default, and is read as it is.
        metric: the metric whose values make the curve. Default: federation sensitivity. With the rule ``manual`` the
            curve is only evidence, and there is none unless you name a metric.
        threshold: above 0, for the rules that have one.
        k: the number of local layers, for the rule ``top``.
        layers: for rule ``manual``: exact names of the layers to share, as a sequence or separated by commas.
        variant: the metric's variant. Default: its first that was measured. For federation sensitivity it is
            ``"training"`` if the rows hold it. PLayer-FL decides on that one.

    Raises:
        UsageError: a rule, metric, variant or layer is unknown; rows have no layers, or
            come from several rounds, models or seeds; a layer in use can have no value;
            names of layers are missing for ``manual`` or given to another rule; or the
            threshold is not above 0.
        RunError: a value could not be computed, or is not above 0 so that its ratio means nothing.

    Warns:
        The plan shares no layer or all, the rule had to adjust it, or the measured models cannot be averaged.
    """
    header, table = open_diagnosis(rows)
    plan = _selected(
        header,
        table,
        rule,
        metric=metric,
        threshold=threshold,
        k=k,
        layers=layers,
        variant=variant,
    )
    if difference := header.get("different"):
        warn(
            f"the clients' models cannot be averaged: {difference} Use the plan where all clients build one network."
        )
    if plan.why.status != "ok":
        warn(f"the plan, by {plan.why.rule}: {plan.why.status}")
    for note in plan.notes():
        warn(note)
    return plan


def _selected(
    header: Mapping[str, Any],
    table: pd.DataFrame,
    rule: str | None,
    *,
    metric: str | None,
    threshold: float,
    k: int = 1,
    layers: Sequence[str] | str | None = None,
    variant: str | None = None,
) -> LayerPlan:
    """Choose as :func:`select` does, without its warnings."""
    if rule is None and metric is not None:
        check_known("metric among the rows", metric, table["metric"].unique())
    rule = rule or default_rule(metric)
    _check_asked(rule, threshold, layers)
    chosen_rule = RULES[rule]
    all_layers = layers_in(header)
    evidence = Evidence(
        rule=rule,
        threshold=threshold if chosen_rule.takes_threshold else None,
        data=str(header.get("data") or ""),
        checkpoint=str(header.get("checkpoint") or ""),
        seed=header.get("seed"),
        version=str(header.get("version") or ""),
    )
    pairs = header.get("pairs") or {}

    def curve_in(table: pd.DataFrame) -> Curve:
        return curve_of(all_layers, table, metric or SENSITIVITY, variant, pairs)

    def decided(table: pd.DataFrame) -> LayerPlan:
        draws = chain.from_iterable(nulls.values())
        null = [curve_in(draw).combined for draw in draws]
        return _cut(
            all_layers,
            curve_in(table),
            chosen_rule,
            threshold,
            evidence,
            k=k,
            null=null,
        )

    nulls = (
        nulls_in(table) if "null" in chosen_rule.takes and chosen_rule.decides else {}
    )
    if chosen_rule.decides:
        plan = against_nulls(decided(table), table, decided)
    else:
        layer_texts = layers.split(",") if isinstance(layers, str) else layers or ()
        names = [name.strip() for name in layer_texts if name.strip()]
        plan = LayerPlan(all_layers, chosen_rule.choose(names), evidence)
        if metric is not None or variant is not None:
            curve = curve_in(table)
            plan = replace(plan, why=_evidence(plan.why, all_layers, curve))
    if chosen_rule.decides:
        rounds = float(table["round"].dropna().astype(float).max())
        is_default = variant in (None, *facts_of(plan.why.metric).preferred[:1])
        if is_default and threshold == THRESHOLD:
            plan = _with_benchmark(plan, k, rounds)
    return _with_bytes(plan, header.get("bytes") or {})


def _check_asked(
    rule: str, threshold: float, layers: Sequence[str] | str | None
) -> None:
    """Check the threshold of :func:`select`, and that the names of layers fit the rule.

    Raises:
        UsageError: the threshold is not above 0, names are missing for a rule that
            takes them, or another rule is given names.
    """
    names_layers = not RULES[rule].decides
    check_value("threshold", threshold, ABOVE_0)
    if names_layers and layers is None:
        raise UsageError(
            f"rule {rule!r} must have the names of the layers to share; got none. Add layers=NAMES."
        )
    if not names_layers and layers is not None:
        raise UsageError(
            f"Rule {rule!r} chooses the layers itself. Only rule 'manual' takes their names."
        )


def default_rule(metric: str | None) -> str:
    """Return the name of a metric's default rule.

    It is ``sensitivity_ratio`` for federation sensitivity, and else ``largest_rise``.

    Args:
        metric: the metric's name. None stands for federation sensitivity.

    Raises:
        UsageError: the metric is unknown, or does not declare at which end of its scale
            clients differ.

    >>> default_rule(None)
    'sensitivity_ratio'
    """
    if metric in (None, SENSITIVITY):
        return "sensitivity_ratio"
    if not facts_of(metric).differs:
        raise UsageError(
            f"metric must say at which end of its scale clients differ; got {metric!r}, which does not. "
            "Name a rule, which then reads its values as they are: rule='largest_rise'."
        )
    return "largest_rise"


def turned(values: Sequence[float], differs: str, ratios: bool) -> list[float]:
    """Return values that are higher where clients differ more.

    Args:
        differs: the end of the scale at which clients differ, ``high``, ``low`` or empty.
        ratios: whether ratios are read. If clients differ at the low end, a value is
            then replaced by 1 / value, and 0 by infinity. Otherwise it is replaced by
            -value.

    >>> turned([1.0, 4.0], "low", True), turned([1.0, 4.0], "low", False)
    ([1.0, 0.25], [-1.0, -4.0])
    """
    if differs != "low":
        return list(values)
    if ratios:
        return [1 / value if value else math.inf for value in values]
    return [-value for value in values]


def _cut(
    layers: Sequence[Layer],
    curve: Curve,
    rule: Rule,
    threshold: float,
    evidence: Evidence,
    *,
    k: int = 1,
    null: Sequence[Sequence[float]] = (),
) -> LayerPlan:
    """Return the plan of a rule that reads one curve, with its evidence.

    Frozen layers are shared, too. A client without a vote gets a note in the status.

    Args:
        layers: all layers of the model.
        curve: the measured curve.
        rule: the rule.
        threshold, k: as for :func:`select`.
        evidence: the evidence so far.
        null: one curve for each draw of each null, [draws, L].

    Raises:
        RunError: the rule names no valid layers, or reads ratios and a value is not
            finite or not above 0.
    """
    metric_facts = facts_of(curve.metric)
    end = (
        "" if metric_facts.pairs and not metric_facts.distance else metric_facts.differs
    )  # turned already

    def named(values: Sequence[float], whose: str) -> tuple[tuple[str, ...], bool]:
        if rule.ratios:
            _sound(values, curve, whose)
        return rule.answer(
            curve.names,
            turned(values, end, rule.ratios),
            threshold=threshold,
            k=k,
            null=[turned(draw, end, rule.ratios) for draw in null],
        )

    shared, by_number = named(curve.combined, "combined over clients")
    votes: dict[str, str] = {}
    notes: list[str] = []
    if rule.lacks:
        missing_cut_reason = rule.lacks(turned(curve.combined, end, True), threshold)
        if missing_cut_reason:
            notes.append(f"{missing_cut_reason}: all but the last layer are shared")
    detail: dict[str, Any] = {"differs": metric_facts.differs or "not declared"}
    if rule.cuts and by_number:
        for client, values in curve.clients.items():
            try:
                votes[client] = named(values, "its own")[0][-1]
            except RunError as error:
                notes.append(f"client {client!r} has no vote: {error}")

        def count(values: Sequence[float], threshold: float) -> int:
            return rule.cut(turned(values, end, True), threshold, curve.names)

        detail["stability"] = stability(
            curve, count, threshold, len(shared), evidence.seed or 0
        )
    evidence = _evidence(evidence, layers, curve, rule, end, by_number)
    return LayerPlan(
        tuple(layers),
        (*shared, *frozen_in(layers)),
        replace(evidence, votes=votes, detail=detail, status="; ".join(notes) or "ok"),
    )


def _with_benchmark(plan: LayerPlan, k: int, rounds: float) -> LayerPlan:
    """Return the plan with the benchmark's sentence in the evidence.

    The sentence describes the plan's metric and rule. Without a line in the benchmark
    it says so.

    Args:
        plan: the plan.
        k: number of local layers, for the rule ``top``.
        rounds: number of rounds before the measurement.
    """
    rule = plan.why.rule
    if rule == "top" and k != 1:
        rule = f"top k={k}"
    line = benchmark_line(plan.why.metric, rule, rounds)
    sentence = f"The benchmark of rules has no line of {rule} of {plan.why.metric}: fl.regret makes one."
    if line is not None:
        sentence = line.text()
    detail = {**plan.why.detail, "benchmark": sentence}
    return replace(plan, why=replace(plan.why, detail=detail))


def _with_bytes(plan: LayerPlan, sizes: Mapping[str, int]) -> LayerPlan:
    """Return the plan with the bytes of its layers in the evidence, if those of all layers in use are known."""
    used_layers = [
        layer.name for layer in plan.layers if layer.used or layer.name in plan.shared
    ]
    if not all(name in sizes for name in used_layers):
        return plan
    layers = {name: float(sizes[name]) for name in used_layers}
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

    The plan is the one that :func:`select` makes of rows with the same numbers (variant
    ``"training"``). There are no warnings, and no bytes in the evidence.

    Args:
        layers: all layers of the model, in order.
        measured: for each client ``{"client": index, "weight": training samples}`` with the ``layers``, ``importance``
            and ``steps`` of :meth:`~diagnostics.sensitivity.SensitivityAccumulator.result`.
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
            check_known("layer", layer, [layer.name for layer in layers])
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
    return _selected(
        header,
        rows,
        rule,
        metric=SENSITIVITY,
        variant="training",
        threshold=threshold,
    )


# --- the evidence ----------------------------------------------------------------------------------------------


def _sound(values: Sequence[float], curve: Curve, whose: str) -> Sequence[float]:
    """Return the values, checked to be finite and above 0, so that ratios mean something.

    Args:
        values: values of the layers, [L].
        curve: the curve, for the message.
        whose: whose values they are, for the message.

    Raises:
        RunError: a value is not finite, or not above 0. The message names its layer.
    """
    for name, value in zip(curve.names, values, strict=True):
        if not (value > 0 and math.isfinite(value)):
            raise RunError(
                f"layer {name!r} has a {curve.metric} of {value:.4g}, {whose}; ratios need values above 0. "
                "Rule 'top' reads their order."
            )
    return values


def _evidence(
    evidence: Evidence,
    layers: Sequence[Layer],
    curve: Curve,
    rule: Rule | None = None,
    end: str = "",
    by_number: bool = False,
) -> Evidence:
    """Return the evidence with the curve, and the decisions by other thresholds.

    There are none for a rule that does not read ratios, or if a value is not above 0.

    Args:
        evidence: the evidence so far.
        layers: all layers of the model.
        curve: the measured curve.
        rule: the rule. If it has no threshold or returns names, ``sensitivity_ratio``
            decides by the other thresholds.
        end: the end of the metric's scale at which clients differ, as for
            :func:`turned`.
        by_number: whether the rule returned a number of layers, so that it may decide by other thresholds.
    """
    cut: Callable[..., int] = sensitivity_ratio
    if rule is not None and rule.takes_threshold and by_number:
        cut = partial(rule.cut, names=curve.names)

    def placed(values: Sequence[float]) -> tuple[float | None, ...]:
        value_of = dict(zip(curve.names, values, strict=True))
        return tuple(value_of.get(layer.name) for layer in layers)

    last_shared: dict[str, str] = {}
    if (rule is None or rule.ratios) and all(v > 0 for v in curve.combined):
        values = turned(curve.combined, end, True)
        last_shared = {f"{t:g}": curve.names[cut(values, t) - 1] for t in THRESHOLDS}
    return replace(
        evidence,
        metric=curve.metric,
        variant=curve.variant,
        values=placed(curve.combined),
        clients={client: placed(values) for client, values in curve.clients.items()},
        weights=curve.weights,
        alternatives=last_shared,
        seed=evidence.seed if curve.seed is None else curve.seed,
    )
