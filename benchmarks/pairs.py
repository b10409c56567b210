"""Times two ways of doing the same job in turn, and reports the ratio pair by pair."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import pandas as pd

from figures.verdicts import median_interval
from fl_core.errors import UsageError

Work = Callable[[], object]
PAIRS = 15
RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Measured:
    """The result of one comparison.

    Attributes:
        job, what, baseline: what was measured and against what.
        ratio: median over the pairs of time(baseline) / time(what) for a speed-up (``at_least``), or of
            time(what) / time(baseline) for a cost (``at_most``); also of memory, or a coverage, as ``unit`` says.
        low, high: its 95 % interval, by the order of the ratios; NaN with fewer than 6 pairs.
        target: with its direction, for instance ``<= 5``; empty where a figure is only reported.
        holds: whether the interval's worse end meets the target; or why nothing was measured, with a ratio of NaN.
        seconds, baseline_seconds: medians of either side.
        pairs: how often.
    """

    job: str
    what: str
    baseline: str
    ratio: float
    low: float
    high: float
    target: str = ""
    holds: str = ""
    seconds: float | None = None
    baseline_seconds: float | None = None
    pairs: int = 1
    unit: str = "time"


def compare(
    job: str,
    title: str,
    work: Work,
    baseline: str,
    baseline_work: Work,
    *,
    at_most: float | None = None,
    at_least: float | None = None,
    pairs: int = PAIRS,
    scale: float = 1.0,
    clock: Callable[[], float] = time.process_time,
) -> Measured:
    """Time ``work`` and ``baseline_work`` in turn, after one warm-up of each.

    The order of a pair changes from pair to pair.

    Args:
        at_most: target for time(work) / time(baseline_work).
        at_least: target for time(baseline_work) / time(work), a speed-up; without a target the speed-up is reported.
        scale: factor on the baseline's time where only a part of its work was run; ``baseline`` says which.
    """
    if at_most is not None and at_least is not None:
        raise UsageError(
            "a comparison must have one target; got at_most and at_least. Leave one out."
        )
    side_seconds = alternate(
        {
            "work": partial(_timed, work, clock),
            "other": partial(_timed, baseline_work, clock),
        },
        pairs,
    )
    side_seconds.other *= scale
    if at_most is not None:
        ratios = side_seconds.work / side_seconds.other
    else:
        ratios = side_seconds.other / side_seconds.work
    return judged(
        job,
        title,
        baseline,
        list(ratios),
        at_most=at_most,
        at_least=at_least,
        seconds=float(side_seconds.work.median()),
        baseline_seconds=float(side_seconds.other.median()),
    )


def alternate(timers: Mapping[str, Callable[[], float]], turns: int) -> pd.DataFrame:
    """Let sides take turns; returns the seconds that each side reports, [turns, sides].

    They follow one another, in the opposite order every other turn.

    A turn before the first is not in the table: what is made once, or is still cold, is behind everyone then.
    """
    side_names = list(timers)
    rows = []
    for turn in range(-1, turns):
        seconds = {
            side_name: timers[side_name]()
            for side_name in (side_names if turn % 2 == 0 else side_names[::-1])
        }
        if turn >= 0:
            rows.append(seconds)
    return pd.DataFrame(rows, columns=side_names)


def _timed(work: Work, clock: Callable[[], float]) -> float:
    start = clock()
    work()
    return clock() - start


def judged(
    job: str,
    title: str,
    baseline: str,
    ratios: list[float],
    *,
    at_most: float | None = None,
    at_least: float | None = None,
    seconds: float | None = None,
    baseline_seconds: float | None = None,
    unit: str = "time",
) -> Measured:
    """Return the median of ratios with its interval, compared with a target."""
    interval = median_interval(ratios)
    target, holds = "", ""
    reason = f"too few values: {len(ratios)}" if math.isnan(interval.low) else ""
    if at_most is not None:
        target, holds = (
            f"<= {at_most:g}",
            reason or ("yes" if interval.high <= at_most else "no"),
        )
    if at_least is not None:
        target, holds = (
            f">= {at_least:g}",
            reason or ("yes" if interval.low >= at_least else "no"),
        )
    result = Measured(
        job,
        title,
        baseline,
        interval.value,
        interval.low,
        interval.high,
        target,
        holds,
        seconds,
        baseline_seconds,
        len(ratios),
        unit,
    )
    print(
        f"{job}: {title} against {baseline}: {interval.value:.3g} "
        f"[{interval.low:.3g}, {interval.high:.3g}] {target} {holds}"
    )
    return result


def table(job_name: str, rows: list[Measured], command: str) -> Path:
    """Write ``results/NAME.csv`` with the command and the machine in its first lines."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{job_name}.csv"
    frame = pd.DataFrame([asdict(row) for row in rows])
    for column in ("ratio", "low", "high", "seconds", "baseline_seconds"):
        frame[column] = [
            None if v is None or pd.isna(v) else float(f"{v:.4g}")
            for v in frame[column]
        ]
    with path.open("w", encoding="utf-8") as file:
        file.write(f"# {command}\n# {os.cpu_count()} CPU cores\n")
        frame.to_csv(file, index=False)
    return path


def peak_from_now() -> float:
    """Reset the kernel's peak of this process (VmHWM), and return its memory now, in MB."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


def memory(field: str) -> float:
    status_lines = dict(
        status_line.split(":", 1)
        for status_line in Path("/proc/self/status").read_text().splitlines()
    )
    return int(status_lines[field].split()[0]) * 1024 / 1e6
