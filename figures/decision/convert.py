"""Convert tables of R's data into .csv files of the data root, for the leaderboard.

    python -m figures.decision.convert Rdatasets

``Rdatasets`` is a checkout of github.com/vincentarelbundock/Rdatasets. No table is part of this project.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import tyro

from fl_core.data.columns import CLIENT_COLUMN, LABEL_COLUMN
from fl_core.data.registry import ROOT_VARIABLE
from fl_core.display import csv_bytes
from fl_core.errors import UsageError, check_known
from fl_core.storage import write_atomically

FOLDER = "families"
"""The folder below the data root that holds the converted tables."""
LEVELS = 20
"""Words that a column of features may hold, at most."""
MOST_MISSING = 0.5


@dataclass(frozen=True)
class Table:
    """One table, and how it becomes a federation.

    Rows without a client or an outcome are left out. Numbers that are missing stay empty, and a run fills them with the
    mean of the training samples. A missing word is no level. Columns with more than half of their values missing are
    left out.

    Attributes:
        origin: ``package/table``.
        outcome: the column of classes.
        client: the column that names clients.
        least: rows with an outcome that a client must have.
        exclude: columns that are no features: identifiers, copies of another, and what reveals the outcome.
        classes: makes classes of the outcome; default as it is.
    """

    origin: str
    outcome: str
    client: str
    least: int = 1
    exclude: tuple[str, ...] = ()
    classes: Callable[[pd.Series[Any]], pd.Series[Any]] = pd.Series.copy


def late(minutes: pd.Series[float]) -> pd.Series[Any]:
    """Return whether a flight has a delay of more than 15 minutes."""
    return (minutes > 15).map({True: "yes", False: "no"}).where(minutes.notna())


def low_grades_merged(grades: pd.Series[Any]) -> pd.Series[Any]:
    """Return grades of loans, with D to G as one."""
    return grades.where(~grades.isin(list("DEFG")), "D to G")


LEAKS = ("interest_rate", "installment", "sub_grade", "loan_status", "balance")
PAID = ("paid_total", "paid_principal", "paid_interest", "paid_late_fees")
TABLES: dict[str, Table] = {
    "aids": Table("MASS/Aids2", "status", "state", 100, ("death",)),
    "contraception": Table("mlmRev/Contraception", "use", "district", 40, ("woman",)),
    "smoking": Table("openintro/smoking", "smoke", "region", 50, ("amt_weekends", "amt_weekdays", "type")),
    "chile": Table("carData/Chile", "vote", "region", 50),
    "values": Table("carData/WVS", "poverty", "country", 100),
    "loans": Table(
        "openintro/loans_full_schema", "grade", "state", 200, ("emp_title", "issue_month", *LEAKS, *PAID),
        low_grades_merged,
    ),
    "developers": Table("modeldata/stackoverflow", "OpenSource", "Country", 100),
    "stops": Table("carData/MplsStops", "problem", "policePrecinct", 500, ("idNum", "date", "neighborhood")),
    "flights": Table(
        "openintro/nycflights", "arr_delay", "carrier", 500,
        ("dep_time", "dep_delay", "arr_time", "tailnum", "flight", "dest", "air_time", "minute"), late,
    ),
}  # fmt: skip


def prepared(table: Table, frame: pd.DataFrame) -> pd.DataFrame:
    """Return a table with the columns ``client``, ``label`` and features that are numbers.

    A column of words becomes a column of 0 and 1 for each of its levels.

    Raises:
        UsageError: a column that is not there, or more than :data:`LEVELS` words in a column of features.
    """
    frame = frame.rename(columns=lambda name: str(name).strip())
    frame = frame.drop(columns="rownames", errors="ignore")
    named = [*table.exclude, table.client, table.outcome]
    for name in named:
        check_known(f"column of {table.origin}", name, list(frame.columns))
    frame = frame.assign(**{table.outcome: table.classes(frame[table.outcome])})
    whole = frame.dropna(subset=[table.client, table.outcome])
    sizes = whole[table.client].value_counts()
    whole = whole[whole[table.client].isin(sizes.index[sizes >= table.least])]
    out: dict[str, pd.Series[Any]] = {
        CLIENT_COLUMN: whole[table.client].map(_word),
        LABEL_COLUMN: whole[table.outcome].map(_word),
    }
    for name in frame.columns.drop(named):
        column = whole[name]
        if frame[name].isna().mean() > MOST_MISSING:
            continue
        if pd.api.types.is_numeric_dtype(column):
            if column.nunique() > 1:
                out[name] = column.astype(float)
            continue
        words = column.map(_word, na_action="ignore")
        levels = sorted(set(words.dropna()))
        if len(levels) > LEVELS:
            raise UsageError(
                f"{table.origin}: column {name!r} must have at most {LEVELS} words; got {len(levels)}. Leave it out."
            )
        alone = len(levels) == 2 and not words.isna().any()
        for level in levels[1:] if alone or len(levels) < 2 else levels:
            out[f"{name}: {level}"] = (words == level).astype(float)
    return pd.DataFrame(out).reset_index(drop=True)


def _word(value: Any) -> str:
    """Return a cell as a word: a number as short as 32 bits keep it."""
    return f"{value:.6g}" if isinstance(value, float) else str(value).strip()


def main(
    checkout: Annotated[Path, tyro.conf.Positional],
    data_root: Path | None = None,
    only: tuple[str, ...] = (),
) -> None:
    """Write tables of R into the folder ``families`` of the data root.

    Args:
        checkout: of Rdatasets.
        data_root: default: the environment's FEDLAYERS_DATA_ROOT.
        only: names of the tables to write; default all.
    """
    root = data_root or os.environ.get(ROOT_VARIABLE)
    try:
        if not root or not Path(root).is_dir():
            raise UsageError(
                f"the data root must be a folder; got {root}. Pass --data-root or set {ROOT_VARIABLE}."
            )
        for name in only or TABLES:
            table = TABLES[check_known("table", name, TABLES)]
            source = checkout / "csv" / f"{table.origin}.csv"
            if not source.is_file():
                raise UsageError(
                    f"{name} must be at {source}; got no file. Pass a checkout of Rdatasets."
                )
            found = prepared(table, pd.read_csv(source, low_memory=False))
            folder = Path(root) / FOLDER
            folder.mkdir(exist_ok=True)
            write_atomically(folder / f"{name}.csv", csv_bytes(found, float_format="%.7g"))  # fmt: skip
            print(
                f"{name:13} {len(found):6} rows, {found[LABEL_COLUMN].nunique()} classes, "
                f"{found.shape[1] - 2:3} features, {found[CLIENT_COLUMN].nunique():3} clients"
            )
    except UsageError as error:
        print(f"convert: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    tyro.cli(main, prog="python -m figures.decision.convert")
