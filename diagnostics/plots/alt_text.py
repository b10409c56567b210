"""Describes a drawn picture for a reader who cannot see it: its axes, and where its lines begin and end."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.collections import QuadMesh
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fl_core.errors import listing

MOST = 8
"""Lines of a panel whose ends are told, and panels of a figure that are described."""


def in_words(figure: Figure) -> str:
    """Describe a figure: the title, the axes and the lines of each panel, with their first and last values.

    >>> from matplotlib.figure import Figure
    >>> figure = Figure()
    >>> ax = figure.subplots()
    >>> _ = ax.plot([0, 1, 2], [0.2, 0.5, 0.4], label="fedavg")
    >>> _ = ax.set(xlabel="round", ylabel="macro F1")
    >>> in_words(figure)
    'macro F1 over round; fedavg from 0.2 to 0.4'
    """
    panels = [
        ax for ax in figure.axes if ax.get_label() != "<colorbar>" and ax.get_visible()
    ]
    told = [text for ax in panels[:MOST] if (text := _panel(ax))]
    rest = [f"{len(panels) - MOST} more panels"] * (len(panels) > MOST)
    return ". ".join([*told, *rest]) or "a picture without axes"


def _panel(ax: Axes) -> str:
    (across, columns), (up, rows) = (_names(axis) for axis in (ax.xaxis, ax.yaxis))
    written = [
        _flat(text.get_text())
        for text in ax.texts
        if any(map(str.isalpha, text.get_text()))
    ]
    if len(written) == len(rows):
        rows, written = (
            [f"{name}: {words}" for name, words in zip(rows, written, strict=True)],
            [],
        )
    axes = " over ".join(
        part for part in (_axis(up, rows), _axis(across, columns)) if part
    )
    parts = [": ".join(part for part in (_flat(ax.get_title()), axes) if part)]
    lines = {
        str(line.get_label()): line
        for line in ax.lines
        if not str(line.get_label()).startswith("_")
    }
    parts += [
        _line(name, line, bool(rows) and not columns)
        for name, line in list(lines.items())[:MOST]
    ]
    legend = ax.get_legend()
    others = (
        [text.get_text() for text in legend.get_texts() if text.get_text() not in lines]
        if legend
        else []
    )
    parts += [f"in colours: {listing(others)}"] if others else []
    parts += [_matrix(mesh) for mesh in ax.collections if isinstance(mesh, QuadMesh)]
    return "; ".join(part for part in (*parts, *written[:MOST]) if part)


def _names(axis: Axis) -> tuple[str, list[str]]:
    """Return the label of an axis, and its ticks that are names."""
    texts = [_flat(tick.get_text()) for tick in axis.get_ticklabels()]
    return _flat(axis.get_label_text()), [
        text for text in texts if text and not _is_number(text)
    ]


def _flat(text: str) -> str:
    """Return a text of several lines as one."""
    return ", ".join(
        " ".join(line.split()) for line in text.splitlines() if line.strip()
    )


def _axis(label: str, names: list[str]) -> str:
    return f"{label} ({listing(names)})" if label and names else label or listing(names)


def _line(name: str, line: Line2D, lies: bool) -> str:
    """Describe the ends of a line.

    Args:
        lies: whether its values are on the horizontal axis.
    """
    x, y = (
        np.asarray(data, dtype=float) for data in (line.get_xdata(), line.get_ydata())
    )
    if not lies and len(x) == 2 and x[0] == x[1]:
        return f"{name} at {x[0]:.3g}"
    values = x if lies else y
    values = values[np.isfinite(values)]
    if not len(values):
        return f"{name} without a value"
    return (
        f"{name} {values[0]:.3g}"
        if len(values) == 1
        else f"{name} from {values[0]:.3g} to {values[-1]:.3g}"
    )


def _matrix(mesh: QuadMesh) -> str:
    values: np.ndarray = np.ma.masked_invalid(
        np.ma.asarray(mesh.get_array(), dtype=float)
    ).compressed()
    return (
        f"values from {values.min():.3g} to {values.max():.3g}"
        if len(values)
        else "no values"
    )


def _is_number(text: str) -> bool:
    return (
        "mathdefault" in text
        or text.replace("−", "-").strip("-").replace(".", "", 1).isdigit()
    )
