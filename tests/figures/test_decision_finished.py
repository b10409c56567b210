"""Tables of the leaderboard, and what the product took from the study with tuned rates."""

import pandas as pd
import pytest

from fedlayers.studies.hint import BANDS
from fedlayers.studies.race import JUDGE
from figures.decision import convert, finished
from fl_core.data import files
from fl_core.data.columns import Reading


def test_a_checkout_becomes_tables_of_the_data_root_that_are_read(tmp_path, capsys):
    frame = pd.DataFrame({
        "rownames": range(620), "arr_delay": [20.0, 10.0, 15.0, None] * 155, "carrier": ["a"] * 600 + ["b"] * 20,
        "hour": range(620), "origin": ["x", "x", "y", "y"] * 155, "same": 1,
        **dict.fromkeys(convert.TABLES["flights"].exclude, 0),
    })  # fmt: skip
    frame = pd.concat([frame, frame], ignore_index=True)
    (tmp_path / "csv" / "openintro").mkdir(parents=True)
    frame.to_csv(tmp_path / "csv" / "openintro" / "nycflights.csv", index=False)
    convert.main(tmp_path, tmp_path, ("flights",))
    path = tmp_path / convert.FOLDER / "flights.csv"
    table = pd.read_csv(path)
    assert list(table.columns) == ["client", "label", "hour", "origin: y"]
    assert set(table["client"]) == {"a"}  # b has too few flights
    assert table["label"].value_counts().to_dict() == {"no": 600, "yes": 300}
    assert table["hour"].isin(range(0, 600, 4)).sum() == 300
    source = files.read(path, Reading(scale="standard", impute="mean"))
    assert source.owner_names == ("a",)
    with pytest.raises(SystemExit):
        convert.main(tmp_path, tmp_path, ("chile",))
    assert "Pass a checkout of Rdatasets" in capsys.readouterr().err


@pytest.mark.slow
def test_the_judge_of_the_product_is_the_fit_of_the_stored_runs():
    found = finished.fit_judge()
    assert tuple(float(f"{value:.4g}") for value in found) == JUDGE


@pytest.mark.slow
def test_the_bands_of_skew_are_those_of_the_stored_runs():
    table = finished.skew_and_gains()
    ends = pd.cut(table["skew"], [-1.0, *(end for end, _, _ in BANDS)], right=False)
    low, middle, high = (own for _, own in table.groupby(ends, observed=True)["gain"])
    counts = [(low < 1.15, low), (middle < 1.35, middle), (high > 1.05, high)]
    for (those, band), (_, _, words) in zip(counts, BANDS, strict=True):
        assert words.startswith(f"{those.sum()} of {len(band)} ")
