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
    for kind, kind_sizes in MADE.items():
        for sizes in kind_sizes:
            for draw in range(sizes.draws):
                yield Exact(kind, sizes.source, draw, draw)
    for draw, federation in itertools.product(range(1, DRAWS + 1), DEALT):
        yield Exact("dealt", federation, 0, draw)
    for seed, federation in itertools.product(SEEDS, KNOWN):
        yield Exact("known", federation, seed, 0)
    for federation in CONFIRMED:
        yield Exact("unseen", federation, 0, 0)


def losses_of(task: Task) -> CrossLosses:
    """Train a federation together and each client alone, and return the losses of the fine-tuned and local models."""
    shared_models, local_models = (
        trained(task, []),
        trained(task, range(len(task.layers))),
    )
    losses, _ = fine_tuned(
        local_models, **setting(task, "validation"), starts=shared_models
    )
    return losses


def made(sizes: Sizes, draw: int, seed: int) -> tuple[Task, Any]:
    """Return the task of a dealt federation, and the number of each validation sample in it.

    The draw deals the samples to clients, with their test samples. The seed deals training and validation samples of
    each client.
    """
    dataset = getattr(datasets, f"load_{sizes.source}")()
    x = dataset.data.astype(np.float32)
    x = (x - x.mean(axis=0)) / (x.std(axis=0) + 1e-6)
    sample_order = np.random.default_rng(draw).permutation(len(x))
    generator = np.random.default_rng((draw, seed))
    parts_by_client, validation_parts, position = {}, [], 0
    for k, train_count in enumerate(sizes.train):
        most_test = (
            (len(x) - position) // (len(sizes.train) - k)
            - train_count
            - sizes.validation
        )
        test_samples = sample_order[position : position + min(TEST, most_test)]
        position += len(test_samples)
        client_samples = sample_order[
            position : position + train_count + sizes.validation
        ]
        position += len(client_samples)
        client_samples = generator.permutation(client_samples)
        validation_parts.append(client_samples[train_count:])
        parts_by_client[f"client {k + 1}"] = {
            "train": client_samples[:train_count],
            "validation": client_samples[train_count:],
            "test": test_samples,
        }
    classes = tuple(map(str, range(dataset.target.max() + 1)))
    source = Source(sizes.source, x, dataset.target, classes)
    data: FederatedData = gather(
        source, Partition("known", {}, 0, parts_by_client, len(x), source.digest)
    )
    config = fl.RunConfig(
        algorithm="fedper", model="mlp", rounds=ROUNDS, lr=RATE, batch_size=16,
        seed=seed, eval_every=ROUNDS, checkpoint_every=ROUNDS, patience=0,
    )  # fmt: skip
    return fl.assemble(config, data=data), np.concatenate(validation_parts)


def measured(job: Exact, known_rows: pd.DataFrame) -> dict[str, Any]:
    """Train the federation of a job, test whether its clients differ, and return the results by column."""
    if job.kind in MADE:
        sizes = next(
            candidate
            for candidate in MADE[job.kind]
            if candidate.source == job.federation
        )
        seed_losses = []
        for seed_index in range(sizes.seeds):
            task, group = made(sizes, job.draw, sizes.seeds * job.seed + seed_index)
            losses = losses_of(task)
            seed_losses.append(
                CrossLosses(losses.losses, losses.client, losses.share, group)
            )
    else:
        known_job = Job(job.federation, "differ", job.seed, job.draw)
        seed_losses = [losses_of(task_of(known_job, rate(known_rows, job.federation)))]
    sample_blocks = blocks(len(seed_losses[0].share), job.seed)
    test = permutation_test(seed_losses, sample_blocks, seed=job.seed)
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
    done_jobs = {tuple(row) for row in rows.reindex(columns=Exact._fields).to_numpy()}
    start_time = time.monotonic()
    for job in jobs():
        if tuple(job) in done_jobs:
            continue
        if time.monotonic() - start_time > 60 * minutes:
            break
        job_start = time.process_time()
        result = measured(job, planted_rows)
        seconds = time.process_time() - job_start
        row = {**job._asdict(), **result, "seconds": seconds}
        rows = pd.DataFrame([*rows.to_dict("records"), row])
        part_file = ROWS.with_suffix(".part")
        rows.to_parquet(part_file, index=False, compression="brotli")
        part_file.replace(ROWS)
        print(*job, f"p {row['p']:.3f}, {seconds:.1f} s", flush=True)


if __name__ == "__main__":
    tyro.cli(main)
