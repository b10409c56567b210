"""The policy of a decision, step by step: train together, train alone, see whether clients differ, train both ends.

FedAvg is tuned first, and each client's own epochs belong to every model. Only where clients differ are the two ends
of the network tried as local layers (``docs/choose_layers.md``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pandas as pd
import torch
from torch import Tensor

from diagnostics.tuning.copies import EPOCHS, Held
from diagnostics.tuning.differ import LEAST_CLIENTS, cross_losses
from diagnostics.tuning.permutation import Difference, blocks, permutation_test
from diagnostics.tuning.profile import every
from fedlayers.backends.local import Backend
from fedlayers.studies.arms import Arm, arm_of
from fedlayers.studies.comparison import headline, scores_of
from fedlayers.studies.harmless import DIGITS, VALIDATION, Bench, Predictor
from fedlayers.studies.jobs import Tell, TrainingJob, assembled, jobs_of, train
from fl_core import rows
from fl_core.algorithms.base import find
from fl_core.config import STOPPING_INTERVAL, Own, RunConfig, is_file, resolve
from fl_core.errors import NonFiniteError, RunError, UsageError, listing
from fl_core.rows import (
    MAIN,
    SCORES,
    TABLE,
    label_of,
    main_score,
    selecting_scores,
)
from fl_core.run.task import Task

if TYPE_CHECKING:
    from diagnostics.groups import Alike

DEFAULT_EVALUATIONS = 20
"""Default number of evaluations of a race's runs."""
FACTORS = (1.0, 3.0, 10.0, 30.0, 0.3)
"""The rates that are tried, times the default, in the order in which they are taken (``decision.tuned``)."""
COUNT = 4
"""How many rates are tried by default for your own data."""
EARLY, KEPT = 0.1, 2
"""The share of the rounds after which only the best rates train on, and how many these are."""
LOWER = 0.3
"""The rate at which an arm that diverged trains again, times the others'."""
THIRD = 1 / 3
"""The rate of own epochs, times the run's. FedAvg also tries its own rate."""
PLAN_ALGORITHM = "fedper"
"""The algorithm that uses the cuts if the configuration's uses no plan."""


@dataclass(frozen=True)
class Race:
    """A decision before its start.

    Attributes:
        config: of its runs, except algorithm and seed. ``own``: the data and the model beside it.
        out: the folder of its runs.
        task: of the first seed; ``tasks`` what each arm trains, by its name.
        ends: the arms that follow only where clients differ; none where arms were named by hand.
        benches: the samples of each seed.
        probes: the runs of a search over rates, if any.
        startup: seconds that a run took to be made and checked.
    """

    config: RunConfig
    own: Own
    out: Path
    seeds: tuple[int, ...]
    task: Task
    arms: tuple[Arm, ...]
    ends: tuple[str, ...]
    tasks: dict[str, Task]
    benches: dict[int, Bench]
    probes: list[TrainingJob]
    startup: float

    @property
    def rounds(self) -> int:
        """The planned maximum of rounds."""
        return int(self.task.config.federation.rounds or 1)

    @property
    def early(self) -> int:
        """The evaluated round after which only the best rates train on."""
        every = int(self.task.config.execution.eval_every or 1)
        return max(every, int(EARLY * self.rounds) // every * every)

    def arm(self, name: str) -> Arm:
        """Return an arm by name."""
        return next(arm for arm in self.arms if arm.name == name)

    def jobs_at(
        self, lr: float | None, names: Sequence[str], seeds: Sequence[int] = ()
    ) -> list[TrainingJob]:
        """Return the runs of some arms at a learning rate; None is the configuration's."""
        config, suffix = self.config, ""
        if lr is not None:
            config, suffix = config.with_keys(lr=lr), f"-lr{lr:g}"
        arms = [arm for arm in self.arms if arm.name in names]
        if not arms:  # the rates of arms by hand are tried with all layers shared
            arms = [arm_of("all", self.task.layers, config.federation.algorithm)]
        folder = self.out / "arms"
        return jobs_of(arms, config, seeds or self.seeds, folder, suffix, **self.own)


class Standing(NamedTuple):
    """The scores of a race's runs on validation samples.

    Attributes:
        main: the score that is shown: the task's main one (:data:`fl_core.rows.MAIN`), or the one that selects.
        judged: a line per run: ``main`` and ``loss`` in its best round under a stopping rule, else in its last one.
            ``score`` ranks the runs, higher is better. NaN for a run that failed.
        failed: why a run has no result.
        best: under a stopping rule the best round of each run.
        left_out: the rows of clients whose samples give no main score. It is the mean over the other clients, for all
            arms alike.
    """

    main: str
    judged: pd.DataFrame
    failed: dict[str, str]
    best: Mapping[str, int]
    left_out: pd.DataFrame

    @property
    def notes(self) -> list[str]:
        """Lines on arms that failed, and on clients that are left out."""
        lines = [f"{run} failed: {why}" for run, why in self.failed.items()]
        return [*lines, *rows.left_out(self.left_out)]


def with_evaluations(config: RunConfig, own: Own) -> RunConfig:
    """Return the configuration of a race's runs, evaluated after every twentieth of the rounds by default.

    A run's own default may be longer if evaluation is expensive. Then few rounds would show where the best one is.

    >>> with_evaluations(RunConfig(dataset="heart", rounds=100), Own(data=None, model=None)).execution.eval_every
    5
    """
    if config.execution.eval_every is not None:
        return config
    federation = resolve(config, **own).federation
    every = max(1, int(federation.rounds or 1) // DEFAULT_EVALUATIONS)
    if federation.patience:
        every = min(every, STOPPING_INTERVAL)
    return config.with_keys(eval_every=every)


def with_plan_algorithm(config: RunConfig) -> RunConfig:
    """Return the configuration with an algorithm that uses cuts: its own, or FedPer."""
    if find(config.federation.algorithm).uses_plan:
        return config
    return config.with_keys(algorithm=PLAN_ALGORITHM, options={})


def check_scored(bench: Bench) -> None:
    """Refuse a race whose score has no value for any client's validation samples.

    Whether it has one depends on the samples alone, so the base rate shows it.

    Raises:
        UsageError: names the score, and why it has no value.
    """
    metric = bench.task.config.federation.monitor or MAIN[bench.kind]
    if math.isnan(bench.scores(bench.base_rate, VALIDATION).get(metric, 0.0)):
        raise UsageError(
            f"{label_of(metric)} must have a value for a client's validation samples; got none: "
            f"{TABLE[metric].missing}. Give clients more samples."
        )


def standings(
    jobs: Sequence[TrainingJob],
    failed: Mapping[str, str],
    trained: Sequence[Trained] = (),
) -> Standing:
    """Return the runs' scores: of their ``trained`` models after own epochs, else as their rows have them.

    Without models ``score`` is minus the sum of ranks by the selecting scores.
    """
    of_run = {one.job.name: {**one.scores, "epochs": one.epochs} for one in trained}
    by = jobs[0].config.federation.monitor
    main = ""
    best: dict[str, int] = {}
    lines, left_out = [], []
    for job in jobs:
        lines.append(
            {
                "run": job.name,
                "arm": job.arm,
                "seed": job.config.execution.seed,
                "lr": job.config.training.lr,
            }
        )
        if job.name in failed:
            continue
        if job.best_round is not None:
            best[job.name] = job.best_round
        final = validation_rows(job)
        main = by or main_score(final["metric"].unique())
        values = scores_of(final).set_index("metric")["value"]
        lines[-1] |= of_run.get(job.name, values[[main, "loss"]].to_dict())
        of_main = final[final["metric"] == main]
        left_out.append(of_main[rows.without_score(of_main)])
    judged = pd.DataFrame(lines).astype({"lr": float})
    if not trained:
        judged["score"] = 0.0
        for name in selecting_scores(TABLE[main].task, by):
            values = judged[name].round(DIGITS).groupby(judged["seed"])
            judged["score"] -= values.rank(ascending=not SCORES[name])
    lacking = pd.concat(left_out, ignore_index=True)
    return Standing(main, judged, dict(failed), best, lacking)


def validation_rows(job: TrainingJob) -> pd.DataFrame:
    """Return the validation scores of a run's one model: of its best round under a stopping rule, else of its last."""
    return headline(job.rows, VALIDATION, best=job.best_round is not None)


# --- a finished run, and own epochs after it -------------------------------------------------------------------


UNSEEN = torch.empty(0)


@dataclass(frozen=True)
class Trained:
    """A finished run of an arm, and each client's own epochs after it.

    Attributes:
        job: the run. Its best round counts under a stopping rule, else its last.
        model: what clients use: the run's models after the own epochs.
        scores: of :meth:`Bench.line`, on validation samples.
        epochs, rate: own epochs of every client, and their learning rate. 0 where none are better.
        price: epochs that were trained to choose them.
        seen: outputs of the candidates for neighbours, [1 + candidates, N, C]; empty where nobody asks.
    """

    job: TrainingJob
    model: Predictor
    scores: Mapping[str, float]
    epochs: int = 0
    rate: float = 0.0
    price: int = 0
    seen: Tensor = UNSEEN

    @property
    def arm(self) -> str:
        """The name of what the run tries."""
        return self.job.arm

    @property
    def seed(self) -> int:
        """The seed of the run."""
        return self.job.config.execution.seed


def own_rates(arm: Arm) -> tuple[float, ...]:
    """Return the rates of own epochs that follow an arm, times the run's."""
    return (THIRD, 1.0) if arm.extreme == "all" else (THIRD,)


def finished(
    job: TrainingJob, bench: Bench, factors: Sequence[float] = (), others: bool = False
) -> Trained:
    """Score a finished run, after the number of own epochs that is best by the score that selects.

    The numbers are 0, 1, 2 and 4, the same for all clients. Of equally good ones the least is taken.

    Args:
        factors: the rates of own epochs, times the run's.
        others: keep what the candidates predict for clients' neighbours.

    Raises:
        UsageError: the clients hold parts of the model, so that none predicts alone.
    """
    loaded = bench.load(job.path)
    tuner, names = bench.tuner(job, loaded, others), every(loaded.task.layers)
    run_rate, tried = float(job.resolved.training.lr or 0), [(0, 0.0, tuner.start)]
    for factor in factors:
        rate = float(f"{run_rate * factor:.3g}")
        try:
            found = tuner.outputs(names, rate)
        except NonFiniteError:
            continue
        tried += [(n, rate, own) for n, own in zip(EPOCHS, found, strict=True)]
    parts = [tuner.parts(own) for *_, own in tried]
    models = [bench.of_parts(job.arm, each) for each in parts]
    worth = [bench.worth(one) for one in models]
    best = max(range(len(worth)), key=lambda k: (not math.isnan(worth[k]), worth[k]))
    seen = UNSEEN
    if others:
        last = len(tuner.near)
        near = [[own for (_, k), own in each.items() if k < last] for each in parts]
        seen = torch.stack([torch.cat(own) for own in near])
    return Trained(
        job,
        models[best],
        bench.line(models[best]),
        *tried[best][:2],
        len(factors) * EPOCHS[-1],
        seen,
    )


# --- the steps of a decision -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rates:
    """The learning rates that were ``tried`` with all layers shared, and the best, ``lr``."""

    tried: tuple[float, ...]
    lr: float

    def text(self) -> str:
        """Return the rates that were tried, and the best."""
        lrs = listing(f"{lr:g}" for lr in self.tried)
        told = f"Learning rates tried on validation: {lrs}. Used: {self.lr:g}. Use it in other runs: --lr {self.lr:g}."
        for end, name in ((min, "smallest"), (max, "largest")):
            if self.lr == end(self.tried):
                told += f" It is the {name} of them: try more with --lr."
        return told


@dataclass
class Decided:
    """What the steps of a decision have trained.

    Attributes:
        runs: the finished runs of the arms, one for each arm and seed.
        jobs: all of these runs, with those that failed.
        failed: why a run has no result.
        rates: the learning rates that were tried, if any.
        differences: of each seed, where the policy asked.
        groups: of clients by their own models, where clients differ.
    """

    race: Race
    runs: list[Trained] = field(default_factory=list)
    jobs: list[TrainingJob] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    rates: Rates | None = None
    differences: list[Difference] = field(default_factory=list)
    groups: Alike | None = None

    @property
    def said(self) -> list[str]:
        """Return a line for each verdict on whether clients differ, with its first seed's evidence; and the groups."""
        first = {each.shown: each for each in reversed(self.differences)}
        lines = [each.text() for each in first.values()]
        if self.groups is not None and self.groups.significant:
            lines.append(self.groups.text())
        return lines

    @property
    def price(self) -> int:
        """Return the epochs of all clients that were trained beside the runs."""
        return sum(one.price for one in self.runs)

    def of(self, arm: str) -> dict[int, Trained]:
        """Return an arm's run in each seed."""
        return {one.seed: one for one in self.runs if one.arm == arm}


def decide(race: Race, place: Backend, tell: Tell) -> Decided:
    """Train what a decision needs, step by step.

    1. FedAvg, by default at four rates, of which the best two train on after a tenth of the rounds.
    2. Every client alone, from the initial model and at the better rate.
    3. Own epochs after each run: 0, 1, 2 or 4, at a third of its rate, and for FedAvg also at its rate.
    4. Whether clients differ. If it is not shown in any seed, the decision ends here.
    5. The two ends of the network as local layers; and one run a group, where the clients form groups.

    Arms that are named by hand replace steps 1, 2, 4 and 5.

    Raises:
        RunError: every arm failed.
    """
    found = Decided(race)
    if race.probes:
        found.rates = _best_rate(race, place, tell)
    first = [arm.name for arm in race.arms if arm.name not in race.ends]
    _train_arms(race, first, found, place, tell)
    if race.ends:
        tell("whether clients differ: own epochs and training alone on validation")
        shared, alone = found.of("all"), found.of("nothing")
        found.differences = [
            difference(shared[seed], alone[seed], race.benches[seed])
            for seed in shared.keys() & alone.keys()
        ]
        found.runs = [replace(one, seen=UNSEEN) for one in found.runs]
        for line in found.said:
            tell(line)
        if any(each.shown for each in found.differences):
            try:
                found.race = with_groups(race, found)
            except (RunError, UsageError) as error:
                tell(f"whether clients form groups is unknown: {error}")
            _train_arms(found.race, found.race.ends, found, place, tell)
    if not found.runs:
        why = next(iter(found.failed.values()))
        raise RunError(f"every arm failed, the first with: {why}")
    return found


def _best_rate(race: Race, place: Backend, tell: Tell) -> Rates:
    """Train FedAvg at each rate for a tenth of the rounds, the best two to the end, and return the better one."""
    bench = race.benches[race.seeds[0]]
    tried = tuple(float(job.config.training.lr or 0) for job in race.probes)
    jobs, failed = race.probes, dict[str, str]()

    def best(jobs: Sequence[TrainingJob]) -> list[TrainingJob]:
        sound = [job for job in jobs if job.name not in failed]
        worth = {job.name: finished(job, bench).scores["score"] for job in sound}
        return sorted(sound, key=lambda job: -worth[job.name])

    while True:
        failed |= train([replace(job, until=race.early) for job in jobs], place, tell)
        kept = best(jobs)[:KEPT]
        failed |= train(kept, place, tell)
        if ranked := best(kept):
            break
        if len(jobs) == 1:
            why = next(iter(failed.values()))
            raise RunError(f"training failed at every rate, the first with: {why}")
        lower = float(f"{min(tried) * LOWER:.3g}")
        tell(f"training failed at every rate; {lower:g} is tried")
        tried, jobs = (*tried, lower), race.jobs_at(lower, ["all"], race.seeds[:1])
    lr = float(ranked[0].config.training.lr or 0)
    tell(f"learning rates {listing(f'{each:g}' for each in tried)}: {lr:g} is used")
    return Rates(tried, lr)


def _train_arms(
    race: Race, names: Sequence[str], found: Decided, place: Backend, tell: Tell
) -> None:
    """Train some arms with every seed. Those that diverge train once more, at a lower rate, if none was given."""
    lr = None if found.rates is None else found.rates.lr
    jobs = race.jobs_at(lr, names)
    failed = train(jobs, place, tell)
    again = {job.arm for job in jobs if job.name in failed}
    if again and race.config.training.lr is None:
        lower = float(f"{LOWER * (lr or race.task.config.training.lr or 0):.3g}")
        tell(f"{listing(sorted(again))} diverged, and trains again at rate {lower:g}")
        jobs = [job for job in jobs if job.arm not in again]
        lowered = race.jobs_at(lower, [name for name in names if name in again])
        failed = train(lowered, place, tell)
        jobs += lowered
    if any(job.name not in failed for job in jobs):
        tell("own epochs of each client, on validation samples")
    for job in jobs:
        if job.name in failed:
            continue
        arm, bench = race.arm(job.arm), race.benches[job.config.execution.seed]
        others = bool(race.ends) and job.arm not in race.ends
        try:
            found.runs.append(finished(job, bench, own_rates(arm), others))
        except UsageError as error:  # its clients hold parts of the model
            failed[job.name] = str(error)
    found.jobs += jobs
    found.failed |= failed


def with_groups(race: Race, found: Decided) -> Race:
    """Return the decision with an arm that trains one model a group of clients, if the clients form groups.

    The clients' models of the first seed that were trained alone say who is alike.
    """
    from diagnostics.cross_scores import cross_scores

    task, trained = race.task, found.of("nothing")
    clients = task.data.clients
    enough = len(clients) >= LEAST_CLIENTS and all(
        len(one.validation) for one in clients
    )
    if not enough or not trained:
        return race
    seed = next(iter(trained))
    models = race.benches[seed].load(trained[seed].job.path).models
    held = {one.name: one.validation for one in race.benches[seed].task.data.clients}
    crossed = cross_scores(models, held, loss=task.criterion)
    groups = found.groups = crossed.alike(seed)
    if not groups.significant:
        return race
    labels = [groups.groups[one.name] for one in clients]
    arm = Arm("groups", "grouped", options={"groups": labels})
    race = replace(race, arms=(*race.arms, arm), ends=(*race.ends, arm.name))
    [race.tasks["groups"], *_] = assembled(race.jobs_at(None, ["groups"]), task)
    return race


def difference(shared: Trained, alone: Trained, bench: Bench) -> Difference:
    """Return whether clients differ, from fine-tuning after the shared model and from local training."""
    clients = bench.task.data.clients
    held = Held.of([one.validation for one in clients], [*bench.sizes.values()])
    parts = blocks(len(clients), shared.seed)
    outputs = torch.cat([shared.seen[1:], alone.seen[:1]])
    losses = cross_losses(bench.task.criterion, held, parts, outputs)
    return permutation_test([losses], parts, seed=shared.seed)


def rates_of(
    config: RunConfig,
    default: float,
    count: int | None,
    tell: Tell,
    from_python: bool = False,
) -> tuple[float, ...]:
    """Return the rates to try; none where the rate is given or known.

    By default :data:`COUNT` rates are tried for your own data. A named dataset has its own rate.

    >>> rates_of(RunConfig(dataset="heart"), 0.01, 4, print)
    (0.01, 0.03, 0.1, 0.3)
    >>> rates_of(RunConfig(dataset="heart"), 0.01, None, print)
    ()

    Args:
        default: The rate that the configuration has without a search.
        count: Asked for; 0 for none, None for the default.
        from_python: Whether the data are, in place of the configuration's.

    Raises:
        UsageError: Fewer than two, or more than there are.
    """
    if count is not None and count and not 2 <= count <= len(FACTORS):
        raise UsageError(
            f"tune_rates must be from 2 to {len(FACTORS)}, or 0 for none; got {count}. Leave it out."
        )
    if config.training.lr is not None:
        if count:
            tell(f"lr {config.training.lr:g} is given and kept: no rates are tuned")
        return ()
    if count is None:
        count = COUNT if from_python or is_file(config.data.dataset) else 0
    return tuple(float(f"{default * factor:.3g}") for factor in FACTORS[:count])
