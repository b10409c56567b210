"""The ServerApp: ordinary runs whose clients are at the sites of a grid."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from diagnostics.metrics.base import METRICS
from diagnostics.report import Report
from fedlayers.backends.local import InProcessBackend
from fedlayers.cli.train import print_result
from fedlayers.decision import training
from fedlayers.decision.answer import Answer
from fedlayers.decision.choose import store
from fedlayers.decision.comparison import validation_rows
from fedlayers.decision.jobs import TrainingJob, check_stored, jobs_of, train
from fedlayers.decision.price import bytes_a_round, measured_cost
from fedlayers.decision.table import VALIDATION, LossTable, Part
from fedlayers.decision.verdict import actions_of, answer
from fedlayers.decision.ways import default_names, ways_of
from fedlayers.flower.clients import UNUSED, Sites
from fedlayers.flower.federation import Packet, checked, federated, read_keys
from fedlayers.run_result import RunResult
from fedlayers.runs import default_instruments, resume
from fl_core import rows
from fl_core.config import RunConfig, with_own
from fl_core.errors import DivergedError, RunError, UsageError, listing
from fl_core.progress import say
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
    """Choose what to share, in place of a run: these ways besides sharing all, none, and all but the head."""
    seeds: list[int] | None = None
    """Seeds of a decision. Default: that of the configuration."""
    config: dict[str, Any] | None = None
    """The run's configuration: keys of fl.RunConfig, apart from those about data."""

    def __post_init__(self) -> None:
        for name, most in (("sites", MOST_SITES), ("min_sites", self.sites)):
            value = getattr(self, name)
            if not 1 <= value <= most:
                raise UsageError(f"{name} must be from 1 to {most:,}; got {value}.")
        if not self.timeout > 0:
            raise UsageError(
                f"timeout must be above 0 seconds; got {self.timeout}. Leave it out to wait for ever."
            )


def federate(grid: Grid, file: ServerFile) -> RunResult | Report | Answer:
    """Do what the server's file says over the sites of a grid.

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

    Raises:
        UsageError: the file, the configuration or a site does not fit.
        RunError: a site fails, or too few reply in time.
    """
    out = Path(file.out)
    given = file.config or {}
    if unused := UNUSED & given.keys():
        raise UsageError(
            f"[config] must have keys that a server uses; got {listing(sorted(unused))}. "
            "Describe data and devices in each site's file, write metrics before [config], and leave out other keys."
        )
    config = RunConfig(**given, checkpoint_every=1, stack="off")
    if config.training.class_weights == "balanced":
        raise UsageError(
            "class_weights must be numbers over sites; got balanced. Give one for each class."
        )
    if (file.metrics and file.arms) or (file.seeds and not file.arms):
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
    used: dict[str, Any] = {"data": data, "clients": sites.clients, "progress": False}
    try:
        if file.arms is not None:
            made = choose(sites, config, out, file)
            print(f"{made.text()}\n\n{made.shown().to_string(index=False)}")
            return made
        check_stored(out, assemble(config, data=data))
        if (out / "config.json").exists():
            result = resume(out, **used)
        else:
            engine = runner.run(config, out, instruments=default_instruments, **used)
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
    """Train ways over sites, and recommend the one with the lowest mean validation loss, as on one machine.

    No sample leaves a site: each client sends the mean loss of its validation samples, and clients are the draws. So
    there is no calibration, no fine-tuning, no base rate and no simple model, and test samples are not read. A way that
    has finished is not trained again.

    Raises:
        UsageError: an unknown name, a plan, or runs of another configuration below ``out``.
        RunError: every way failed.
    """
    if config.federation.plan is not None:
        raise UsageError(
            "plan must be left out: a decision makes its own plans. Name a plan among the arms."
        )
    given = with_own(training.with_plan_algorithm(config))
    config = training.with_evaluations(*given)
    jobs: list[TrainingJob] = []
    seeds = file.seeds or [config.execution.seed]
    for seed in seeds:
        data = federated(sites.common(seed, seeds[0]))
        task = assemble(config.with_keys(seed=seed), data=data)
        names = (*default_names(task.layers), *(file.arms or ()))
        ways = ways_of(names, task.layers, config.federation.algorithm)
        jobs += jobs_of(
            ways, config, [seed], out / "arms", data=data, clients=sites.clients
        )
    for job in jobs:
        check_stored(job.path, job.assemble())
    say("no calibration, base rate or simple model over sites: samples stay there")
    failed = train(jobs, InProcessBackend(), say)
    if len(failed) == len(jobs):
        raise RunError(f"every way failed: {listing(failed.values())}")
    table = _table(jobs, failed, config.federation.monitor or "loss", task)
    spent = measured_cost(task, jobs, 1)
    made = answer(
        table,
        table,
        actions_of(ways),
        {way.name: way.plan for way in ways},
        task=task.data.task,
        not_tried=failed,
        next="",
        cost={
            "bytes_a_round": bytes_a_round(task) / len(task.data.clients),
            "rounds": spent.rounds,
            "full_runs": round(spent.full_runs, 2),
            "bytes": spent.n_bytes,
            "seconds": round(spent.seconds, 1),
        },
    )
    return store(made, out)


def _table(
    jobs: Sequence[TrainingJob], failed: Mapping[str, str], score: str, task: Task
) -> LossTable:
    """Return the table of the sites' mean scores, in which each client is one draw."""
    names = [client.name for client in task.data.clients]
    parts = {}
    for job in jobs:
        if job.name in failed:
            continue
        frame = validation_rows(job)
        frame = frame[(frame["metric"] == score) & frame["value"].notna()]
        weight = frame["n_train"].to_numpy(float)
        value = frame["value"].to_numpy(float)
        client = frame["client"].map(names.index).to_numpy(int)
        mean = float(np.average(value, weights=weight))
        part = Part(mean, value, weight / weight.sum(), client, 0 * client)
        parts[job.config.execution.seed, job.arm, VALIDATION] = part
    return LossTable(parts, score, {VALIDATION: 1.0}, ())


def diagnose(sites: Sites, task: Task, metrics: Sequence[str]) -> Report:
    """Let each site measure its own client after the first round, and join their rows.

    Raises:
        UsageError: a metric compares clients, or a site sends other rows than it was asked for.
    """
    if compare := [name for name in metrics if METRICS[name].pairs]:
        raise UsageError(
            f"metrics over sites must be of single clients; got {listing(compare)}."
        )
    clients = sites.clients(task)
    asked = Packet({"run": clients.run_name, "metrics": list(metrics)})
    replies = sites.ask("query.measure", dict.fromkeys(clients.names, asked), 0)
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

    Flower prints what this raises, and marks the run as failed. Without its frames an error is one line.
    """
    try:
        path = Path(str(context.run_config.get(RUN_KEY, "")))
        federate(grid, read_keys(path.absolute(), ServerFile))
    except (UsageError, RuntimeError, OSError) as error:
        sys.tracebacklimit = 0
        raise RunError(f"fedlayers: {error}") from None
