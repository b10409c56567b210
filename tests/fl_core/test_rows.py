"""One schema: what is written comes back, and a missing value says why."""

import json
import math

import pandas as pd
import pytest
from hypothesis import given, strategies as st

from fl_core import rows
from fl_core.errors import CorruptError, UsageError
from tests.conftest import refuses

texts = st.text(max_size=8)
counts = st.none() | st.integers(0, 2**53)
any_row = st.builds(
    lambda value, stderr, reason, **columns: rows.row(
        "loss",
        value,
        stderr=stderr,
        status="ok" if value is not None and math.isfinite(value) else reason,
        **columns,
    ),
    value=st.none() | st.floats(),
    stderr=st.none() | st.floats(min_value=0),
    reason=st.text(min_size=1, max_size=8).filter(lambda text: text != "ok"),
    client=texts,
    layer=texts,
    n_train=counts,
    round=counts,
)


@given(any_row)
def test_a_row_has_every_column_and_a_value_exactly_when_ok(row):
    assert list(row) == list(rows.COLUMNS)
    assert (row["value"] is None) == (row["status"] != "ok")
    assert row["value"] is None or math.isfinite(row["value"])
    assert json.loads(rows.dumps(row)) == row


@given(st.lists(any_row, max_size=5))
def test_file_gives_back_what_was_written(tmp_path_factory, many):
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    rows.write(path, {"seed": 3, "layers": ["fc1"]}, many)
    header, table = rows.read(path)
    assert header == {"schema": rows.SCHEMA, "seed": 3, "layers": ["fc1"]}
    pd.testing.assert_frame_equal(table, rows.frame(many))
    for row, (_, read) in zip(many, table.iterrows(), strict=True):
        for name, value in row.items():
            assert pd.isna(read[name]) if value is None else read[name] == value, name
    assert [p.name for p in path.parent.iterdir()] == ["rows.jsonl"]


GOOD = rows.dumps(rows.row("loss", 1.0))


@pytest.mark.parametrize(
    ("content", "error", "what"),
    [
        (None, UsageError, "a folder"),
        ("", UsageError, "no header"),
        ("not json\n", UsageError, "no header"),
        ("[1]\n", UsageError, "schema"),
        ('{"seed": 1}\n', UsageError, "schema"),
        ('{"schema": 99}\n', UsageError, r"rows/1;.*rows/99"),
        (b"\xff\xfe\x00", UsageError, "no header"),
        (f'{{"schema": 1}}\n{GOOD}\n{GOOD[:40]}', CorruptError, "line 3"),
        (f'{{"schema": 1}}\n{GOOD}\n\n{GOOD}\n', CorruptError, "line 3"),
        ('{"schema": 1}\n[1, 2]\n', CorruptError, "line 2"),
        ('{"schema": 1}\n{"metric": "loss"}\n', CorruptError, "line 2"),
        (b'{"schema": 1}\n\xff\xfe\n', CorruptError, "line 2"),
        (
            f'{{"schema": 1}}\n{GOOD.replace("loss", chr(92) + "ud800")}\n',
            CorruptError,
            "line 2 is damaged.*surrogates",
        ),
        (
            f'{{"schema": 1}}\n{rows.dumps(rows.row("accuracy", 1.1))}\n',
            CorruptError,
            "no accuracy has the value 1.1",
        ),
        (
            f'{{"schema": 1}}\n{rows.dumps(rows.row("mse", -1.0))}\n',
            CorruptError,
            "no mse has the value -1",
        ),
        (
            f'{{"schema": 1}}\n{rows.dumps(rows.row("r2", 2.0))}\n',
            CorruptError,
            "no r2 has the value 2",
        ),
    ],
)
def test_damaged_files_are_refused(tmp_path, content, error, what):
    path = tmp_path / "rows.jsonl"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(error, match=what) as caught:
        rows.read(path)
    assert str(path.parent) in str(caught.value)


def test_an_unfinished_line_is_left_out_only_after_what_must_be_complete(tmp_path):
    path = tmp_path / "rows.jsonl"
    sound = f'{{"schema": 1}}\n{GOOD}\n'
    path.write_text(sound + GOOD[:40])
    assert len(rows.read(path, complete=len(sound))[1]) == 1
    with refuses("line 3", CorruptError):
        rows.read(path, complete=len(sound) + 41)
    path.write_text(f"{sound}oops\n{GOOD[:40]}")
    with refuses("line 3", CorruptError):
        rows.read(path, complete=len(sound))
