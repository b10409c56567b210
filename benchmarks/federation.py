"""Benchmark ``federation``: a round over Flower's processes on this machine against the same round with workers."""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.pairs import Measured, judged
from benchmarks.training import WORKERS, federation
from fl_core import runner
from fl_core.config import RunConfig
from fl_core.data import FederatedData
from fl_core.records import timing

SAMPLES = 64
ROUNDS = 6
FIRST = 1
"""Rounds that are not timed: in the first, what is made once is made; in the last, all is scored and saved."""


@dataclass(frozen=True)
class Case:
    """A federation: how many sites, samples of how many features, and the hidden widths, which say the model's size."""

    sites: int
    features: int
    hidden: tuple[int, ...]

    def data(self) -> FederatedData:
        return federation(self.sites, SAMPLES, (self.features,))

    def config(self, workers: int) -> RunConfig:
        return RunConfig(
            dataset="random", model="mlp", model_options={"sizes": self.hidden}, algorithm="fedavg", rounds=ROUNDS,
            epochs=1, batch=32, lr=0.01, optimizer="sgd", keep_optimizer=False, loss="cross_entropy", workers=workers,
            stack="off", eval_every=ROUNDS, checkpoint_every=ROUNDS,
        )  # fmt: skip

    def words(self, megabytes: float) -> str:
        return f"{self.sites} sites, {megabytes:.3g} MB"


CASES = (Case(4, 256, (448,)), Case(4, 2048, (4096, 3328)), Case(16, 256, (448,)))
"""Models of 0.5 MB and 90 MB."""


def flower(pairs: int = 3) -> list[Measured]:
    """A round of FedAvg over superlink and supernodes on 127.0.0.1, against the same round with workers.

    The ratio is that of the medians of the rounds' seconds by the clock, after the first; its interval is over runs.
    """
    warnings.simplefilter("ignore")  # Flower's own deprecations
    return [_measured(case, pairs) for case in CASES]


def _measured(case: Case, pairs: int) -> Measured:
    from fedlayers.remote.flower.local import Local
    from fedlayers.remote.flower.server import FlowerLink

    data = case.data()
    names = [client.name for client in data.clients]
    ratios, over, here, away, size = [], [], [], 0, 0
    with tempfile.TemporaryDirectory() as folder, Local(Path(folder) / "net", names) as local:
        place = local.start_superlink()
        for number, name in enumerate(names):
            words = [
                name,
                place,
                str(local.site_keys(name)),
                str(local.folder / f"home-{name}"),
                str(CASES.index(case)),
            ]
            local.start_site(name, [sys.executable, "-m", "benchmarks.federation", *words], wait=number % 4 == 3)
        link = FlowerLink(place, local.server_keys, names)
        for pair in range(pairs):
            one, away, size = _over(case, link, Path(folder) / f"flower-{pair}")
            other = _here(case, data, Path(folder) / f"workers-{pair}")
            over.append(one)
            here.append(other)
            ratios.append(one / other)
        link.close()
    print(f"{away / (case.sites * ROUNDS * size):.3f} times the model's bytes left each site in an exchange")
    what, seconds = f"a round over Flower, {case.words(size / 1e6)}", (float(np.median(over)), float(np.median(here)))
    return judged(
        "federation", what, f"{WORKERS} workers", ratios, seconds=seconds[0], baseline_seconds=seconds[1], unit="cost"
    )


def _over(case: Case, link: object, out: Path) -> tuple[float, int, int]:
    """Seconds a round over the link, the bytes that left the sites, and those of the model."""
    from fedlayers.remote.federation import federate
    from fedlayers.remote.sites import left

    engine = federate(case.config(workers=0), link, out, progress=False)  # type: ignore[arg-type]
    size = sum(tensor.nbytes for tensor in engine.initial.values())
    return _seconds(out), int(left(out)["train"].sum()), size


def _here(case: Case, data: FederatedData, out: Path) -> float:
    runner.run(case.config(WORKERS), out, data=data, progress=False)
    return _seconds(out)


def _seconds(out: Path) -> float:
    rounds = [sum(record[part] for part in timing.PARTS) for record in timing.by_round(out / "timing.jsonl").values()]
    return float(np.median(rounds[FIRST:-1]))


def site(words: Sequence[str]) -> None:
    """One site as a process: NAME, PLACE, KEYS, HOME and the number of the case."""
    from fedlayers.remote.flower.site import Connection, serve
    from fedlayers.remote.holdings import Given
    from fedlayers.remote.site import Site

    name, place, keys, home, case = words
    held = Site(Given(CASES[int(case)].data(), name), Path(home) / "state")
    connection = Connection(place, Path(keys) / "ca.crt", Path(keys) / "key")
    serve(held, connection, Path(home) / "flower", lambda line: print(line, flush=True))


if __name__ == "__main__":
    site(sys.argv[1:])
