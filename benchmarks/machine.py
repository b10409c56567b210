"""Shares of the machine: steps and floating-point work a second against what its cores do with nothing else to do."""

from __future__ import annotations

import copy
import math
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import training
from benchmarks.operations import alone, counted
from benchmarks.pairs import PAIRS, Measured, alternate, judged
from benchmarks.training import OneLayer, plain_epoch, rounds
from fl_core.data import Split
from fl_core.rounds import recorder
from fl_core.rounds.engine import Engine
from fl_core.rounds.workers import ALLOCATOR, environment
from fl_core.run import runner
from fl_core.run.task import assemble

CORES = 2
SIDE = 1024
"""Rows and columns of the matrices whose product is the measure of a core."""
PRODUCTS = 20
ROUNDS, LONG = 20, 100
"""Of a run with evaluation and saving."""
RUNS, LONG_RUNS = 5, 3
FEWER = 8
"""Pairs of S4, of which each layer takes minutes until all clients were seen."""
UNIT = "share of the machine"
SGD = partial(torch.optim.SGD, lr=0.005)
ADAMW = partial(torch.optim.AdamW, lr=0.001, weight_decay=0.01, fused=True)


@dataclass(frozen=True)
class Steps:
    """A job's local training without the rounds: what one core does over and over.

    Attributes:
        data: as many samples as fall to one core in a round.
        make: the optimiser of given parameters.
        layer: the only one that trains; empty = all.
        job: makes the configuration and the data, and the model if it is not the configuration's, of whole rounds.
    """

    model: nn.Module
    data: Split
    batch: int
    make: Callable[[Any], Any]
    layer: str = ""
    job: Callable[[], tuple[Any, ...]] | None = None

    def prepared(self) -> Callable[[], object]:
        """Return one pass over the data, as a function."""
        model = copy.deepcopy(self.model)
        for parameter_name, parameter in model.named_parameters():
            parameter.requires_grad_(
                not self.layer or parameter_name.split(".")[0] == self.layer
            )
        make = lambda _: self.make([p for p in model.parameters() if p.requires_grad])  # noqa: E731
        return partial(plain_epoch, model, self.data, self.batch, make)

    def kernels(self) -> Callable[[], object]:
        """Return the matrix products and convolutions of one pass over the data, as repetitions of its first batch."""
        first_batch = Split(self.data.x[: self.batch], self.data.y[: self.batch])
        return alone(
            replace(self, data=first_batch).prepared(),
            times=math.ceil(len(self.data) / self.batch),
        )

    def operations(self) -> int:
        """Return floating-point operations of one pass, of matrix products and convolutions forward and backward."""
        return counted(self.prepared())


def products() -> Callable[[], object]:
    """Return products of two matrices in float32, as a function; of 2 SIDE^3 operations each."""
    a, b = torch.ones(SIDE, SIDE), torch.ones(SIDE, SIDE)
    product = torch.empty(SIDE, SIDE)

    def work() -> None:
        for _ in range(PRODUCTS):
            torch.mm(a, b, out=product)

    return work


def _serve(link: Connection, steps: Steps) -> None:
    """Do each requested work on one thread, and reply with its seconds. It runs in the process of one core."""
    torch.set_num_threads(1)
    work_by_name = {
        "steps": steps.prepared(),
        "kernels": steps.kernels(),
        "products": products(),
    }
    with ExitStack() as stack:
        if steps.job is not None:
            work_by_name["rounds"] = stack.enter_context(
                _started(steps.job(), steps.layer, workers=0)
            ).step
        while (work_name := link.recv()) is not None:
            start = time.perf_counter()
            work_by_name[work_name]()
            link.send(time.perf_counter() - start)


@contextmanager
def _started(
    job_result: tuple[Any, ...], layer: str, **config_keys: Any
) -> Iterator[Engine]:
    """Yield the engine of a job. If one layer trains alone, the cache of frozen layers is filled before."""
    config, data, *model = job_result
    algorithm = partial(OneLayer, layer=layer) if layer else None
    with rounds(
        config.with_keys(stack="off", **config_keys), data, algorithm, *model
    ) as engine:
        for _ in range(training.SEEN if layer else 0):
            engine.step()
        yield engine


class Cores:
    """A process for each core. All do the same at once."""

    def __init__(self, links: Sequence[Connection]) -> None:
        self.links = links

    def seconds(self, work_name: str) -> float:
        """Return the time if all continue at their own rates until everything is done: n / sum of the rates."""
        for link in self.links:
            link.send(work_name)
        return len(self.links) / sum(1 / link.recv() for link in self.links)


@contextmanager
def cores(steps: Steps, count: int = CORES) -> Iterator[Cores]:
    """Yield processes that wait for work, with the allocator's settings that workers have."""
    context = multiprocessing.get_context("spawn")
    links, processes = [], []
    try:
        with environment(ALLOCATOR):
            for _ in range(count):
                parent_end, child_end = context.Pipe()
                process = context.Process(
                    target=_serve, args=(child_end, steps), daemon=True
                )
                process.start()
                child_end.close()
                links.append(parent_end)
                processes.append(process)
        yield Cores(links)
        for link in links:
            link.send(None)
    finally:
        for link in links:
            link.close()
        for process in processes:
            process.kill()
            process.join()


def _steps(
    job: Callable[[], tuple[Any, ...]],
    job_result: tuple[Any, ...],
    make: Callable[[Any], Any],
    layer: str,
) -> Steps:
    """Return each core's part of the samples that a job makes in a round."""
    config, data, *model = job_result
    clients = max(1, int(config.federation.participation * len(data.clients)))
    sample_count = clients * len(data.clients[0].train) // CORES
    client_splits = [client.train for client in data.clients[:clients]]
    core_data = Split(
        torch.cat([split.x for split in client_splits])[:sample_count],
        torch.cat([split.y for split in client_splits])[:sample_count],
    )
    start_model = assemble(config, data=data, model=next(iter(model), None)).model
    return Steps(
        start_model, core_data, int(config.training.batch_size or 1), make, layer, job
    )


def _of_rounds(
    job_name: str,
    job: Callable[[], tuple[Any, ...]],
    make: Callable[[Any], Any],
    pairs: int,
    layer: str = "",
) -> list[Measured]:
    """Return the shares of the machine that a job's rounds reach, and its whole runs where all layers train."""
    torch.set_num_threads(CORES)
    job_result = job()
    steps = _steps(job, job_result, make, layer)
    round_operations = CORES * steps.operations()
    with cores(steps) as machine, _started(job_result, layer) as engine:

        def at_full_rate() -> float:
            return (
                round_operations
                / (CORES * PRODUCTS * 2 * SIDE**3)
                * machine.seconds("products")
            )

        timers: dict[str, Callable[[], float]] = {
            "round": partial(_seconds, engine.step),
            "own": lambda: machine.seconds("rounds") / CORES,
            "steps": lambda: machine.seconds("steps"),
            "kernels": lambda: machine.seconds("kernels"),
            "products": at_full_rate,
        }
        frame = alternate(timers, pairs)
        medians = {
            timer_name: float(frame[timer_name].median()) for timer_name in frame
        }
        title = f"{layer} alone, clients seen before" if layer else "fedavg"
        title += f", {job_result[0].workers} workers"
        judge = partial(judged, job_name, unit=UNIT)
        peak_text = f"sgemm {SIDE}, {CORES} cores at once: {round_operations / medians['products'] / 1e9:.0f} Gflop/s"
        rows = [
            judge(
                title, f"the same rounds in one process a core, {CORES} at once",
                list(frame.own / frame["round"]), at_least=0.9,
                seconds=medians["round"], baseline_seconds=medians["own"],
            ),
            judge(
                title, f"the same steps as a plain loop, {CORES} at once",
                list(frame.steps / frame["round"]), seconds=medians["round"], baseline_seconds=medians["steps"],
            ),
            judge(
                title, f"the products and convolutions of these steps alone, {CORES} at once",
                list(frame.kernels / frame["round"]), seconds=medians["round"], baseline_seconds=medians["kernels"],
            ),
            judge(
                title, peak_text, list(frame.products / frame["round"]), seconds=medians["round"],
                baseline_seconds=medians["products"],
            ),
        ]  # fmt: skip
        if not layer:
            rows.append(
                _of_runs(job_name, title, job_result, machine, min(pairs, RUNS))
            )
    return rows


def _of_runs(
    job_name: str,
    title: str,
    job_result: tuple[Any, ...],
    machine: Cores,
    turns: int,
    length: int = ROUNDS,
) -> Measured:
    """Return the share of the machine that whole runs reach, with evaluation and saving at the default intervals."""
    config, data, *model = job_result
    paces: list[recorder.Pace] = []

    def run() -> float:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "run"
            model_keywords = {"model": model[0]} if model else {}
            runner.run(
                config.with_keys(rounds=length, stack="off"),
                out,
                data=data,
                progress=False,
                **model_keywords,
            )
            paces.append(recorder.read_pace(out / "timing.jsonl"))
        return paces[-1].total

    def rounds_alone() -> float:
        round_seconds = [
            machine.seconds("rounds") / CORES for _ in range(max(1, length // ROUNDS))
        ]
        return length * sum(round_seconds) / len(round_seconds)

    frame = alternate({"run": run, "own": rounds_alone}, turns)
    baseline_text = (
        f"the same rounds in one process a core; of the last run {paces[-1].line()}"
    )
    return judged(
        job_name,
        f"{title}, runs of {length} rounds with evaluation and saving",
        baseline_text,
        list(frame.own / frame.run),
        at_least=0.8,
        unit=UNIT,
        seconds=float(frame.run.median()),
        baseline_seconds=float(frame.own.median()),
    )


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def cross_device(pairs: int = PAIRS) -> list[Measured]:
    """Return shares of the machine that the rounds and runs of S1 reach."""
    training.tuned()
    return _of_rounds("S1", partial(training._cross_device, held_out=167), SGD, pairs)


def long_runs(turns: int = LONG_RUNS) -> list[Measured]:
    """Return the share of the machine that runs of S1 of 100 rounds reach, with evaluation and saving.

    With so few runs the interval of their median is their range.
    """
    training.tuned()
    torch.set_num_threads(CORES)
    job = partial(training._cross_device, held_out=167)
    job_result = job()
    with cores(_steps(job, job_result, SGD, "")) as machine:
        return [
            _of_runs(
                "S1",
                f"fedavg, {job_result[0].execution.workers} workers",
                job_result,
                machine,
                turns,
                LONG,
            )
        ]


def cross_silo(pairs: int = PAIRS) -> list[Measured]:
    """Return shares of the machine that the rounds and runs of S2 reach."""
    training.tuned()
    return _of_rounds("S2", partial(training._cross_silo, held_out=667), ADAMW, pairs)


def scheduling(pairs: int = FEWER) -> list[Measured]:
    """Return shares of the machine that the rounds of S4 reach, each layer alone, clients seen before."""
    training.tuned()
    job = partial(training._cross_device, held_out=167)
    rows: list[Measured] = []
    for layer in ("conv1", "conv2", "fc1", "fc2"):
        rows += _of_rounds("S4", job, SGD, pairs, layer)
    return rows


JOBS = {
    "shares-s1": cross_device,
    "shares-runs": long_runs,
    "shares-s2": cross_silo,
    "shares-s4": scheduling,
}
