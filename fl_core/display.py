"""What objects show of themselves: a sentence, one table and a plan, as text and in a notebook."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

LINES = 12
"""The most lines of an object as text."""
ROWS = 20
"""The most rows of a table in a notebook. A line says how many more there are."""


@dataclass(frozen=True)
class Summary:
    """What an object shows.

    Attributes:
        lead: one sentence or a few, each on its own line.
        columns, rows: one table. Without columns there is none.
        layers: for each layer from input to output, whether it is shared. It is empty without a plan.
    """

    lead: str
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[object]] = ()
    layers: Mapping[str, bool] = field(default_factory=dict)

    @classmethod
    def of_frame(cls, lead: str, frame: Any, layers: Any = None) -> Summary:
        """Return the summary of a pandas table, with its index as first columns unless that only counts."""
        if list(frame.index) != list(range(len(frame))):
            frame = frame.reset_index()
        rows = list(frame.itertuples(index=False, name=None))
        return cls(lead, [str(name) for name in frame.columns], rows, layers or {})

    def text(self) -> str:
        """Return at most :data:`LINES` lines."""
        lines = self.lead.splitlines()
        if self.columns:
            lines += aligned([self.columns, *(map(_cell, row) for row in self.rows)])
        if len(lines) > LINES:
            lines = [*lines[: LINES - 1], f"... {len(lines) - LINES + 1} more lines"]
        return "\n".join(lines)

    def html(self) -> str:
        """Return plain HTML, without script. Its colours follow the page's.

        There is no SVG: JupyterLab removes its tags from a notebook that it does not trust yet.
        """
        parts = [_escaped(self.lead).replace("\n", "<br>")]
        if self.layers:
            parts.append(_strip(self.layers))
        if self.columns:
            parts.append(_table(self.columns, self.rows))
        return '<div style="color:inherit">' + "\n".join(parts) + "</div>"


class Displayed:
    """An object that shows its :meth:`summary` as text and in a notebook."""

    def summary(self) -> Summary:
        """Return what the object shows."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return self.summary().text()

    def _repr_html_(self) -> str:
        return self.summary().html()


def _escaped(text: str) -> str:
    from html import escape  # a table of all entities, which text does without

    return escape(text)


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def aligned(rows: Sequence[Any]) -> list[str]:
    """Return rows of cells as lines with aligned columns."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]


def _table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    head = "".join(f"<th>{_escaped(name)}</th>" for name in columns)
    lines = [f"<tr>{head}</tr>"]
    for row in rows[:ROWS]:
        cells = "".join(f"<td>{_escaped(_cell(value))}</td>" for value in row)
        lines.append(f"<tr>{cells}</tr>")
    more = len(rows) - ROWS
    note = f"<div>{more} more rows</div>" if more > 0 else ""
    return f"<table>{''.join(lines)}</table>{note}"


def _strip(layers: Mapping[str, bool]) -> str:
    """Draw a plan from input to output: a filled box and bold name for a shared layer, an outline for a local one."""
    boxes = []
    for name, shared in layers.items():
        tag, word, fill = ("b", "shared", 0.35) if shared else ("span", "local", 0)
        boxes.append(
            f'<{tag} title="{_escaped(name)}: {word}" style="display:inline-block;margin:4px 4px 4px 0;'
            f'padding:1px 8px;border:1px solid gray;background-color:rgba(128,128,128,{fill})">'
            f"{_escaped(name)}</{tag}>"
        )
    return f"<div>{''.join(boxes)}</div>"
