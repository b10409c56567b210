"""Train federations of which it is known what differs, and measure what the diagnosis says of them.

    python -m figures.decision.known_runs [--hours 2]

``REGISTERED_KNOWN.md`` says what is asked, and ``REGISTERED_ADAPTERS.md`` of adapters. A job is one row of
``known.parquet``. They begin in the order of :func:`jobs`. A job with a row is skipped, so a stopped call goes on.
One core does one job after the other. Commit 38f55f44 is the last with the code of natural federations, of smaller
samples, of what each command says and of ``known_plans.parquet``. Their rows stay.
The data lie below ``FEDLAYERS_DATA_ROOT``.
"""

from __future__ import annotations

import functools
import itertools
import json
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
import torchvision
import tyro

import fedlayers as fl
from diagnostics.null import null_data
from diagnostics.tuning import differ as whether
from diagnostics.tuning.copies import EPOCHS, SAMPLES, Tuner
from diagnostics.tuning.profile import every
from figures.decision import known_tweets as tweets
from figures.decision.known_signals import blocks, chosen, falls, inputs_differ, signals
from figures.recipe import where
from fl_core.data.federated import FederatedData, gather
from fl_core.data.named.known import KINDS, coded_labels, permuted_inputs
from fl_core.data.partitions import SPLITS, Partition
from fl_core.data.sources import Source
from fl_core.errors import DivergedError
from fl_core.plan import LayerPlan
from fl_core.run import runner
from fl_core.run.task import Task
from fl_core.training.phases import Training

ROWS = Path(__file__).with_name("known.parquet")
RATES, TUNING, SEEDS, DRAWS = (0.001, 0.003, 0.01, 0.03), 90, tuple(range(10)), 10
FIRST_UNSEEN, TEST, PROFILED = 30_000, 300, 20
ATTEMPTS = 10
"""Draws of class shares until there are pictures enough."""
SIZES = {
    240: (6, 240, 100, 40),
    120: (6, 120, 50, 60),
    64: (6, 64, 60, 10),
    60: (12, 60, 40, 80),
}
"""Training samples of a client: clients, training and validation samples of each, rounds."""
NETWORKS: dict[str, tuple[str, dict[str, Any], int]] = {
    "mlp": ("mlp", {}, 3),
    "cnn": ("fmnist_cnn", {"width": 0.125}, 5),
    "resnet": ("resnet8", {}, 5),
    "heart": ("heart_mlp", {}, 4),
    "words": ("text_transformer", {"width": 128}, 4),
    "lora": (f"{tweets.__name__}:{tweets.last_blocks.__name__}", {}, 9),
}
"""Model, its options, and its count of layers."""
KNOWN = tuple(f"known_{kind}" for kind in KINDS)
CHOSEN = (*KNOWN, "coded_digits")
"""Data sets on which decisions are held against the truth."""
CONFIRMED = (
    "mlp mnist labels 240 10",
    "mlp mnist labels 60 10",
    "mlp mnist labels 240 2",
    "mlp mnist shares 60 10",
    "mlp mnist permuted 60 2",
    "mlp mnist turned 240 10",
    "mlp mnist inverted 240 2",
    "mlp mnist contrast 60 10",
    "cnn fashion labels 60 10",
    "cnn fashion labels 240 10",
    "cnn fashion labels 60 2",
    "cnn fashion shares 240 2",
    "cnn fashion permuted 240 10",
    "cnn fashion turned 60 10",
    "cnn fashion inverted 60 10",
    "cnn fashion contrast 240 2",
    "resnet cifar10 labels 240 10",
    "resnet cifar10 labels 60 2",
    "resnet cifar10 shares 60 10",
    "resnet cifar10 shares 240 2",
    "resnet cifar10 permuted 240 10",
    "resnet cifar10 permuted 60 10",
    "resnet cifar10 turned 240 10",
    "resnet cifar10 turned 60 10",
)
"""The federations of the confirmation: network, source, what differs, training samples a client, classes."""
FURTHER = (
    "mlp fashion labels 240 10",
    "mlp fashion turned 240 10",
    "mlp fashion permuted 60 10",
    "mlp fashion inverted 60 10",
    "mlp fashion contrast 240 10",
    "mlp fashion shares 60 10",
)
CONVOLUTIONAL = tuple(
    f"cnn fashion {kind} 120 10"
    for kind in ("labels", "shares", "turned", "inverted", "permuted", "neither")
)
"""Federations of which every cut of a convolutional network is trained."""
ADAPTED = tuple(
    f"lora airline_tweets {kind} 64 3"
    for kind in ("neither", "labels", "words", "shares")
)
"""Federations of a pretrained encoder with adapters. The first one has the rate of all."""
FACTOR_A = "1 3 5 7 8"
"""The local layers where the factors A of all adapters are shared."""
CHANCE = 0.99 * np.log(10)
"""The validation loss from which a network has learned nothing of ten classes."""
DEALT = (*CONFIRMED[:8], *KNOWN, *FURTHER)
CONTRASTS = ((1.0, 0.0), (0.5, 0.0), (0.3, 0.35), (0.6, 0.4), (0.25, 0.7), (0.8, 0.1))
"""Factor of the contrast and brightness added, by client."""


class Job(NamedTuple):
    """A row: its federation, its arm or ``whether``, its seed, a draw of dealt samples, and a rate that is tried."""

    federation: str
    arm: str
    seed: int
    draw: int = 0
    lr: float | None = None


def jobs() -> Iterator[Job]:
    """Yield all jobs in the order of the registration."""
    for federation in KNOWN:
        yield from (Job(federation, "rate", TUNING, 0, lr) for lr in RATES)
    yield from truths(SEEDS[:5])
    for federation in (*CONFIRMED[:8], *FURTHER):
        yield from (Job(federation, arm, 0) for arm in ("whether", *ends(federation)))
    for draw, federation in itertools.product(range(1, DRAWS + 1), DEALT):
        yield Job(federation, "whether", 0, draw)
    yield from truths(SEEDS[5:])
    for federation in CONFIRMED[8:]:
        yield from (Job(federation, arm, 0) for arm in ("whether", *ends(federation)))
    yield from differences()


def differences() -> Iterator[Job]:
    """Yield the jobs of ``REGISTERED_DIFFERS.md``, and what was registered after it."""
    for federation in (*CONFIRMED, *FURTHER, *KNOWN):
        yield from (Job(federation, arm, 0) for arm in ("differ", "profile"))
    for draw, federation in itertools.product(range(1, DRAWS + 1), DEALT):
        yield Job(federation, "differ", 0, draw)
    for seed, federation in itertools.product(SEEDS[1:], KNOWN):
        yield Job(federation, "differ", seed)
    yield from decisions()
    for federation in CONVOLUTIONAL:
        yield from (Job(federation, "rate", TUNING, 0, lr) for lr in RATES)
    yield from truths(SEEDS[:5], CONVOLUTIONAL)
    yield from (Job(ADAPTED[0], "rate", TUNING, 0, lr) for lr in RATES[1:3])
    for seed, federation in itertools.product(SEEDS[:2], ADAPTED):
        for arm in ("whether", *ends(federation), FACTOR_A):
            yield Job(federation, arm, seed)


def decisions() -> Iterator[Job]:
    """Yield the decisions of ``choose``, and the truth of their last data set."""
    for seed, federation in itertools.product(SEEDS, CHOSEN):
        yield Job(federation, "choose", seed)
    for job in truths(SEEDS, CHOSEN[-1:]):
        yield job._replace(lr=RATES[2])  # the data set's own


def truths(seeds: Sequence[int], federations: Sequence[str] = KNOWN) -> Iterator[Job]:
    """Yield the runs of every plan of a known federation."""
    for seed, federation in itertools.product(seeds, federations):
        yield from (
            Job(federation, arm, seed)
            for arm in ("whether", *subsets(depth(federation)))
        )


def depth(federation: str) -> int:
    """Return the count of layers of a federation's network."""
    return NETWORKS.get(federation.split()[0], NETWORKS["mlp"])[2]


def subsets(layers: int) -> list[str]:
    """Return every cut from both ends and each single layer that stays local, as the local layers' numbers."""
    cuts = [range(k) for k in range(1, layers)] + [
        range(k, layers) for k in range(1, layers)
    ]
    local_sets = [*cuts, *([k] for k in range(layers))]
    return list(
        dict.fromkeys(" ".join(map(str, local_set)) for local_set in local_sets)
    )


def ends(federation: str) -> list[str]:
    """Return a federation's two arms of the decision: the head local, and the first half of the rest local."""
    layers = depth(federation)
    return [str(layers - 1), " ".join(map(str, range(layers // 2)))]


# --- federations -----------------------------------------------------------------------------------------------------


def pictures(source: str) -> tuple[Any, Any]:
    """Return pictures uint8 [n, H, W] or [n, H, W, 3] that no threshold saw, and their labels."""
    if source == "airline_tweets":
        return tweets.tweets()
    if source == "cifar10":
        arrays = np.load(tweets.place("cifar10.npz"))
        order = np.random.default_rng(0).permutation(len(arrays["y_train"]))
        unseen_rows = order[FIRST_UNSEEN:]  # the file has one class after the other
        return arrays["x_train"][unseen_rows], arrays["y_train"][unseen_rows].astype(
            int
        )
    dataset_class = {"mnist": "MNIST", "fashion": "FashionMNIST"}[source]
    dataset = getattr(torchvision.datasets, dataset_class)(tweets.place(""))
    return dataset.data.numpy()[FIRST_UNSEEN:], dataset.targets.numpy()[FIRST_UNSEEN:]


def changed(x: Any, y: Any, kind: str, client: int, classes: int) -> tuple[Any, Any]:
    """Return a client's pictures and labels, changed its own way."""
    if kind == "labels":
        y = coded_labels(y, client, classes)
    elif kind == "turned":
        x = np.rot90(x, client % 4, (1, 2))
    elif kind == "permuted":
        planes = x if x.ndim == 3 else x.transpose(0, 3, 1, 2)
        planes = permuted_inputs(planes, client)
        x = planes if x.ndim == 3 else planes.transpose(0, 2, 3, 1)
    elif kind == "inverted":
        if client % 2:
            x = 255 - x
    elif kind == "contrast":
        factor, brightness = CONTRASTS[client % len(CONTRASTS)]
        x = np.clip(x * factor + 255 * brightness, 0, 255).astype(np.uint8)
    elif kind == "words" and client % 2:
        x = tweets.coded_words(x, client)
    return x, y


@functools.lru_cache(maxsize=1)
def federation(federation_name: str, seed: int = 0) -> tuple[FederatedData, str, int]:
    """Return the samples of a federation, drawn by its name and a seed, its network and its rounds."""
    network, source, kind, size, class_text = federation_name.split()
    clients, train_count, validation_count, rounds = SIZES[int(size)]
    x, y = pictures(source)
    classes = int(class_text)
    if classes == 2:
        y = (y < 5).astype(int)
    generator = np.random.default_rng(zlib.crc32(federation_name.encode()) + seed)
    shares = np.full((clients, classes), 1 / classes)
    if kind == "shares":
        shares = generator.dirichlet(np.full(classes, 0.2), clients)
    pools = [generator.permutation(np.flatnonzero(y == k)) for k in range(classes)]
    for _ in range(ATTEMPTS):
        labels = [
            generator.choice(classes, train_count + validation_count + TEST, p=p)
            for p in shares
        ]
        class_counts = np.bincount(np.concatenate(labels), minlength=classes)
        if all(n <= len(pool) for n, pool in zip(class_counts, pools, strict=True)):
            break
        shares = generator.dirichlet(
            np.full(classes, 0.2), clients
        )  # too few of a class
    else:
        raise ValueError(
            f"{federation_name} must have pictures of each class; got too few."
        )
    used_counts = [0] * classes
    xs, ys, indices_by_client, position = [], [], {}, 0
    for client, label in enumerate(labels):
        picked_rows = np.zeros(len(label), int)
        for k in range(classes):
            positions = np.flatnonzero(label == k)
            picked_rows[positions] = pools[k][
                used_counts[k] : used_counts[k] + len(positions)
            ]
            used_counts[k] += len(positions)
        picked_samples = changed(x[picked_rows], y[picked_rows], kind, client, classes)
        xs.append(picked_samples[0])
        ys.append(picked_samples[1])
        bounds = [0, train_count, train_count + validation_count, len(label)]
        splits = [position + np.arange(a, b) for a, b in itertools.pairwise(bounds)]
        indices_by_client[f"client {client + 1}"] = dict(
            zip(SPLITS, splits, strict=True)
        )
        position += len(label)
    samples = np.concatenate(xs)
    if network == "lora":
        samples = tweets.states(samples)
    federation_source = Source(
        federation_name, samples, np.concatenate(ys), tuple(map(str, range(classes)))
    )
    partition = Partition(
        "known",
        {},
        0,
        indices_by_client,
        len(federation_source.y),
        federation_source.digest,
    )
    return gather(federation_source, partition), network, rounds


def task_of(job: Job, lr: float) -> Task:
    """Return the task of a job, with samples that are dealt if it has a draw."""
    config_keys: dict[str, Any] = {
        "algorithm": "fedper",
        "seed": job.seed,
        "lr": lr,
        "keep_optimizer": job.federation == CHOSEN[-1],  # as the data set has it
    }
    if job.federation in CHOSEN:
        task = fl.assemble(fl.RunConfig(dataset=job.federation, **config_keys))
        data, config = task.data, task.config
        config_keys |= {
            "model": "mlp",
            "rounds": config.federation.rounds,
            "batch_size": config.training.batch_size,
        }
    else:
        data, network, rounds = federation(job.federation, job.seed)
        model, options, _ = NETWORKS[network]
        config_keys |= {
            "model": model,
            "model_options": options,
            "rounds": rounds,
            "batch_size": 16 if network == "lora" else 32,
            "adapt": tweets.ADAPT if network == "lora" else None,
        }
    if job.arm == "profile":
        config_keys["rounds"] = PROFILED
    config_keys["eval_every"] = config_keys["checkpoint_every"] = config_keys["rounds"]
    if job.draw:
        data = null_data(data, "clients", job.seed, job.draw)
    return fl.assemble(fl.RunConfig(**config_keys, patience=0), data=data)


# --- runs ------------------------------------------------------------------------------------------------------------


def trained(task: Task, local: Sequence[int]) -> list[Any]:
    """Train with these layers local, and return each client's tensors after the last round."""
    shared_names = [layer.name for k, layer in enumerate(task.layers) if k not in local]
    plan = LayerPlan(task.layers, tuple(shared_names))
    engine = runner.run(
        task.config, data=task.data, plan=plan, progress=False, announce=False
    )
    model_name = engine.algorithm.evaluates
    clients = range(len(task.data.clients))
    return [
        engine.clients.models(k, engine.server, engine.done)[model_name]
        for k in clients
    ]


def setting(task: Task, split: str) -> dict[str, Any]:
    """Return what own epochs are trained with, scored on a split, as arguments of a tuner."""
    return {
        "model": task.model,
        "loss": task.criterion,
        "training": Training.of(task.config.training),
        "clients": [
            (client.train, client.split(split)) for client in task.data.clients
        ],
        "seed": task.config.execution.seed,
        "round": int(task.config.federation.rounds or 1),
        "samples": None,
    }


def scored(task: Task, starts: list[Any]) -> dict[str, float]:
    """Return an arm's scores: own epochs are chosen by validation loss, accuracy and loss are of test samples.

    They are 0, 1, 2 or 4 at a third of the rate or at the rate.
    """
    validation_tuner, test_tuner = (
        Tuner(**setting(task, split), starts=starts) for split in ("validation", "test")
    )
    rates = validation_tuner.training.lr / 3, validation_tuner.training.lr
    tuned_outputs = [
        validation_tuner.outputs(every(task.layers), rate) for rate in rates
    ]
    outputs = torch.cat([validation_tuner.start[None], *tuned_outputs])
    losses = (
        validation_tuner.held.losses(task.criterion, outputs)
        @ validation_tuner.held.weight
    )
    best_index = int(losses.argmin())
    test_outputs = test_tuner.start
    if best_index:
        rate, epochs = [*itertools.product(rates, EPOCHS)][best_index - 1]
        test_outputs = test_tuner.outputs(every(task.layers), rate, (epochs,))[0]
    test_set = test_tuner.held
    return {
        "validation": losses[best_index],
        "own": best_index,
        "test": test_set.right(test_outputs) @ test_set.weight,
        "loss": test_set.losses(task.criterion, test_outputs) @ test_set.weight,
        "plain_validation": losses[0],
        "plain_test": test_set.right(test_tuner.start) @ test_set.weight,
    }


def measured(job: Job, lr: float) -> dict[str, Any]:
    """Train what a job names, and return what was found by name."""
    if job.arm == "choose":
        return chosen(dataset=job.federation, seed=job.seed)
    task = task_of(job, lr)
    layers = range(len(task.layers))
    if job.arm == "profile":
        profile_arguments = {"samples": SAMPLES, "starts": trained(task, [])}
        signal_values = signals(
            setting(task, "validation") | profile_arguments, task.layers
        )
        return signal_values | {"inputs differ": inputs_differ(task.data)}
    if job.arm == "rate":
        return scored(task, trained(task, []))
    if job.arm[0].isdigit():
        return scored(task, trained(task, [*map(int, job.arm.split())]))
    shared_models, local_models = trained(task, []), trained(task, layers)
    arguments = setting(task, "validation")
    answer = whether.compared(**arguments, starts=shared_models, alone=local_models)
    results: dict[str, Any] = {"p": answer.p_value, "lead": answer.lead}
    if job.arm == "whether":
        results |= {
            "all": scored(task, shared_models),
            "nothing": scored(task, local_models),
        }
    if job.federation in ADAPTED:
        tuner = Tuner(**arguments, starts=shared_models)
        results["layer_tuning"] = falls(tuner, blocks(task.layers))
    return results


def rate(rows: pd.DataFrame, federation: str) -> float:
    """Return the rate of a federation: the one of FedAvg with the lowest validation loss, or the registered one."""
    tuned_name = federation
    if federation in ADAPTED:
        tuned_name = ADAPTED[0]
    rate_rows = where(rows, federation=tuned_name, arm="rate")
    if rate_rows.empty:
        return RATES[1]
    losses = rate_rows["found"].map(
        lambda text: json.loads(text).get("validation", np.inf)
    )
    return float(rate_rows.loc[losses.idxmin(), "lr"])


def at_chance(scores: dict[str, Any]) -> bool:
    """Return whether neither sharing all layers nor training alone learns anything, so that no plan is compared."""
    arms = ("all", "nothing")
    return min(scores.get(arm, {}).get("validation", 0) for arm in arms) > CHANCE


def main(hours: float = 24.0, name: str = "") -> None:
    """Do the jobs without a row.

    Args:
        hours: hours of processor time after which no further job begins, all calls together.
        name: how the names of the federations begin whose jobs are done.
    """
    torch.set_num_threads(1)
    rows = pd.read_parquet(ROWS)
    done_jobs = {
        (r.federation, r.arm, r.seed, r.draw, None if pd.isna(r.lr) else r.lr)
        for r in rows.itertuples()
    }
    for job in jobs():
        if tuple(job) in done_jobs or not job.federation.startswith(name):
            continue
        job_rows = where(rows, federation=job.federation, arm="whether", seed=job.seed)
        if any(at_chance(json.loads(text)) for text in job_rows["found"]):
            continue
        if rows["seconds"].sum() > 3600 * hours:
            return
        start = time.process_time()
        try:
            result = measured(job, job.lr or rate(rows, job.federation))
        except DivergedError as error:
            result = {"failed": str(error)}
        row = {
            **job._asdict(),
            "found": json.dumps(result),
            "seconds": time.process_time() - start,
        }
        rows = pd.DataFrame([*rows.to_dict("records"), row])
        part_file = ROWS.with_suffix(".part")
        rows.to_parquet(part_file, index=False, compression="brotli")
        part_file.replace(ROWS)
        print(tuple(job), f"{row['seconds']:.1f} s", flush=True)


if __name__ == "__main__":
    tyro.cli(main)
