"""One table for each client: a folder or a list of files, and .tsv tables."""

import os
from pathlib import Path

import pandas as pd
import pytest

from fedlayers.cli.app import main
from fl_core import data
from fl_core.data.loading import as_data
from fl_core.data.reading import PLAIN, Reading
from fl_core.data.table.prepare import find_faults
from fl_core.data.table.read import FILES, files_of, is_table, open_table
from fl_core.records.store import Run
from tests.conftest import refuses
from tests.made import SPLITS, frame, written


@pytest.fixture
def wards(tmp_path):
    """A folder with a file for each ward of a table, and beside it the whole table."""
    folder = tmp_path / "wards"
    folder.mkdir()
    for name, rows in frame().groupby("client"):
        ward_rows = rows.drop(columns="client")  # one file has another order of columns
        order = ward_rows.columns[:: -1 if name == "ward_1" else 1]
        written(folder / f"{name}.csv", ward_rows[order])
    (folder / "readme.txt").write_text("notes")
    written(tmp_path / "whole.csv", frame().sort_values("client", kind="stable"))
    return folder


def joined(folder):
    return ",".join(str(path) for path in sorted(folder.glob("*.csv")))


@pytest.mark.parametrize("how", [str, joined])
def test_each_file_is_a_client(wards, how):
    dataset = how(wards)
    of_files, whole = data.load(dataset), data.load(wards.parent / "whole.csv")
    assert [client.name for client in of_files.clients] == [
        "ward_0",
        "ward_1",
        "ward_2",
    ]
    for one, other in zip(of_files.clients, whole.clients, strict=True):
        for split in SPLITS:
            assert one.split(split).x.equal(other.split(split).x)
            assert one.split(split).y.equal(other.split(split).y)
    assert of_files.classes == whole.classes
    recipe = data.recipe(dataset)
    assert (recipe.partition, recipe.model) == ("natural", "mlp")


@pytest.mark.parametrize("name", ["NA", "null", "?"])
def test_the_name_of_a_file_is_no_missing_cell(wards, name):
    """It is a client's name, as that of a folder of images is."""
    (wards / "ward_0.csv").rename(wards / f"{name}.csv")
    clients = data.load(wards).names
    assert sorted(clients) == sorted([name, "ward_1", "ward_2"])


def test_a_column_of_clients_beside_files_of_clients_is_refused(wards):
    for path in wards.glob("*.csv"):
        written(path, pd.read_csv(path).assign(client=range(20)))
    with refuses("'client'.*client_column='file'"):
        data.load(wards)
    federated = data.load(wards, client_column="file", exclude_columns=["client"])
    assert [client.name for client in federated.clients] == [
        "ward_0",
        "ward_1",
        "ward_2",
    ]


def test_files_of_a_folder_are_its_visible_tables_in_order(tmp_path):
    """Texts and hidden files are none, and a folder of images has no table at all."""
    for name in ("b.tsv", "A.CSV", "c.parquet", "d.jsonl", ".e.csv", "f.txt"):
        (tmp_path / name).write_text("")
    names = ["A.CSV", "b.tsv", "c.parquet"]
    assert files_of(tmp_path) == [tmp_path / name for name in names]
    single = tmp_path / "x,b.tsv"
    assert files_of(single) == [tmp_path / "x", Path("b.tsv")]
    single.write_text("")  # a file whose name has a comma
    assert files_of(single) == files_of(tmp_path / "b.tsv") == []
    assert is_table(single)
    assert not is_table(tmp_path / "f.txt")
    (tmp_path / "ill").mkdir()
    (tmp_path / "ill/1.png").write_bytes(b"")
    assert files_of(tmp_path) == []
    assert not is_table(tmp_path)


def test_the_fault_of_one_of_several_files_names_no_option_of_all(wards):
    """Other files would be read with the option too. A single file is read with it."""
    odd = wards / "ward_1.csv"
    rows = pd.read_csv(odd)
    (fault,) = find_faults(written(odd, rows, sep=";"), PLAIN).faults[:1]
    assert fault.repair == {"csv": {"sep": ";"}}
    (fault,) = find_faults(wards, PLAIN).faults
    assert not fault.ways
    space = {"pd": pd}
    exec(fault.line, space)
    assert space["table"].equals(rows)


def test_options_of_csv_are_for_the_csv_files_of_several(wards):
    """A Parquet file by itself has no use for them."""
    options = Reading(csv={"sep": ";"}, scale="none")
    parquet = wards / "ward_1.parquet"
    for path in sorted(wards.glob("*.csv")):
        rows = pd.read_csv(path).assign(age=range(20))
        if path.stem == parquet.stem:
            path.unlink()
            rows.to_parquet(parquet)
        else:
            written(path, rows, sep=";")
    source = open_table(wards, options)
    assert source.frame.age.tolist() == [*range(20)] * 3
    assert source.frame.client.tolist() == sorted(frame().client)
    assert not source.faults
    for path, line in source.sources.items():
        assert eval(line, {"pd": pd}).age.tolist() == [*range(20)], path
    assert {*source.sources} == {*wards.glob("ward_*")}
    with refuses("says itself how it is written.*Leave out csv"):
        open_table(parquet, options)
    assert len(open_table(parquet, PLAIN).frame) == 20


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
        (
            "wards/ward_1.csv,ward_1.csv",
            r"'ward_1' in .*ward_1\.csv.*ward_1\.csv\. Rename",
        ),
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


def test_more_tables_than_are_read_are_refused_before_one_is_opened(tmp_path):
    for k in range(FILES + 1):
        (tmp_path / f"{k}.csv").touch()
    with refuses(f"must have at most {FILES:,} tables"):
        files_of(tmp_path)
    (tmp_path / "0.csv").unlink()
    assert len(files_of(tmp_path)) == FILES


@pytest.mark.parametrize("name", [b"\xff", b"c\n0", b"c\x1b[31m"])
def test_names_of_clients_that_are_no_text_are_refused(tmp_path, name):
    """They are names of files and of folders."""
    for folder, end in ((b"tables", b".csv"), (b"images/a", b"/1.png")):
        path = os.fsencode(tmp_path) + b"/" + folder + b"/" + name + end
        os.makedirs(os.path.dirname(path))
        with open(path, "w") as file:
            file.write("x,label\n1,0\n")
        whole = tmp_path / folder.decode().partition("/")[0]
        with refuses("must be text without control characters") as caught:
            data.load(whole)
        assert "\n" not in str(caught.value)
