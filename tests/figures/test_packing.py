"""Packed rows of figures: runs come back as they were, and a damaged file is refused by name."""

import base64
import zlib

import numpy as np
import pytest
from pyarrow import parquet

from figures import packing
from fl_core import rows
from fl_core.errors import CorruptError

FRAME = rows.frame([rows.row("accuracy", 0.1 * k, seed=k) for k in range(3)])
PARTS = [
    ({"version": "1", "seed": 0}, FRAME),
    ({"version": "1", "seed": 1}, FRAME.iloc[:1]),
]


def test_whole_numbers_stay_and_scores_are_float32(tmp_path):
    values = [2.0**40 + 1, 0.1, -1e-9]
    table = rows.frame([rows.row("flops", value) for value in values])
    packing.write(tmp_path / "rows.parquet", [({}, table)])
    ((_, frame),) = packing.read(tmp_path / "rows.parquet")
    expected = [values[0], *np.array(values[1:], np.float32).astype(float)]
    np.testing.assert_array_equal(frame["value"], expected)


@pytest.mark.parametrize(
    "about",
    [
        {"headers": ["one", "two"], "lengths": [3, 1]},
        {"headers": [{"schema": 1}, {"schema": 1}], "lengths": [3, 2]},
        {"headers": [{"schema": 1}], "lengths": [3, 1]},
        {"headers": [{"schema": 2}, {"schema": 2}], "lengths": [3, 1]},
    ],
)
def test_other_headers_are_damage(tmp_path, about):
    path = tmp_path / "rows.parquet"
    packing.write(path, PARTS)
    table = parquet.read_table(path)
    header = base64.b64encode(zlib.compress(rows.dumps(about).encode()))
    parquet.write_table(table.replace_schema_metadata({packing.KEY: header}), path)
    with pytest.raises(CorruptError, match=path.name):
        packing.read(path)
