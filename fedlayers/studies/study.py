"""A whole study on one dataset: choose layers by a race, compare algorithms with it, and report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import pandas as pd

from fedlayers.backends.local import Backend
from fedlayers.studies.arms import Ways
from fedlayers.studies.baselines import rows_of
from fedlayers.studies.choice import Answers, Choice
from fedlayers.studies.choose import choose, save_plan
from fedlayers.studies.compare import compare, compared_jobs
from fedlayers.studies.comparison import Comparison
from fedlayers.studies.first_screen import bracket
from fedlayers.studies.jobs import Tell, seeds_of, study_folder, task_kind
from fl_core import rows
from fl_core.config import Keys, RunConfig, with_own
from fl_core.errors import RunError, UsageError, as_list, plural
from fl_core.plan import LayerPlan
from fl_core.rows import CLASSIFICATION, in_points, label_of

CHOSEN, OWN = "choose", "own_race"
"""Names among the algorithms: the recommended arm's runs, and each seed's own winner."""
AGAINST = {
    "fedavg": "sharing every layer",
    "local": "sharing nothing",
    "base_rate": "the base rate",
}
"""The algorithms with which a choice of layers is compared, by name."""


@dataclass
class Outcome:
    """The result of a study.

    Attributes:
        plan: the plan of the race's winner; None if it uses none.
        choice: the race.
        comparison: all algorithms' runs, with the chosen ones.
        lead: the outcome in words: what to do, how certain it is, and what it gains or costs.
        page: the report.
    """

    plan: LayerPlan | None
    choice: Choice
    comparison: Comparison
    lead: Answers
    page: Path


def study(
    config: RunConfig | None = None,
    algorithms: str | Sequence[str] = (),
    seeds: Sequence[int] | None = None,
    out: Path | str = "out/study",
    *,
    data: Any = None,
    model: Any = None,
    arms: Ways = None,
    tune_rates: int | None = None,
    options: Mapping[str, dict[str, Any]] | None = None,
    backend: Backend | str = "",
    command: str = "",
    tell: Tell = lambda text: None,
    progress: bool = True,
    live: bool = False,
    **keys: Unpack[Keys],
) -> Outcome:
    """Choose which layers to federate, run every algorithm over all seeds, and report.

    A few candidates race in every seed (:func:`~fedlayers.studies.choose.choose`). Several seeds show how certain the
    decision is. The recommended arm's runs are compared as ``choose``, each seed's own winner as
    ``own_race``. The other algorithms use their own default, at the race's learning rate. The base rate and simple
    baselines are added.

    ``out`` receives ``report.html``, ``plan.json`` and the pictures as PNG. ``race/`` has the race. ``comparison/`` has
    all runs with their rows and table. After a stop, the same call resumes. Every run keeps its last and best
    checkpoints.

    >>> import numpy as np
    >>> draw = np.random.default_rng(0)
    >>> wards = {ward: (draw.normal(size=(40, 5)), np.arange(40) % 2) for ward in ("north", "south")}
    >>> made = study(RunConfig(rounds=1), ["fedavg"], (0,), "study", data=wards, model="mlp", progress=False)
    >>> made.page.name, "choose" in set(made.comparison.table["algorithm"])
    ('report.html', True)

    Args:
        seeds: the default is five, from the configuration's on.
        out: the folder; default ``out/study``, as of the command.
        data, model, keys: as of :func:`fedlayers.run <fedlayers.runs.run>`.
        arms, tune_rates: of the race, as of :func:`~fedlayers.studies.choose.choose`.
        options: each algorithm's own configuration, by name.
        backend: where runs are trained; see :func:`~fedlayers.studies.compare.compare`.
        tell: receives the progress and the outcome, line by line.
        live: as of :func:`~fedlayers.studies.choose.choose`.

    Raises:
        UsageError: an unknown name or an invalid value, or a folder with another study; nothing is written then.
        RunError: there is no decision, or a run failed; the same call resumes from there.
    """
    out = study_folder(out)
    config, own = with_own(config, data, model, **keys)
    seeds = seeds_of(config, seeds, 5)
    algorithms = as_list("algorithms", algorithms, distinct=True)
    if config.federation.plan is not None:
        raise UsageError(
            "A study decides on its own plan. Leave plan out, or use compare."
        )
    if (kind := task_kind(config, own)) != CLASSIFICATION:
        raise UsageError(
            f"A study must have classes; got task {kind}. Use choose and compare."
        )
    config = config.with_keys(seed=seeds[0])
    compared_jobs(config, algorithms, seeds, None, options, **own)
    how: dict[str, Any] = {"backend": backend, "live": live, **own}
    choice = choose(
        config,
        out / "race",
        arms=arms,
        seeds=seeds,
        tune_rates=tune_rates,
        progress=tell,
        **how,
    )
    if choice.winner is not None and len(choice.of_seed) < len(seeds):
        lost = next(seed for seed in seeds if seed not in choice.of_seed)
        raise RunError(f"every arm failed with seed {lost}")
    save_plan(choice.plan, out)
    if choice.rates is not None:
        config = config.with_keys(lr=choice.rates.lr)
    result = compare(
        config,
        algorithms,
        seeds,
        out / "comparison",
        options=options,
        baselines=True,
        beside=None if choice.winner is None else _rows_of(choice),
        command=command,
        progress=progress,
        **how,
    )
    lead = choice.answers
    known = ""
    if choice.winner is not None:
        same = {"all": "fedavg", "nothing": "local"}.get(choice.winner.extreme)
        others = [name for name in AGAINST if name != same]  # it has the same runs
        gains = result.gains(CHOSEN, others)
        lead = with_gains(lead, gains, len(seeds), result.score)
        known = f" {CHOSEN}: the recommended arm. {OWN}: each seed's own winner."
    table = result.shown().to_string(index=False)
    way = "Test samples, mean ± half the 95 % interval."
    tell(f"\n{lead.text()}\n\n{table}\n\n{way}{known}")
    from fedlayers.studies.report import write_page  # draws, so it comes last

    page = write_page(choice, out, command, lead, result)
    tell(f"report, with the meaning of rows and columns: {page}")
    return Outcome(choice.plan, choice, result, lead, page)


def _rows_of(choice: Choice) -> pd.DataFrame:
    """Return the rows of the recommended arm's runs, and those of each seed's own winner."""
    frames = []
    for name, runs in ((CHOSEN, choice.recommended), (OWN, choice.of_seed)):
        for seed, one in runs.items():
            bench, said = choice.benches[seed], ""
            if one.epochs:
                said = f"{plural(one.epochs, 'own epoch')} at rate {one.rate:g}"
            done = int(bench.task.config.federation.rounds or 1)
            made = rows_of(bench, one.model, name, done, "personal", said)
            frames.append(rows.frame(made))
    return pd.concat(frames, ignore_index=True)


# --- gains on test samples -------------------------------------------------------------------------------------


def with_gains(found: Answers, table: pd.DataFrame, seeds: int, score: str) -> Answers:
    """Combine the answers of a race with the gains on test samples.

    Args:
        table: what the chosen layers gain over each of :data:`AGAINST`, of :meth:`Comparison.gains`.
        seeds: number of repetitions.
        score: of the gains.
    """
    lines = []
    for line in table.itertuples():
        plus = "+" if line.value >= 0 else ""
        gain = f"over {AGAINST[line.algorithm]}: {plus}{in_points(score, line.value)}"
        gain += bracket(score, line.low, line.high)
        if line.low < line.high and line.low <= 0 <= line.high:
            gain += ", no significant difference"
        lines.append(f"Gain in {label_of(score)} on test samples {gain}.")
    lines.append("One seed gives no interval of a gain.")
    if seeds > 1:
        lines[-1] = (
            f"Gains are paired over {seeds} seeds. Their 95 % intervals hold together: Student's t, Bonferroni."
        )
    head = found.head
    own = found.lines
    useless = "base_rate" in set(table.loc[table["high"] < 0, "algorithm"])
    if useless:
        head, own = "The base rate is better on test samples.", (head, *own)
    return Answers(head, (*own, *lines), found.useless or useless)
