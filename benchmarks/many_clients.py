"""``python -m benchmarks.many_clients``: what a run with very many clients holds in memory and writes to disk."""

from __future__ import annotations

import resource
import tempfile
import warnings
from pathlib import Path

import tyro

from benchmarks.training import federation
from fl_core.config import RunConfig
from fl_core.records import store
from fl_core.rounds import recorder
from fl_core.run import runner

SHAPE, CLASSES = (1, 28, 28), 10


def main(
    clients: int = 10_000, algorithm: str = "fedper", samples: int = 12, rounds: int = 2
) -> None:
    """Run the 582,026-parameter network with a personal last layer, all clients in the first round; print a table.

    Args:
        clients: number of clients; all take part in every round, so that everyone comes to hold a head.
        algorithm: registry name.
        samples: training samples of each client; it holds a third as many for validation and for test.
        rounds: the last ends with an evaluation and a checkpoint.
    """
    warnings.simplefilter("ignore")  # that clients have less than a batch
    data = federation(clients, samples, SHAPE, CLASSES, held=samples // 3)
    config = RunConfig(
        model="scheduling_cnn", algorithm=algorithm, rounds=rounds, epochs=1, batch_size=10, lr=0.005, optimizer="sgd",
        keep_optimizer=False, loss="cross_entropy", eval_every=rounds, checkpoint_every=rounds,
    )  # fmt: skip
    before = _peak()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        runner.run(config, out, data=data)
        held = _peak()
        blobs = [path.stat().st_size for path in (out / "blobs").iterdir()]
        print(recorder.read_pace(out / "timing.jsonl").line())
        print(
            f"{clients:,} clients of {algorithm}: {held:.2f} GB at most, {before:.2f} GB of it before the run"
        )
        print(
            f"last checkpoint: {len(blobs):,} blobs, {sum(blobs) / 1e9:.2f} GB",
            end="; ",
        )
        print(f"{len(store.Run(out).manifest(rounds)['states']):,} states")


def _peak() -> float:
    """The peak memory of this process so far, in GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


if __name__ == "__main__":
    tyro.cli(main)
