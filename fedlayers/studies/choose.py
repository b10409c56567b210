"""Chooses the layers to federate by a race: a few arms are trained, and validation samples pick one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedlayers.backends.base import Backend
from fedlayers.backends.names import open_parallel
from fedlayers.studies import arms as candidates
from fedlayers.studies.argument_checks import checked_call, seeds_of
from fedlayers.studies.arms import Arm, arms_of
from fedlayers.studies.baselines import is_table
from fedlayers.studies.choice import Choice
from fedlayers.studies.compare import check_stored
from fedlayers.studies.early_stop import judged_at, run_judged
from fedlayers.studies.harmless import Bench
from fedlayers.studies.inference import evidence_of
from fedlayers.studies.race import (
    Entry,
    Tell,
    check_scored,
    entries_of,
    run_entries,
    standings,
    with_evaluations,
    with_plan_algorithm,
)
from fedlayers.studies.rates import Rates, RateSearch, at_rate, distinct, rates_of
from fedlayers.studies.recommend import recommend
from fedlayers.studies.runtime_estimate import estimate_cost, measured_cost
from fl_core import __version__, runner, tree
from fl_core.config import RunConfig, in_memory
from fl_core.errors import RunError, UsageError, check_distinct
from fl_core.names import csv_bytes
from fl_core.plan import LayerPlan
from fl_core.storage.files import write_atomically, write_json
from fl_core.task import Task


@checked_call
def choose(
    config: RunConfig,
    out: Path | str = "out/choose",
    *,
    data: Any = None,
    model: Any = None,
    arms: Sequence[str] = candidates.DEFAULT,
    seeds: Sequence[int] | None = None,
    thorough: bool = False,
    tune_rates: int | None = None,
    baselines: bool = True,
    backend: Backend | str = "",
    progress: bool = True,
    tell: Tell = lambda line: None,
) -> Choice:
    """Race a few candidates (arms) on the same data, start and batches, and judge them on validation samples.

    A run's best round, and its end, follow from the ranks of two scores (:data:`fl_core.scores.SELECTION`). Rates, arms
    and finished runs are ranked by the validation loss after one temperature (:mod:`fl_core.training.evaluate`). An
    arm is refused if that loss is above the base rate's: the paired 95 % interval over samples is above 0. If all arms
    are refused, there is no plan and no model.

    All finished runs count, trials of rates among them. With several seeds the arm with the best mean over seeds at
    its rate is recommended, with one seed the arm of the best run. The recommended model is the best finished run of
    that arm. Nothing here reads test samples before the model is named. Then it is scored on them once, next to the
    base rate and the baselines.

    Under a stopping rule, one seed of FedPer's default cuts is judged early. All arms train to 15 % of the planned
    rounds. A judge (:mod:`fedlayers.studies.judge`) then keeps one. It trains to its stop. The others have no final
    score. Every other race trains all arms to the end, and ``tell`` receives the reason.

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
        tune_rates: number of learning rates to try, 2 to 5 (:mod:`fedlayers.studies.rates`), or 0. The first seed tries
            them with all but the last layer shared. Then the arms race at the best. The default is 4 for your own data
            here, else 0. A rate in the configuration is kept, and none is tried.
        baselines: for tables, fit the baselines too (:mod:`fedlayers.studies.baselines`).
        backend: where runs are trained: ``local:N``, ``ray`` or ``ray:HOST:PORT`` (:mod:`fedlayers.backends.base`);
            default this process, with the configuration's number of ``workers``.
        progress: show the runs that are done.
        tell: receives the estimated cost, and a line whenever an arm has finished the race.

    Raises:
        UsageError: an unknown name or an invalid value, or runs of another configuration below ``out``, before any
            training.
        RunError: every arm failed.

    >>> import tempfile
    >>> where = tempfile.TemporaryDirectory()
    >>> config = RunConfig(dataset="heart", rounds=4, eval_every=1)
    >>> choice = choose(config, where.name, baselines=False)
    >>> choice.inference.seeds, len(choice.table)
    (1, 4)
    """
    out, config = Path(out), in_memory(config, data, model)
    seeds = seeds_of(config, seeds, 1)
    if config.federation.plan is not None:
        raise UsageError("choose makes its own plans. Name a plan among the arms.")
    check_distinct("choose", "seed", seeds)
    race = _plan_race(config, out, arms, seeds)
    task, entries = race.task, race.entries
    search = race.rate_search(
        rates_of(config, float(task.config.training.lr or 0), tune_rates, tell)
    )
    trained = race.at_rates(search)
    rounds = int(task.config.federation.rounds or 1)
    at, why = (0, "") if thorough else judged_at(task, race.arms, seeds)
    until = at or rounds
    probes = 0 if search is None else len(search.rates)
    with open_parallel(backend, race.config.execution.workers) as place:
        place.progress = progress
        cost = estimate_cost(
            race.tasks, trained, until, place.side_by_side, whole=probes * bool(at)
        )
        tell(
            f"at most {cost.text()}" if task.config.federation.patience else cost.text()
        )
        if why:
            tell(f"no arm stops early: {why}")
        began = time.monotonic()
        rates = None
        if search is not None:
            rates = search.run(place, tell, Bench(task))
            entries = race.at_rate(rates.lr)
            trained = distinct([*rates.entries, *entries])
        early = None
        if at:
            stands, early = run_judged(entries, at, rounds, place, tell)
        else:
            failed = run_entries(entries, None, place, tell)
            if len(failed) == len(entries):
                raise RunError(
                    f"every arm failed, the first with: {next(iter(failed.values()))}"
                )
            stands = standings(entries, until, failed)
        table = baselines and is_table(task.data)
        found = recommend(race, stands, rates, early, entries, until, table)
        if at and found.winner is None:
            tell(
                "no finished run is better than the base rate: all arms train to the end"
            )
            failed, until = run_entries(entries, None, place, tell), rounds
            stands = standings(entries, until, failed)
            found = recommend(race, stands, rates, None, entries, until, table)
        spent = measured_cost(task, trained, until, place.side_by_side)
    winner = found.winner
    if winner is not None:
        plan = _with_evidence(winner, found, until, task, rates)
        winner = replace(winner, plan=plan)
    choice = replace(
        found,
        winner=winner,
        cost=cost,
        measured=spent,
        seconds=time.monotonic() - began,
    )
    write_atomically(out / "standing.csv", csv_bytes(stands.rounds))
    write_json(out / "choice.json", choice.to_json())
    save_plan(choice.plan, out)
    return choice


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
        entries: its runs; ``tasks`` what each arm trains, by its name.
        of_seed: the first task of each seed.
    """

    config: RunConfig
    out: Path
    seeds: tuple[int, ...]
    task: Task
    arms: tuple[Arm, ...]
    entries: list[Entry]
    tasks: dict[str, Task]
    of_seed: dict[int, Task]

    def at_rate(self, lr: float) -> list[Entry]:
        """Return the runs of all arms at a learning rate."""
        return at_rate(self.arms, self.config, self.seeds, self.out, lr)

    def at_rates(self, search: RateSearch | None) -> list[Entry]:
        """Return all runs, including trials of rates. At which rate the arms race does not change what they cost."""
        return (
            self.entries
            if search is None
            else distinct([*search.entries(), *self.at_rate(search.rates[0])])
        )

    def rate_search(self, rates: tuple[float, ...]) -> RateSearch | None:
        """Return the search over rates, its stored runs checked; None without rates to try."""
        if not rates:
            return None
        search = RateSearch(
            self.config.with_keys(seed=self.seeds[0]), rates, self.task.layers, self.out
        )
        probes = search.entries()
        probe = runner.assemble(
            probes[0].config, plan=probes[0].arm.plan, loaded=self.task.data
        )
        self.tasks.setdefault(probes[0].arm.name, probe)
        for entry in (*probes, *(each for lr in rates for each in self.at_rate(lr))):
            if entry.path.exists():
                check_stored(
                    entry.path, runner.assemble(entry.config, plan=entry.arm.plan)
                )
        return search


def _plan_race(
    config: RunConfig,
    out: Path,
    arms: Sequence[str],
    seeds: tuple[int, ...],
) -> Race:
    """Make every run's task, so that errors are found before any training."""
    config = with_evaluations(with_plan_algorithm(config))
    task = runner.assemble(config.with_keys(seed=seeds[0]))
    task.announce()
    check_scored(task)
    racing = arms_of(arms, task.layers, config.federation.algorithm)
    entries = entries_of(racing, config, seeds, out)
    tasks: dict[str, Task] = {}
    of_seed: dict[int, Task] = {}
    for entry in entries:
        same_data = task.data if entry.config.execution.seed == seeds[0] else None
        its_task = runner.assemble(entry.config, plan=entry.arm.plan, loaded=same_data)
        check_stored(entry.path, its_task)
        tasks.setdefault(entry.arm.name, its_task)
        of_seed.setdefault(entry.config.execution.seed, its_task)
    return Race(config, out, seeds, task, racing, entries, tasks, of_seed)


def _with_evidence(
    winner: Arm, found: Choice, until: int, task: Task, rates: Rates | None
) -> LayerPlan | None:
    """Return the winner's plan with the race as its evidence; None if it uses none."""
    if winner.plan is None:
        return None
    judged = found.standing.judged
    return winner.plan.with_shared(
        winner.plan.shared,
        rule="race",
        metric="loss after a temperature",
        detail={} if rates is None else {"rates": rates.to_json()},
        data=task.data.digest,
        checkpoint=tree.digest(tree.state_dict(task.model)),
        seed=task.config.execution.seed,
        version=__version__,
        race=evidence_of(judged, found.inference, winner.name, until),
    )
