"""Tables of settings and symbols, without measurements: the papers' values next to the values here.

This project's values come from the configurations in headers of stored rows, or from recipes. The papers' numbers come
from :mod:`figures.papers` or from a recipe's paper scale.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib import ticker
from matplotlib.axes import Axes

from diagnostics.plots.drawing import COLOURS, FAINT, style
from figures.items import Drawing, Finding
from figures.page import markdown
from fl_core.errors import listing

Value = float | str
NONE = "–"
LEGEND = f"A cell has the paper's value / the value here. One entry: both are the same. {NONE}: none."
PRECISE = 1e-9
"""Relative difference up to which two numbers are the same."""


@dataclass(frozen=True)
class Setting:
    """One cell of such a table.

    Attributes:
        what: its line: a method, a dataset, or what a symbol stands for.
        of: its column and panel.
        paper, here: the values; several of a grid, none where there is none. Words stand on the page only.
        called: the package's name of it, where the paper has its own.
    """

    what: str
    of: str
    paper: tuple[Value, ...] = ()
    here: tuple[Value, ...] = ()
    called: str = ""

    @property
    def same(self) -> bool:
        """Return whether the paper's values equal the values here, in any order."""
        return len(self.paper) == len(self.here) and all(
            _equal(theirs, own)
            for theirs, own in zip(_sorted(self.paper), _sorted(self.here), strict=True)
        )

    @property
    def text(self) -> str:
        """Its cell."""
        theirs, own = (
            ", ".join(map(_text, values)) or NONE for values in (self.paper, self.here)
        )
        return theirs if self.same else f"{theirs} / {own}"


def option(
    config: Mapping[str, Any], name: str, defaults: Mapping[str, Any] | None = None
) -> tuple[Value, ...]:
    """A run's setting by its name, among the algorithm's own options or the run's, as values of a :class:`Setting`.

    Args:
        config: as rows' headers have it.
        defaults: of the algorithm's own options.

    Raises:
        KeyError: neither has this name.
    """
    own = {**(defaults or {}), **config["options"]}
    value = own[name] if name in own else config[name]
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def agreement(
    expected: str, settings: Iterable[Setting], incomparable: str = ""
) -> Finding:
    """The finding that each setting in common has the printed value. It names the others."""
    both = [each for each in settings if each.paper and each.here]
    others = [f"{each.of}, {each.what} {each.text}" for each in both if not each.same]
    said = f"{len(both) - len(others)} of {len(both)} agree"
    if others:
        more = len(others) - SHOWN
        said += f"; different (paper / here): {listing(others[:SHOWN])}" + (
            f" and {more} more" if more > 0 else ""
        )
    return Finding(expected, said, not others, incomparable)


SHOWN = 1
"""Settings that a finding names at most; the page's table has all."""


def drawing(
    settings: Sequence[Setting],
    caption: str,
    findings: Sequence[Finding] = (),
    *,
    line: str = "",
    shared: bool = True,
    quantity: str = "",
) -> Drawing:
    """Picture and page of settings: a panel for each ``of`` that has numbers, a line for each ``what``.

    Args:
        line: the heading of the page's first column.
        shared: whether the panels have one axis of values.
        quantity: what that axis shows, if the panels' titles do not say it.
    """
    with style():
        figure = _picture(settings, shared)
        for ax in figure.axes:
            ax.set_xlabel(quantity, fontsize=7)
    table = pd.DataFrame(
        [
            (each.what, each.called, each.of, _cell(each.paper), _cell(each.here))
            for each in settings
        ],
        columns=["what", "called", "of", "paper", "here"],
    )
    return Drawing(
        figure, table, caption, tuple(findings), f"{_page(settings, line)}\n\n{LEGEND}"
    )


def _page(settings: Sequence[Setting], line: str) -> str:
    cells = {(each.what, each.of): each.text for each in settings}
    lines, columns = ([*dict.fromkeys(names)] for names in zip(*cells, strict=True))
    called = {each.what: f"`{each.called}`" for each in settings if each.called}
    names = (
        {"here called": [called.get(what, NONE) for what in lines]} if called else {}
    )
    shown = {
        of: [cells.get((what, of), NONE) for what in lines] for of in columns if of
    }
    columns_ = {line: lines, **names, **shown}
    return markdown(
        {
            name: [cell.replace("|", r"\|") for cell in cells_]
            for name, cells_ in columns_.items()
        }
    )


def _picture(settings: Sequence[Setting], shared: bool) -> plt.Figure:
    """Draw numbers above 0 on logarithmic axes: open circles for the paper, dots for here, a line between two."""
    drawn = [each for each in settings if _numbers(each.paper) or _numbers(each.here)]
    lines, panels = (
        list(dict.fromkeys(names))
        for names in zip(*((e.what, e.of) for e in drawn), strict=True)
    )
    figure = plt.figure(
        figsize=(max(5.0, 2.2 + 1.45 * len(panels)), 1.5 + 0.24 * len(lines)),
        layout="constrained",
    )
    axes = figure.subplots(1, len(panels), sharey=True, sharex=shared, squeeze=False)[0]
    for ax, panel in zip(axes, panels, strict=True):
        for each in drawn:
            if each.of == panel:
                _line(ax, each, lines.index(each.what))
        ax.set_title(panel, fontsize=8)
        _scale(ax)
    axes[0].set_yticks(range(len(lines)), lines, fontsize=7.5)
    axes[0].set_ylim(len(lines) - 0.5, -0.5)
    keys = [
        ax.plot([], [], label=label, **look)[0]
        for ax in axes[:1]
        for label, look in LOOKS.items()
    ]
    figure.legend(handles=keys, loc="outside upper center", ncols=2, fontsize=8)
    return figure


LOOKS: dict[str, dict[str, Any]] = {
    "the paper": {
        "marker": "o",
        "markersize": 7,
        "markerfacecolor": "none",
        "color": "0.1",
        "linestyle": "none",
    },
    "here": {
        "marker": "o",
        "markersize": 3.5,
        "color": COLOURS[0],
        "linestyle": "none",
    },
}


def _line(ax: Axes, each: Setting, y: int) -> None:
    theirs, own = _numbers(each.paper), _numbers(each.here)
    if len(theirs) == len(own) == 1:
        ax.plot([*theirs, *own], [y, y], color=FAINT, linewidth=1.2, zorder=1)
    for values, look in zip((theirs, own), LOOKS.values(), strict=True):
        ax.plot(values, [y] * len(values), **look)


def _scale(ax: Axes) -> None:
    ax.set_xscale("log")
    ax.margins(x=0.12)
    low, high = ax.get_xlim()
    few = high / low < 100
    if high / low < 4:  # one number, or nearly: room for two ticks
        middle = (low * high) ** 0.5
        ax.set_xlim(middle / 2.5, middle * 2.5)
    ax.xaxis.set_major_locator(
        ticker.LogLocator(subs=(1, 2, 5) if few else (1,), numticks=5)
    )
    ax.xaxis.set_major_formatter(lambda x, _: _tick(x))
    ax.xaxis.set_minor_locator(ticker.NullLocator())
    ax.tick_params(axis="x", labelsize=6.5)


def _numbers(values: Sequence[Value]) -> list[float]:
    return [value for value in values if not isinstance(value, str) and value > 0]


def _sorted(values: Sequence[Value]) -> list[Value]:
    return sorted(values, key=lambda value: (isinstance(value, str), value))


def _equal(one: Value, other: Value) -> bool:
    if isinstance(one, str) or isinstance(other, str):
        return one == other
    return abs(one - other) <= PRECISE * max(abs(one), abs(other))


def _text(value: Value) -> str:
    if isinstance(value, str):
        return value
    return (
        f"{value:,.0f}" if value == int(value) and abs(value) >= 1000 else f"{value:g}"
    )


def _tick(value: float) -> str:
    return f"{value / 1000:g}k" if value >= 1000 else f"{value:g}"


def _cell(values: Sequence[Value]) -> str:
    return "; ".join(
        value if isinstance(value, str) else f"{value:g}" for value in values
    )
