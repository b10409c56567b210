"""Packed rows of figures: runs come back as they were, and a damaged or forged file is refused by name."""

from __future__ import annotations

import base64
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow
import pytest
from pyarrow import parquet

from figures import packing
from fl_core import limits, rows
from fl_core.errors import CorruptError

FRAME = rows.frame([rows.row("accuracy", 0.1 * k, seed=k) for k in range(3)])
PARTS = [
    ({"version": "1", "seed": 0}, FRAME),
    ({"version": "1", "seed": 1}, FRAME.iloc[:1]),
]


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    packing.write(tmp_path / "rows.parquet", PARTS)
    return tmp_path / "rows.parquet"


def with_about(path: Path, about: bytes) -> None:
    """Put other headers and lengths into a file."""
    table = parquet.read_table(path)
    parquet.write_table(
        table.replace_schema_metadata({packing.KEY: base64.b64encode(about)}), path
    )


def test_runs_come_back(stored: Path) -> None:
    for (header, frame), (before, written) in zip(
        packing.read(stored), PARTS, strict=True
    ):
        assert header.items() >= before.items()
        pd.testing.assert_frame_equal(
            frame.reset_index(drop=True), written.reset_index(drop=True), rtol=1e-7
        )


def test_whole_numbers_stay_and_scores_are_float32(tmp_path: Path) -> None:
    values = [2.0**40 + 1, 0.1, -1e-9]
    packing.write(
        tmp_path / "rows.parquet",
        [({}, rows.frame([rows.row("flops", value) for value in values]))],
    )
    ((_, frame),) = packing.read(tmp_path / "rows.parquet")
    expected = [values[0], *np.array(values[1:], np.float32).astype(float)]
    np.testing.assert_array_equal(frame["value"], expected)


@pytest.mark.parametrize(
    "about",
    [
        {"headers": [{}, {}], "lengths": [3, 1]},
        {"headers": ["one", "two"], "lengths": [3, 1]},
        {"headers": [{"schema": 1}, {"schema": 1}], "lengths": ["3", "1"]},
        {"headers": [{"schema": 1}, {"schema": 1}], "lengths": [5, -1]},
        {"headers": [{"schema": 1}], "lengths": [3, 1]},
        {"headers": [{"schema": "one"}, {"schema": "one"}], "lengths": [3, 1]},
        [1],
    ],
)
def test_other_headers_are_damage(stored: Path, about: Any) -> None:
    with_about(stored, zlib.compress(rows.dumps(about).encode()))
    with pytest.raises(CorruptError, match=stored.name):
        packing.read(stored)


@pytest.mark.parametrize(("count", "size"), [(50_000, 100_000), (2**21, 1)])
def test_rows_that_unpack_to_far_more_are_refused(
    count: int, size: int, stored: Path
) -> None:
    """One large text many times, or far too many rows. Both take few bytes as a dictionary's index."""
    table = parquet.read_table(stored)
    text = pyarrow.DictionaryArray.from_arrays(
        pyarrow.array([0] * count, pyarrow.int32()), ["a" * size]
    )
    columns = {
        field.name: text
        if pyarrow.types.is_large_string(field.type)
        else pyarrow.array([0] * count, field.type)
        for field in table.schema
    }
    large = pyarrow.table(columns).replace_schema_metadata(table.schema.metadata)
    parquet.write_table(large, stored, store_schema=False)
    assert stored.stat().st_size < 2**21
    with pytest.raises(CorruptError, match="unpack"):
        packing.read(stored)


def test_headers_that_unpack_to_far_more_are_refused(
    stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "UNPACKED", 1 << 12)
    about = {"headers": [{"schema": 1, "command": " " * (1 << 22)}], "lengths": [4]}
    with_about(stored, zlib.compress(rows.dumps(about).encode()))
    with pytest.raises(CorruptError, match=stored.name):
        packing.headers(stored)
