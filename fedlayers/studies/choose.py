"""Chooses which layers to federate by trial: a few candidates race, and the winner's run is continued."""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from fedlayers.studies import arms as candidates
from fedlayers.studies.arms import Arm, arms_of
from fedlayers.studies.certainty import MARGIN, Certainty, certainty, leader_of
from fedlayers.studies.compare import check_stored
from fedlayers.studies.race import SHARE, Entry, Standing, Tell, entries_of, race_end, run_entries, standing
from fl_core import __version__, runner, tree
from fl_core.algorithms.base import find
from fl_core.config import RunConfig
from fl_core.errors import RunError, UsageError, listing
from fl_core.plan import LayerPlan
from fl_core.records.files import write_atomically, write_json
from fl_core.scores import label_of, main_score
from fl_core.task import Task

OBEYS = "fedper"
"""What obeys the cuts where the configuration's algorithm takes no plan."""


@dataclass(frozen=True)
class Cost:
    """The cost of a choice.

    Attributes:
        runs, rounds: how many runs race, and their rounds in all, the winner's completion included.
        full_runs: the same in runs of full length.
        n_bytes: what all clients together send and receive, at most.
        seconds: of local training on this machine with the given workers, roughly, from a few timed steps.
    """

    runs: int
    rounds: int
    full_runs: float
    n_bytes: float
    seconds: float

    def text(self) -> str:
        """The cost in one line."""
        return (
            f"{self.runs} runs, {self.rounds} rounds in all ({self.full_runs:.1f} full runs), "
            f"up to {_sized(self.n_bytes)} sent and received, about {_timed(self.seconds)} of training"
        )


@dataclass(frozen=True)
class Choice:
    """The result of a race.

    Attributes:
        winner: the arm to follow.
        arms: all that raced.
        standing: how they stood at the end of the race.
        certainty: how sure that is.
        run: the winner's run directory; complete, unless the race was all that was asked for.
        cost: what was foreseen; ``seconds`` what it took.
    """

    winner: Arm
    arms: tuple[Arm, ...]
    standing: Standing
    certainty: Certainty
    run: Path
    until: int
    cost: Cost
    seconds: float

    @property
    def plan(self) -> LayerPlan | None:
        """The winner's layer plan."""
        return self.winner.plan

    @property
    def main(self) -> str:
        """The score that arms are judged by beside the loss."""
        return main_score(self.standing.judged.columns)

    @property
    def table(self) -> pd.DataFrame:
        """A row per arm, the leader first: means over seeds of the scores that it was judged by."""
        means = self.standing.judged.groupby("arm", sort=False)[[self.main, "loss", "score"]].mean().reset_index()
        return means.sort_values("score", ascending=False, kind="stable", ignore_index=True)

    def text(self) -> str:
        """The decision, how certain it is, and the table of arms."""
        seeds, word = self.standing.judged["seed"].nunique(), label_of(self.main)
        shown = pd.DataFrame(
            {
                "arm": self.table["arm"],
                f"{word} %": [f"{100 * value:.1f}" for value in self.table[self.main]],
                "loss": [f"{value:.3f}" for value in self.table["loss"]],
                "score": [f"{value:+.2f}" for value in self.table["score"]],
            }
        )
        notes = [f"{name} failed with seed {seed}: {why}" for (name, seed), why in self.standing.failed.items()]
        legend = (
            f"Validation samples, the last evaluated rounds up to round {self.until}, {seeds} "
            f"{'seed' if seeds == 1 else 'seeds'}; score = z({word}) - z(loss) over the arms, higher = better."
        )
        return "\n\n".join([self.lead(), shown.to_string(index=False), *notes, legend])

    def lead(self) -> str:
        """What to use and how certain that is, in one or two sentences."""
        do = self.winner.words[0].upper() + self.winner.words[1:] + "."
        race, points, word = self.certainty, 100 * MARGIN, label_of(self.main)
        if race.verdict == "one race":
            return f"{do} That is what one race says; how sure it is takes repeated races: --seeds 3."
        if race.verdict == "decided":
            return f"{do} Every other candidate is excluded (95 %, paired by seed)."
        if race.verdict == "no matter":
            return (
                f"{do} It does not matter here: {listing(race.left)} are within {points:g} point of {word} of each "
                "other; this one sends least."
            )
        more = "more than 999 further seeds" if race.more_seeds is None else f"about {race.more_seeds} more seeds"
        return (
            f"Not decided between {listing(race.left)}. {do} That may lose up to {100 * race.at_stake:.1f} points of "
            f"{word}; {more} would decide."
        )

    def to_json(self) -> dict[str, Any]:
        """The choice as a dictionary for JSON, as in ``choice.json``."""
        seen = self.certainty
        return {
            "winner": self.winner.name,
            "algorithm": self.winner.algorithm,
            "shared": None if self.plan is None else list(self.plan.shared),
            "verdict": seen.verdict,
            "left": list(seen.left),
            "at_stake": None if pd.isna(seen.at_stake) else seen.at_stake,
            "more_seeds": seen.more_seeds,
            "judged": self.standing.judged.astype(object).where(self.standing.judged.notna(), None).to_dict("records"),
            "failed": [{"arm": arm, "seed": seed, "why": why} for (arm, seed), why in self.standing.failed.items()],
            "until": self.until,
            "foreseen": asdict(self.cost),
            "seconds": self.seconds,
            "version": __version__,
        }


def choose(
    config: RunConfig,
    out: Path | str,
    *,
    arms: Sequence[str] = candidates.DEFAULT,
    seeds: Sequence[int] = (0,),
    share: float = SHARE,
    complete: bool = True,
    tell: Tell = lambda line: None,
) -> Choice:
    """Race a few candidates on the same data, start and batches, judge them on validation, continue the winner.

    Each arm runs to a share of the rounds. An arm's score in an evaluated round is z(macro-F1) - z(loss) of its
    validation scores, standardised over the arms; the mean over the last three evaluated rounds, and over the seeds,
    decides. Nobody is dropped earlier. The winner's run of the first seed then goes on to the end. Test samples are
    scored and stored with each run, as always, but nothing here reads them.

    The same call goes on after a stop. Below ``out``: ``arms/`` (run directories), ``standing.csv``, ``choice.json``
    and, where the winner obeys a plan, ``plan.json`` with the race as its evidence.

    Args:
        config: what is run; its algorithm obeys the cuts if it takes a plan, otherwise FedPer does.
        arms: see :func:`~fedlayers.studies.arms.arms_of`.
        seeds: one for a decision; three or more also tell how sure it is.
        share: of the rounds that are raced, from 0.5 to 1.
        complete: train the winner to the end.
        tell: hears what it costs, and a line whenever an arm has reached the end of the race.

    Raises:
        UsageError: anything unknown or not fitting, or runs of another configuration below ``out``, before anything is
            trained.
        RunError: every arm failed.

    >>> import tempfile
    >>> where = tempfile.TemporaryDirectory()
    >>> choice = choose(RunConfig(dataset="heart", rounds=4, eval_every=1), where.name, complete=False)
    >>> choice.certainty.verdict, len(choice.table)
    ('one race', 3)
    """
    out = Path(out)
    if config.plan is not None:
        raise UsageError("choose makes its plans itself; name a plan among the arms instead")
    if len(set(seeds)) != len(seeds) or not seeds:
        raise UsageError(f"choose needs one or more different seeds, not {list(seeds)}")
    algorithm = config.algorithm if find(config.algorithm).splits else OBEYS
    config = replace(config, algorithm=algorithm, options=config.options if algorithm == config.algorithm else {})
    task = runner.assemble(replace(config, seed=seeds[0]))
    for note in task.notes():
        warnings.warn(note, stacklevel=2)
    racing = arms_of(arms, task.layers, algorithm)
    until = race_end(config, share)
    entries = entries_of(racing, config, seeds, out)
    for entry in entries:
        same_data = task.data if entry.config.seed == seeds[0] else None
        check_stored(entry.path, runner.assemble(entry.config, plan=entry.arm.plan, loaded=same_data))
    cost = foreseen(task, entries, until, complete, config.workers)
    tell(cost.text())
    began = time.monotonic()
    failed = run_entries(entries, until, config.workers, tell)
    if len(failed) == len(entries):
        raise RunError(f"every arm failed, the first with: {next(iter(failed.values()))}")
    stands = standing(entries, until, failed)
    sure = certainty(stands.judged)
    winner = _winner(racing, stands, sure, task)
    run = next(entry for entry in entries if entry.arm == winner and (winner.name, entry.config.seed) not in failed)
    if complete:
        tell(f"going on with {winner.name} to round {task.config.rounds}")
        reasons = run_entries([run], None, 0, tell)
        if reasons:
            raise RunError(next(iter(reasons.values())))
    plan = None if winner.plan is None else _with_evidence(winner.plan, stands, sure, task)
    winner = replace(winner, plan=plan)
    choice = Choice(winner, racing, stands, sure, run.path, until, cost, time.monotonic() - began)
    write_atomically(out / "standing.csv", stands.rounds.to_csv(index=False).encode())
    write_json(out / "choice.json", choice.to_json())
    if plan is not None:
        plan.save(out / "plan.json")
    return choice


def _winner(racing: Sequence[Arm], stands: Standing, sure: Certainty, task: Task) -> Arm:
    """The leading arm; if the difference does not matter, the remaining arm that sends least."""
    by_name = {arm.name: arm for arm in racing}
    if sure.verdict != "no matter":
        return by_name[leader_of(stands.judged)]
    return min((by_name[name] for name in sure.left), key=lambda arm: _bytes_a_round(task, arm))


def _with_evidence(plan: LayerPlan, stands: Standing, sure: Certainty, task: Task) -> LayerPlan:
    judged = stands.judged.groupby("arm")["score"].mean()
    detail = {"race": {str(arm): float(score) for arm, score in judged.dropna().items()}, "verdict": sure.verdict}
    return plan.with_shared(
        plan.shared,
        rule="race",
        metric=f"{main_score(stands.judged.columns)} - loss, standardised",
        detail=detail,
        data=task.data.digest,
        checkpoint=tree.digest(tree.of(task.model)),
        seed=task.config.seed,
        version=__version__,
    )


# --- what it costs ---------------------------------------------------------------------------------------------


def foreseen(task: Task, entries: Sequence[Entry], until: int, complete: bool, workers: int) -> Cost:
    """Estimate the cost of a race before it starts."""
    full = int(task.config.rounds or 1)
    rest = (full - until) * complete
    rounds = until * len(entries) + rest
    arms = [entry.arm for entry in entries]
    most = max(_bytes_a_round(task, arm) for arm in arms)
    sent = until * sum(_bytes_a_round(task, arm) for arm in arms) + rest * most
    training = task.config.training
    steps = sum(-(-n // training.batch) for n in task.data.weights) * int(task.config.epochs or 0)
    seconds_a_round = steps * task.config.participation * _seconds_a_step(task)
    side_by_side = max(1, min(workers, len(entries)))
    seconds = seconds_a_round * (until * len(entries) / side_by_side + rest)
    return Cost(len(entries), rounds, rounds / full, sent, seconds)


def _bytes_a_round(task: Task, arm: Arm) -> float:
    """Bytes that all sampled clients send and receive in a round; without a plan at most, the whole model's."""
    live = tree.live(task.model)
    names = live.keys() if arm.plan is None else arm.plan.body_tensors & live.keys()
    return 2 * tree.n_bytes(tree.pick(live, frozenset(names))) * len(task.data.clients) * task.config.participation


def _seconds_a_step(task: Task, steps: int = 4) -> float:
    """Seconds of one training step on a batch of the largest client, in one thread, after one that is not counted."""
    largest = max(task.data.clients, key=lambda client: len(client.train)).train
    batch = int(task.config.batch or 1)
    x, y = largest.x[:batch], largest.y[:batch]
    seconds, model = [], copy.deepcopy(task.model)
    with tree.one_thread(), torch.random.fork_rng():
        for _ in range(steps):
            began = time.perf_counter()
            loss = task.criterion(model(x), y)
            torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad], allow_unused=True)
            seconds.append(time.perf_counter() - began)
    return min(seconds[1:])


def _sized(n_bytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if n_bytes < 1000:
            return f"{n_bytes:.3g} {unit}"
        n_bytes /= 1000
    return f"{n_bytes:.3g} TB"


def _timed(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
