"""Test whether clients differ, by dealing validation samples, where the answer is known.

    python -m figures.decision.exact [--minutes 60]

``REGISTERED_EXACT.md`` says what is asked. A job is one row of ``exact.parquet``, and a job with a row is skipped. The
page :mod:`figures.decision.known` has the table.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
import tyro
from sklearn import datasets

import fedlayers as fl
from diagnostics.tuning.differ import fine_tuned
from diagnostics.tuning.permutation import CrossLosses, blocks, permutation_test
from figures.decision.known_runs import (
    CONFIRMED,
    DEALT,
    DRAWS,
    KNOWN,
    ROWS as KNOWN_ROWS,
    SEEDS,
    Job,
    rate,
    setting,
    task_of,
    trained,
)
from fl_core.data.federated import FederatedData, gather
from fl_core.data.partitions import Partition
from fl_core.data.sources import Source
from fl_core.run.task import Task

ROWS = Path(__file__).with_name("exact.parquet")
TEST = 20
"""Test samples of a client in a federation that is made here. No test reads them."""


class Sizes(NamedTuple):
    """A federation that is dealt here: its data, each client's training and validation samples, draws and seeds."""

    source: str
    train: tuple[int, ...]
    validation: int
    draws: int
    seeds: int = 1


MADE = {
    "small": (
        Sizes("breast_cancer", (60,) * 5, 20, 15),
        Sizes("wine", (15,) * 5, 6, 15),
        Sizes("digits", (30,) * 10, 10, 15),
    ),
    "unequal": (Sizes("digits", (20, 30, 40, 160, 320), 20, 200),),
    "seeds": (Sizes("digits", (60,) * 4, 20, 100, 3),),
}
ROUNDS, RATE = 20, 0.01


class Exact(NamedTuple):
    """A row: its kind, its federation, the seed of its runs, and a draw of dealt samples."""

    kind: str
    federation: str
    seed: int
    draw: int


def jobs() -> Iterator[Exact]:
    """Yield all jobs in the order of the registration."""
    for kind, sizes_of_kind in MADE.items():
        for sizes in sizes_of_kind:
            for draw in range(sizes.draws):
                yield Exact(kind, sizes.source, draw, draw)
    for draw, name in itertools.product(range(1, DRAWS + 1), DEALT):
        yield Exact("dealt", name, 0, draw)
    for seed, name in itertools.product(SEEDS, KNOWN):
        yield Exact("known", name, seed, 0)
    for name in CONFIRMED:
        yield Exact("unseen", name, 0, 0)


def losses_of(task: Task) -> CrossLosses:
    """Train a federation together and each client alone, and return the losses of the fine-tuned and local models."""
    shared, alone = trained(task, []), trained(task, range(len(task.layers)))
    losses, _ = fine_tuned(alone, **setting(task, "validation"), starts=shared)
    return losses


def made(sizes: Sizes, draw: int, seed: int) -> tuple[Task, Any]:
    """Return the task of a dealt federation, and the number of each validation sample in it.

    The draw deals the samples to clients, with their test samples. The seed deals training and validation samples of
    each client.
    """
    read = getattr(datasets, f"load_{sizes.source}")()
    x = read.data.astype(np.float32)
    x = (x - x.mean(axis=0)) / (x.std(axis=0) + 1e-6)
    order = np.random.default_rng(draw).permutation(len(x))
    draws = np.random.default_rng((draw, seed))
    parts, held_out, position = {}, [], 0
    for k, train in enumerate(sizes.train):
        most = (len(x) - position) // (len(sizes.train) - k) - train - sizes.validation
        test = order[position : position + min(TEST, most)]
        position += len(test)
        rest = order[position : position + train + sizes.validation]
        position += len(rest)
        rest = draws.permutation(rest)
        held_out.append(rest[train:])
        parts[f"client {k + 1}"] = {
            "train": rest[:train],
            "validation": rest[train:],
            "test": test,
        }
    classes = tuple(map(str, range(read.target.max() + 1)))
    source = Source(sizes.source, x, read.target, classes)
    data: FederatedData = gather(
        source, Partition("known", {}, 0, parts, len(x), source.digest)
    )
    config = fl.RunConfig(
        algorithm="fedper", model="mlp", rounds=ROUNDS, lr=RATE, batch_size=16,
        seed=seed, eval_every=ROUNDS, checkpoint_every=ROUNDS, patience=0,
    )  # fmt: skip
    return fl.assemble(config, data=data), np.concatenate(held_out)


def measured(job: Exact, known_rows: pd.DataFrame) -> dict[str, Any]:
    """Do a job: train, and test."""
    if job.kind in MADE:
        sizes = next(one for one in MADE[job.kind] if one.source == job.federation)
        seeds = []
        for number in range(sizes.seeds):
            task, group = made(sizes, job.draw, sizes.seeds * job.seed + number)
            losses = losses_of(task)
            seeds.append(CrossLosses(losses.losses, losses.client, losses.share, group))
    else:
        arm = Job(job.federation, "differ", job.seed, job.draw)
        seeds = [losses_of(task_of(arm, rate(known_rows, job.federation)))]
    parts = blocks(len(seeds[0].share), job.seed)
    test = permutation_test(seeds, parts, seed=job.seed)
    return {
        "p": test.p_value,
        "lead": test.lead,
        "smallest": test.smallest,
        "samples": test.samples,
    }


def main(minutes: float = 60.0) -> None:
    """Do the jobs without a row.

    Args:
        minutes: minutes of this call after which no further job begins.
    """
    torch.set_num_threads(1)
    rows = pd.read_parquet(ROWS) if ROWS.exists() else pd.DataFrame()
    planted_rows = pd.read_parquet(KNOWN_ROWS)
    done = {tuple(row) for row in rows.reindex(columns=Exact._fields).to_numpy()}
    start = time.monotonic()
    for job in jobs():
        if tuple(job) in done:
            continue
        if time.monotonic() - start > 60 * minutes:
            break
        began = time.process_time()
        result = measured(job, planted_rows)
        seconds = time.process_time() - began
        row = {**job._asdict(), **result, "seconds": seconds}
        rows = pd.DataFrame([*rows.to_dict("records"), row])
        part = ROWS.with_suffix(".part")
        rows.to_parquet(part, index=False, compression="brotli")
        part.replace(ROWS)
        print(*job, f"p {row['p']:.3f}, {seconds:.1f} s", flush=True)


if __name__ == "__main__":
    tyro.cli(main)
