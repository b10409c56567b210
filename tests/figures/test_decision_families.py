"""Tables of the tuned and finished study: settings make federations of numbers."""

import zipfile

import numpy as np
import pandas as pd
import pytest

from figures.decision import convert, families
from fl_core import data


def stays(n=60):
    draw = np.random.default_rng(0)
    return pd.DataFrame(
        {
            "rownames": range(n), "died": draw.integers(2, size=n), "los": draw.integers(1, 9, size=n),
            "type": draw.integers(1, 4, size=n), "type1": 0, "type2": 0, "type3": 0,
            "provnum": np.repeat([7, 8, 9], [35, 20, 5])[:n],
        }
    )  # fmt: skip


def wheel(path, frames):
    with zipfile.ZipFile(path, "w") as archive:
        for name, frame in frames.items():
            archive.writestr(f"csv/{name}.csv", frame.to_csv(index=False))
    return path


def test_a_wheel_becomes_tables_of_the_data_root_that_runs_can_name(tmp_path):
    path = wheel(tmp_path / "r.whl", {"COUNT/medpar": stays()})
    folder = tmp_path / "unpacked"
    zipfile.ZipFile(path).extractall(folder)

    def converted(source, name):
        return convert.convert([source], tmp_path, [name], say=lambda line: None)

    assert converted(folder, "medpar") == converted(path, "medpar") == ["medpar"]
    assert converted(path, "loans") == []
    table = pd.read_csv(tmp_path / families.FOLDER / "medpar.csv")
    assert list(table.columns) == ["client", "label", "los", "type"]
    assert table["client"].value_counts().to_dict() == {
        7: 35
    }  # the others have fewer than 30
    loaded = data.load(
        families.dataset_of("medpar"), data_root=tmp_path, **families.READING
    )
    assert [client.name for client in loaded.clients] == ["7"]
    assert loaded.classes == ("0", "1")
    assert float(loaded.clients[0].train.x.mean()) == pytest.approx(
        0, abs=1e-6
    )  # scaled


def test_outcomes_that_are_made_leave_out_who_was_not_seen_for_long_enough():
    frame = pd.DataFrame(
        {"time": [5, 20, 20, 5], "event": [1, 1, 0, 0], "x": [1, 2, 3, 4]}
    )
    outcome = families.died_within(10, "time", lambda each: each["event"] == 1)(frame)
    assert outcome.isna().tolist() == [False, False, False, True]
    assert outcome.dropna().tolist() == ["died", "alive", "alive"]
