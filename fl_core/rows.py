"""The schema of rows, for runs and for diagnostics, and its JSON-lines file.

A file is a header line followed by one row per line. ``value`` is null exactly if ``status`` is not ``"ok"``. A value
that could not be computed is a row with the reason. It is never 0 and never left out.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fl_core import limits
from fl_core.errors import CorruptError, UsageError, damaged
from fl_core.scores import ROUNDING, TABLE
from fl_core.storage.files import check_version, write_atomically

if TYPE_CHECKING:
    import pandas as pd

SCHEMA = 1
COLUMNS: dict[str, str] = {
    "run": "name of the run directory or study, empty for a direct diagnosis",
    "algorithm": "registry name, empty for a direct diagnosis",
    "seed": "the run's seed",
    "round": "rounds completed when the value was taken; 0 = before the first aggregation",
    "model": "which model: global, local, personal (or a name such as personal@best_val)",
    "split": "train, validation, test, or probe",
    "client": "client name; empty for a combined value",
    "client_b": "the second client of a pair",
    "layer": "exact layer name; empty for a whole model",
    "metric": "registry name of the metric",
    "variant": "which definition of the metric; empty for its only one",
    "value": "the number; null where status is not ok",
    "stderr": "standard error of the value; 0 = exact; null = not known",
    "estimator": "how the value was obtained",
    "unit": "unit of the value; empty for a pure number",
    "n_params": "parameters that the value covers",
    "n_samples": "samples that the value was computed from",
    "n_train": "training samples of the client (its weight)",
    "status": "ok, or why there is no value",
}
_INTEGERS = ("seed", "round", "n_params", "n_samples", "n_train")
_NUMBERS = ("value", "stderr")
_SIZED = (*_INTEGERS, *_NUMBERS)
_SIZES = frozenset((int, float, type(None)))
_TEXTS = _SIZES | {str, bool}

Row = dict[str, Any]


def row(metric: str, value: float | None, *, status: str = "ok", **columns: Any) -> Row:
    """Return one row. Omitted columns are empty. A value that is None or not finite needs a ``status`` of its own.

    >>> row("weight_norm", 0.7, client="north", layer="fc1")["status"]
    'ok'
    >>> row("weight_norm", None, status="the layer has no weights", client="north", layer="pool")["value"] is None
    True

    Raises:
        KeyError: a column is not in the schema.
        ValueError: the value is missing although the status is ok, or present with another status.
    """
    unknown = set(columns) - set(COLUMNS)
    if unknown:
        raise KeyError(f"columns must be in the schema of rows; got {sorted(unknown)}.")
    if value is not None and not math.isfinite(value):
        value = None
    if value is None and status == "ok":
        raise ValueError(
            f"{metric}: the value must be finite with status 'ok'; got none. Give a status that says why."
        )
    if value is not None and status != "ok":
        raise ValueError(
            f"{metric}: the value must be left out with status {status!r}; got {value}."
        )
    if columns.get("stderr") is not None and not math.isfinite(columns["stderr"]):
        columns["stderr"] = None
    filled = {
        "metric": metric,
        "value": None if value is None else float(value),
        "status": status,
        **columns,
    }
    return {name: filled.get(name, None if name in _SIZED else "") for name in COLUMNS}


def dumps(record: dict[str, Any]) -> str:
    """Return one line of JSON, without the non-standard NaN."""
    return json.dumps(record, allow_nan=False, separators=(",", ":"))


def frame(rows: Iterable[Row]) -> pd.DataFrame:
    """Return a tidy frame with every column of the schema. Missing numbers are NaN, integers are pandas' Int64."""
    import pandas as pd  # here alone: who only checks or appends rows goes without

    rows = list(rows)
    table = pd.DataFrame(rows, columns=list(COLUMNS))
    for name in _NUMBERS:
        table[name] = pd.to_numeric(table[name])
    for name in _INTEGERS:
        table[name] = pd.array(
            [row.get(name) for row in rows], dtype="Int64"
        )  # exact, without floats
    return table


def records(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the lines of a table as plain data, with None for what is missing."""
    found: list[dict[str, Any]] = (
        table.astype(object).where(table.notna(), None).to_dict("records")
    )
    return found


def write(path: Path, header: dict[str, Any], rows: Iterable[Row]) -> None:
    """Write a whole file atomically: a reader sees the old file or the new one, never a part."""
    lines = [dumps({"schema": SCHEMA, **header}), *(dumps(record) for record in rows)]
    write_atomically(Path(path), ("\n".join(lines) + "\n").encode())


def read(
    path: Path, complete: int | None = None
) -> tuple[dict[str, Any], pd.DataFrame]:
    """Read header and frame of a rows file.

    Args:
        complete: for a file that is being appended to, the bytes that must be valid. An incomplete last line after them
            is not read.

    Raises:
        UsageError: the file does not exist, is not a rows file, or has another version's schema.
        CorruptError: a line is damaged.
    """
    header, lines = _open(Path(path), complete)
    return header, _frame(path, lines)


def parsed(path: Path, data: bytes) -> pd.DataFrame:
    """Return the frame of rows without a header, one per line.

    Args:
        path: that an error names.

    Raises:
        CorruptError: a line is damaged.
    """
    with damaged(path):  # no JSON, no UTF-8, or beyond the limits
        lines = [limits.parsed_json(line.decode("utf-8")) for line in data.splitlines()]
    return check_rows(path, lines)


def check_rows(what: Path | str, lines: Iterable[Any]) -> pd.DataFrame:
    """Return the frame of rows that somebody else made.

    Args:
        what: their file or sender, which an error names.

    Raises:
        CorruptError: one has other columns or types than the schema, or a value that does not fit its status.
    """
    lines = list(lines)
    if not all(map(_is_row, lines)):
        raise CorruptError(f"{what} is damaged: a line is not a row")
    return _frame(what, lines)


def _frame(path: Path | str, lines: Iterable[Row]) -> pd.DataFrame:
    try:
        table = frame(lines)
    except (
        OverflowError,
        TypeError,
    ) as error:  # a number beyond 64 bits, or a fraction in place of a count
        raise CorruptError(
            f"{path} is damaged: a row does not fit the schema ({error})"
        ) from error
    _check_values(path, table)
    return table


def _check_values(path: Path | str, table: pd.DataFrame) -> None:
    """Refuse values that no row has: one beyond its score's range, or one that does not fit its status."""
    value = table["value"]
    low, high = (
        table["metric"].map({name: score.ends[k] for name, score in TABLE.items()})
        for k in (0, 1)
    )
    wrong = (
        (value.isna() == (table["status"] == "ok"))
        | (value.abs() == math.inf)
        | (table["stderr"] == math.inf)
    )
    wrong |= (value < low - ROUNDING) | (value > high + ROUNDING)
    if wrong.any():
        row = table[wrong].iloc[0]
        found = f"the value {row['value']} with status {row['status']!r}"
        raise CorruptError(
            f"{path} is damaged: no {row['metric'] or 'metric'} has {found}"
        )


def read_header(path: Path) -> dict[str, Any]:
    """Read only the header of a rows file. Errors are as in :func:`read`."""
    return _open(Path(path))[0]


def _open(
    path: Path, complete: int | None = None
) -> tuple[dict[str, Any], Iterator[dict[str, Any]]]:
    if not path.is_file():
        raise _refusal(path, "no file there")
    lines = _lines(path, complete)
    header = next(lines, None)
    if not isinstance(header, dict) or "schema" not in header:
        raise _refusal(path, "a first line without a schema")
    if not check_version(
        path, f"fedlayers.rows/{header['schema']}", f"fedlayers.rows/{SCHEMA}"
    ):
        raise _refusal(path, f"schema {header['schema']!r}")
    return header, lines


def _refusal(path: Path, found: str) -> UsageError:
    return UsageError(
        f"{path} must be a file of rows; got {found}. Make one with fedlayers diagnose."
    )


def _is_row(record: Any) -> bool:
    if (
        not isinstance(record, dict)
        or record.keys() != COLUMNS.keys()
        or not _TEXTS.issuperset(map(type, record.values()))
    ):
        return False
    return _SIZES.issuperset(map(type, map(record.__getitem__, _SIZED)))


def _lines(path: Path, complete: int | None) -> Iterator[dict[str, Any]]:
    end = 0
    with path.open("rb") as file:
        for number in itertools.count(1):
            try:
                line = limits.read_line(file)
                end += len(line)
                if not line or (
                    complete is not None and end > complete and not line.endswith(b"\n")
                ):
                    return
                record = limits.parsed_json(line.decode("utf-8"))
            except ValueError as error:  # no JSON, no UTF-8, or beyond the limits
                if number == 1:
                    raise _refusal(path, "a first line that is no header") from error
                raise CorruptError(
                    f"{path}, line {number} is damaged: {error}"
                ) from error
            if number > 1 and not _is_row(record):
                raise CorruptError(
                    f"{path}, line {number} is damaged: it is no row of the schema"
                )
            yield record
