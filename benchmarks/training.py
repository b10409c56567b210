"""Benchmarks S1 to S4: rounds of federated training against the same steps written as a plain PyTorch loop."""

from __future__ import annotations

import copy
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.operations import least
from benchmarks.pairs import PAIRS, Measured, compare
from fl_core import tree
from fl_core.algorithms.base import Algorithm, Message, Round, State, TaskInfo
from fl_core.config import RunConfig
from fl_core.data import ClientData, FederatedData, Source, Split, partitions
from fl_core.data.federated import gather
from fl_core.rounds.clients import LocalClients
from fl_core.rounds.engine import Engine, Schedule
from fl_core.rounds.workers import ALLOCATOR
from fl_core.run import runner
from fl_core.run.runner import executor
from fl_core.run.task import assemble
from fl_core.training.phases import Phase

WORKERS = 2
THREADS = 2
SILO_WORKERS = 3
"""For the five clients of S2: three start, two follow, and no core is idle; with two workers one is at the end."""
SEEN = 60
"""Rounds of 10 among 100 clients after which nearly all have taken part."""
CROSS_DEVICE = RunConfig(
    dataset="random",
    model="scheduling_cnn",
    participation=0.1,
    epochs=1,
    batch_size=10,
    lr=0.005,
    optimizer="sgd",
    keep_optimizer=False,
    loss="cross_entropy",
    workers=WORKERS,
)
CROSS_SILO = RunConfig(
    dataset="random",
    epochs=1,
    batch_size=64,
    lr=0.001,
    optimizer="adamw",
    weight_decay=0.01,
    keep_optimizer=False,
    loss="cross_entropy",
    workers=SILO_WORKERS,
)
TINY = RunConfig(
    dataset="random", model="heart_mlp", epochs=1, batch_size=32, lr=0.01, optimizer="sgd", keep_optimizer=False,
    loss="cross_entropy",
)  # fmt: skip


def tuned() -> None:
    """Restart this program with the allocator's settings, so that both sides of every comparison have them."""
    if any(os.environ.get(variable) != value for variable, value in ALLOCATOR.items()):
        os.environ.update(ALLOCATOR)
        os.execv(sys.executable, [sys.executable, "-m", "benchmarks", *sys.argv[1:]])


def federation(
    clients: int, n: int, shape: tuple[int, ...], classes: int = 10, held_out: int = 0
) -> FederatedData:
    """Return clients with ``n`` random training samples each.

    Args:
        shape: the shape of a sample.
        held_out: validation samples of a client, and as many test samples; at least 2.
    """
    held_out = max(held_out, 2)
    generator = np.random.default_rng(0)
    sample_count = clients * (n + 2 * held_out)
    x = generator.standard_normal((sample_count, *shape), dtype=np.float32)
    y = generator.integers(classes, size=sample_count)
    sample_clients = np.repeat(np.arange(clients), n + 2 * held_out)
    client_names = tuple(f"client_{k}" for k in range(clients))
    source = Source(
        "random",
        x,
        y,
        tuple(f"class {k}" for k in range(classes)),
        sample_clients,
        client_names,
    )
    data = gather(source, partitions.make(source, "natural", seed=0))

    def cut(client: ClientData) -> ClientData:
        client_splits = (client.train, client.validation, client.test)
        xs, ys = (
            torch.cat([split.x for split in client_splits]),
            torch.cat([split.y for split in client_splits]),
        )
        split_ends = (n, n + held_out, n + 2 * held_out)
        splits = [
            Split(xs[a:b].clone(), ys[a:b].clone())
            for a, b in zip((0, *split_ends), split_ends, strict=False)
        ]
        return ClientData(client.name, *splits)

    return replace(data, clients=tuple(cut(client) for client in data.clients))


@contextmanager
def rounds(
    config: RunConfig,
    data: FederatedData | None = None,
    make: Callable[[TaskInfo], Algorithm] | None = None,
    model: nn.Module | None = None,
    count: int = 10**6,
) -> Iterator[Engine]:
    """Yield a started engine; each call of its ``step`` is a round without evaluation.

    Args:
        data, make, model: samples, algorithm and model, if they are not the configuration's.
    """
    task = assemble(config, data=data, model=model)
    client_runner = task.client_runner()
    pool = executor(
        client_runner, config.execution.workers, task.config.execution.stack == "on"
    )
    schedule = Schedule(
        count,
        task.config.federation.participation,
        eval_every=count,
        checkpoint_every=count,
    )
    initial = tree.state_dict(task.model)
    clients = LocalClients(client_runner, pool, initial)
    try:
        engine = Engine(
            make(task.task_info) if make else task.algorithm(task.plan),
            task.data,
            initial,
            clients,
            schedule,
            runner.listeners_of(task, client_runner, runner.Instruments()),
        )
        clients.use(engine.algorithm)
        yield engine
    finally:
        pool.close()


class BareLoop:
    """FedAvg as a plain loop: tensor slices, one model, state dictionaries added up."""

    def __init__(
        self,
        model: nn.Module,
        data: FederatedData,
        batch: int,
        make: Callable[[Any], Any],
        take: int,
    ) -> None:
        self.model, self.data, self.batch, self.make, self.take = (
            copy.deepcopy(model),
            data,
            batch,
            make,
            take,
        )
        self.round = 0

    def __call__(self) -> int:
        """Run one round; returns the number of steps."""
        chosen_clients = np.random.default_rng(self.round).choice(
            len(self.data.clients), self.take, replace=False
        )
        self.round += 1
        start = {
            tensor_name: tensor.clone()
            for tensor_name, tensor in self.model.state_dict().items()
        }
        mean_state: dict[str, Tensor] = {}
        steps = 0
        for client in chosen_clients:
            self.model.load_state_dict(start)
            steps += plain_epoch(
                self.model, self.data.clients[client].train, self.batch, self.make
            )
            for tensor_name, tensor in self.model.state_dict().items():
                term = tensor / self.take
                mean_state[tensor_name] = (
                    mean_state[tensor_name] + term
                    if tensor_name in mean_state
                    else term
                )
        self.model.load_state_dict(mean_state)
        return steps


def plain_epoch(
    model: nn.Module, split: Split, batch: int, make: Callable[[Any], Any]
) -> int:
    """Train for one pass over a client's samples with a new optimiser, and return the number of steps."""
    optimizer = make(model.parameters())
    row_batches = torch.randperm(len(split)).split(batch)
    for batch_rows in row_batches:
        optimizer.zero_grad()
        F.cross_entropy(model(split.x[batch_rows]), split.y[batch_rows]).backward()
        optimizer.step()
    return len(row_batches)


class OneLayer(Algorithm):
    """FedAvg of one layer; all others keep their initial weights."""

    name = "one layer"

    def __init__(self, task_info: TaskInfo, layer: str) -> None:
        super().__init__(task_info)
        self.tensors = frozenset(
            next(
                candidate.tensors
                for candidate in task_info.layers
                if candidate.name == layer
            )
        )

    def shared(self, rnd: Round, client: int) -> frozenset[str]:
        return self.tensors

    def local_tensors(self, rnd: Round, client: int) -> frozenset[str]:
        return frozenset()

    def phases(self, rnd: Round, client: int) -> tuple[Phase, ...]:
        return (Phase("train", self.tensors, self.task_info.epochs),)

    def server_message(self, server: State, client: int, rnd: Round) -> Message:
        return Message({"model": server.trees["model"]})


def _job(
    job_name: str,
    config: RunConfig,
    data: FederatedData,
    make: Callable[[Any], Any],
    at_most: float,
    baseline: str,
    pairs: int,
    model: nn.Module | None = None,
    times: int = 1,
) -> list[Measured]:
    """Time a configuration's rounds against the bare loop's, ``times`` rounds at once."""
    torch.set_num_threads(THREADS)
    client_count = max(1, int(config.federation.participation * len(data.clients)))
    start_model = assemble(config, data=data, model=model).model
    bare_loop = BareLoop(
        start_model, data, int(config.training.batch_size or 1), make, client_count
    )
    with rounds(config, data, model=model) as engine:
        if config.execution.workers:
            label = f"{config.federation.algorithm}, {config.execution.workers} workers"
        else:
            label = f"{config.federation.algorithm}, stacked clients"
        own_rounds, bare_rounds = (
            partial(repeat, work, times) for work in (engine.step, bare_loop)
        )
        label += f", {times} rounds" if times > 1 else ""
        return [
            compare(
                job_name,
                label,
                own_rounds,
                baseline,
                bare_rounds,
                at_most=at_most,
                pairs=pairs,
                clock=time.perf_counter,
            )
        ]


def repeat(work: Callable[[], object], times: int) -> None:
    """Call a function several times."""
    for _ in range(times):
        work()


def _cross_device(held_out: int = 0) -> tuple[RunConfig, FederatedData]:
    return CROSS_DEVICE, federation(100, 500, (1, 28, 28), held_out=held_out)


def cross_device(pairs: int = PAIRS) -> list[Measured]:
    """S1: 100 clients of 500 samples, 10 a round, SGD 0.005 with batch 10. The CNN has 582,026 parameters."""
    tuned()
    config, data = _cross_device()
    text = f"bare loop, tensor slices, {THREADS} threads"
    return _job(
        "S1", config, data, lambda p: torch.optim.SGD(p, lr=0.005), 0.60, text, pairs
    )


def silo_network() -> nn.Sequential:
    """Return a 3Conv-2FC CNN of 122,570 parameters on 3 x 32 x 32."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(
            nn.Conv2d(3, 32, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ),
        *(
            nn.Conv2d(64, 64, 3),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(1024, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        ),
    )


def _cross_silo(held_out: int = 0) -> tuple[RunConfig, FederatedData, nn.Module]:
    return (
        CROSS_SILO,
        federation(5, 2000, (3, 32, 32), held_out=held_out),
        silo_network(),
    )


def cross_silo(pairs: int = PAIRS) -> list[Measured]:
    """S2: 5 clients of 2,000 samples, all in every round, AdamW with batch 64.

    A 3Conv-2FC CNN on 3 x 32 x 32 has 122,570 parameters.
    """
    tuned()
    config, data, model = _cross_silo()
    text = f"bare loop, fused AdamW, {THREADS} threads, allocator tuned on both sides"
    make = lambda p: torch.optim.AdamW(p, lr=0.001, weight_decay=0.01, fused=True)  # noqa: E731
    return _job("S2", config, data, make, 0.60, text, pairs, model)


def tiny(pairs: int = PAIRS) -> list[Measured]:
    """S3: 4 clients of 200 samples, batch 32. The 4-FC heart MLP has 2,095 parameters."""
    tuned()
    data = federation(4, 200, (10,), classes=5)
    text = f"bare loop, {THREADS} threads"
    return _job(
        "S3",
        TINY,
        data,
        lambda p: torch.optim.SGD(p, lr=0.01),
        0.50,
        text,
        pairs,
        times=20,
    )


def scheduling(pairs: int = PAIRS) -> list[Measured]:
    """S4: S1 with one layer trainable, each in turn, against rounds that train all layers.

    Once from the start, when clients are sampled for the first time. Once after enough rounds to fill the cache of
    frozen layers; the targets are for these. Means are over the three base layers, and over all four; the former is
    also held against the operations that cannot be saved.
    """
    tuned()
    torch.set_num_threads(THREADS)
    config, data = _cross_device()
    rows: list[Measured] = []
    baseline = "a round of all layers"
    model, train_split = assemble(config, data=data).model, data.clients[0].train
    batch = (
        train_split.x[: config.training.batch_size],
        train_split.y[: config.training.batch_size],
    )
    with rounds(config, data) as full_engine:
        for warm_up_rounds, moment in (
            (0, "clients new"),
            (SEEN, "clients seen before"),
        ):
            shares = []
            for layer in ("conv1", "conv2", "fc1", "fc2"):
                with rounds(
                    config, data, partial(OneLayer, layer=layer)
                ) as layer_engine:
                    for _ in range(warm_up_rounds):
                        layer_engine.step()
                    compare_layer = partial(
                        compare,
                        "S4",
                        f"{layer} alone, {moment}",
                        layer_engine.step,
                        baseline,
                        full_engine.step,
                    )
                    row = compare_layer(
                        at_most=1.0, pairs=pairs, clock=time.perf_counter
                    )
                    rows.append(replace(row, target="", holds=""))
                    shares.append([row.ratio, row.low, row.high])
            for title, layer_count in (
                ("the three base layers", 3),
                ("all four layers", 4),
            ):
                ratio, low, high = np.mean(shares[:layer_count], axis=0).tolist()
                mean_row = Measured(
                    "S4",
                    f"mean of {title}, {moment}",
                    baseline,
                    ratio,
                    low,
                    high,
                    pairs=pairs,
                )
                if warm_up_rounds:
                    holds = "yes" if high <= 0.40 else "no"
                    mean_row = replace(mean_row, target="<= 0.4", holds=holds)
                rows.append(mean_row)
                if warm_up_rounds and layer_count == 3:
                    least_share = float(
                        np.mean(
                            [
                                least(model, layer, *batch)
                                for layer in ("conv1", "conv2", "fc1")
                            ]
                        )
                    )
                    text = (
                        f"the operations that cannot be saved, {least_share:.3f} of all"
                    )
                    rows.append(
                        Measured(
                            "S4", mean_row.what, text, ratio / least_share, low / least_share, high / least_share,
                            "<= 1.1",
                            "yes" if high / least_share <= 1.1 else "no", pairs=pairs,
                        )
                    )  # fmt: skip
    return rows


JOBS = {
    "s1": cross_device,
    "s2": cross_silo,
    "s3": tiny,
    "s4": scheduling,
}
