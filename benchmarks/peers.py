"""Times rounds of S1 to S3 by this package, a bare loop and public packages, in one alternating run."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from benchmarks import adapters, training
from benchmarks.pairs import PAIRS, Measured, alternate, judged
from benchmarks.sides import Job, Open, Plain, Side, remote
from fl_core.rounds.recorder import Timer

OURS = "fedlayers"
JOBS = (
    Job("S1", training.CROSS_DEVICE, 100, 500, (1, 28, 28)),
    Job("S2", training.CROSS_SILO, 5, 1984, (3, 32, 32), network=training.silo_network),
    Job("S3", training.TINY, 4, 192, (10,), classes=5, rounds=20),
)
"""The standard jobs; S2 and S3 have the largest number of whole batches in their 2,000 and 200 samples."""


@contextmanager
def ours(job: Job) -> Iterator[Side]:
    """Yield the engine as a run uses it, without evaluation and files."""
    data = job.data()
    parameter_names = [
        parameter_name for parameter_name, _ in job.model(data).named_parameters()
    ]
    with training.rounds(
        job.config, data, model=job.network() if job.network else None
    ) as engine:

        def run() -> int:
            steps_before = engine.listener(Timer).pace.steps
            engine.step()
            return engine.listener(Timer).pace.steps - steps_before

        yield Plain(
            run,
            lambda: [
                engine.server.trees["model"][parameter_name]
                for parameter_name in parameter_names
            ],
        )


@contextmanager
def bare(job: Job) -> Iterator[Side]:
    """Yield a plain PyTorch loop that takes the same steps."""
    data = job.data()
    loop = training.BareLoop(job.model(data), data, job.batch, job.optimizer, job.taken)
    yield Plain(loop, lambda: list(loop.model.parameters()))


@dataclass(frozen=True)
class Peer:
    """A public package whose rounds are timed for comparison.

    Attributes:
        open: prepares it for a job.
        needs: packages without which it cannot run; their versions are in the table.
        checkout: whether the environment variable PFLLIB has to name its sources.
        reach: for each job, how many times its speed this package is to reach.
    """

    open: Open
    needs: tuple[str, ...] = ()
    checkout: bool = False
    reach: Mapping[str, float] = field(default_factory=dict)

    def missing(self) -> str:
        """Return the reason why the package cannot be measured here, or an empty text."""
        if self.checkout and adapters.VARIABLE not in os.environ:
            return f"{adapters.VARIABLE} names no checkout of it"
        missing_packages = [
            package
            for package in self.needs
            if importlib.util.find_spec(package) is None
        ]
        if missing_packages:
            names_text = ", ".join(missing_packages)
            return f"not installed: {names_text}"
        return ""

    def versions(self) -> str:
        """Return versions of the packages that it needs."""
        versions = map(importlib.metadata.version, self.needs)
        return ", ".join(map("{} {}".format, self.needs, versions))


PEERS = {
    "bare loop": Peer(bare),
    "PFLlib": Peer(
        adapters.pfllib, ("h5py",), checkout=True, reach={"S1": 2.2, "S3": 3.0}
    ),
    "Flower simulation": Peer(adapters.flower, ("flwr", "ray"), reach={"S1": 2.5}),
    "pfl-research": Peer(adapters.pfl, ("pfl",)),
    "fedjax": Peer(adapters.fedjax, ("fedjax", "jax"), reach={"S3": 1.0}),
}


def measure(
    job: Job,
    peers: Mapping[str, Peer],
    pairs: int = PAIRS,
) -> list[Measured]:
    """Time one job by this package and by every available peer; returns a row for each peer, also for missing ones.

    Raises:
        RunError: a side failed, or took another number of steps than the others.
    """
    reason_by_peer = {
        peer_name: reason
        for peer_name, peer in peers.items()
        if (reason := peer.missing())
    }
    open_by_peer = {
        peer_name: peer.open
        for peer_name, peer in peers.items()
        if peer_name not in reason_by_peer
    }
    with remote({OURS: ours, **open_by_peer}, job) as sides:
        turn_by_side = {peer_name: side.turn for peer_name, side in sides.items()}
        seconds = alternate(turn_by_side, pairs) / job.rounds
    execution = job.config.execution
    title = "fedavg, stacked clients"
    if execution.workers:
        title = f"fedavg, {execution.workers} workers"
    if execution.device != "cpu":
        title = f"fedavg, {torch.cuda.get_device_name()}"
    rows = []
    for peer_name, peer in peers.items():
        reach = peer.reach.get(job.name)
        if peer_name in reason_by_peer:
            target = f">= {reach:g}" if reach else ""
            no_interval = (math.nan, math.nan, math.nan)
            rows.append(
                Measured(
                    job.name,
                    title,
                    peer_name,
                    *no_interval,
                    target,
                    f"not measured: {reason_by_peer[peer_name]}",
                    pairs=0,
                )
            )
            print(f"{job.name}: {peer_name}: not measured: {reason_by_peer[peer_name]}")
            continue
        own_seconds, peer_seconds = seconds[OURS], seconds[peer_name]
        label = peer_name
        if peer.needs and not peer.checkout:
            label = f"{peer_name} ({peer.versions()})"
        rows.append(
            judged(
                job.name,
                title,
                label,
                list(peer_seconds / own_seconds),
                at_least=reach,
                seconds=float(own_seconds.median()),
                baseline_seconds=float(peer_seconds.median()),
            )
        )
        own_peak, peer_peak = sides[OURS].peak / 1e6, sides[peer_name].peak / 1e6
        if own_peak and peer_peak:
            titles = (
                f"{title}, {own_peak:.4g} MB of the device",
                f"{label}, {peer_peak:.4g} MB",
            )
            ratio = (peer_peak / own_peak, math.nan, math.nan)
            rows.append(Measured(job.name, *titles, *ratio, unit="peak memory"))
    return rows


def peers(pairs: int = PAIRS) -> list[Measured]:
    """S1 to S3 against public packages: PFLlib, Flower's simulation, pfl-research and fedjax, if installed."""
    training.tuned()
    rows: list[Measured] = []
    for job in JOBS:
        rows += measure(job, PEERS, pairs)
    return rows
