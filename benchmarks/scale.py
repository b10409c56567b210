"""Measure the growth of time and memory with the size of a job, next to theory."""

from __future__ import annotations

import json
import math
import multiprocessing
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from scipy import stats

from benchmarks.curves import CURVES, Curve
from benchmarks.pairs import RESULTS, Measured, memory, peak_from_now
from diagnostics.plots.drawing import style
from figures.drawing import save_png
from fl_core.errors import RunError

POINTS = RESULTS / "scale-points.jsonl"
PICTURE = RESULTS / "scale.png"
REPEATS = 3
"""Processes for each size."""
TAIL = 3
"""Largest sizes that a slope is fitted to: below them, what is made once weighs."""
MEASURES = {"seconds": "CPU time, s", "megabytes": "memory, MB"}
WORTH = {"seconds": 0.0, "megabytes": 1.0}
"""Values below which a measure is the allocator's grain, and has no slope."""


def scale(repeats: int = REPEATS) -> list[Measured]:
    """Slopes of time and memory against size on logarithmic axes, compared with theory; with a picture.

    Every point is measured in a process of its own with one thread. The work has run once at the least size before.
    Points in results/scale-points.jsonl are not measured again.
    """
    missing_points = wanted(repeats)
    for point_number, (curve_name, size, repeat) in enumerate(missing_points, 1):
        seconds, megabytes = point(curve_name, size)
        record = {
            "curve": curve_name,
            "size": size,
            "repeat": repeat,
            "seconds": seconds,
            "megabytes": megabytes,
        }
        with POINTS.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        print(
            f"{point_number} of {len(missing_points)}: {curve_name} {size:,}: {seconds:.3g} s, {megabytes:.3g} MB",
            flush=True,
        )
    frame = read()
    draw(frame)
    rows: list[Measured] = []
    for curve_name in CURVES:
        rows += slopes(curve_name, frame)
    return rows


def read() -> pd.DataFrame:
    """Return the points measured so far: curve, size, repeat, seconds, megabytes."""
    point_lines = (
        POINTS.read_text(encoding="utf-8").splitlines() if POINTS.exists() else []
    )
    return pd.DataFrame(
        map(json.loads, point_lines), columns=["curve", "size", "repeat", *MEASURES]
    )


def wanted(repeats: int) -> list[tuple[str, int, int]]:
    """Return the points yet to be measured: curve, size and repeat, each curve once before any a second time."""
    measured_points = set(
        zip(*(read()[column] for column in ("curve", "size", "repeat")), strict=True)
    )
    all_points: list[tuple[str, int, int]] = []
    for repeat in range(repeats):
        for curve_name, curve in CURVES.items():
            all_points += [(curve_name, size, repeat) for size in curve.sizes]
    return [point_key for point_key in all_points if point_key not in measured_points]


# --- one point -------------------------------------------------------------------------------------------------


def point(curve_name: str, size: int) -> tuple[float, float]:
    """Return the CPU seconds of a curve's work at one size, and the rise of its process's peak memory in MB.

    The process is forked from one that has imported what is needed and computed nothing.

    Raises:
        RunError: the process ended without an answer.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.curves"])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(curve_name, size, sender))
    process.start()
    sender.close()
    try:
        seconds, megabytes = receiver.recv()
    except EOFError:
        process.join()
        raise RunError(
            f"{curve_name} at {size:,}: its process ended with {process.exitcode}"
        ) from None
    process.join()
    return seconds, megabytes


def _measure(
    curve_name: str, size: int, answer: multiprocessing.connection.Connection
) -> None:
    import torch

    torch.set_num_threads(1)
    curve = CURVES[curve_name]
    with ExitStack() as stack:
        curve.job(curve.sizes[0], stack)()
    with ExitStack() as stack:
        work = curve.job(size, stack)
        megabytes_before = peak_from_now()
        start = time.process_time()
        work()
        seconds = time.process_time() - start
        answer.send((seconds, max(memory("VmHWM") - megabytes_before, 0.0)))


# --- slopes ----------------------------------------------------------------------------------------------------


def slope(
    sizes: Sequence[float], values: Sequence[float]
) -> tuple[float, float, float]:
    """Return the exponent b in value = a size^b, and the ends of its 95 % interval (Student's t).

    It is fitted by least squares of the logarithms. The ends are NaN with two sizes.
    """
    fit = stats.linregress(np.log(sizes), np.log(values))
    half_width = math.nan
    if len(sizes) > 2:
        half_width = float(stats.t.ppf(0.975, len(sizes) - 2) * fit.stderr)
    return (
        float(fit.slope),
        float(fit.slope - half_width),
        float(fit.slope + half_width),
    )


def slopes(curve_name: str, frame: pd.DataFrame) -> list[Measured]:
    """Return a curve's exponents at its largest sizes, each against theory: equal, slower or faster growth."""
    curve, rows = CURVES[curve_name], []
    for measure, theory in (("seconds", curve.time), ("megabytes", curve.memory)):
        largest_points = frame[
            (frame["curve"] == curve_name) & frame["size"].isin(curve.sizes[-TAIL:])
        ]
        title, theory_text = (
            f"{curve.title}: {measure}",
            f"theory, size^{theory:g}: {curve.why}",
        )
        medians = largest_points.groupby("size")[measure].median()
        large_sizes = medians.index[medians >= WORTH[measure]]
        if len(large_sizes) < 2:
            reason = "not measured"
            if len(largest_points):
                reason = f"at most {medians.max():.2g}: no slope"
            rows.append(
                Measured(
                    "scale",
                    title,
                    theory_text,
                    math.nan,
                    math.nan,
                    math.nan,
                    holds=reason,
                    unit="exponent",
                )
            )
            continue
        largest_points = largest_points[largest_points["size"].isin(large_sizes)]
        exponent, low, high = slope(
            largest_points["size"], largest_points[measure].clip(lower=1e-6)
        )
        growth_text = "as theory"
        if high < theory:
            growth_text = "grows slower"
        elif low > theory:
            growth_text = "grows faster"
        rows.append(
            Measured(
                "scale",
                title,
                theory_text,
                exponent,
                low,
                high,
                f"= size^{theory:g}",
                growth_text,
                pairs=len(largest_points),
                unit="exponent",
            )
        )
        print(
            f"{title}: size^{exponent:.2f} [{low:.2f}, {high:.2f}], theory {theory:g}: {growth_text}"
        )
    return rows


# --- the picture -----------------------------------------------------------------------------------------------


def draw(frame: pd.DataFrame, path: Path = PICTURE, columns: int = 5) -> Path:
    """Draw each curve's points on logarithmic axes, time above memory, with theory's slope through the last size.

    Args:
        columns: curves in a row.
    """
    block_count = -(-len(CURVES) // columns)
    with style():
        figure, axes = plt.subplots(
            2 * block_count,
            columns,
            figsize=(2.5 * columns, 3.9 * block_count),
            layout="constrained",
        )
        for ax in axes.flat:
            ax.set_axis_off()
        for curve_number, (curve_name, curve) in enumerate(CURVES.items()):
            block, column = divmod(curve_number, columns)
            for k, measure in enumerate(MEASURES):
                ax = axes[2 * block + k, column]
                ax.set_axis_on()
                _panel(ax, curve, frame[frame["curve"] == curve_name], measure)
                if k == 0:
                    ax.set_title(
                        curve.title.replace(" against", "\nagainst"), fontsize=8
                    )
                else:
                    ax.set_xlabel(curve.axis, fontsize=7)
                if column == 0:
                    ax.set_ylabel(MEASURES[measure], fontsize=7)
        save_png(figure, path, 110, bbox_inches="tight")
        plt.close(figure)
    return path


def _panel(ax: Axes, curve: Curve, points: pd.DataFrame, measure: str) -> None:
    if measure == "seconds":
        theory, colour = (curve.time, "#0072B2")
    else:
        theory, colour = (curve.memory, "#D55E00")
    point_values = points[measure].clip(lower=1e-3)
    ax.loglog(points["size"], point_values, "o", ms=3.5, alpha=0.6, color=colour)
    medians = point_values.groupby(points["size"]).median()
    if len(medians):
        ax.plot(medians.index, medians, "-", color=colour, lw=1.2)
        curve_sizes = np.array(curve.sizes, dtype=float)
        theory_line = medians.iloc[-1] * (curve_sizes / medians.index[-1]) ** theory
        ax.plot(
            curve_sizes, theory_line, "--", color="0.45", lw=1, label=f"size^{theory:g}"
        )
        ax.set_ylim(
            min(point_values.min(), *theory_line) / 3,
            max(point_values.max(), *theory_line) * 3,
        )
        ax.legend(fontsize=6, loc="best", frameon=False, handlelength=1.5)
    ax.tick_params(labelsize=6)
    ax.minorticks_off()


if __name__ == "__main__":
    sys.exit("python -m benchmarks scale")
