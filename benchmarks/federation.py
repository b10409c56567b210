"""Benchmarks ``federation*``: a round over Flower's processes on this machine against the same round with workers."""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.pairs import Measured, judged
from benchmarks.training import WORKERS, federation
from fl_core import runner
from fl_core.config import RunConfig
from fl_core.data import FederatedData
from fl_core.records import timing

if TYPE_CHECKING:
    from examples.local_federation import Local
    from fedlayers.remote.link import RequestHandler, SiteLink

SAMPLES = 64
ROUNDS = 6
FIRST = 1
"""Rounds that are not timed: in the first, what is made once is made; in the last, all is scored and saved."""
AT_A_TIME = 4
"""Sites that are started side by side."""


@dataclass(frozen=True)
class Case:
    """The size of a federation: its sites, its features and the model's hidden widths."""

    sites: int
    features: int
    hidden: tuple[int, ...]

    def data(self) -> FederatedData:
        return federation(self.sites, SAMPLES, (self.features,))

    def config(self, workers: int) -> RunConfig:
        return RunConfig(
            dataset="random", model="mlp", model_options={"sizes": self.hidden}, algorithm="fedavg", rounds=ROUNDS,
            epochs=1, batch_size=32, lr=0.01, optimizer="sgd", keep_optimizer=False, loss="cross_entropy",
            workers=workers,
            stack="off", eval_every=ROUNDS, checkpoint_every=ROUNDS,
        )  # fmt: skip


CASES = {
    "federation": Case(4, 256, (448,)),
    "federation-16": Case(16, 256, (448,)),
    "federation-90mb": Case(4, 2048, (4096, 3328)),
}
"""Models of 0.5 MB and 90 MB, by the job's name."""


class Run(NamedTuple):
    """The time and traffic of a run over Flower.

    Attributes:
        seconds: a round by the clock; ``parts``: of that, by where they went.
        left: bytes of one site's reply to one exchange. size: the sum of the model's tensors in bytes.
        peak: MB that the server's process had at its peak above what it had before.
    """

    seconds: float
    parts: dict[str, float]
    left: float
    size: int
    peak: float


def flower(job: str, pairs: int = 3) -> list[Measured]:
    """A round of FedAvg over superlink and supernodes on 127.0.0.1: time by part, bytes, memory."""
    from examples.local_federation import Local
    from fedlayers.remote.flower.server import FlowerLink

    warnings.simplefilter("ignore")  # Flower's own deprecations
    case = CASES[job]
    data = case.data()
    names = [client.name for client in data.clients]
    over: list[Run] = []
    here: list[float] = []
    with tempfile.TemporaryDirectory() as folder, Local(Path(folder) / "net", names) as local:
        _start(job, local, names)
        link = Timed(FlowerLink(local.place, local.server_keys, names))
        for pair in range(pairs):
            over.append(_over(case, link, local, Path(folder) / f"flower-{pair}"))
            here.append(_here(case, data, Path(folder) / f"workers-{pair}"))
        link.close()
        peaks = _peaks(local, names)
    return _rows(job, case, over, here, peaks)


def _start(job: str, local: Local, names: Sequence[str]) -> None:
    place = local.start_superlink()
    for number, name in enumerate(names, 1):
        words = [name, place, str(local.site_keys(name)), str(local.folder / f"home-{name}"), job]
        last = number % AT_A_TIME == 0 or number == len(names)
        local.start_site(name, [sys.executable, "-m", "benchmarks.federation", *words], wait=last)


def _rows(
    job: str, case: Case, over: Sequence[Run], here: Sequence[float], peaks: Mapping[str, float]
) -> list[Measured]:
    what = f"over Flower, {case.sites} sites, {over[0].size / 1e6:.3g} MB"
    seconds = statistics.median(run.seconds for run in over)
    ratios = [run.seconds / other for run, other in zip(over, here, strict=True)]
    took: Callable[..., Measured] = partial(judged, job)
    rows = [
        took(
            f"a round {what}",
            f"{WORKERS} workers",
            ratios,
            seconds=seconds,
            baseline_seconds=statistics.median(here),
            unit="cost",
        )
    ]
    for part in over[0].parts:
        shares = [run.parts[part] / run.seconds for run in over]
        of_part = statistics.median(run.parts[part] for run in over)
        where = f"{part}, in a round {what}"
        rows.append(took(where, "the round", shares, seconds=of_part, baseline_seconds=seconds, unit="share of time"))
    sent = [run.left / run.size for run in over]
    rows.append(took(f"a site's reply to an exchange, {what}", "the model's tensors", sent, unit="bytes"))
    for process, peak in {"the server, above before": max(run.peak for run in over), **peaks}.items():
        rows.append(took(f"{process}, {what}", "1 MB", [peak], unit="MB at the peak"))
    return rows


# --- one side and the other --------------------------------------------------------------------------------------


class Timed:
    """A link that notes how long its exchanges of training take."""

    def __init__(self, link: SiteLink) -> None:
        self.link, self.sites = link, link.sites
        self.seconds: list[float] = []

    def ask(
        self, requests: Mapping[str, bytes], timeout: float | None = None, grace: tuple[int, float] | None = None
    ) -> Iterator[tuple[str, bytes | None]]:
        began, missing = time.perf_counter(), set(requests)
        for site, reply in self.link.ask(requests, timeout):
            missing.discard(site)
            if not missing and _kind(requests[site]) == "train":
                self.seconds.append(time.perf_counter() - began)
            yield site, reply

    def close(self) -> None:
        self.link.close()


def _kind(request: bytes) -> str:
    size = int.from_bytes(request[8:16], "little")  # as fedlayers.remote.codec has it; the tensors are not looked at
    return str(json.loads(request[16 : 16 + size])["kind"])


def _over(case: Case, link: Timed, local: Local, out: Path) -> Run:
    """One run over the link, its rounds after the first and before the last."""
    from fedlayers.remote.federation import federate
    from fedlayers.remote.rpc import traffic_by_site

    link.seconds.clear()
    at = {name: len(_answers(local, name)) for name in link.sites}
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = _memory("self", "VmRSS")
    engine = federate(case.config(workers=0), link, out, progress=False)
    peak = _memory("self", "VmHWM") - before
    size = sum(tensor.nbytes for tensor in engine.initial.values())
    answers = [_answers(local, name)[at[name] :][-ROUNDS:] for name in link.sites]  # one may have been asked twice
    slowest = [max(each) for each in zip(*answers, strict=True)]
    records = list(timing.by_round(out / "timing.jsonl").values())
    timed = slice(FIRST, ROUNDS - 1)
    rounds = [sum(record[part] for part in timing.PARTS) for record in records[timed]]
    seconds = statistics.median(rounds)
    sites, asked = statistics.median(slowest[timed]), statistics.median(link.seconds[timed])
    parts = {"the slowest site": sites, "the way there and back": asked - sites, "the server": seconds - asked}
    return Run(seconds, parts, int(traffic_by_site(out)["train"].sum()) / (case.sites * ROUNDS), size, peak)


def _here(case: Case, data: FederatedData, out: Path) -> float:
    runner.run(case.config(WORKERS), out, data=data, progress=False)
    records = list(timing.by_round(out / "timing.jsonl").values())
    return statistics.median(sum(record[part] for part in timing.PARTS) for record in records[FIRST : ROUNDS - 1])


def _peaks(local: Local, names: Sequence[str]) -> dict[str, float]:
    """Peak memory of the other processes in MB: the superlink's, and the largest site's and supernode's."""
    found: dict[str, float] = defaultdict(float)
    found["the superlink"] = _memory(str(local.processes["superlink"].pid), "VmHWM")
    for name in names:
        pid = local.processes[name].pid
        found["a site"] = max(found["a site"], _memory(str(pid), "VmHWM"))
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            found["a supernode"] = max(found["a supernode"], _memory(child, "VmHWM"))
    return dict(found)


def _memory(process: str, name: str) -> float:
    """One field of a process's memory status, in MB (Linux)."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return float(next(line for line in lines if line.startswith(name)).split()[1]) / 1024


# --- a site ------------------------------------------------------------------------------------------------------


class Noting:
    """A site that notes how long it takes to answer a request to train."""

    def __init__(self, site: RequestHandler, file: Path) -> None:
        self.site, self.name, self.file = site, site.name, file
        self.limit_memory = site.limit_memory

    def answer(self, request: bytes) -> bytes:
        began, kind, requests = time.perf_counter(), _kind(request), [request]
        del request  # the site alone holds it
        reply = self.site.answer(requests.pop())
        took = time.perf_counter() - began
        if kind == "train":
            with self.file.open("a") as file:
                file.write(json.dumps(took) + "\n")
        return reply


def _answers(local: Local, name: str) -> list[float]:
    file = local.folder / f"home-{name}" / "answers.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def site(words: Sequence[str]) -> None:
    """One site as a process: NAME, PLACE, KEYS, HOME and the job."""
    from fedlayers.remote import log
    from fedlayers.remote.flower.site_process import Connection, serve
    from fedlayers.remote.site import Site
    from fedlayers.remote.site_data import PresplitData

    name, place, keys, home, job = words
    held = Site(PresplitData(CASES[job].data(), name), Path(home) / "state")
    connection = Connection(place, Path(keys) / "ca.crt", Path(keys) / "key")
    noting = Noting(held, Path(home) / "answers.jsonl")
    log.start()
    serve(noting, connection, Path(home) / "flower")


def _job(name: str) -> Callable[..., list[Measured]]:
    case = CASES[name]

    def job(pairs: int = 3) -> list[Measured]:
        return flower(name, pairs)

    job.__doc__ = f"{(flower.__doc__ or '').splitlines()[0].rstrip('.')}; {case.sites} sites."
    return job


JOBS = {name: _job(name) for name in CASES}


if __name__ == "__main__":
    site(sys.argv[1:])
