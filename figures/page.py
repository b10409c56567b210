"""Format numbers, tables and settings, and the whole page of a figure."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pandas as pd

from figures import names
from figures.claims import opening_lines
from figures.drawing import VERDICTS, Drawing, Finding, opening
from fl_core.display import printable
from fl_core.statistics import mean_interval


def in_markdown(text: str) -> str:
    r"""Return text for a cell of a Markdown table. Its links and code stay.

    >>> in_markdown("a|b <script>")
    'a\\|b &lt;script>'
    """
    return re.sub(
        r"<(?=[A-Za-z/!?])", "&lt;", re.sub(r"(?<!\\)\|", r"\|", printable(text))
    )


def percent(mean: float, low: float, high: float, sign: str = "") -> str:
    """Return a share in percent with half the width of its interval; a dash without a value."""
    if math.isnan(mean):
        return "–"
    half_text = "" if math.isnan(low) else f" ± {100 * (high - low) / 2:.1f}"
    return f"{100 * mean:{sign}.1f}{half_text}"


def seeds_in_words(count: int | str) -> str:
    """Return a number of seeds as text: ``1 seed``, ``3 seeds``, ``3-5 seeds``."""
    return f"{count} seed{'s' * (str(count) != '1')}"


def seeds_behind(header: Mapping[str, Any], runs: Collection[str] = ()) -> str:
    """Return how many seeds each of these runs has, as :func:`span`; of all runs if none is named."""
    seeds_by_run = header.get("had", {})
    return span(
        [
            len(seeds_by_run[run])
            for run in runs or seeds_by_run
            if seeds_by_run.get(run)
        ]
        or [header["seeds"]]
    )


def span(numbers: Iterable[int]) -> str:
    """Return the least and the greatest of some numbers, as text: ``3-4``, or ``4`` if they are one."""
    ordered_numbers = sorted(numbers)
    if ordered_numbers[0] == ordered_numbers[-1]:
        return f"{ordered_numbers[0]}"
    return f"{ordered_numbers[0]}-{ordered_numbers[-1]}"


def numbers(values: Iterable[Any], spec: str = ".2f") -> list[str]:
    """Return numbers as text in a format, and a dash for what is missing."""
    return ["–" if pd.isna(value) else f"{value:{spec}}" for value in values]


def means(values: pd.DataFrame, row_keys: Iterable[Any]) -> list[str]:
    """Return means over seeds in percent, each with half its interval; a dash for a row that is not there."""
    return [
        percent(*mean_interval(values.loc[row_key].dropna()))
        if row_key in values.index
        else "–"
        for row_key in row_keys
    ]


def markdown(columns: Mapping[str, Sequence[Any]] | pd.DataFrame) -> str:
    """Return a Markdown table from columns of equal length."""
    row_cells = zip(*(columns[column] for column in columns), strict=True)
    rows = [list(columns), ["---"] * len(list(columns)), *row_cells]
    text_rows = [" | ".join(in_markdown(str(cell)) for cell in row) for row in rows]
    return "\n".join(f"| {text_row} |" for text_row in text_rows)


_SETTINGS = {
    "dataset": "data", "max_samples": "samples in all", "samples_per_client": "samples a client", "clients": "clients",
    "partition": "partition", "alpha": "Dirichlet's alpha", "model": "network", "algorithm": "methods",
    "rounds": "rounds", "participation": "share of clients a round", "epochs": "local epochs a round",
    "batch_size": "batch size", "optimizer": "optimiser", "lr": "learning rate",
}  # fmt: skip
"""Keys of a configuration that a page shows, in words."""
MANY = 6


def settings(configs: Iterable[Mapping[str, Any]], seeds: int | str) -> dict[str, str]:
    """Return what runs were trained with, by setting; of many values their range or their number.

    >>> settings([{"dataset": "mnist", "lr": 0.1, "clients": None}, {"dataset": "mnist", "lr": 0.01}], 3)
    {'data': 'MNIST', 'learning rate': '0.01, 0.1', 'seeds': '3'}
    """
    configs = list(configs)
    text_by_setting = {}
    for config_key, label in _SETTINGS.items():
        config_values = {
            config[config_key]
            for config in configs
            if config.get(config_key) is not None
        }
        if config_values:
            text_by_setting[label] = _in_one_cell(config_key, config_values)
    return {**text_by_setting, "seeds": str(seeds)}


def _in_one_cell(key: str, values: Collection[Any]) -> str:
    """The values of a setting as text."""
    if all(isinstance(value, int | float) for value in values):
        if len(values) > MANY:
            return f"{min(values):g} to {max(values):g}"
        return ", ".join(
            f"{value:,}" if isinstance(value, int) else f"{value:g}"
            for value in sorted(values)
        )
    spellings = {
        "dataset": names.dataset,
        "algorithm": names.title,
        "model": names.network,
        "optimizer": names.OPTIMISERS.__getitem__,
    }
    spelling = spellings.get(key, str)
    value_texts = sorted(
        {spelling(str(value).rpartition(":")[2]) for value in values}, key=str.lower
    )
    if len(value_texts) > 2 * MANY:
        return f"{len(value_texts)} of them"
    return ", ".join(value_texts)


_HEAD = ("expectation", "verdict", "measured")
_VERDICTS = "|".join(VERDICTS)
_ROW = re.compile(rf"\| (.*?) \| ({_VERDICTS})(?: \(\d+\))? \| (.*) \|")


def expectations(findings: Sequence[Finding]) -> str:
    """Return the expectations as a table, after the reasons why some are not comparable.

    >>> print(expectations([Finding("a lies above b", "+2 ± 1", True), Finding("c", "-1", None, "few images")]))
    Why not comparable: few images.
    <BLANKLINE>
    | expectation | verdict | measured |
    | --- | --- | --- |
    | a lies above b | held | +2 ± 1 |
    | c | not comparable | -1 |
    """
    if not findings:
        return ""
    reasons = list(
        dict.fromkeys(
            finding.incomparable for finding in findings if finding.incomparable
        )
    )
    if len(reasons) > 1:
        number_by_reason = {reason: f" ({k})" for k, reason in enumerate(reasons, 1)}
    else:
        number_by_reason = {}
    finding_cells = [
        (
            finding.expected,
            finding.verdict + number_by_reason.get(finding.incomparable, ""),
            finding.measured,
        )
        for finding in findings
    ]
    table_text = markdown(pd.DataFrame(finding_cells, columns=_HEAD))
    if number_by_reason:
        return "\n".join(
            [
                "Why not comparable:\n",
                *(
                    f"{k}. {numbered_reason}."
                    for k, numbered_reason in enumerate(reasons, 1)
                ),
                "",
                table_text,
            ]
        )
    return "\n\n".join(
        [*(f"Why not comparable: {reason}." for reason in reasons), table_text]
    )


def read_expectations(text: str) -> list[tuple[str, str, str]]:
    """Return expectation, verdict and measurement of each line of the table on a page."""
    heading = " | ".join(_HEAD)
    table_text = text.partition(f"| {heading} |\n")[2].partition("\n\n")[0]
    matches = map(_ROW.fullmatch, table_text.splitlines())
    row_cells = (
        tuple(cell.replace("\\|", "|").replace("&lt;", "<") for cell in match.groups())
        for match in matches
        if match
    )
    return [(expected, verdict, measured) for expected, verdict, measured in row_cells]


@functools.cache
def shown() -> frozenset[str]:
    """Return the names of the pictures that a page of the project shows. Only these are in version control."""
    folder = Path(__file__).parent
    pages = [
        *folder.glob("*.md"),
        folder.parent / "README.md",
        *(folder.parent / "docs").rglob("*.md"),
    ]
    picture_names = (
        re.findall(r"pictures/([^/()\s]+)\.png", path.read_text(encoding="utf-8"))
        for path in pages
    )
    return frozenset(chain.from_iterable(picture_names))


def lead_of(figure_name: str, drawing: Drawing) -> list[str]:
    """Return the lines with which a figure's page and picture begin.

    They are the scorecard's lines of the claims that the figure decides. Without any it is the drawing's own lead, or
    the first finding.
    """
    findings = [
        (finding.expected, finding.verdict, finding.measured)
        for finding in drawing.findings
    ]
    claim_lines = opening_lines(figure_name, findings)
    return claim_lines or [drawing.lead or opening(drawing.findings)]


def of_figure(
    figure_name: str,
    title: str,
    drawing: Drawing,
    settings: Mapping[str, str],
    notes: Iterable[str],
) -> str:
    """Return the page of a figure: its lead, picture, expectations and numbers. The settings come last.

    A picture that no other page shows is not in version control, and its page says how to draw it.
    """
    sections = [
        f"# {title}",
        "\n\n".join(lead_of(figure_name, drawing)),
        f"![{title}]({figure_name}.png)" if figure_name in shown() else "",
        expectations(drawing.findings),
        drawing.text,
        "## The picture" if drawing.figure else "## The runs",
        drawing.caption
        + (
            ""
            if figure_name in shown()
            else f" Draw it by `python -m figures {figure_name}`."
        ),
        "## Settings",
        *notes,
        markdown({"setting": list(settings), "value": list(settings.values())}),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def missing_runs(header: Mapping[str, Any], runs: Collection[str] | None = None) -> str:
    """Return a sentence on missing or diverged runs; empty without any.

    Args:
        header: as :meth:`figures.items.Item.read` gives it.
        runs: names of the runs to speak of; default all.
    """
    missing_names = [
        *header["missing"],
        *(f"{missing_name} (diverged)" for missing_name in header["failed"]),
    ]
    missing_names = [
        missing_name
        for missing_name in missing_names
        if runs is None or missing_name.partition(" ")[0] in runs
    ]
    if len(missing_names) > 2 * MANY:
        return f" {len(missing_names)} runs are missing."
    if missing_names:
        lacking_text = ", ".join(missing_names)
        return f" Missing: {lacking_text}."
    return ""
