"""The constructed data of the pages are what the pages say."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from examples import handwriting, intensive_care
from fl_core.data import load


def test_the_wards_have_the_troubles_of_real_tables(tmp_path: Path) -> None:
    intensive_care.main(str(tmp_path))
    every = pd.concat(pd.read_csv(path) for path in tmp_path.iterdir())
    assert every.shape == (4000, 42)
    assert every.isna().mean().max() == 0.47
    assert (every["outcome"] == "died").mean() == pytest.approx(0.14, abs=0.002)
    assert set(every["sex"]) == {"m", "f"}
    again = intensive_care.tables()
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "neuro.csv"), again["neuro"])


def test_the_writers_have_folders(tmp_path: Path) -> None:
    handwriting.main(str(tmp_path))
    data = load(str(tmp_path))
    assert (len(data.clients), data.n_classes, data.shape) == (10, 10, (1, 32, 32))
