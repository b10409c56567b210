"""The cheap alternative to a race: one run of FedAvg, after which each client fine-tunes its last layers alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from fedlayers.backends.base import Backend, InProcessBackend
from fedlayers.studies.arms import Arm, arms_of
from fedlayers.studies.compare import check_stored
from fedlayers.studies.race import Entry, Tell, best_of_run, run_entries, standardise, validation_scores
from fedlayers.studies.runtime_estimate import Cost, estimate_cost, measured_cost, round_seconds
from fl_core import runner
from fl_core.config import RunConfig
from fl_core.errors import RunError
from fl_core.plan import LayerPlan
from fl_core.records import store
from fl_core.rows import records
from fl_core.scores import main_score
from fl_core.task import Task

OWN_EPOCHS = 2
"""Epochs that each client trains alone."""
MOST_DEPTHS = 6
FEDAVG, OWN = "fedavg", "local_head"


@dataclass(frozen=True)
class PersonalisedModels:
    """FedAvg's model, personalised at several depths.

    Attributes:
        best: the depth with the highest score: ``first_K``, whose first K layers stay FedAvg's, or ``fedavg`` itself.
        run: its run directory.
        table: a line for each depth (``arm``): the main score and ``loss`` on validation samples, and ``score``
            = z(main score) - z(loss) over the depths. Depths that failed are missing.
        cost: the estimate; ``measured`` is the cost of the runs.
    """

    best: Arm
    run: Path
    table: pd.DataFrame
    cost: Cost
    measured: Cost

    def to_json(self) -> dict[str, Any]:
        """Return the best depth and all scores as a dictionary for JSON."""
        return {"best": self.best.name, "own_epochs": OWN_EPOCHS, "table": records(self.table)}


def depths(layers: int) -> tuple[int, ...]:
    """Return numbers of first layers that stay FedAvg's: at most six, evenly spread, never all.

    >>> depths(4), depths(40)
    ((0, 1, 2, 3), (0, 8, 16, 23, 31, 39))
    """
    count = min(layers, MOST_DEPTHS)
    return tuple(round(k * (layers - 1) / (count - 1)) for k in range(count)) if count > 1 else (0,)


def then_personalise(
    task: Task,
    config: RunConfig,
    out: Path,
    place: Backend,
    tell: Tell,
    made: Callable[..., Task] = runner.assemble,
) -> PersonalisedModels:
    """Train FedAvg to the end, then each client's last layers alone at several depths. Validation chooses the depth.

    After a stop, the same call resumes.

    Args:
        task: the task of ``config``, for its layers and costs.
        out: folder of these runs.
        place: trains FedAvg; the own epochs run on this machine, which has FedAvg's model.
        tell: receives the estimated cost, and a line whenever a run is done.
        made: makes the tasks of configurations, as :func:`fl_core.task.assemble` does.

    Raises:
        UsageError: runs of another configuration below ``out``. RunError: FedAvg failed.
    """
    fedavg = replace(config, algorithm=FEDAVG, plan=None, options={}, workers=0)
    start = Entry(Arm(FEDAVG, FEDAVG, None), fedavg, out / f"{FEDAVG}-{config.seed}")
    names = [f"first_{k}" for k in depths(len(LayerPlan(task.layers, ()).trainable))]
    own = replace(start.config, algorithm=OWN, init=str(start.path), rounds=1, epochs=OWN_EPOCHS)
    own = replace(own, participation=1.0, eval_every=1, checkpoint_every=1, patience=0)
    own = replace(own, client_dropout=0.0, dropout_trace=None)  # alone: no reply is lost
    arms = arms_of(names, task.layers, own.algorithm)
    entries = [Entry(arm, own, out / f"{arm.name}-{config.seed}") for arm in arms]
    of_start = made(start.config, loaded=task.data)
    check_stored(start.path, of_start)
    cost = _estimate(of_start, start, len(entries))
    tell(f"FedAvg, then {OWN_EPOCHS} own epochs at {len(entries)} depths: {cost.text()}")
    reasons = run_entries([start], None, place, tell)
    if reasons:
        raise RunError(f"FedAvg failed: {next(iter(reasons.values()))}")
    for entry in entries:
        check_stored(entry.path, made(entry.config, plan=entry.arm.plan, loaded=task.data))
    near = place if place.here else InProcessBackend()
    failed = run_entries(entries, None, near, tell)
    done = [*(entry for entry in entries if entry.key not in failed), start]
    table = pd.DataFrame({"arm": entry.arm.name, **last_scores(entry.path)} for entry in done)
    table["score"] = standardise(table[main_score(table.columns)]) - standardise(table["loss"])
    best = done[int(table["score"].idxmax())]
    spent = [
        measured_cost(task, [start], int(task.config.rounds or 1), 1),
        measured_cost(task, entries, 1, near.side_by_side),
    ]
    n_bytes, seconds = (sum(getattr(each, name) for each in spent) for name in ("n_bytes", "seconds"))
    return PersonalisedModels(best.arm, best.path, table, cost, replace(cost, n_bytes=n_bytes, seconds=seconds))


def last_scores(path: Path) -> dict[str, float]:
    """Return the main score of the task and ``loss`` on validation after a run's last evaluated round.

    Under a stopping rule it is the best round.
    """
    scores = validation_scores(store.Run(path).rows()[1], best_of_run(path))[-1]
    return {name: value for name, value in scores.items() if name != "round"}


def _estimate(task: Task, start: Entry, n_depths: int) -> Cost:
    """Estimate the cost of one run of FedAvg, and of own epochs without sending."""
    rounds, epochs = int(task.config.rounds or 1), int(task.config.epochs or 1)
    fedavg = estimate_cost({start.arm.name: task}, [start], rounds, 1)
    own_rounds = n_depths * OWN_EPOCHS / epochs
    seconds = own_rounds * round_seconds(task) / task.config.participation
    return replace(fedavg, runs=1 + n_depths, full_runs=1 + own_rounds / rounds, seconds=fedavg.seconds + seconds)
