"""The picture of a Hessian's spectrum: the density of each layer's eigenvalues."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from fl_core.bounds import ABOVE_0, check_value
from fl_core.errors import UsageError, check_known

from ..curvature.spectrum import AT, smooth_density
from .drawing import (
    COLOURS,
    DASHES,
    canvas,
    check_single,
    legend,
    missing_notes,
    of_metric,
    with_notes,
)

METRIC = "hessian_spectrum"


def has_density(frame: pd.DataFrame) -> bool:
    """Return True if rows hold the shares of eigenvalues that :func:`spectral_density` draws."""
    rows = frame[frame["metric"] == METRIC]
    return bool((rows["variant"].str.startswith(AT) & rows["value"].notna()).any())


def spectral_density(
    frame: pd.DataFrame,
    client: str | None = None,
    width: float = 0.01,
    ax: Axes | None = None,
) -> Axes:
    """Draw the density of each layer's eigenvalues, a curve per layer, with strokes at its largest eigenvalues.

    If the rows are of several clients, the curve is the mean of their densities, and the strokes are of all of them.
    The density has a log axis. A curve has gaps below a twentieth of the peak of one single eigenvalue.

    Args:
        frame: rows of ``hessian_spectrum``, measured with its option ``density``.
        client: draw one client only.
        width: standard deviation of the Gaussians that smooth a curve, relative to the span of its eigenvalues.

    Raises:
        UsageError: the rows have no density, the client is unknown, the width is not above 0, or a place has two
            values.
    """
    rows = of_metric(frame, METRIC)
    if client is not None:
        rows = rows[
            rows["client"] == check_known("client", client, rows["client"].unique())
        ]
    check_value("width", width, ABOVE_0)
    if not has_density(rows):
        raise UsageError(
            f"The rows hold no density of eigenvalues. Measure {METRIC} with the option density=50."
        )
    check_single(rows, ["client", "layer", "variant"])
    shares = rows[rows["variant"].str.startswith(AT.strip())]
    tops = rows[rows["variant"].str.startswith("top") & rows["value"].notna()]
    layers, clients = list(shares["layer"].unique()), shares["client"].nunique()
    notes = ["no curve of " + note for note in missing_notes(shares, "layer")]
    with canvas(ax, 6.2, 3.6) as axes:
        lowest, highest = math.inf, 0.0
        for k, layer in enumerate(layers):
            of_layer = shares[(shares["layer"] == layer) & shares["value"].notna()]
            if of_layer.empty:
                continue
            nodes = of_layer["variant"].str.removeprefix(AT).astype(float).to_numpy()
            low, high = nodes.min(), nodes.max()
            spread = width * max(high - low, abs(high), np.finfo(np.float64).tiny)
            grid = np.unique(
                np.concatenate(
                    [np.linspace(low - 5 * spread, high + 5 * spread, 400), nodes]
                )
            )
            density = smooth_density(
                grid,
                nodes,
                of_layer["value"].to_numpy(dtype=float) / of_layer["client"].nunique(),
                spread,
            )
            colour, dash = (
                COLOURS[k % len(COLOURS)],
                DASHES[k // len(COLOURS) % len(DASHES)],
            )
            floor = (
                0.05
                / float(of_layer["n_params"].max())
                / (spread * math.sqrt(2 * math.pi))
            )
            highest, lowest = max(highest, 2 * float(density.max())), min(lowest, floor)
            axes.plot(
                grid,
                np.where(density >= floor, density, np.nan),
                color=colour,
                linestyle=dash,
                marker="",
                label=layer,
            )
            at = tops.loc[tops["layer"] == layer, "value"]
            foot = 0.035 * (len(layers) - 1 - k) if len(layers) <= 8 else 0.0
            axes.vlines(
                at,
                foot,
                foot + 0.03,
                transform=axes.get_xaxis_transform(),
                color=colour,
                linewidth=1.8,
                zorder=3,
            )
        axes.set_yscale("log")
        # the strokes have the lowest part of the axis, which holds no curve
        room = 0.035 * min(len(layers), 8) + 0.02
        bottom = 10 ** ((math.log10(lowest) - room * math.log10(highest)) / (1 - room))
        axes.set_ylim(bottom, highest)
        of = "" if clients == 1 else f", mean of {clients} clients"
        unit = next((name for name in tops["unit"].unique() if name), "").replace(
            "^2", "²"
        )
        beneath = "eigenvalue of the layer's Hessian block" + (
            f" [{unit}]" if unit else ""
        )
        axes.set(ylabel=f"density{of}", xlabel=with_notes(beneath, notes))
        legend(axes, title="layer\n(strokes: its largest\neigenvalues)")
    return axes
