"""The ServerApp: ordinary runs whose clients are at the sites of a grid."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import pandas as pd
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from diagnostics.metrics.base import METRICS
from diagnostics.report import Report
from fedlayers.backends.local import InProcessBackend
from fedlayers.cli.train import print_result
from fedlayers.decision import training
from fedlayers.decision.answer import Answer
from fedlayers.decision.choose import answered, cost_of, store
from fedlayers.decision.jobs import check_stored, jobs_of
from fedlayers.decision.sums import check_count
from fedlayers.decision.table import FEDAVG
from fedlayers.decision.ways import ELSEWHERE, default_names, ways_of
from fedlayers.flower.clients import UNUSED, Sites
from fedlayers.flower.federation import Packet, checked, federated, read_keys
from fedlayers.flower.losses import SiteLosses
from fedlayers.run_result import RunResult
from fedlayers.runs import default_instruments, resume
from fl_core import rows
from fl_core.config import RunConfig, with_own
from fl_core.errors import DivergedError, RunError, UsageError, listing, plural
from fl_core.progress import say
from fl_core.rounds.clients import SCORED
from fl_core.run import runner
from fl_core.run.task import Task, assemble

RUN_KEY = "server"
"""The key of the run config that names the server's TOML file."""
MOST_SITES = 10_000
app = ServerApp()


@dataclass(frozen=True)
class ServerFile:
    """The keys of the server's TOML file."""

    out: str
    """The run directory, or the folder of a decision. What is there continues."""
    sites: int
    """Sites to wait for, 1 to 10,000."""
    timeout: float = math.inf
    """Seconds to wait for the replies of a stage, above 0. Default: for ever."""
    min_sites: int = 1
    """Replies without which a stage ends the run, 1 to the number of sites."""
    clip_updates: bool = False
    """Shorten each update to 10 times the median norm of the updates of its round."""
    metrics: list[str] | None = None
    """Measure these after each client's first round, for a diagnosis in place of a run."""
    arms: list[str] | None = None
    """Choose what to share, in place of a run: these ways, or none, are tried besides the usual ones."""
    seeds: list[int] | None = None
    """Seeds of a decision. Default: three from the configuration's on, or one where a run is long."""
    config: dict[str, Any] | None = None
    """The run's configuration: keys of fl.RunConfig, apart from those about data."""

    def __post_init__(self) -> None:
        for name, maximum in (("sites", MOST_SITES), ("min_sites", self.sites)):
            value = getattr(self, name)
            if not 1 <= value <= maximum:
                raise UsageError(f"{name} must be from 1 to {maximum:,}; got {value}.")
        if not self.timeout > 0:
            raise UsageError(
                f"timeout must be above 0 seconds; got {self.timeout}. Leave it out to wait for ever."
            )


def federate(grid: Grid, file: ServerFile) -> RunResult | Report | Answer:
    """Run, diagnose or choose over the sites of a grid, as the server's file says, and return the result.

    A run saves in every round, because a site keeps a client's states of two rounds only. Keys that a server does not
    use are refused:

    >>> federate(None, ServerFile("out", 2, config={"dataset": "heart", "workers": 2, "rounds": 1}))
    Traceback (most recent call last):
        ...
    fl_core.errors.UsageError: [config] must have keys that a server uses; got dataset, workers. Describe data ...
    >>> federate(None, ServerFile("out", 2, seeds=[0, 1]))
    Traceback (most recent call last):
        ...
    fl_core.errors.UsageError: arms must be given without metrics, and seeds with arms; got other keys. Leave one out.

    Args:
        grid: Flower's grid, which connects the sites.
        file: the keys of the server's TOML file.

    Raises:
        UsageError: the file, the configuration or a site does not fit.
        RunError: a site fails, or too few reply in time.
    """
    out = Path(file.out)
    keys = file.config or {}
    if unused_set := UNUSED & keys.keys():
        unused_keys = listing(sorted(unused_set))
        raise UsageError(
            f"[config] must have keys that a server uses; got {unused_keys}. "
            "Describe data and devices in each site's file, write metrics before [config], and leave out other keys."
        )
    config = RunConfig(**keys, checkpoint_every=1, stack="off")
    if config.training.class_weights == "balanced":
        raise UsageError(
            "class_weights must be numbers over sites; got balanced. Give one for each class."
        )
    is_decision = file.arms is not None
    if (file.metrics and is_decision) or (file.seeds and not is_decision):
        raise UsageError(
            "arms must be given without metrics, and seeds with arms; got other keys. Leave one out."
        )
    sites = Sites(grid, file.sites, file.timeout, file.min_sites, file.clip_updates)
    sites.connect()
    data = federated(sites.common(config.execution.seed))
    if file.metrics is not None:
        report = diagnose(sites, assemble(config, data=data), file.metrics)
        report.write(out / "rows.jsonl")
        return report
    run_arguments: dict[str, Any] = {
        "data": data,
        "clients": sites.clients,
        "progress": False,
    }
    try:
        if file.arms is not None:
            choice = choose(sites, config, out, file)
            print(f"{choice.text()}\n\n{choice.shown().to_string(index=False)}")
            return choice
        check_stored(out, assemble(config, data=data))
        if (out / "config.json").exists():
            result = resume(out, **run_arguments)
        else:
            engine = runner.run(
                config, out, instruments=default_instruments, **run_arguments
            )
            result = RunResult(engine, out)
        print_result(result, out)
    except DivergedError as error:
        if not sites.largest:
            raise
        raise type(error)(
            f"{error} The largest update of the last exchange was that of site {sites.largest!r}."
        ) from error
    return result


def choose(sites: Sites, config: RunConfig, out: Path, file: ServerFile) -> Answer:
    """Train ways over sites, and recommend one, as on one machine (:func:`fedlayers.decision.choose.choose`).

    Losses leave a site as sums alone. Each site replies twice: with sums of losses at
    given temperatures, and with sums and products over groups of samples
    (:mod:`fedlayers.decision.sums`). The base rate and FedAvg of a linear model are
    among the ways. Simple models of each client are not, and tests that compare single
    samples are left out. A finished way is not trained again.

    Args:
        sites: the connected sites.
        config: the configuration of the runs.
        out: the folder of the runs and of the answer.
        file: the server's file, with further ways (``arms``) and the seeds.

    Raises:
        UsageError: an unknown name, a plan, a stopping rule, a client with a single sample in a split, or
            runs of another configuration below ``out``.
        RunError: every way failed.
    """
    if config.federation.plan is not None:
        raise UsageError(
            "plan must be left out: a decision makes its own plans. Name a plan among the arms."
        )
    if config.federation.monitor:
        raise UsageError(
            f"monitor must be left out of a decision over sites, which the loss ranks; got {config.federation.monitor}."
        )
    begin_time = time.monotonic()
    with_options = with_own(training.with_plan_algorithm(config))
    config = training.with_evaluations(*with_options)
    first_seed = file.seeds[0] if file.seeds else config.execution.seed
    first_task = assemble(
        config.with_keys(seed=first_seed),
        data=federated(sites.common(first_seed, first_seed)),
    )
    seeds = tuple(file.seeds or training.default_seeds(first_task))
    data = {seed: federated(sites.common(seed, first_seed)) for seed in seeds}
    objects: dict[int, dict[str, Any]] = {
        seed: {"data": data[seed], "clients": sites.clients} for seed in seeds
    }
    names = (*default_names(first_task.layers), *(file.arms or ()))
    ways = ways_of(names, first_task.layers, config.federation.algorithm)
    fedavg = [way for way in ways if way.name == FEDAVG]
    tasks = {
        seed: jobs_of(fedavg, config, [seed], out / "arms", **objects[seed])[
            0
        ].assemble()
        for seed in seeds
    }
    task = tasks[seeds[0]]
    if task.config.federation.patience:
        raise UsageError(
            "patience must be 0 in a decision over sites, which keep the states of two rounds; got "
            f"{task.config.federation.patience}."
        )
    if not any(len(client.validation) for client in task.data.clients):
        raise UsageError(
            "clients must have validation samples to choose a plan; got none. Give clients more samples."
        )
    for client in chain.from_iterable(one.data.clients for one in tasks.values()):
        for split in SCORED:
            check_count(split, client.name, len(client.split(split)))
    rate = float(task.config.training.lr or 0)
    question = training.Question(
        config,
        with_options[1],
        out,
        seeds,
        ways,
        tasks,
        {seed: SiteLosses(tasks[seed], sites, seeds[0]) for seed in seeds},
        training.rates_of(config, rate, None, say, not sites.facts["dataset"]),
        {"fallback": ELSEWHERE},
        simple=False,
        over_sites=True,
        of_seed=objects,
    )
    question = training.with_linear(question)
    for way in question.ways:
        for job in question.jobs(way, None):
            check_stored(job.path, job.assemble())
    say(f"{plural(len(question.ways), 'way')} with {plural(len(seeds), 'seed')}")
    trained_ways = training.train_ways(question, InProcessBackend(), say)
    answer = answered(trained_ways)
    answer = replace(answer, cost=cost_of(trained_ways, 1, begin_time), next="")
    return store(answer, out)


def diagnose(sites: Sites, task: Task, metrics: Sequence[str]) -> Report:
    """Let each site measure its own client after the first round, and join their rows.

    Args:
        sites: the connected sites.
        task: the run's task, without samples.
        metrics: names of metrics of single clients.

    Raises:
        UsageError: a metric compares clients, or a site sends other rows than it was asked for.
    """
    if pair_metrics := [name for name in metrics if METRICS[name].pairs]:
        raise UsageError(
            f"metrics over sites must be of single clients; got {listing(pair_metrics)}."
        )
    clients = sites.clients(task)
    packet = Packet({"run": clients.run_name, "metrics": list(metrics)})
    replies = sites.ask("query.measure", dict.fromkeys(clients.names, packet), 0)
    frames = []
    for name in clients.names:
        head = checked(name, replies[name].head, {"header": dict, "rows": [dict]})
        frames.append(rows.check_rows(f"site {name!r}", head["rows"]))
        if set(frames[-1]["client"]) - {name} or set(frames[-1]["client_b"]) - {""}:
            raise UsageError(f"site {name!r} must send rows of its own client.")
    header = {**head["header"], **task.header("diagnose")}
    return Report(pd.concat(frames, ignore_index=True), header)


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the federation that the run config names.

    Flower prints an error that is raised here, and marks the run as failed. The error is one line, without a traceback.

    Args:
        grid: Flower's grid, which connects the sites.
        context: Flower's context, whose run config names the server's TOML file.

    Raises:
        RunError: the run failed, or its file or configuration does not fit.
    """
    try:
        path = Path(str(context.run_config.get(RUN_KEY, "")))
        federate(grid, read_keys(path.absolute(), ServerFile))
    except (UsageError, RuntimeError, OSError) as error:
        sys.tracebacklimit = 0
        raise RunError(f"fedlayers: {error}") from None
