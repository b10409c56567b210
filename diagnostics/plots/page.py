"""All pictures of given rows by name, and a report as one self-contained HTML file for screen and paper."""

from __future__ import annotations

import base64
import html
import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fl_core.display import in_file_name, printable
from fl_core.errors import UsageError, check_known, listing, plural
from fl_core.rows import SCORES, SHOWN
from fl_core.storage import write_atomically

from ..metrics import facts_of
from ..representation import PAIRS
from .layers import cka_matrices, costs, metric
from .runs import clients, learning

MOST_PANELS = 8
"""The most panels of a figure that a description contains."""


def in_words(figure: Figure) -> str:
    """Describe a figure: the title and the axes of each panel, and the names of its lines and ticks.

    At most :data:`MOST_PANELS` panels are described, and the number of others is added.
    A figure without such texts is ``a picture without axes``.

    >>> from matplotlib.figure import Figure
    >>> figure = Figure()
    >>> ax = figure.subplots()
    >>> _ = ax.plot([0, 1, 2], [0.2, 0.5, 0.4], label="fedavg")
    >>> _ = ax.set(xlabel="round", ylabel="macro F1")
    >>> in_words(figure)
    'macro F1 over round: fedavg'
    """
    panels = []
    for ax in figure.axes:
        if ax.get_label() != "<colorbar>" and ax.get_visible():
            labels = map(_flat, (ax.get_ylabel(), ax.get_xlabel()))
            axes = " over ".join(filter(None, labels))
            ticks = [*ax.get_yticklabels(), *ax.get_xticklabels()]
            words = [_flat(tick.get_text()) for tick in ticks]
            words = [word for word in words if any(map(str.isalpha, word))]
            names = listing([*ax.get_legend_handles_labels()[1], *words])
            parts = filter(None, (_flat(ax.get_title()), axes, names))
            panels.append(": ".join(parts))
    sentences = [text for text in panels if text]
    overflow_note = [f"{len(sentences) - MOST_PANELS} more panels"] * (
        len(sentences) > MOST_PANELS
    )
    return (
        ". ".join([*sentences[:MOST_PANELS], *overflow_note])
        or "a picture without axes"
    )


def _flat(text: str) -> str:
    """Return a text of several lines as one, with commas between them and no empty lines."""
    return ", ".join(
        " ".join(line.split()) for line in text.splitlines() if line.strip()
    )


DPI = 200
NARROW = 390
"""Width of a page on a telephone without its margins, in pixels. Wider pictures scroll."""
LONG = 30
"""The most rows of a table that is not folded."""
TEMPLATE = Path(__file__).with_suffix(".html")
Spans = list[tuple[str, str]]
"""Pieces of a text, each with its tag: ``code``, ``strong`` or none."""


class Page:
    """A report to which text, figures and tables are added from top to bottom.

    Everything given is text and is escaped. Markup and control characters in it are shown, not followed. The file holds
    its style and its pictures (PNG) and loads nothing else. The same contents give the same bytes.

    Args:
        title: the heading, and the title of the window.
        lead: the report's message in a sentence or two. It may be empty.
    """

    def __init__(self, title: str, lead: str = "") -> None:
        self.title, self.lead = title, lead
        self._parts: list[dict[str, Any]] = []
        self._open = self._parts  # of the innermost fold
        self._figures = self._tables = 0

    def _add(self, kind: str, **part: Any) -> None:
        self._open.append({"kind": kind, **part})

    def text(self, text: str) -> None:
        """Add paragraphs, separated by empty lines.

        A heading begins with ``##`` or ``###`` and a space, and a line of a list with
        ``-`` and a space. The text may contain ``**strong**`` and `` `code` ``.
        """
        for block in re.split(r"\n\s*\n", text.strip()):
            lines = [line.strip() for line in block.strip().splitlines()]
            heading = None
            if len(lines) == 1:
                heading = re.fullmatch(r"(##|###) (.+)", lines[0])
            if heading:
                level = len(heading[1])
                self._add(f"h{level}", text=_spans(heading[2]))
            elif lines and all(line.startswith("- ") for line in lines):
                self._add("list", lines=[_spans(line[2:]) for line in lines])
            elif any(lines):
                self._add("p", text=_spans(" ".join(lines)))

    def points(self, lines: Iterable[str]) -> None:
        """Add a list, with a line of text for each point."""
        self.text("\n".join(f"- {line}" for line in lines))

    @contextmanager
    def fold(self, summary: str) -> Iterator[None]:
        """Put what the ``with`` block adds into a folded part. A click on its summary opens it.

        Args:
            summary: the line that is always shown.
        """
        outer_parts, folded_parts = self._open, list[dict[str, Any]]()
        self._add("fold", summary=_spans(summary), parts=folded_parts)
        self._open = folded_parts
        try:
            yield
        finally:
            self._open = outer_parts

    def glossary(self, terms: Mapping[str, str]) -> None:
        """Add a folded list of the terms on the page so far, with their meanings.

        Nothing is added if the page has none of the terms.

        Args:
            terms: term -> meaning. A term is also found in the plural, and in any case.
        """
        text = html.unescape(re.sub(r"<[^>]*>", " ", self.html()))
        used_terms = []
        for term, meaning in terms.items():
            word = re.escape(term)
            if re.search(rf"(?i)\b{word}s?\b", text):
                used_terms.append((term, _spans(meaning)))
        if used_terms:
            with self.fold("Words on this page"):
                self._add("terms", terms=used_terms)

    def figure(self, figure: Figure | Axes, caption: str, alt: str = "") -> bytes:
        """Add a picture as it looks now, at its size in inches, with a number and a caption beneath.

        Args:
            figure: the figure. Of an Axes, its whole figure is added.
            caption: the text beneath, after the number.
            alt: a description for people who cannot see the picture. Default:
                :func:`in_words` of it.

        Returns:
            The picture as a PNG file.

        Raises:
            UsageError: the axes were removed from their figure.
        """
        picture = figure_of(figure) if isinstance(figure, Axes) else figure
        self._figures += 1
        file = io.BytesIO()
        picture.savefig(
            file,
            format="png",
            dpi=DPI,
            bbox_inches="tight",
            facecolor="white",
            metadata={"Software": None},
        )
        png = file.getvalue()
        width = int.from_bytes(png[16:20], "big")  # a field of PNG's first chunk
        pixels = round(width / DPI * 120)
        self._add(
            "figure",
            number=self._figures,
            png=base64.b64encode(png).decode(),
            pixels=pixels,
            scrolled=pixels > NARROW,
            alt=alt or in_words(picture),
            caption=_spans(caption),
        )
        return png

    def table(
        self,
        table: pd.DataFrame,
        caption: str,
        formats: Mapping[str, str] | None = None,
    ) -> None:
        """Add a table with a number and a caption above.

        Numbers are right-aligned. Missing ones are a dash. More than :data:`LONG` rows are folded.

        Args:
            table: the table. Its index is shown unless it only counts the rows.
            caption: the text above, after the number.
            formats: column -> format of its numbers, such as ``".3f"``. Other numbers
                with a fraction are written with four digits.

        Raises:
            UsageError: a format's column does not exist, or the format does not fit the column's values.
        """
        formats = formats or {}
        for name in formats:
            check_known("column of the table", name, list(map(str, table.columns)))
        if not isinstance(table.index, pd.RangeIndex) or table.index.name:
            names = [name or "" for name in table.index.names]
            table = table.reset_index(names=names, allow_duplicates=True)
        self._tables += 1
        numeric = [
            pd.api.types.is_numeric_dtype(kind) and not pd.api.types.is_bool_dtype(kind)
            for kind in table.dtypes
        ]
        columns = list(map(str, table.columns))
        rows = []
        for record in table.itertuples(index=False, name=None):
            cells = [
                _cell(value, formats.get(name), name)
                for value, name in zip(record, columns, strict=True)
            ]
            rows.append(list(zip(numeric, cells, strict=True)))
        length_text = ""
        if len(table) > LONG:
            length_text = plural(len(table), "row")
        self._add(
            "table",
            number=self._tables,
            caption=_spans(caption),
            head=list(zip(numeric, columns, strict=True)),
            rows=rows,
            long=length_text,
        )

    def html(self) -> str:
        """Return the whole document as HTML."""
        from jinja2 import Environment

        environment = Environment(
            autoescape=True, keep_trailing_newline=True, finalize=_shown
        )
        template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
        lead = _spans(self.lead)
        return template.render(title=self.title, lead=lead, parts=self._parts)

    def write(self, path: Path | str) -> None:
        """Write the document to a file, atomically: at any time it is the old one or the new one."""
        write_atomically(Path(path), self.html().encode())


def _shown(value: Any) -> Any:
    """Return a template's value as the page shows it.

    A text has its control characters as escapes. Other values are returned unchanged.
    """
    return printable(value) if type(value) is str else value


def _spans(text: str) -> Spans:
    """Return the pieces of a text with ``**strong**`` and `` `code` `` in it; code itself is not formatted."""
    spans = []
    for number, piece in enumerate(re.split(r"`([^`]+)`", " ".join(text.split("\n")))):
        if number % 2:
            spans.append(("code", piece))
            continue
        for place, part in enumerate(re.split(r"\*\*(.+?)\*\*", piece)):
            spans.append(("strong" if place % 2 else "", part))
    return [(tag, part) for tag, part in spans if part]


def _cell(value: Any, form: str | None, column: str) -> str:
    """Return a table cell's value as text; a missing value is a dash.

    Args:
        value: the value.
        form: the format. None means four digits for numbers with a fraction.
        column: name of the column, for the message.

    Raises:
        UsageError: the format does not fit the value.
    """
    if pd.api.types.is_scalar(value) and pd.isna(value):
        return "–"
    if form is None:
        is_whole = isinstance(value, Integral) or not isinstance(value, Real)
        form = "" if is_whole else ".4g"
    try:
        return format(value, form)
    except (ValueError, TypeError) as error:
        raise UsageError(
            f"format of column {column!r} must fit its values; got {form!r} for {value!r}."
        ) from error


Drawn = Axes | list[Axes]
Draw = Callable[[pd.DataFrame], Drawn]


STATES = ("aggregation_weight", "prompt_attention", "trained", "retained", "held")
"""Metrics by which algorithms record their internal state. They have no picture here."""


def album(
    frame: pd.DataFrame, metrics: Sequence[str] = ()
) -> dict[str, Callable[[], Figure]]:
    """Return {name: function that draws} for the metrics' pictures: scores over rounds and by client, layers' curves.

    Each function takes no argument and returns a new figure. So not all figures need be
    open at once. A function raises a ``UsageError`` if there are several values for one
    place.

    The names are valid names of files. A metric's curve shows what was measured during training if the rows have that,
    and else the metric's default variant. If there are several rounds it shows the last one.

    Args:
        frame: rows of measurements or of runs.
        metrics: names of metrics. Default: all metrics among the rows except the
            further scores, such as AUROC. Those are many, and some have no value.

    Raises:
        UsageError: there are no rows, a metric is not among them, or no metric has a
            picture.
    """
    present_metrics = list(frame["metric"].unique())
    if not present_metrics:
        raise UsageError("rows must not be empty; got none. Measure first.")
    usual_metrics = {*chain.from_iterable(SHOWN.values())}
    wanted_metrics = metrics or [
        name for name in present_metrics if name in usual_metrics or name not in SCORES
    ]
    pictures: dict[str, Callable[[], Figure]] = {}
    for name in dict.fromkeys(
        check_known("metric among the rows", name, present_metrics)
        for name in wanted_metrics
    ):
        for title, draw in _pictures(frame[frame["metric"] == name], name).items():
            pictures[in_file_name(title)] = lambda draw=draw: figure_of(draw(frame))  # type: ignore[misc]
    if not pictures:
        wanted_names = listing(metrics or present_metrics)
        raise UsageError(
            f"metrics must have a picture; got {wanted_names}. Choose others."
        )
    return pictures


def figure_of(drawn: Drawn) -> Figure:
    """Return the matplotlib figure to which the axes belong.

    Args:
        drawn: the axes, or a list of axes of one figure.

    Raises:
        UsageError: the axes were removed from their figure.
    """
    figure = (drawn[0] if isinstance(drawn, list) else drawn).get_figure(root=True)
    if figure is None:
        raise UsageError(
            "the axes must belong to a figure; got axes that were removed from theirs."
        )
    return figure


def _pictures(rows: pd.DataFrame, name: str) -> dict[str, Draw]:
    pictures: dict[str, Draw] = {}
    if name in STATES:
        return pictures
    if name in SCORES and (rows["layer"] == "").any():
        pictures[name] = lambda frame: learning(frame, name)
        pictures[f"{name}_clients"] = lambda frame: clients(frame, name)
    elif (rows["layer"] != "").any():
        variants = set(rows["variant"])
        metric_facts = facts_of(name)
        variant = next(
            (name for name in metric_facts.preferred if name in variants), None
        )
        last_rows = rows[rows["round"].isna() | (rows["round"] == rows["round"].max())]
        pictures[name] = lambda frame: metric(last_rows, name, variant=variant)
        has_positive = bool((rows["value"] > 0).any())
        if has_positive and name == "layer_cost":
            pictures["costs"] = costs
        if has_positive and name == "cka":
            pictures["cka_matrices"] = cka_matrices
            if rows["variant"].str.startswith(f"{PAIRS} ").any():
                pictures["cka_pairs"] = partial(cka_matrices, variant=PAIRS)
    return pictures
