"""Benchmark of a vision transformer on PACS: rounds of all weights against rounds of low-rank adapters."""

from __future__ import annotations

import math
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace

import torch

from benchmarks import peers, training
from benchmarks.pairs import Measured, compare, memory, peak_from_now
from benchmarks.sides import Job, Side
from fl_core import tree
from fl_core.config import RunConfig
from fl_core.errors import RunError, UsageError
from fl_core.rounds.clients import OPTIMIZER_TREE, LocalClients
from fl_core.rounds.engine import Engine
from fl_core.rounds.recorder import Recorder

LORA = "lora:r=8,targets=attn"
WHOLE = RunConfig(
    dataset="pacs", max_samples=1200, model="timm:vit_tiny_patch16_224",
    model_options={"embed_dim": 256, "num_heads": 8}, rounds=10, epochs=1, batch_size=32, lr=0.0003, optimizer="adamw",
    weight_decay=0.01, keep_optimizer=True, loss="cross_entropy", eval_every=10,
)  # fmt: skip
"""PACS has four clients. Images of 64 x 64 are 16 patches. The base of the race is trained by this."""
TIMED = 160
"""Samples of the rounds that are timed."""
PAIRS = 6


def transformer(pairs: int = PAIRS) -> list[Measured]:
    """Return a vision transformer of 9.7 million parameters on PACS: what low-rank adapters save.

    Everything runs on one thread. Times are CPU seconds. A round has 4 clients and no evaluation.
    """
    torch.set_num_threads(1)
    config = WHOLE.with_keys(max_samples=TIMED)
    with (
        training.rounds(config) as whole_engine,
        training.rounds(config.with_keys(adapt=LORA)) as adapter_engine,
    ):
        rows = [
            compare(
                "transformer",
                f"{LORA}, a round",
                adapter_engine.step,
                "all weights",
                whole_engine.step,
                pairs=pairs,
            )
        ]
        megabytes_by_engine = [
            (_sent(engine), _kept(engine)) for engine in (whole_engine, adapter_engine)
        ]
    peaks = [_alone(adapt) for adapt in (None, LORA)]
    for quantity, megabyte_pair in (
        (
            "sent by a client in a round",
            [megabytes[0] for megabytes in megabytes_by_engine],
        ),
        (
            "of optimiser state that a client keeps",
            [megabytes[1] for megabytes in megabytes_by_engine],
        ),
        ("of peak memory of a round in a new process", peaks),
    ):
        whole_megabytes, adapter_megabytes = megabyte_pair
        titles = (
            f"{LORA}, {adapter_megabytes:.4g} MB {quantity}",
            f"all weights, {whole_megabytes:.4g} MB",
        )
        rows.append(
            Measured(
                "transformer",
                *titles,
                whole_megabytes / adapter_megabytes,
                math.nan,
                math.nan,
                unit="memory",
            )
        )
    return rows


def _sent(engine: Engine) -> float:
    """Return the MB that one client sent in one round."""
    return (
        max(
            float(row["value"])
            for row in engine.listener(Recorder).rows
            if row["metric"] == "bytes_up"
        )
        / 1e6
    )


def _kept(engine: Engine) -> float:
    """Return the MB of the first client's optimiser."""
    assert isinstance(engine.clients, LocalClients)
    return (
        tree.n_bytes(engine.clients.states[engine.names[0]].trees[OPTIMIZER_TREE]) / 1e6
    )


def _alone(adapt: str | None) -> float:
    """Return the rise of a new process's peak memory in a round, in MB."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_peak, adapt).result()


def _peak(adapt: str | None) -> float:
    torch.set_num_threads(1)
    with training.rounds(WHOLE.with_keys(max_samples=TIMED, adapt=adapt)) as engine:
        megabytes_before = peak_from_now()
        engine.step()
    return memory("VmHWM") - megabytes_before


def on_processors(job: Job) -> AbstractContextManager[Side]:
    """Open this package's side of a job on processors."""
    config = job.config.with_keys(device="cpu", workers=training.WORKERS)
    return peers.ours(replace(job, config=config))


NEXT_TO = {
    "processors": peers.Peer(on_processors),
    "PFLlib": replace(peers.PEERS["PFLlib"], reach={}),
    "Flower simulation": replace(peers.PEERS["Flower simulation"], reach={}),
}
"""What rounds on a device are compared with. The packages train on the same device."""
ON_DEVICE = (
    *peers.JOBS[:2],
    Job(
        "transformer",
        WHOLE.with_keys(dataset="random", max_samples=None, keep_optimizer=False),
        *(4, 64, (3, 64, 64)),
        classes=7,
    ),
)
"""S1, S2, and random images of the size and number of classes of PACS."""


def gpu(pairs: int = PAIRS) -> list[Measured]:
    """S1, S2 and the transformer on a CUDA device: next to processors, and to PFLlib and Flower on the same device.

    Raises:
        UsageError: there is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise UsageError(
            "benchmark gpu must run on a machine with a CUDA device; got none. Use another machine."
        )
    rows: list[Measured] = []
    for job in ON_DEVICE:
        rows += on_device(job, "cuda", pairs)
    return rows


def on_device(job: Job, device: str, pairs: int) -> list[Measured]:
    """Time a job's rounds on a device next to the others, and compare the peaks of the device's memory.

    Each of the others runs alone next to this package, so that the failure of one leaves the rest. Its row says why.
    """
    config = job.config.with_keys(device=device, workers=0)
    device_job, rows = replace(job, config=config), []
    for peer_name, peer in NEXT_TO.items():
        try:
            rows += peers.measure(device_job, {peer_name: peer}, pairs)
        except RunError as error:
            print(error)
            reason = f"not measured: {str(error).splitlines()[-1]}"
            no_interval = (math.nan, math.nan, math.nan)
            row = Measured(
                job.name, device, peer_name, *no_interval, holds=reason, pairs=0
            )
            rows.append(row)
    return rows


JOBS = {"gpu": gpu, "transformer": transformer}
