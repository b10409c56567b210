"""Chooses the layers to federate by a race: a few arms are trained, and validation samples pick one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd

from fedlayers.backends.local import Backend, no_progress
from fedlayers.studies import arms as candidates
from fedlayers.studies.arms import Arm, arms_of
from fedlayers.studies.baselines import is_table
from fedlayers.studies.choice import Choice
from fedlayers.studies.harmless import Bench
from fedlayers.studies.hint import (
    Cost,
    Hint,
    estimate_cost,
    in_words,
    measured_cost,
    skew_of,
)
from fedlayers.studies.jobs import (
    Tell,
    TrainingJob,
    assembled,
    checked_call,
    jobs_of,
    open_backend,
    seeds_of,
    task_kind,
    train,
)
from fedlayers.studies.race import (
    at_rate,
    best_rate,
    check_scored,
    judged_at,
    rate_jobs,
    rates_of,
    run_judged,
    standings,
    with_evaluations,
    with_plan_algorithm,
)
from fedlayers.studies.recommend import recommend
from fl_core import __version__, runner, tree
from fl_core.config import RunConfig, in_memory
from fl_core.display import csv_bytes
from fl_core.errors import RunError, UsageError, listing
from fl_core.plan import LayerPlan
from fl_core.progress import say
from fl_core.rows import CLASSIFICATION, check_score
from fl_core.storage import write_atomically, write_json
from fl_core.task import Task


@checked_call
def choose(
    config: RunConfig,
    out: Path | str = "out/choose",
    *,
    data: Any = None,
    model: Any = None,
    arms: str | Sequence[str] = candidates.DEFAULT,
    seeds: Sequence[int] | None = None,
    thorough: bool = False,
    score: str = "",
    tune_rates: int | None = None,
    baselines: bool = True,
    backend: Backend | str = "",
    progress: bool | Tell = True,
    live: bool = False,
) -> Choice:
    """Race a few candidates (arms) on the same data, start and batches, and judge them on validation samples.

    A run's best round, and its end, follow from the ranks of two scores (:data:`fl_core.rows.SELECTION`). Rates, arms
    and finished runs are ranked by the calibrated validation loss (:func:`fl_core.training.evaluate.fit`). A
    named ``score`` does both instead. An
    arm is refused if the mean of that loss is above the base rate's. If all arms
    are refused, there is no plan and no model.

    All finished runs count, trials of rates among them. With several seeds the arm with the best mean over seeds at
    its rate is recommended, with one seed the arm of the best run. The recommended model is the best finished run of
    that arm. Nothing here reads test samples before the model is named. Then it is scored on them once, next to the
    base rate and the baselines.

    Under a stopping rule, one seed of FedPer's default cuts is judged early. All arms train to 15 % of the planned
    rounds. A judge (:mod:`fedlayers.studies.race`) then keeps one. It trains to its stop. The others have no final
    score. Every other race trains all arms to the end, and says why.

    After a stop, the same call resumes. Below ``out`` are ``arms/`` (run directories), ``standing.csv``,
    ``choice.json``, and ``plan.json`` if the winner uses a plan. The plan has the race as its evidence. If
    there is no plan now, that of an earlier call is removed.

    Args:
        config: of the runs. Its algorithm uses the cuts if it uses a plan; otherwise FedPer does.
        out: the folder; default ``out/choose``, as of the command.
        data, model: your own, as of :func:`fedlayers.run <fedlayers.runs.run>`.
        arms: see :func:`~fedlayers.studies.arms.arms_of`.
        seeds: one for a decision about this run; three or more for one about the federation. The default is the
            configuration's.
        thorough: train all arms to the end. Runs that were stopped early in ``out`` continue.
        score: one of the task's scores (:data:`fl_core.rows.TABLE`), which alone selects.
        tune_rates: number of learning rates to try, 2 to 5 (:mod:`fedlayers.studies.race`), or 0. The first seed tries
            them with all but the last layer shared. Then the arms race at the best. The default is 4 for your own data
            here, else 0. A rate in the configuration is kept, and none is tried.
        baselines: for tables, fit the baselines too (:mod:`fedlayers.studies.baselines`).
        backend: where runs are trained: ``local:N``, ``ray`` or ``ray:HOST:PORT`` (:mod:`fedlayers.backends.local`);
            default this process, with the configuration's number of ``workers``.
        progress: print the estimated cost and a line whenever an arm has finished the race, and show the runs that are
            done. A function receives the lines alone.
        live: draw the runs' main score in the notebook's cell, again at most once a second.

    Raises:
        UsageError: an unknown name or an invalid value, or runs of another configuration below ``out``, before any
            training.
        RunError: every arm failed.

    >>> import tempfile
    >>> where = tempfile.TemporaryDirectory()
    >>> config = RunConfig(dataset="heart", rounds=4, eval_every=1)
    >>> choice = choose(config, where.name, baselines=False, progress=False)
    >>> choice.inference.seeds, len(choice.table)
    (1, 4)
    """
    config = in_memory(config, data, model)
    tell = progress if callable(progress) else say if progress else no_progress
    if score:
        config = config.with_keys(monitor=check_score(score, task_kind(config)))
    race = planned(config, Path(out), arms, seeds, tune_rates, thorough, tell)
    task, jobs = race.task, race.jobs
    table = baselines and is_table(task.data)
    shown = {"parallel": True, "progress": progress is True, "live": live}
    with open_backend(backend, config.execution.workers, **shown) as place:
        cost = race.cost(place.side_by_side)
        most = "at most " if task.config.federation.patience else ""
        tell(f"{most}{cost.text()}")
        if known := in_words(skew_of(task)):
            tell(known)
        if race.why:
            tell(f"no arm stops early: {race.why}")
        began = time.monotonic()
        rates, found = None, None
        if race.probes:
            rates = best_rate(race.probes, place, tell, Bench(task))
            jobs = race.at_rate(rates.lr)
        if race.at:
            stands, early = run_judged(jobs, race.at, race.rounds, place, tell)
            found = recommend(race, jobs, stands, rates, early, table)
            if found.winner is None:
                tell(
                    "no finished run is better than the base rate: all arms train to the end"
                )
        if found is None or found.winner is None:
            failed = train(jobs, place, tell)
            if len(failed) == len(jobs):
                raise RunError(
                    f"every arm failed, the first with: {next(iter(failed.values()))}"
                )
            stands = standings(jobs, race.rounds, failed)
            found = recommend(race, jobs, stands, rates, None, table)
        spent = measured_cost(task, race.trained(jobs), place.side_by_side)
    seconds = time.monotonic() - began
    found = replace(found, cost=cost, measured=spent, seconds=seconds)
    return stored(found, race.out)


def stored(choice: Choice, out: Path) -> Choice:
    """Write a race's files. The plan gets the race as its evidence.

    A plan of an earlier decision is removed if there is none now.
    """
    if choice.winner is not None:
        winner = replace(choice.winner, plan=_with_evidence(choice))
        choice = replace(choice, winner=winner)
    write_atomically(out / "standing.csv", csv_bytes(choice.standing.rounds))
    write_json(out / "choice.json", choice.to_json())
    save_plan(choice.plan, out)
    return choice


def hint(
    config: RunConfig | None = None,
    *,
    data: Any = None,
    model: Any = None,
    arms: str | Sequence[str] = candidates.DEFAULT,
    seeds: Sequence[int] | None = None,
    tune_rates: int | None = None,
    **keys: Any,
) -> Hint:
    """Return the label skew of a federation, and what :func:`choose` would cost.

    Nothing is trained but a few timed steps.

    >>> import fedlayers as fl
    >>> found = fl.hint(dataset="heart", rounds=10)
    >>> round(found.skew, 2), found.cost.runs
    (0.31, 4)

    Args:
        config, data, model, keys: as of :func:`fedlayers.run <fedlayers.runs.run>`.
        arms, seeds, tune_rates: as of :func:`choose`.

    Raises:
        UsageError: an unknown name or an invalid value.
    """
    config = in_memory((config or RunConfig()).with_keys(**keys), data, model)
    with TemporaryDirectory() as folder:
        out = Path(folder)
        race = planned(config, out, arms, seeds, tune_rates, False, no_progress)
    data, counts = race.task.data, pd.DataFrame()
    if data.task == CLASSIFICATION:
        counts = data.class_counts()
    return Hint(skew_of(race.task), counts, race.cost(config.execution.workers))


def save_plan(plan: LayerPlan | None, out: Path) -> None:
    """Write ``plan.json``. Without a plan, remove that of an earlier decision."""
    if plan is None:
        (out / "plan.json").unlink(missing_ok=True)
    else:
        plan.save(out / "plan.json")


# --- before anything is trained --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Race:
    """A race before its start.

    Attributes:
        config: of its runs, except algorithm and seed.
        out: the folder of its runs.
        task: of the first seed.
        jobs: its runs at the configuration's rate; ``tasks`` what each arm trains, by its name.
        of_seed: the first task of each seed.
        probes: the runs of a search over rates, if any.
        at: the round after which a judge keeps one arm; 0, and ``why``, if all train to the end.
    """

    config: RunConfig
    out: Path
    seeds: tuple[int, ...]
    task: Task
    arms: tuple[Arm, ...]
    jobs: list[TrainingJob]
    tasks: dict[str, Task]
    of_seed: dict[int, Task]
    probes: list[TrainingJob]
    at: int
    why: str

    @property
    def rounds(self) -> int:
        """The planned maximum of rounds."""
        return int(self.task.config.federation.rounds or 1)

    def at_rate(self, lr: float) -> list[TrainingJob]:
        """Return the runs of all arms at a learning rate."""
        return at_rate(self.arms, self.config, self.seeds, self.out / "arms", lr)

    def trained(self, jobs: Sequence[TrainingJob]) -> list[TrainingJob]:
        """Return the probes and the arms' runs. One run may be both."""
        return list({job.path: job for job in (*self.probes, *jobs)}.values())

    def cost(self, side_by_side: int) -> Cost:
        """Estimate what all runs cost, with a number of them at a time. It is the same for any best rate."""
        jobs = self.jobs
        if self.probes:
            jobs = self.at_rate(float(self.probes[0].config.training.lr or 0))
        if not self.at:
            return estimate_cost(self.tasks, self.trained(jobs), side_by_side)
        whole = {job.path for job in self.probes}
        judged = [replace(job, until=self.at) for job in jobs if job.path not in whole]
        rest = self.rounds - self.at
        return estimate_cost(self.tasks, [*self.probes, *judged], side_by_side, rest)


def planned(
    config: RunConfig,
    out: Path,
    arms: str | Sequence[str],
    seeds: Sequence[int] | None,
    tune_rates: int | None,
    thorough: bool,
    tell: Tell,
) -> Race:
    """Make a race's tasks, so that errors are found before any training. Arguments are those of :func:`choose`."""
    seeds = seeds_of(config, seeds, 1)
    if config.federation.plan is not None:
        raise UsageError("A race makes its own plans. Name a plan among the arms.")
    config = with_evaluations(with_plan_algorithm(config)).with_keys(workers=0)
    task = runner.assemble(config.with_keys(seed=seeds[0]))
    task.announce()
    check_scored(task)
    racing = arms_of(arms, task.layers, config.federation.algorithm)
    jobs = jobs_of(racing, config, seeds, out / "arms")
    tasks: dict[str, Task] = {}
    of_seed: dict[int, Task] = {}
    for job, each in zip(jobs, assembled(jobs, task), strict=True):
        tasks.setdefault(job.arm, each)
        of_seed.setdefault(job.config.execution.seed, each)
    rates = rates_of(config, float(task.config.training.lr or 0), tune_rates, tell)
    first = config.with_keys(seed=seeds[0])
    probes = rate_jobs(first, rates, task.layers, out / "arms")
    for job, each in zip(probes, assembled(probes, task), strict=True):
        tasks.setdefault(job.arm, each)
    at, why = (0, "") if thorough else judged_at(task, racing, seeds)
    race = Race(config, out, seeds, task, racing, jobs, tasks, of_seed, probes, at, why)
    begun = [job for lr in rates for job in race.at_rate(lr) if job.path.exists()]
    list(assembled(begun, task))  # which checks them
    return race


def _with_evidence(choice: Choice) -> LayerPlan | None:
    """Return the winner's plan with the race as its evidence; None if it uses none."""
    task, plan, rates = choice.task, choice.plan, choice.rates
    if plan is None:
        return None
    seeds = listing(map(str, choice.standing.judged["seed"].unique()))
    head, lines = choice.answers.head, choice.answers.lines
    ranked = choice.main if choice.trials.empty else "calibrated loss"
    return plan.with_shared(
        plan.shared,
        rule="race",
        metric=task.config.federation.monitor or ranked,
        detail={} if rates is None else {"rates": rates.to_json()},
        data=task.data.digest,
        checkpoint=tree.digest(tree.state_dict(task.model)),
        seed=task.config.execution.seed,
        version=__version__,
        race=(f"race up to round {choice.until}, seeds {seeds}", head, *lines),
    )
