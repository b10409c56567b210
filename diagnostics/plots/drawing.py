"""Helpers shared by all pictures: style, colours and markers, selecting rows, axes, legends and notes."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib import font_manager, ticker
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Text

from fl_core.errors import UsageError, check_known, listing, warn
from fl_core.rows import COLUMNS

from ..null import of_null

STYLE = Path(__file__).with_name("fedlayers.mplstyle")
COLOURS: tuple[str, ...] = tuple(
    "#" + colour.lstrip("#")
    for colour in mpl.rc_params_from_file(STYLE, use_default_template=False)[
        "axes.prop_cycle"
    ].by_key()["color"]
)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h")
DASHES = ("-", "--", ":")
MEAN, FAINT = "0.1", "0.6"
ARMS = {"nothing": 0, "local": 0, "half": 1, "first_half_local": 1}
ARMS |= {"head_local": 2, "fedper": 2, "all": 3, "fedavg": 3}
"""The position in :data:`COLOURS` of each usual algorithm's or plan's colour.

There are four: for sharing nothing, half, all but the last layer, and all layers.
"""
MOST_CLIENTS = 10
"""The most clients that get a colour and a legend entry each; more are drawn alike."""
NICE = [1, 2, 5, 10]
NUMBERS = (ticker.LogFormatter, ticker.ScalarFormatter)
"""The formatters that write numbers at an axis, such as powers of ten."""


FONTS: tuple[str, ...] = (
    "CJK",
    "WenQuanYi",
    "SimHei",
    "YaHei",
    "PingFang",
    "Hiragino",
    "Source Han",
)
FONTS += ("Droid Sans Fallback", "Noto Sans SC", "Arial Unicode", "Malgun", "Unifont")
"""Parts of the names of fonts that have East Asian letters."""
ASIA = 0x2E80
"""The Unicode number of the first East Asian letter."""
LONGEST = 28
"""The most letters of a name in a picture."""


@cache
def asian_fonts() -> list[str]:
    """Return at most three installed fonts with East Asian letters.

    They are a fallback for letters that other fonts lack. The list is empty without
    such fonts.
    """
    names = sorted(font_manager.get_font_names())
    return [name for name in names if any(part in name for part in FONTS)][:3]


@contextmanager
def style() -> Iterator[None]:
    """Apply the package's style inside a ``with`` block, without a change of matplotlib's backend."""
    with plt.style.context(STYLE):
        mpl.rcParams["font.family"] = [*mpl.rcParams["font.family"], *asian_fonts()]
        yield
        interactive = mpl.is_interactive()
    # a notebook's backend turns this on while it makes the first figure
    mpl.interactive(interactive)


@contextmanager
def canvas(ax: Axes | None, width: float = 5.0, height: float = 3.2) -> Iterator[Axes]:
    """Yield the given Axes, or that of a new figure in the package's style.

    A given Axes keeps its caller's style. When the block ends, dollar signs in its
    texts are made literal (:func:`literal`).

    Args:
        ax: the Axes. None means a new figure.
        width, height: size of a new figure, in inches.
    """
    with style() if ax is None else nullcontext():
        if ax is None:
            ax = plt.figure(figsize=(width, height), layout="constrained").subplots()
        yield ax
        literal([ax])


def as_label(name: object) -> str:
    """Return a name as a picture shows it: long ones are shortened in the middle.

    A zero-width space is put before a leading underscore, because matplotlib leaves such names out of legends.

    >>> as_label("north"), as_label("a_ward_for_patients_with_a_very_long_name")
    ('north', 'a_ward_for_patien…_long_name')
    """
    text = str(name)
    if len(text) > LONGEST:
        text = f"{text[: LONGEST - 11]}…{text[-10:]}"
    if text.startswith("_"):
        return f"\u200b{text}"
    return text


def check_letters(axes: Sequence[Axes]) -> None:
    """Warn of letters that the fonts of the texts lack. matplotlib draws them as boxes.

    Nothing is checked if the texts have no East Asian or later letters.
    """
    texts: list[Text] = []
    for artist in chain.from_iterable(ax.findobj(Text) for ax in axes):
        if isinstance(artist, Text) and not artist.get_text().isascii():
            texts.append(artist)
    words = "".join(text.get_text() for text in texts)
    if not any(ord(letter) >= ASIA for letter in words):
        return
    missing_letters: dict[str, None] = {}
    for text in texts:
        characters: set[int] = set()
        for family in text.get_fontfamily():
            path = font_manager.findfont(font_manager.FontProperties([family]))
            characters |= font_manager.get_font(path).get_charmap().keys()
        letters = dict.fromkeys(text.get_text())
        missing_letters |= dict.fromkeys(
            k for k in letters if k != "\n" and ord(k) not in characters
        )
    if missing_letters:
        warn(
            f"the picture's fonts lack the letters {listing(missing_letters, 4)}, which are drawn as boxes: "
            "install one that has them, such as Noto Sans CJK, name one in matplotlib's font.family, "
            "or write names in Latin letters"
        )


def literal(axes: Sequence[Axes]) -> None:
    """Show dollar signs in texts of the Axes as they are, so that matplotlib reads no formula there.

    Numbers on an axis are left as they are. Letters that the texts' fonts lack cause a
    warning (:func:`check_letters`).
    """
    check_letters(axes)
    for ax in axes:
        numbers: set[Any] = set()
        for axis in (ax.xaxis, ax.yaxis):
            labels = axis.get_ticklabels(which="both")  # writes their texts
            if isinstance(axis.get_major_formatter(), NUMBERS):
                numbers |= {*labels}
        for text in ax.findobj(Text):
            if (
                isinstance(text, Text)
                and text not in numbers
                and "$" in text.get_text()
            ):
                text.set_parse_math(False)


@dataclass(frozen=True)
class Panel:
    """One Axes of a grid, and whether it has axis labels.

    Attributes:
        ax: the Axes.
        below: whether it has labels below.
        beside: whether it has labels at its left.
    """

    ax: Axes
    below: bool
    beside: bool


@contextmanager
def panels(
    axes: Figure | Sequence[Axes] | None,
    count: int,
    width: float = 1.4,
    height: float = 1.5,
    columns: int = 4,
    room: tuple[float, float] = (1.6, 0.9),
) -> Iterator[list[Panel]]:
    """Yield a list with a :class:`Panel` for each of several Axes.

    They are the first of the given Axes, or a grid. The grid lies in a given figure, or
    in a new one in the package's style.

    Args:
        axes: the given Axes, a figure to fill, or None for a new figure.
        count: number of Axes.
        width, height: size of each Axes in a new figure, in inches.
        columns: maximum number of columns of the grid.
        room: the space for labels at the grid's left and below it, in inches.

    Raises:
        UsageError: there are fewer Axes than needed.
    """
    n_rows = -(-count // columns)
    columns = -(-count // n_rows)
    with style() if axes is None else nullcontext():
        if axes is None:
            axes = plt.figure(
                figsize=(width * columns + room[0], height * n_rows + room[1]),
                layout="constrained",
            )
        is_figure = isinstance(axes, Figure)
        if isinstance(axes, Figure):
            grid = axes.subplots(n_rows, columns, squeeze=False)
            for spare_axes in grid.flat[count:]:
                spare_axes.remove()
            axes = list(grid.flat[:count])
        if len(axes) < count:
            raise UsageError(
                f"axes must be at least {count}, one for each panel; got {len(axes)}."
            )
        yield [
            Panel(
                ax,
                not is_figure or k >= count - columns,
                not is_figure or k % columns == 0,
            )
            for k, ax in enumerate(axes[:count])
        ]
        literal(axes[:count])


# --- picking rows ----------------------------------------------------------------------------------------------


def of_metric(frame: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Return the rows of one metric, without rows of nulls (:mod:`diagnostics.null`), their layers labelled.

    Raises:
        UsageError: the frame has none. The message lists its metrics.
    """
    if frame.empty:
        raise UsageError(f"rows must have {metric}; got none. Measure it first.")
    check_known("metric", metric, frame["metric"].unique())
    rows = labelled(frame[frame["metric"] == metric])
    return rows[~of_null(rows)]


def labelled(rows: pd.DataFrame) -> pd.DataFrame:
    """Return rows with the layers' names as people read them, such as ``0 Linear``.

    The names are those in the frame's ``attrs["labels"]``. A layer that is not in it
    keeps its name.
    """
    return rows.replace({"layer": rows.attrs.get("labels", {})})


def of_variant(
    rows: pd.DataFrame, wanted: str | None, preferred: Sequence[str] = ()
) -> pd.DataFrame:
    """Return the rows of the wanted variant, else of the first preferred one that exists, else all rows.

    Raises:
        UsageError: the wanted variant is not among the rows.
    """
    present_variants = list(rows["variant"].unique())
    chosen_variant = next(
        (name for name in preferred if name in present_variants), None
    )
    if wanted is not None:
        chosen_variant = check_known("variant", wanted, present_variants)
    if chosen_variant is None:
        return rows
    return rows[rows["variant"] == chosen_variant]


def check_single(rows: pd.DataFrame, keys: Sequence[str]) -> None:
    """Refuse rows with several values for the same place in a picture.

    Args:
        rows: the rows to draw.
        keys: the columns that name a place.

    Raises:
        UsageError: a place has several values. The message names the place, and the
            columns by which to filter the rows.
    """
    repeated_rows = rows[rows.duplicated(list(keys), keep=False)]
    if repeated_rows.empty:
        return
    places = repeated_rows[list(keys)].astype(str)
    first_place_rows = repeated_rows[(places == places.iloc[0]).all(axis=1)]
    value_columns = {
        *keys,
        "value",
        "stderr",
        "status",
        "n_params",
        "n_samples",
        "n_train",
    }
    filters = []
    for name in COLUMNS:
        values = (
            first_place_rows[name].astype(str).unique()
            if name in first_place_rows
            else []
        )
        if name not in value_columns and len(values) > 1:
            filters.append(f"{name} ({listing(values, 6)})")
    place_text = ", ".join(
        f"{name} {value!r}" for name, value in places.iloc[0].items()
    )
    advice = "; ".join(filters) or "run"
    raise UsageError(
        f"There are {len(first_place_rows)} values of {first_place_rows.iloc[0]['metric']} for {place_text}. "
        f"Filter the rows by {advice}."
    )


def weighted_mean(rows: pd.DataFrame, keys: Sequence[str]) -> pd.Series:
    """Return the mean over the clients of each group, weighted by ``n_train`` if every client's is known.

    If one is missing or all are 0, the group's clients have equal weights. The columns
    ``keys`` name the groups, and index the result. A group with a missing value is NaN.
    Without rows the result is empty.
    """

    def mean(group: pd.DataFrame) -> float:
        weights = group["n_train"].astype("Float64").to_numpy(float, na_value=np.nan)
        if np.isnan(weights).any() or not weights.any():
            weights = np.ones(len(group))
        return float((group["value"] * weights).sum(skipna=False) / weights.sum())

    groups = rows.groupby(list(keys), sort=False, dropna=False)
    means = groups[["value", "n_train"]].apply(mean)
    if len(rows):
        return means
    return pd.Series(dtype=float)


def missing_notes(rows: pd.DataFrame, where: str) -> list[str]:
    """Return a note for each place and reason of missing values, with the clients concerned.

    Without missing values the list is empty.

    Args:
        rows: the rows that are drawn.
        where: the column that names a place, such as ``layer``.
    """
    missing_rows = rows[rows["value"].isna()]
    # the clients are listed behind it
    statuses = missing_rows["status"].str.replace(r" at client '[^']*'", "", regex=True)
    missing_rows = missing_rows.assign(status=statuses)
    notes = []
    for (place, status), group in missing_rows.groupby([where, "status"], sort=False):
        pairs = zip(group["client"], group["client_b"], strict=True)
        clients = list(
            dict.fromkeys("–".join(filter(None, pair)) for pair in pairs if any(pair))
        )
        place_name = place or "all"
        notes.append(
            f"{place_name}: {status}" + (f" ({listing(clients, 3)})" if clients else "")
        )
    return notes


# --- axes ------------------------------------------------------------------------------------------------------


def with_notes(label: str, notes: Sequence[str], most: int = 4) -> str:
    """Return an axis label followed by at most ``most`` notes, one per line, and the number of further ones."""
    shown_notes = [
        *notes[:most],
        *(
            [f"and {len(notes) - most} more without a value"]
            if len(notes) > most
            else []
        ),
    ]
    return "\n".join(
        [
            label,
            *(textwrap.fill(note, 64, subsequent_indent="   ") for note in shown_notes),
        ]
    )


def arm_colours(names: Sequence[str]) -> list[str]:
    """Return a colour for each way or algorithm. Those of :data:`ARMS` have the same colour in every picture.

    Other names take the remaining colours in turn. With many names colours repeat.

    >>> arm_colours(["fedavg", "mine"]) == arm_colours(["mine", "fedavg"])[::-1]
    True
    """
    fixed_numbers = {name: ARMS[name] for name in names if name in ARMS}
    free_numbers = [k for k in range(len(COLOURS)) if k not in fixed_numbers.values()]
    free_names = iter(name for name in names if name not in ARMS)
    free_colours = {
        name: free_numbers[k % len(free_numbers)] for k, name in enumerate(free_names)
    }
    return [COLOURS[{**free_colours, **fixed_numbers}[name]] for name in names]


def client_style(k: int, names: Sequence[str]) -> dict[str, Any]:
    """Return matplotlib's colour, marker and label of client number ``k`` among ``names``.

    More than :data:`MOST_CLIENTS` clients look alike and share one entry in the legend.
    The name "" has the label ``all clients``.

    Args:
        k: the client's position in ``names``, from 0.
        names: the names of all clients in the picture.
    """
    if len(names) > MOST_CLIENTS:
        return {
            "color": FAINT,
            "marker": ".",
            "alpha": 0.6,
            "label": "_" if k else f"each of {len(names)} clients",
        }
    return {
        "color": COLOURS[k],
        "marker": MARKERS[k],
        "label": as_label(names[k]) or "all clients",
    }


def legend(ax: Axes, title: str | None = None) -> None:
    """Draw a legend to the right of the data, if the Axes has a label to show.

    Args:
        ax: the Axes.
        title: the legend's title. None means no title.
    """
    if ax.get_legend_handles_labels()[0]:
        ax.legend(
            loc="upper left",
            bbox_to_anchor=(1.01, 1.02),
            borderaxespad=0,
            title=title,
            alignment="left",
        )


def name_ticks(ax: Axes, names: Sequence[str]) -> None:
    """Label the x axis with names, rotated if they would overlap."""
    names = list(map(as_label, names))
    is_long = sum(len(name) + 2 for name in names) > 46
    ax.set_xticks(
        range(len(names)),
        names,
        rotation=90 if is_long else 0,
        fontsize=small(len(names), 8),
    )
    ax.set_xlim(-0.4, len(names) - 0.6)


def small(count: int, size: float) -> float:
    """Return a font size in points for this many labels: smaller above 20, at least 4.5.

    Args:
        count: number of labels.
        size: the size for at most 20 labels.
    """
    return max(4.5, size * min(1.0, 0.7 + 6 / max(count, 1)))


def set_scale(ax: Axes, values: pd.DataFrame, log: bool) -> None:
    """Set the scale of the y axis and its ticks.

    Args:
        ax: the Axes to change.
        values: the drawn values.
        log: whether the axis is logarithmic. It is symmetric-logarithmic if a value is
            not above 0. It stays linear if no finite value differs from 0.
    """
    finite = values.to_numpy(dtype=np.float64)
    finite = finite[np.isfinite(finite)]
    sizes = np.abs(finite[finite != 0])
    if not log or not len(sizes):
        return
    if (finite > 0).all():
        decades = np.log10(sizes.max() / sizes.min())
        ax.set_yscale("log")
        if decades < 3:
            locator = ticker.MaxNLocator(5, steps=NICE)
            ax.yaxis.set_major_locator(
                locator if decades < 0.8 else ticker.LogLocator(subs=(1, 2, 5))
            )
            ax.yaxis.set_major_formatter(
                ticker.FuncFormatter(lambda y, _: f"{y:g}".replace("e-0", "e-"))
            )
            ax.yaxis.set_minor_formatter(ticker.NullFormatter())
    else:
        threshold = max(sizes.min(), sizes.max() * 1e-4)
        ax.set_yscale("symlog", linthresh=10.0 ** np.floor(np.log10(threshold)))
        ax.axhline(0, color="0.6", linewidth=0.8, zorder=1)


def stacked(
    ax: Axes, table: pd.DataFrame, write: Callable[[float], str], **looks: Any
) -> None:
    """Draw a stacked bar for each row, from the top, with a colour for each column and numbers where they fit.

    Args:
        ax: the Axes to draw on.
        table: lengths of the parts, bars x parts.
        write: a function that formats a length as text.
        looks: further arguments of pandas' ``plot.barh``.
    """
    n_columns = table.shape[1]
    colours: Any = COLOURS[:n_columns]
    if n_columns > len(COLOURS):
        colours = mpl.colormaps["viridis"](np.linspace(0, 1, n_columns))[:, :3]
    table.plot.barh(
        stacked=True,
        ax=ax,
        width=0.8,
        color=list(colours),
        edgecolor="white",
        legend=False,
        **looks,
    )
    largest_total = table.to_numpy().sum(axis=1).max()
    bar_rows: list[Any] = ax.containers
    for bars, colour in zip(bar_rows, colours, strict=True):
        shares = [bar.get_width() / (largest_total or 1.0) for bar in bars]
        texts = [write(bar.get_width()) for bar in bars]
        fitting_texts = [
            text if share > 0.024 * len(text) else ""
            for text, share in zip(texts, shares, strict=True)
        ]
        ink = "0.1"
        if np.dot(to_rgb(colour), (0.299, 0.587, 0.114)) < 0.55:
            ink = "white"
        ax.bar_label(bars, fitting_texts, label_type="center", fontsize=6.5, color=ink)
    ax.set(ylabel="", ylim=(len(table) - 0.4, -0.6))
    ax.grid(axis="y", visible=False)


def heat(
    panel: Panel,
    matrix: pd.DataFrame,
    *,
    high: float = 1.0,
    cmap: Any = "viridis",
    square: bool = False,
    names: tuple[int, int] = (12, 12),
) -> Any:
    """Draw a heat map from 0 to ``high``, grey for a missing value, with numbers if they fit.

    Numbers fit into at most 6 rows and columns.

    Args:
        panel: the Axes to draw on.
        matrix: rows from the top, columns from the left.
        high: the value of the last colour.
        cmap: matplotlib's colour map, or its name.
        square: whether cells are squares.
        names: maximum number of names at the left and below, if the panel has labels.

    Returns:
        The image from which a colour bar is made.
    """
    has_numbers = max(matrix.shape) <= 6
    rows_step, columns_step = (
        -(-count // max_names)
        for count, max_names in zip(matrix.shape, names, strict=True)
    )
    import seaborn as sns

    # seaborn draws the figure once: the names that it has must be plain, and this panel's come afterwards
    literal(panel.ax.figure.axes)
    ax = sns.heatmap(
        matrix.astype(float),
        ax=panel.ax,
        vmin=0,
        vmax=high,
        cmap=cmap,
        square=square,
        cbar=False,
        annot=has_numbers,
        fmt=".2f",
        annot_kws={"fontsize": 6},
        linewidths=0.5 * has_numbers,
        xticklabels=False,
        yticklabels=False,
    )
    if panel.below:
        shown_positions = range(0, matrix.shape[1], columns_step)
        ax.set_xticks(
            [position + 0.5 for position in shown_positions],
            map(as_label, matrix.columns[shown_positions]),
        )
    if panel.beside:
        shown_positions = range(0, matrix.shape[0], rows_step)
        ax.set_yticks(
            [position + 0.5 for position in shown_positions],
            map(as_label, matrix.index[shown_positions]),
        )
    ax.set_facecolor("0.85")
    ax.grid(visible=False)
    ax.set(xlabel="", ylabel="")
    ax.tick_params(length=0, labelsize=7)
    ax.tick_params(axis="x", labelrotation=90)
    ax.tick_params(axis="y", labelrotation=0)
    return ax.collections[0]
