"""``fl.regret``: how many points the plans of a rule lose, in federations whose best plan is known."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection, Sequence
from functools import cache
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import pandas as pd

from diagnostics.measure import diagnose
from diagnostics.metrics.base import METRICS
from diagnostics.regret import (
    ADAPTED,
    COLUMNS,
    Regret,
    federations as stored,
    known_seeds,
    line_of,
    truth_of,
)
from diagnostics.select import RULES, THRESHOLD, curve_rule, select
from fedlayers.runs import run
from fl_core.data.registry import DATASETS, ROOT_VARIABLE
from fl_core.errors import (
    ABOVE_0,
    UsageError,
    as_list,
    at_least,
    check_known,
    check_type,
    check_value,
    plural,
    short_value,
)
from fl_core.plan import LayerPlan

if TYPE_CHECKING:
    from fedlayers.run_result import RunResult

BASE, ADAPTERS = "tweets_base", "lora:r=4"
"""The dataset that pretrains the base of adapters, and the adapters."""
OPTIONS = ("k", "threshold", "variant")
"""Arguments of ``select`` that ``regret`` takes."""
SEEDS = 3
"""Seeds of each federation by default."""


def regret(
    rule: str | Callable[..., Any] = "sensitivity_ratio",
    *,
    metric: str | None = None,
    rounds: int = 1,
    federations: str | Sequence[str] = (),
    seeds: int = SEEDS,
    **options: Any,
) -> Regret:
    """Score a rule on federations whose plans are all known. Return the points that its plans lose.

    Each federation trains FedAvg for some rounds. The metric is measured, the rule names layers, and the plan's test
    accuracy is looked up in a stored table of all subsets of layers, or of cuts and parts of a network with adapters.
    No plan is trained. Equal calls give equal numbers.

    >>> import fedlayers as fl
    >>> lost = fl.regret(lambda run: ["fc1", "fc2"], federations=["known_labels"], seeds=1)
    >>> float(lost.rows["rule"].iloc[0]) == float(lost.rows["head_local"].iloc[0])
    True

    Args:
        rule: one of :data:`RULES <diagnostics.select.RULES>`,
            ``package.module:function``, or a function. With ``metric`` the function is
            a rule (:func:`fl.rule <diagnostics.select.rule>`). Without it, it takes a
            :class:`run <fedlayers.run_result.RunResult>`, and returns the shared layers
            or a plan.
        metric: what the rule reads. Default for a rule by name: federation sensitivity.
        rounds: rounds that are trained before the measurement.
        federations: names of federations. The default is all whose samples are available. Federations whose files are
            missing are listed as left out.
        seeds: the number of seeds of each federation, from the first on. One with
            fewer in the table is scored on those, and the reason is listed.
        options: ``k``, ``threshold`` and ``variant`` of :func:`select <diagnostics.select.select>`. A rule that takes
            ``null`` gets the null of permuted labels.

    Returns:
        The points lost, with a row for each federation and seed. A seed whose training
        or rule fails is listed as left out, with the error.

    Raises:
        UsageError: a rule, metric, federation or option is unknown, the rule does not decide by itself, or a number is
            too small.
    """
    for name in options:
        check_known("option of regret", name, OPTIONS)
    for name, count in (
        ("rounds", rounds),
        ("seeds", seeds),
        ("k", options.get("k", 1)),
    ):
        check_type(name, count, int, numpy=True)
        check_value(name, count, at_least(1))
    check_value("threshold", options.get("threshold", THRESHOLD), ABOVE_0)
    federation_names = [
        check_known("federation of the table", name, stored())
        for name in as_list("federations", federations, empty=True)
    ]
    names = [*dict.fromkeys(federation_names)]
    left_out: dict[str, str] = {}
    if not names:
        names, left_out = available()
    metric_given = metric is not None
    metric = METRICS[metric or "federation_sensitivity"].name
    rule_of_selection, title = "", getattr(rule, "__name__", "rule")
    if isinstance(rule, str) or metric_given:
        rule_of_selection = rule_name(rule)
        kind = curve_rule(rule_of_selection)
        nulls = ("labels",) if "null" in kind.takes else ()
        title = f"{kind.name} of {metric} after {plural(rounds, 'round')}"
        if not METRICS[metric].differs:
            title += (
                ", which declares no end at which clients differ and is read as it is"
            )
    lines: list[dict[str, Any]] = []
    for name in names:
        seeds_of_table = known_seeds(name)
        if len(seeds_of_table) < seeds:
            next_seed = seeds_of_table[-1] + 1
            left_out[f"{name} seeds from {next_seed}"] = (
                f"the table has {plural(len(seeds_of_table), 'seed')}, not {seeds}"
            )
        for seed in seeds_of_table[:seeds]:
            truth = truth_of(name, seed)
            assert truth is not None  # by known_seeds
            with TemporaryDirectory() as folder:
                try:
                    trained_run = measured_run(name, seed, rounds, folder)
                    if isinstance(rule, str) or metric_given:
                        # a stored run has the clients' models, which differ
                        report = diagnose(
                            trained_run, metrics=[metric], null=nulls, progress=False
                        )
                        plan = select(
                            report, rule_of_selection, metric=metric, **options
                        )
                        shared = plan.shared
                    else:
                        shared = layers_named(rule, trained_run)
                    lines.append(line_of(truth, shared))
                except Exception as error:  # a rule from outside may raise anything
                    error_type, reason = (
                        type(error).__name__,
                        " ".join(str(error).split()),
                    )
                    left_out[f"{name} seed {seed}"] = f"{error_type}: {reason}"
    return Regret(title, pd.DataFrame(lines, columns=[*COLUMNS]), left_out)


def start_of(federation: str) -> dict[str, Any]:
    """Return the arguments of ``fl.run`` for a federation's initial weights: for adapters a trained base model.

    >>> start_of("heart")
    {}
    """
    if federation in ADAPTED:
        return {"init": f"{pretrained().name}/base", "adapt": ADAPTERS}
    return {}


@cache
def pretrained() -> TemporaryDirectory[str]:
    """Return a temporary folder with a run of the base model in its subfolder ``base``.

    It is made once, and removed when the process ends.
    """
    folder = TemporaryDirectory()
    run(dataset=BASE, algorithm="fedavg", out=f"{folder.name}/base", progress=False)
    return folder


def measured_run(federation: str, seed: int, rounds: int, out: str) -> RunResult:
    """Train FedAvg on a federation of the benchmark, and return the run, from which a rule chooses layers.

    Args:
        federation: name of the federation.
        seed: seed of the run.
        rounds: number of rounds.
        out: the run directory.
    """
    return run(
        dataset=federation,
        algorithm="fedavg",
        rounds=rounds,
        seed=seed,
        out=out,
        progress=False,
        **start_of(federation),
    )


def available() -> tuple[list[str], dict[str, str]]:
    """Return the federations with available samples, and why each other one has none.

    Some need files below the data root, which the environment variable ``FEDLAYERS_DATA_ROOT`` names.
    """
    names, missing = [], {}
    for name in stored():
        open_function = DATASETS[name].open
        needs_files = "data_root" in inspect.signature(open_function).parameters
        if needs_files and not os.environ.get(ROOT_VARIABLE):
            missing[name] = f"needs files: set {ROOT_VARIABLE}"
        else:
            names.append(name)
    return names, missing


def rule_name(rule: str | Callable[..., Any]) -> str:
    """Return the name of a rule in the registry. A function is registered under its own name.

    Raises:
        UsageError: the rule is unknown, or another rule has the function's name.
    """
    if isinstance(rule, str):
        RULES[rule]  # refuses an unknown one
        return rule
    member = RULES.adopt(rule, getattr(rule, "__name__", type(rule).__name__))
    RULES.add(member.name, member, rule)
    return member.name


def layers_named(rule: Callable[..., Any], trained: RunResult) -> tuple[str, ...]:
    """Call a user's function with a run, and return the shared layers that it names.

    Raises:
        UsageError: it returns an empty list, or something else than names or a plan.
    """
    answer = rule(trained)
    if isinstance(answer, LayerPlan):
        return answer.shared
    if hasattr(answer, "tolist"):  # of NumPy
        answer = answer.tolist()
    if isinstance(answer, str) or not isinstance(answer, Collection) or not answer:
        answer_text = short_value(answer)
        raise UsageError(
            f"the function must return a list of the shared layers' names, or a plan; got {answer_text}."
        )
    return tuple(answer)
