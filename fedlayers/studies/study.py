"""A whole study on one dataset: decide by a race or a rule, federate and compare, with pictures and a report page."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from diagnostics import measure
from diagnostics.decide import select
from diagnostics.decide.evidence import in_words
from diagnostics.report import Report
from fedlayers.backends.base import Backend
from fedlayers.backends.local import open_backend
from fedlayers.studies import arms as candidates
from fedlayers.studies.arms import Arm
from fedlayers.studies.choice import Choice
from fedlayers.studies.choose import choose, save_plan
from fedlayers.studies.compare import compare, compared_jobs
from fedlayers.studies.comparison import Comparison, paired
from fedlayers.studies.harmless import Bench
from fedlayers.studies.inference import NAMES, Answers
from fedlayers.studies.jobs import assembled, checked_call, seeds_of, task_kind
from fedlayers.studies.race import best_rate, rate_jobs, rates_of
from fedlayers.studies.tune import APART
from fl_core import runner
from fl_core.config import RunConfig, in_memory
from fl_core.display import csv_bytes
from fl_core.errors import RunError, UsageError, as_list, check_known
from fl_core.plan import LayerPlan
from fl_core.records import store
from fl_core.rows import CLASSIFICATION, SCORES, in_points, label_of
from fl_core.storage import write_atomically

Say = Callable[[str], None]
CHOSEN, OWN = "choose", "own_race"
"""Names among the algorithms: the recommended arm's runs, and each seed's own winner."""
RULED = "playerfl"
"""The algorithm that decides by a rule, in each seed for itself."""
NULLS = ("labels", "clients", "fresh")


AGAINST = {
    "fedavg": NAMES["all"],
    "local": NAMES["nothing"],
    "base_rate": "the base rate",
}
"""The algorithms with which a choice of layers is compared, by name."""
YES, NO, OPEN = "yes", "no", "open"
ACCURACY = "accuracy"
SAME, LEVEL = "the same", "no significant difference"


@dataclass
class Outcome:
    """The result of a study.

    Attributes:
        report: the measurements of every layer after one local epoch, with their nulls.
        plan: the plan of the race's winner or of the rule; None if the winner uses none.
        choice: the race; None if a rule decided.
        comparison: all algorithms' runs, with the chosen ones.
        lead: the outcome in words: what to do, how certain it is, and what it gains or costs.
        page: the report.
    """

    report: Report
    plan: LayerPlan | None
    choice: Choice | None
    comparison: Comparison
    lead: Answers
    page: Path


@checked_call
def study(
    config: RunConfig,
    algorithms: str | Sequence[str],
    seeds: Sequence[int] | None = None,
    out: Path | str = "out/study",
    *,
    data: Any = None,
    model: Any = None,
    rule: str | None = None,
    arms: str | Sequence[str] = candidates.DEFAULT,
    tune_rates: int | None = None,
    options: Mapping[str, dict[str, Any]] | None = None,
    backend: Backend | str = "",
    command: str = "",
    say: Say = lambda text: None,
    progress: bool = True,
    live: bool = False,
) -> Outcome:
    """Decide which layers to federate, run every algorithm over all seeds, and report.

    A few candidates race in every seed (:func:`~fedlayers.studies.choose.choose`). Several seeds show how certain the
    decision is. The recommended arm's runs are compared as ``choose``, each seed's own winner as
    ``own_race``.

    With a ``rule``, one epoch of the first seed's local training decides. Each run of the PLayer-FL family then decides
    for itself on its own seed's training data. The other algorithms use their own default. The base rate and
    simple baselines are added. In either case the report describes what one epoch shows of
    the layers.

    ``out`` receives ``report.html``, ``plan.json``, the pictures as PNG, and the diagnosis in ``rows.jsonl``. ``race/``
    has the race. ``comparison/`` has all runs with their rows and table. ``rates/`` exists if rates were tuned. After a
    stop, the same call resumes. Every run keeps its last and best checkpoints.

    >>> import numpy as np
    >>> draw = np.random.default_rng(0)
    >>> wards = {ward: (draw.normal(size=(40, 5)), np.arange(40) % 2) for ward in ("north", "south")}
    >>> made = study(RunConfig(rounds=1), ["fedavg"], (0,), "study", data=wards, model="mlp", progress=False)
    >>> made.page.name, "choose" in set(made.comparison.table["algorithm"])
    ('report.html', True)

    Args:
        seeds: the default is five, from the configuration's on.
        out: the folder; default ``out/study``, as of the command.
        data, model: your own, as of :func:`fedlayers.run <fedlayers.runs.run>`.
        rule: decides instead of a race: one that decides by itself, with the configuration's threshold.
        arms: of the race; see :func:`~fedlayers.studies.arms.arms_of`.
        tune_rates: number of learning rates to try first, 2 to 5, or 0 (:mod:`fedlayers.studies.race`). They are tried
            with all but the last layer shared, on a seed of their own. All runs use the best. The default is 4 for your
            own data, else 0. A rate in the configuration is kept.
        options: each algorithm's own configuration, by name.
        backend: where runs are trained; see :func:`~fedlayers.studies.compare.compare`. The diagnosis is measured here.
        say: receives the progress and the outcome, line by line.
        live: as of :func:`~fedlayers.studies.choose.choose`.

    Raises:
        UsageError: an unknown name or an invalid value, or a folder with another study; nothing is written then.
        RunError: there is no decision, or a run failed; the same call resumes from there.
    """
    config = in_memory(config, data, model)
    seeds = seeds_of(config, seeds, 5)
    algorithms = as_list("algorithms", algorithms, distinct=True)
    if config.federation.plan is not None:
        raise UsageError(
            "A study decides on its own plan. Leave --plan out, or use compare."
        )
    if (kind := task_kind(config)) != CLASSIFICATION:
        raise UsageError(
            f"A study must have classes; got task {kind}. Use choose and compare."
        )
    out = Path(out)
    racing = config.with_keys(seed=seeds[0])
    config = racing.with_keys(algorithm=RULED, rule=rule or config.federation.rule)
    compared_jobs(config, algorithms, seeds, None, options)
    task = runner.assemble(config)
    if rates := rates_of(racing, float(task.config.training.lr or 0), tune_rates, say):
        tuning = racing.with_keys(seed=APART + racing.execution.seed)
        probes = rate_jobs(tuning, rates, task.layers, out / "rates" / "arms")
        bench = Bench(next(assembled(probes)))
        shown = {"parallel": True, "progress": progress, "live": live}
        with open_backend(backend, config.execution.workers, **shown) as place:
            found = best_rate(probes, place, say, bench)
        write_atomically(out / "rates" / "rates.csv", csv_bytes(found.table))
        racing, config = racing.with_keys(lr=found.lr), config.with_keys(lr=found.lr)
        task = runner.assemble(config)
    compared_jobs(config, algorithms, seeds, out / "comparison", options)
    counts = task.data.class_counts()
    say(
        f"{task.config.data.dataset}: {len(counts)} clients, {int(counts.to_numpy().sum())} training samples"
    )
    say(f"{task.config.model.model}: {', '.join(layer.name for layer in task.layers)}")

    report = measure.diagnose_task(task, command=command, null=NULLS, progress=progress)
    described = None  # a rule cannot choose within a single layer, but a race can
    if rule is not None or len(LayerPlan(task.layers, ()).trainable) > 1:
        described = select.select(
            report,
            config.federation.rule,
            threshold=config.federation.threshold,
            metric=measure.SENSITIVITY,
        )
    with open_backend(backend, config.execution.workers) as place:
        backend = place if backend else backend
        choice = None
        if rule is None:
            say("")
            whole: dict[str, Any] = {
                "thorough": True,
                "tune_rates": 0,
            }  # all are compared, at one rate
            choice = choose(
                racing,
                out / "race",
                arms=arms,
                seeds=seeds,
                backend=backend,
                progress=say,
                live=live,
                **whole,
            )
            if choice.winner is not None and len(choice.of_seed) < len(seeds):
                raise RunError(
                    f"every arm failed with seed {next(s for s in seeds if s not in choice.of_seed)}"
                )
        plan = described if choice is None else choice.plan
        out.mkdir(parents=True, exist_ok=True)
        report.write(out / "rows.jsonl")
        save_plan(plan, out)

        result = compare(
            config,
            algorithms,
            seeds,
            out / "comparison",
            options=options,
            baselines=True,
            beside=None
            if choice is None or choice.winner is None
            else _rows_of(choice),
            backend=backend,
            command=command,
            progress=progress,
            live=live,
        )
    lead = _lead(choice, described, result, len(seeds))
    chosen = (
        ""
        if choice is None or choice.winner is None
        else f"\n{CHOSEN}: the recommended arm. {OWN}: in each seed, the arm that wins its own race."
    )
    say(f"\n{lead.text()}\n\n{result.text()}{chosen}")
    from fedlayers.studies.report import write_page  # draws, so it comes last

    ruled = out / "comparison" / "runs" / f"{RULED}-{seeds[0]}"
    page = write_page(
        out, task, lead, choice, plan, command, ruled, result, report, described
    )
    say(f"\nreport: {page}")
    return Outcome(report, plan, choice, result, lead, page)


def _rows_of(choice: Choice) -> pd.DataFrame:
    """Return the rows of the recommended arm's runs, and those of each seed's own winner."""
    frames = [
        store.Run(entry.path).rows()[1].assign(algorithm=name)
        for name, entries in ((CHOSEN, choice.recommended), (OWN, choice.of_seed))
        for entry in entries.values()
    ]
    return pd.concat(frames, ignore_index=True)


def _lead(
    choice: Choice | None, described: LayerPlan | None, result: Comparison, seeds: int
) -> Answers:
    if choice is not None:
        if choice.winner is None:
            return choice.answers
        table = gains(result, CHOSEN)
        return with_gains(choice.answers, table, seeds)
    if described is None:
        raise ValueError("a study must have a race or a rule")
    found = of_rule(Arm("rule", RULED, described).words, seeds)
    lines = [f"{in_words(described.why.detail['null'], described.why.variant)}."]
    if RULED in set(result.table["algorithm"]):
        table = gains(result, RULED)
        found = with_gains(found, table, seeds, "rule selects")
    else:
        absent = f"{RULED}, which uses the rule in every seed, was not compared."
        lines.insert(0, absent)
    return found._replace(lines=(*found.lines, *lines))


# --- gains on test samples -------------------------------------------------------------------------------------


def gains(result: Comparison, chosen: str) -> pd.DataFrame:
    """Return what the chosen layers gain on test samples over sharing all, sharing nothing and the base rate.

    Each gain is judged by the comparison's score, by default macro-F1. Accuracy against the base rate has a line
    of its own. It judges nothing, since it is hard to beat if classes are rare. Differences are paired by seed. The 95
    % intervals hold together (Student's t with Bonferroni's correction), so they depend on the number of lines.

    Args:
        result: has ``chosen`` and some of :data:`AGAINST`.

    Returns:
        Columns ``against`` and ``metric`` (names), ``value``, ``low``, ``high`` (0 to 1; no ends with one seed),
        ``sign`` (``higher``, ``lower``, ``the same`` in every seed, or ``no significant difference``) and ``better``:
        yes, no, or open.

    Raises:
        UsageError: the chosen one is not in this comparison.
    """
    scores = result.scores.pivot(
        index="seed", columns=["metric", "algorithm"], values="value"
    )
    present = set(result.table["algorithm"])
    check_known("algorithm of this comparison", chosen, present)
    against = [(result.score, name) for name in AGAINST if name in present - {chosen}]
    if result.score != ACCURACY and (ACCURACY, "base_rate") in scores:
        against.append((ACCURACY, "base_rate"))
    pairs = [((metric, chosen), (metric, name)) for metric, name in against]
    table = paired(scores, pairs)
    table.insert(0, "against", [name for _, name in against])
    table.insert(1, "metric", [metric for metric, _ in against])
    same = [bool((scores[one] == scores[other]).all()) for one, other in pairs]
    signs = [same, table["low"] > 0, table["high"] < 0]
    table["sign"] = np.select(signs, [SAME, "higher", "lower"], LEVEL)
    decided = ~table["sign"].isin([SAME, LEVEL])
    good = (table["sign"] == "higher") == table["metric"].map(SCORES)
    table["better"] = np.where(decided, np.where(good, YES, NO), OPEN)
    return table.drop(columns="n")


def with_gains(
    found: Answers, table: pd.DataFrame, seeds: int, by: str = "race chooses"
) -> Answers:
    """Combine the answers of a race or a rule with the gains on test samples.

    Args:
        table: from :func:`gains`.
        seeds: number of repetitions.
        by: what found the layers of each seed's own run.
    """
    first = table.drop_duplicates("against").set_index("against")["better"]
    lines = [
        f"On test samples {AGAINST[name]} is better."
        for name in ("fedavg", "local")
        if first.get(name) == NO
    ]
    head, own = found.head, found.lines
    better = first.get("base_rate", YES)
    if better == NO:
        head, own = "The base rate is better on test samples.", (head, *own)
    elif better == OPEN and seeds > 1:
        lines.append(
            f"On test samples the chosen layers show {LEVEL} from {AGAINST['base_rate']}."
        )
    how = (
        f"Differences are paired over {seeds} seeds. The 95 % intervals hold together: Student's t, Bonferroni."
        if seeds > 1
        else "One seed gives no interval."
    )
    each = [
        f"against {AGAINST[str(name)]}: {'; '.join(map(_gain, part.itertuples()))}"
        for name, part in table.groupby("against", sort=False)
    ]
    about = f"On test samples, the layers that the {by}. {how}"
    useless = found.useless or better == NO
    return Answers(head, (*own, *lines), useless, tuple(each), about)


def of_rule(do: str, seeds: int) -> Answers:
    """Return the answers if a rule has decided, such as ``federate conv1; keep fc local``."""
    lines = ["A rule decided this from one local epoch. It gives no uncertainty."]
    if seeds < 2:
        lines.append("One seed, so no uncertainty can be given.")
    return Answers(f"{do[0].upper()}{do[1:]}.", tuple(lines))


def _gain(line: Any) -> str:
    by = f"{'+' if line.value >= 0 else ''}{in_points(line.metric, line.value)} of {label_of(line.metric)}"
    interval = (
        ""
        if math.isnan(line.low)
        else f" [{100 * line.low:+.1f}, {100 * line.high:+.1f}], {line.sign}"
    )
    return f"{by}{interval}"
