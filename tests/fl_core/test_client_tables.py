"""One table for each client: a folder or a list of files, and .tsv tables."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fedlayers.cli.app import main
from fl_core import data
from fl_core.errors import UsageError
from fl_core.records.store import Run
from tests.fl_core.test_tables import SPLITS, frame, samples, written


@pytest.fixture
def wards(tmp_path: Path) -> Path:
    """A folder with a file for each ward of a table, and beside it the whole table."""
    folder = tmp_path / "wards"
    folder.mkdir()
    for name, rows in frame().groupby("client"):
        written(folder / f"{name}.csv", rows.drop(columns="client"))
    (folder / "readme.txt").write_text("notes")
    written(tmp_path / "whole.csv", frame().sort_values("client", kind="stable"))
    return folder


def joined(folder: Path) -> str:
    return ",".join(str(path) for path in sorted(folder.glob("*.csv")))


@pytest.mark.parametrize("how", [str, joined])
def test_each_file_is_a_client(wards: Path, how) -> None:
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


def test_columns_may_stand_in_another_order(wards: Path) -> None:
    before = samples(data.load(wards), *SPLITS)
    table = pd.read_csv(wards / "ward_1.csv")
    written(wards / "ward_1.csv", table[table.columns[::-1]])
    assert (samples(data.load(wards), *SPLITS) == before).all()


def test_two_files_of_one_name_are_refused(wards: Path) -> None:
    (wards / "more").mkdir()
    again = written(wards / "more/ward_1.csv", pd.read_csv(wards / "ward_1.csv"))
    with pytest.raises(UsageError, match=r"'ward_1'.*[Rr]ename"):
        data.load(f"{joined(wards)},{again}")


def test_a_column_of_clients_beside_files_of_clients_is_refused(wards: Path) -> None:
    for path in wards.glob("*.csv"):
        written(path, pd.read_csv(path).assign(client=range(20)))
    with pytest.raises(UsageError, match=r"'client'.*--client-column"):
        data.load(wards)
    found = data.load(wards, client_column="file", exclude_columns=["client"])
    assert [client.name for client in found.clients] == ["ward_0", "ward_1", "ward_2"]


@pytest.mark.parametrize("missing", ["there.csv", "is not"])
def test_a_file_that_is_not_there_is_named(wards: Path, missing: str) -> None:
    with pytest.raises(UsageError, match=missing):
        data.load(f"{joined(wards)},{missing}")


def test_images_stay_images_though_a_table_lies_beside_them(tmp_path: Path) -> None:
    from PIL import Image

    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for k in range(10):
            Image.fromarray(np.full((4, 4), 20 * k, np.uint8)).save(
                tmp_path / name / f"{k}.png"
            )
    (tmp_path / "notes.csv").write_text("a,b\n1,2\n")
    assert data.load(tmp_path, partition="iid", clients=2).classes == ("cat", "dog")


def test_the_command_takes_files_and_the_run_resumes(
    wards: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = wards.parent / "run"
    files = [str(path) for path in sorted(wards.glob("*.csv"))]
    main(["run", "--dataset", *files, "--rounds", "1", "--out", str(out)])
    assert Run(out).config["dataset"] == joined(wards)
    main(["resume", str(out)])
    assert "ward_2" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(
            [
                "run",
                "--dataset",
                files[0],
                "digts",
                "--out",
                str(wards.parent / "other"),
            ]
        )
    assert "digts" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["file", "folder"])
def test_an_excel_table_says_what_to_save_it_as(wards: Path, place: str) -> None:
    (wards / "t.xlsx").write_bytes(b"PK")
    dataset = wards / "t.xlsx" if place == "file" else wards
    for read in (data.load, data.recipe):
        with pytest.raises(UsageError, match=r"t\.xlsx must be .*\.csv") as refused:
            read(dataset)
        assert "\n" not in str(refused.value)
