"""What a decision trains: every way in each seed, with fine-tuning of every client after it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from diagnostics.tuning.copies import EPOCHS, Held
from diagnostics.tuning.differ import LEAST_CLIENTS, cross_losses, pair_losses
from diagnostics.tuning.permutation import (
    CrossLosses,
    Difference,
    blocks,
    permutation_test,
)
from fedlayers.backends.local import Backend, no_progress
from fedlayers.decision.jobs import (
    FREE,
    Tell,
    TrainingJob,
    assembled,
    check_same_data,
    jobs_of,
    seeds_of,
    train,
)
from fedlayers.decision.linear import linear_model_of
from fedlayers.decision.losses import (
    THIRD,
    FinishedRun,
    Loaded,
    Predictor,
    SeedLosses,
    Tuning,
    rounded_rate,
)
from fedlayers.decision.price import EARLY, estimate_cost, format_seconds
from fedlayers.decision.simple import predictors
from fedlayers.decision.table import (
    BASE_RATE,
    FEDAVG,
    TEST,
    VALIDATION,
    LossTable,
    Part,
    SumPart,
)
from fedlayers.decision.ways import (
    ELSEWHERE,
    LINEAR,
    Way,
    Ways,
    default_names,
    linear_way,
    way_of,
    ways_of,
)
from fl_core.algorithms.base import find
from fl_core.config import (
    OWN,
    STOPPING_INTERVAL,
    Own,
    RunConfig,
    is_file,
    resolve,
)
from fl_core.data.federated import FederatedData
from fl_core.errors import (
    NonFiniteError,
    RunError,
    UsageError,
    as_list,
    listing,
    plural,
)
from fl_core.rows import MAIN, TABLE, label_of
from fl_core.run import runner
from fl_core.run.costs import training_flops
from fl_core.run.task import Task
from fl_core.storage import sha
from fl_core.training import evaluate
from fl_core.training.phases import Training
from fl_core.training.workspace import Workspace
from fl_core.tree import one_thread

if TYPE_CHECKING:
    from diagnostics.groups import Alike

DEFAULT_EVALUATIONS = 10
"""Default number of evaluations of a run."""
FACTORS = (1.0, 3.0, 10.0, 30.0, 0.3)
"""The rates that are tried for FedAvg, times the default, in the order in which they are taken."""
LINEAR_FACTORS = (1.0, 5.0, 25.0)
"""The rates that are tried for the linear model, times FedAvg's."""
COUNT = 4
"""How many rates are tried by default for your own data."""
LOWER = 0.3
"""The factor of the learning rate if a way diverged or learned nothing."""
THREE_SEEDS = 1e12
"""Training FLOPs of a FedAvg run up to which three seeds are the default: about 20 s of one core.

A convolutional network of 1.8e12 took 47 s of a busy core.
"""
GROUPS = "groups"
"""The way that trains one model a group of clients."""
MOST_PAIRED = 30
"""The most clients whose models are compared pair by pair."""
PLAN_ALGORITHM = "fedper"
"""The algorithm that trains plans, if the configuration's algorithm uses no plan."""


@dataclass(frozen=True)
class Question:
    """The setting of a decision, complete before anything is trained.

    Attributes:
        config: the configuration of the runs, except algorithm and seed.
        own: data and model from Python.
        out: the folder of the runs.
        seeds: the seeds of the runs.
        ways: the ways of the network, and the linear model where it can be built.
        tasks: the FedAvg task of each seed.
        losses: the samples of each seed, on which ways are compared.
        rates: the learning rates to try with all layers shared; none where the rate is given or known.
        not_tried: why a way cannot be tried, by its name.
        simple: whether the simple ways are fitted.
        by_default: whether the number of seeds is the default.
        grouped: whether one model for each group of clients is among the ways.
        pooled: whether all samples are on this machine, so that pooled models can be fitted.
        over_sites: whether the clients are at sites.
        of_seed: further attributes of each seed's runs: over sites their data, and the function that makes their
            clients.
    """

    config: RunConfig
    own: Own
    out: Path
    seeds: tuple[int, ...]
    ways: tuple[Way, ...]
    tasks: dict[int, Task]
    losses: dict[int, SeedLosses]
    rates: tuple[float, ...]
    not_tried: dict[str, str]
    simple: bool = True
    pooled: bool = False
    by_default: bool = False
    grouped: bool = False
    over_sites: bool = False
    of_seed: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def task(self) -> Task:
        """Return the FedAvg task of the first seed."""
        return self.tasks[self.seeds[0]]

    @property
    def rounds(self) -> int:
        """Return the planned maximum of rounds."""
        return int(self.task.config.federation.rounds or 1)

    @property
    def early(self) -> int:
        """Return the round after which only the best rates train on; it is an evaluated one."""
        step = int(self.task.config.execution.eval_every or 1)
        return max(step, int(EARLY * self.rounds) // step * step)

    @property
    def score(self) -> str:
        """Return the name of the score that ranks the ways: ``loss``, or the one that was asked for."""
        return self.task.config.federation.monitor or "loss"

    def way(self, name: str) -> Way:
        """Return a way by its name."""
        return next(way for way in self.ways if way.name == name)

    def jobs(
        self, way: Way, lr: float | None, seeds: Sequence[int] = ()
    ) -> list[TrainingJob]:
        """Return the runs of a way at a learning rate, one for each seed.

        Args:
            lr: the learning rate; None for the configuration's.
            seeds: the seeds. Default: all of the question.
        """
        config, suffix = self.config, ""
        if lr is not None:
            config, suffix = config.with_keys(lr=lr), f"-lr{lr:g}"
        jobs = []
        for seed in seeds or self.seeds:
            common = {**self.own, **self.of_seed.get(seed, {})}
            jobs += jobs_of([way], config, [seed], self.out / "arms", suffix, **common)
        return jobs


def make_question(
    config: RunConfig,
    own: Own,
    out: Path | None,
    arms: Ways,
    seeds: Sequence[int] | int | None,
    tune_rates: int | None,
    simple: bool,
    tell: Tell,
    one_split: bool = True,
) -> Question:
    """Check the arguments of a decision before training, and return them as one object.

    Args:
        config, out, arms, seeds, tune_rates: as for :func:`~fedlayers.decision.choose.choose`.
        own: data and model from Python.
        simple: whether simple models are fitted, too.
        tell: receives notes for the user.
        one_split: whether all seeds have the partition and the test samples of the first one.

    Raises:
        UsageError: an argument is invalid, there are fewer than 2 clients, or ``out`` has runs of another
            configuration.
    """
    if config.federation.plan is not None:
        raise UsageError(
            "plan must be left out: a decision makes its own plans. Name a plan among the arms."
        )
    is_frame = bool(getattr(own["data"], "columns", ()))
    pooled = is_file(config.data.dataset) or is_frame
    config = with_evaluations(with_plan_algorithm(config), own).with_keys(workers=0)
    first_task = runner.assemble(config, **own)
    first_task.announce()
    if len(first_task.data.clients) < 2:
        raise UsageError(
            f"a federation must have at least 2 clients to choose what they share; got {len(first_task.data.clients)}. "
            "Train this one with fedlayers run --algorithm local."
        )
    by_default = seeds is None
    if seeds is None:
        seeds = default_seeds(first_task)
    else:
        seeds = seeds_of(config, seeds, 1)
    if one_split and not isinstance(own["data"], FederatedData):  # its split is fixed
        config = config.with_keys(split_seed=seeds[0])
    algorithm = config.federation.algorithm
    arms_list = () if arms is None else as_list("arms", arms)
    names = (
        *default_names(first_task.layers),
        *(name for name in arms_list if name != GROUPS),
    )
    ways = ways_of(names, first_task.layers, algorithm)
    if out is None:
        arguments_of_folder = {
            "arms": arms_list,
            "seeds": seeds,
            "rates": tune_rates,
            "simple": simple,
        }
        out = folder_of(first_task, **arguments_of_folder)
    fedavg = way_of(FEDAVG, tuple(first_task.layers), algorithm)
    jobs = jobs_of([fedavg], config, seeds, out / "arms", **own)
    check_same_data(out / "arms", first_task)
    tasks = {task.config.execution.seed: task for task in assembled(jobs)}
    losses = {seed: SeedLosses(task) for seed, task in tasks.items()}
    for seed_losses in losses.values():
        check_scored(seed_losses)
    rate = float(first_task.config.training.lr or 0)
    rates = rates_of(config, rate, tune_rates, tell, own["data"] is not None)
    arguments = config, own, out, tuple(seeds), ways, tasks, losses, rates
    question = Question(*arguments, {}, simple, pooled, by_default, GROUPS in arms_list)
    for way in ways:
        jobs_to_check = question.jobs(way, None)[:1]
        for lr in rates:
            jobs_to_check += [job for job in question.jobs(way, lr) if job.begun]
        list(assembled(jobs_to_check, first_task))
    return with_linear(question) if question.simple else question


def folder_of(task: Task, **choice_arguments: Any) -> Path:
    """Return the default output folder, below ``out``. A digest of configuration, data and arguments names it."""
    keys = {k: v for k, v in task.config.to_json().items() if k not in FREE}
    text = json.dumps({**keys, **task.header(""), **choice_arguments}, default=str)
    digest = sha(text.encode())[:8]
    return Path("out") / f"choose-{digest}"


def with_linear(question: Question) -> Question:
    """Return the question with FedAvg of a linear model among its ways, or with the reason why it is not tried.

    Reasons that the question has already are kept.
    """
    way_or_reason = _linear(question)
    if isinstance(way_or_reason, str):
        not_tried = {**question.not_tried, LINEAR: way_or_reason}
        return replace(question, not_tried=not_tried)
    return replace(question, ways=(*question.ways, way_or_reason))


def _linear(question: Question) -> Way | str:
    """Return FedAvg of a linear model as a way, or the reason why it is not tried."""
    model = question.task.config.model
    if model.model == "linear" and not model.adapt:
        return "the network is linear: fedavg is it"
    if question.config.training.loss == OWN:
        return "the loss belongs to your model"
    options = linear_model_of(question.task.data)
    if isinstance(options, str):
        return options
    way = linear_way(options)
    try:
        list(assembled(question.jobs(way, None)[:1], question.task))
    except UsageError as error:
        return str(error)
    return way


def with_evaluations(config: RunConfig, own: Own) -> RunConfig:
    """Return the configuration of a decision's runs, evaluated after every tenth of the rounds by default.

    With a stopping rule, evaluations are at most
    :data:`fl_core.config.STOPPING_INTERVAL` rounds apart.

    >>> with_evaluations(RunConfig(dataset="heart", rounds=100), Own(data=None, model=None)).execution.eval_every
    10
    """
    if config.execution.eval_every is not None:
        return config
    federation = resolve(config, **own).federation
    step = max(1, int(federation.rounds or 1) // DEFAULT_EVALUATIONS)
    if federation.patience:
        step = min(step, STOPPING_INTERVAL)
    return config.with_keys(eval_every=step)


def with_plan_algorithm(config: RunConfig) -> RunConfig:
    """Return the configuration with an algorithm that uses a plan: its own, or FedPer."""
    if find(config.federation.algorithm).uses_plan:
        return config
    return config.with_keys(algorithm=PLAN_ALGORITHM, options={})


def check_scored(losses: SeedLosses) -> None:
    """Refuse a decision whose score has no value for any client's validation samples.

    Whether a score has a value depends on the samples alone, so the base rate is scored.

    Raises:
        UsageError: it has none. The message has the score, and the reason.
    """
    if not losses.labels[VALIDATION]:
        raise UsageError(
            "clients must have validation samples to choose a plan; got none. Give clients more samples."
        )
    metric = losses.task.config.federation.monitor or MAIN[losses.kind]
    if math.isnan(losses.scores(losses.base_rate, VALIDATION).get(metric, 0.0)):
        label = label_of(metric)
        raise UsageError(
            f"{label} must have a value for a client's validation samples; got none: "
            f"{TABLE[metric].missing}. Give clients more samples."
        )


def default_seeds(task: Task) -> tuple[int, ...]:
    """Return the default seeds of a decision: three from the configuration's seed on, or one if a run is long."""
    return seeds_of(task.config, None, 3 if run_flops(task) <= THREE_SEEDS else 1)


def run_flops(task: Task) -> float:
    """Return the FLOPs that all clients together spend on training in a FedAvg run, without evaluation."""
    config = task.config
    names = frozenset(dict(task.model.named_parameters()))
    with torch.no_grad():
        workspace = Workspace(task.model)
    sample = training_flops(workspace, task.data.shape, names)
    samples = sum(len(client.train) for client in task.data.clients)
    epochs = int(config.training.epochs or 1) * int(config.federation.rounds or 1)
    return sample * samples * epochs * config.federation.participation


def rates_of(
    config: RunConfig,
    default: float,
    count: int | None,
    tell: Tell,
    from_python: bool = False,
) -> tuple[float, ...]:
    """Return the learning rates to try; none if the rate is given or known.

    By default :data:`COUNT` rates are tried for your own data. A named dataset has its own rate.

    >>> rates_of(RunConfig(dataset="heart"), 0.01, 4, print)
    (0.01, 0.03, 0.1, 0.3)
    >>> rates_of(RunConfig(dataset="heart"), 0.01, None, print)
    ()

    Args:
        config: the configuration. A rate that it names is kept.
        default: the rate of the configuration without a search.
        count: number of rates to try, or 0 for no search. None: the default number.
        tell: receives a line if a rate is kept although rates were to be tried.
        from_python: whether the data come from Python, in place of the configuration's.

    Raises:
        UsageError: ``count`` is 1, or more than there are rates.
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
    return tuple(rounded_rate(default * factor) for factor in FACTORS[:count])


def tunings(way: Way) -> list[Tuning]:
    """Return the amounts of fine-tuning that are tried after a way's runs: 0, 1, 2 or 4 epochs.

    The learning rate is a third of the run's. After FedAvg and the linear model the run's own rate is tried, too.
    """
    factors = (THIRD, 1.0) if way.name in (FEDAVG, LINEAR) else (THIRD,)
    amounts = [Tuning()]
    for factor in factors:
        amounts += [Tuning(n, factor) for n in EPOCHS]
    return amounts


# --- the steps -------------------------------------------------------------------------------------------------


@dataclass
class Trained:
    """The result of training all ways of a decision.

    Attributes:
        runs: the finished runs, by way and seed.
        tuning: the amount of fine-tuning of each way, one for all seeds and clients.
        simple: the predictors of simple models, by name and seed.
        jobs: all runs, also failed ones.
        failed: why a run has no result, by its name.
        rates: the learning rates that were tried for FedAvg.
        lr: the rate that was chosen; None without a search.
        alike: the groups of similar clients; None if unknown.
    """

    question: Question
    runs: dict[str, dict[int, FinishedRun]] = field(default_factory=dict)
    tuning: dict[str, Tuning] = field(default_factory=dict)
    simple: dict[str, dict[int, Predictor]] = field(default_factory=dict)
    jobs: list[TrainingJob] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    rates: tuple[float, ...] = ()
    lr: float | None = None
    alike: Alike | None = None

    def predictors(self) -> Iterator[tuple[int, str, Predictor]]:
        """Yield (seed, name of the way, its predictor after fine-tuning) for all ways, also the simple ones."""
        for name, by_seed in self.runs.items():
            for seed, finished_run in by_seed.items():
                yield seed, name, finished_run.tuned[self.tuning[name]]
        for name, by_simple in self.simple.items():
            for seed, model in by_simple.items():
                yield seed, name, model

    def fine_tuning_epochs(self) -> int:
        """Return the epochs that all clients together trained to choose the amounts of fine-tuning."""
        factors = [
            {
                tuning.factor
                for tuning in tunings(self.question.way(name))
                if tuning.epochs
            }
            for name in self.runs
            if name != LINEAR
        ]
        return EPOCHS[-1] * len(self.question.seeds) * sum(map(len, factors))

    def table(self, score: str = "") -> LossTable:
        """Return the table of a score. Default: the score that ranks the ways.

        It has the splits in which each seed has samples.
        """
        question, score = self.question, score or self.question.score
        parts: dict[tuple[int, str, str], Part | SumPart] = {}
        predictors_by_seed = {
            seed: {BASE_RATE: losses.base_rate}
            for seed, losses in question.losses.items()
        }
        for seed, name, predictor in self.predictors():
            predictors_by_seed[seed][name] = predictor
        splits = [
            split
            for split in (VALIDATION, TEST)
            if all(split in losses.splits for losses in question.losses.values())
        ]
        for seed, losses in question.losses.items():
            for split in splits:
                parts_of_split = losses.parts(predictors_by_seed[seed], split, score)
                parts |= {
                    (seed, name, split): part for name, part in parts_of_split.items()
                }
        names = [client.name for client in question.task.data.clients]
        first_losses, last_losses = (
            question.losses[question.seeds[k]] for k in (0, -1)
        )
        shares = {split: last_losses.overlap(first_losses, split) for split in splits}
        return LossTable(parts, score, shares, tuple(names))


def train_ways(question: Question, place: Backend, tell: Tell) -> Trained:
    """Train all ways in all seeds.

    FedAvg is first, at each rate of the question, if there are any. After a tenth of
    the rounds only the best two train on. The linear model has FedAvg's rate times 1, 5
    and 25, and only the best trains on, unless the configuration names the rate. The
    other ways have FedAvg's rate. Rates are chosen in the first seed. After each run
    every client fine-tunes for 0, 1, 2 or 4 epochs. The amount with the best mean
    validation score over the seeds counts, one for all clients.

    Args:
        question: the setting of the decision.
        place: the backend that trains the runs.
        tell: receives a line for each step.

    Raises:
        RunError: every way failed, or FedAvg at every rate that was tried.
    """
    trained = Trained(question, rates=question.rates)
    seed = question.seeds[0]
    fedavg = question.way(FEDAVG)
    if question.rates:
        trained.lr = _best_rate(trained, fedavg, question.rates, 2, place, tell)
    client_blocks = blocks(len(question.task.data.clients), seed)
    for way in question.ways:
        lr = trained.lr
        if way.name == LINEAR:
            used_rate = lr or float(question.task.config.training.lr or 0)
            if question.config.training.lr is None:
                rates = [rounded_rate(used_rate * factor) for factor in LINEAR_FACTORS]
                try:
                    lr = _best_rate(trained, way, rates, 1, place, tell)
                except RunError as error:
                    question.not_tried[LINEAR] = str(error)
                    continue
        is_crossed = way.name in (FEDAVG, "local") and not question.over_sites
        cross_blocks = client_blocks if is_crossed else ()
        _train_way(trained, way, lr, cross_blocks, place, tell)
    trained.alike = _find_alike(trained)
    if question.grouped:
        try:
            way = _grouped_way(trained)
        except UsageError as error:
            question.not_tried[GROUPS] = str(error)
        else:
            trained.question = replace(question, ways=(*question.ways, way))
            _train_way(trained, way, trained.lr, (), place, tell)
    if not trained.runs:
        reason = next(iter(trained.failed.values()), "no way could be trained")
        raise RunError(f"every way failed, the first with: {reason}")
    for name, by_seed in trained.runs.items():
        trained.tuning[name] = _best_tuning(trained, name, by_seed)
    _fit_simple(trained, tell if question.simple else no_progress)
    return trained


def _fit_simple(trained: Trained, tell: Tell) -> None:
    """Fit the simple models of each seed. Those that fail in a seed are named as not tried."""
    question = trained.question
    if not question.simple:
        return
    tell("fitting the simple models")
    for seed, losses in question.losses.items():
        failed: list[str] = []
        for predictor in predictors(losses, failed.append, pooled=question.pooled):
            if predictor.name != BASE_RATE:
                trained.simple.setdefault(predictor.name, {})[seed] = predictor
        for line in failed:
            name, _, reason = line.partition(" failed: ")
            question.not_tried[name] = reason


def _best_rate(
    trained: Trained,
    way: Way,
    rates: Sequence[float],
    finalists: int,
    place: Backend,
    tell: Tell,
) -> float:
    """Train a way at each rate for a tenth of the rounds, the best to the end, and return the best one's rate.

    If all diverge, a lower one is tried. The runs are added to ``trained``.

    Args:
        trained: what is trained so far.
        way: the way.
        rates: the learning rates.
        finalists: how many of them train to the end.
        place: the backend.
        tell: receives a line for each step.

    Raises:
        RunError: the lower one diverged, too.
    """
    question, seed = trained.question, trained.question.seeds[0]
    losses = question.losses[seed]
    jobs: list[TrainingJob] = []
    for lr in rates:
        jobs += question.jobs(way, lr, [seed])
    failed: dict[str, str] = {}

    def best(jobs: Sequence[TrainingJob]) -> list[TrainingJob]:
        scores = {}
        for job in jobs:
            if job.name not in failed:
                try:
                    finished_run = losses.finish(job, tunings(way))
                    scores[job.name] = max(
                        map(losses.worth, finished_run.tuned.values())
                    )
                except NonFiniteError as error:
                    failed[job.name] = str(error)
        finished_jobs = [job for job in jobs if job.name in scores]
        return sorted(finished_jobs, key=lambda job: -scores[job.name])

    while True:
        failed |= train(
            [replace(job, until=question.early) for job in jobs], place, tell
        )
        ranked_jobs = best(jobs)
        # a repeated call has the finalists of the first one
        ranked_jobs.sort(key=lambda job: not job.is_past(question.early))
        last_jobs = ranked_jobs[:finalists]
        failed |= train(last_jobs, place, tell)
        ranked_jobs = [job for job in last_jobs if job.name not in failed]
        if len(ranked_jobs) > 1:
            ranked_jobs = best(ranked_jobs)
        trained.jobs += [
            job
            for job in jobs
            if job.path not in {earlier_job.path for earlier_job in trained.jobs}
        ]
        if ranked_jobs:
            break
        if len(jobs) == 1:
            reason = next(iter(failed.values()))
            raise RunError(f"training failed at every rate, the first with: {reason}")
        lower_rate = rounded_rate(min(rates) * LOWER)
        tell(f"training failed at every rate; {lower_rate:g} is tried")
        jobs = question.jobs(way, lower_rate, [seed])
    lr = float(ranked_jobs[0].config.training.lr or 0)
    rates_text = listing(f"{rate:g}" for rate in rates)
    tell(f"{way.name}: of the learning rates {rates_text}, {lr:g} is used")
    return lr


def _train_way(
    trained: Trained,
    way: Way,
    lr: float | None,
    parts: Sequence[Sequence[int]],
    place: Backend,
    tell: Tell,
) -> None:
    """Train a way in all seeds.

    If it diverges or learns nothing, it trains once more at a lower rate, unless the
    configuration names its rate. If both rates have a result, the one with the better
    mean validation score counts. Results and failures are added to ``trained``.

    Args:
        trained: what is trained so far.
        way: the way.
        lr: the learning rate; None for the configuration's.
        parts: blocks of clients, as for
            :meth:`~fedlayers.decision.losses.SeedLosses.finish`.
        place: the backend.
        tell: receives a line for each step.
    """
    question = trained.question
    used_rate = lr or float(question.task.config.training.lr or 0)
    for rate in (lr, rounded_rate(LOWER * used_rate)):
        jobs = question.jobs(way, rate)
        trained.jobs += [
            job
            for job in jobs
            if job.path not in {earlier_job.path for earlier_job in trained.jobs}
        ]
        failed = train(jobs, place, tell)
        runs = {}
        for job in jobs:
            seed = job.config.execution.seed
            if job.name in failed:
                continue
            try:
                losses = question.losses[seed]
                runs[seed] = losses.finish(job, tunings(way), parts)
            except (UsageError, NonFiniteError) as error:
                failed[job.name] = str(error)
        useless_seeds = [seed for seed, run in runs.items() if run.learned_nothing]
        if runs and not failed:
            results = [runs]  # of this rate, and of the higher one
            if way.name in trained.runs:
                results.insert(0, trained.runs[way.name])
            trained.runs[way.name] = max(
                results,
                key=lambda runs_of_rate: _worth(
                    trained, runs_of_rate, _best_tuning(trained, way.name, runs_of_rate)
                ),
            )
        if not (failed or useless_seeds) or question.config.training.lr is not None:
            break
        if rate is lr:
            problem = "diverged" if failed else "learned nothing"
            tell(f"{way.name} {problem}, and trains again at a lower rate")
    if way.name not in trained.runs:
        trained.failed |= failed


def _worth(trained: Trained, runs: Mapping[int, FinishedRun], amount: Tuning) -> float:
    """Return the mean validation score over the seeds after an amount of fine-tuning.

    It is higher for better runs, also for a loss. An unknown score is minus infinity.
    """
    losses = trained.question.losses
    values = [
        losses[seed].worth(finished_run.tuned[amount])
        for seed, finished_run in runs.items()
    ]
    mean = float(np.mean(values))
    return -math.inf if math.isnan(mean) else mean


def _best_tuning(
    trained: Trained, name: str, by_seed: Mapping[int, FinishedRun]
) -> Tuning:
    """Return the amount of fine-tuning with the best mean validation score; of equal ones the least."""
    common_amounts = [
        amount
        for amount in tunings(trained.question.way(name))
        if all(amount in finished_run.tuned for finished_run in by_seed.values())
    ]
    return max(common_amounts, key=lambda amount: _worth(trained, by_seed, amount))


# --- do clients differ? ----------------------------------------------------------------------------------------


def differing(trained: Trained) -> Difference | None:
    """Test whether clients differ, and return the result.

    The models come from local training and from fine-tuning the shared model.

    The result is None if clients are at sites, a run of FedAvg or local training is
    missing, or the test cannot be made. ``not_tried`` of the question then has the
    reason, unless a run is missing.
    """
    fedavg_runs, local_runs = trained.runs.get(FEDAVG), trained.runs.get("local")
    question = trained.question
    if question.over_sites:
        question.not_tried["clients_differ"] = ELSEWHERE
        return None
    if not fedavg_runs or not local_runs:
        return None
    client_blocks = blocks(len(question.task.data.clients), question.seeds[0])
    try:
        seeds = [
            _cross(
                question.losses[seed],
                fedavg_runs[seed],
                local_runs[seed],
                client_blocks,
            )
            for seed in question.seeds
        ]
        return permutation_test(seeds, client_blocks, seed=question.seeds[0])
    except UsageError as error:
        question.not_tried["clients_differ"] = str(error)
        return None


def _cross(
    losses: SeedLosses,
    shared_run: FinishedRun,
    local_run: FinishedRun,
    parts: Sequence[Sequence[int]],
) -> CrossLosses:
    """Return the losses of clients' models on each other's validation samples.

    Groups of samples have the same numbers in all seeds.

    Args:
        losses: the samples of the seed.
        shared_run, local_run: the runs of FedAvg and of local training in this seed.
        parts: blocks of clients. A model's losses are known for the samples of its
            block.
    """
    clients = losses.task.data.clients
    amounts = [Tuning(n, THIRD) for n in EPOCHS]
    kinds = [
        shared_run.cross[amount] for amount in amounts if amount in shared_run.cross
    ]
    kinds.append(local_run.cross[Tuning()])
    validation = Held.of(
        [client.validation for client in clients], [*losses.sizes.values()]
    )
    losses_of_pairs = cross_losses(
        losses.task.criterion, validation, parts, torch.stack(kinds)
    )
    return replace(losses_of_pairs, group=_groups(losses))


def _groups(losses: SeedLosses) -> NDArray[np.int64]:
    """Return a number for each validation sample's group that is the same in all seeds."""
    places = losses.task.data.partition.indices
    numbers = []
    for k, client in enumerate(losses.task.data.clients):
        names = client.validation.groups
        if names is None:
            names = places[client.name][VALIDATION]
        numbers.append(np.asarray(names, dtype=np.int64) * len(losses.sizes) + k)
    return np.concatenate(numbers)


def _find_alike(trained: Trained) -> Alike | None:
    """Return which clients are alike, by their local training in the first seed.

    The result is None if clients are at sites, fewer than 4 or more than 30, without a
    run of local training, or if one has no validation samples. Over sites ``not_tried``
    of the question receives the reason.
    """
    from diagnostics.groups import alike  # imports scikit-learn

    question = trained.question
    runs = trained.runs.get("local")
    if question.over_sites:
        question.not_tried["who is alike"] = ELSEWHERE
        return None
    seed = question.seeds[0]
    losses = question.losses[seed]
    clients = losses.task.data.clients
    has_right_number = LEAST_CLIENTS <= len(clients) <= MOST_PAIRED
    if (
        not runs
        or not has_right_number
        or not all(len(client.validation) for client in clients)
    ):
        return None
    loaded = runs[seed].last
    assert loaded is not None
    samples = losses.samples[VALIDATION]
    return alike(
        _pair_losses(losses, loaded),
        pd.factorize(samples["client"])[0],
        [client.name for client in clients],
        samples["group"].to_numpy(np.int64),
        seed=seed,
    )


def _pair_losses(losses: SeedLosses, loaded: Loaded) -> NDArray[np.float64]:
    """Return the losses of each of K clients' models on all n validation samples, float64 [K, n]."""
    clients = losses.task.data.clients
    pairs = []
    with one_thread():
        for model_client in clients:
            model = loaded.models[model_client.name]
            for client in clients:
                outputs = evaluate.predict(model, client.validation.x)
                pairs.append((outputs, client.validation.y))
    return pair_losses(losses.task.criterion, pairs, len(clients))


def _grouped_way(trained: Trained) -> Way:
    """Return FedAvg in each group of clients.

    Raises:
        UsageError: no groups of clients are shown.
    """
    if trained.alike is None or not trained.alike.significant:
        raise UsageError("no groups of clients are shown")
    names = [client.name for client in trained.question.task.data.clients]
    labels = [trained.alike.groups[name] for name in names]
    return Way(GROUPS, "grouped", options={"groups": labels})


def foreseen(question: Question, side_by_side: int) -> str:
    """Return a line on what a decision trains, with the estimated time.

    Args:
        side_by_side: the number of runs that train at a time.
    """
    n_ways, n_seeds = len(question.ways), len(question.seeds)
    n_probes = len(question.rates) * EARLY + 2 if question.rates else 0
    n_runs = n_ways * n_seeds + n_probes
    jobs: list[TrainingJob] = []
    for way in question.ways:
        if way.own_network:
            jobs += question.jobs(way, None)
    tasks = {way.name: question.task for way in question.ways}
    cost = estimate_cost(tasks, jobs, side_by_side)
    seconds = cost.seconds * n_runs / max(1, len(jobs))
    reason = "" if n_seeds > 1 else ", since a run is long" * question.by_default
    duration = format_seconds(seconds)
    return (
        f"Training {plural(n_ways, 'way')} with {plural(n_seeds, 'seed')}{reason}: about {n_runs:.0f} runs of "
        f"{plural(question.rounds, 'round')}, {duration}."
    )


def describe_rates(trained: Trained) -> str:
    """Return the rates that were tried for FedAvg, and the one that is used; empty without a search."""
    if not trained.rates or trained.lr is None:
        return ""
    rates_text = listing(f"{lr:g}" for lr in trained.rates)
    text = f"Learning rates tried for {FEDAVG}: {rates_text}. Used: {trained.lr:g}."
    for end, name in ((min, "smallest"), (max, "largest")):
        if trained.lr == end(trained.rates):
            text += f" It is the {name}: try more with --lr."
    return text


def training_of(trained: Trained) -> str:
    """Return the settings of local training in words."""
    config = trained.question.task.config
    rounds = plural(int(config.federation.rounds or 1), "round")
    optimizer = Training.of(config.training).description
    return f"{rounds}, {optimizer}"
