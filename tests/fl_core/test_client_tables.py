"""One table for each client: a folder or a list of files, and .tsv tables."""

from pathlib import Path

import pandas as pd
import pytest

from fedlayers.cli.app import main
from fl_core import data
from fl_core.data.loading import as_data
from fl_core.data.reading import Reading
from fl_core.records.store import Run
from tests.conftest import refuses
from tests.made import SPLITS, frame, written


@pytest.fixture
def wards(tmp_path):
    """A folder with a file for each ward of a table, and beside it the whole table."""
    folder = tmp_path / "wards"
    folder.mkdir()
    for name, rows in frame().groupby("client"):
        own = rows.drop(columns="client")  # one file has another order of columns
        order = own.columns[:: -1 if name == "ward_1" else 1]
        written(folder / f"{name}.csv", own[order])
    (folder / "readme.txt").write_text("notes")
    written(tmp_path / "whole.csv", frame().sort_values("client", kind="stable"))
    return folder


def joined(folder):
    return ",".join(str(path) for path in sorted(folder.glob("*.csv")))


@pytest.mark.parametrize("how", [str, joined])
def test_each_file_is_a_client(wards, how):
    dataset = how(wards)
    found, whole = data.load(dataset), data.load(wards.parent / "whole.csv")
    assert [client.name for client in found.clients] == ["ward_0", "ward_1", "ward_2"]
    for one, other in zip(found.clients, whole.clients, strict=True):
        for split in SPLITS:
            assert one.split(split).x.equal(other.split(split).x)
            assert one.split(split).y.equal(other.split(split).y)
    assert found.classes == whole.classes
    recipe = data.recipe(dataset)
    assert (recipe.partition, recipe.model) == ("natural", "mlp")


def test_a_column_of_clients_beside_files_of_clients_is_refused(wards):
    for path in wards.glob("*.csv"):
        written(path, pd.read_csv(path).assign(client=range(20)))
    with refuses("'client'.*client_column='file'"):
        data.load(wards)
    found = data.load(wards, client_column="file", exclude_columns=["client"])
    assert [client.name for client in found.clients] == ["ward_0", "ward_1", "ward_2"]


def test_a_note_is_repeated_by_each_load(wards):
    for _ in range(2):
        with pytest.warns(UserWarning, match="left out: readme.txt"):
            data.load(wards)


def test_the_command_takes_files_and_the_run_resumes(wards, capsys):
    out = wards.parent / "run"
    files = [str(path) for path in sorted(wards.glob("*.csv"))]
    main(["run", "--dataset", *files, "--rounds", "1", "--out", str(out)])
    assert Run(out).config["dataset"] == joined(wards)
    main(["resume", str(out)])
    assert "ward_2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ("wards/t.xlsx", r"t\.xlsx must be .*\.csv"),
        ("wards", r"t\.xlsx must be .*\.csv"),
        ("wards/ward_1.csv,ward_1.csv", r"'ward_1'.*Rename"),
        ("wards/ward_1.csv,there.csv", "there.csv"),
        ("wards/ward_1.csv,digts", "digts"),
        ("ward/ward_1.csv", "Did you mean 'wards/ward_1.csv'"),
        ("wards/Ward1.csv", "Did you mean 'wards/ward_1.csv'"),
        ("wardz", "did you mean 'wards'"),
    ],
)
def test_files_that_are_no_clients_are_refused(wards, monkeypatch, dataset, message):
    monkeypatch.chdir(wards.parent)
    (wards / "t.xlsx").write_bytes(b"PK")
    written(Path("ward_1.csv"), frame())
    with refuses(message) as refused:
        data.load(dataset)
    assert "\n" not in str(refused.value)


def test_frames_by_client_are_refused_with_the_call_that_joins_them():
    rows = {"age": [50, 61, 47] * 4, "label": [0, 1, 1] * 4}
    frames = {"a": pd.DataFrame(rows), "b": pd.DataFrame(rows)}
    with refuses(r"got 2 DataFrames\. Join them: pd\.concat"):
        as_data(frames, Reading(label_column="label", impute="mean"))
    joined = pd.concat(frames, names=["client"])
    assert as_data(joined).owner_names == ("a", "b")
    with refuses("Name a file or a dataset with dataset="):
        as_data("t.csv", Reading(client_column="ward"))
