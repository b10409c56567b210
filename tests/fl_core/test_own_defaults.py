"""Own tables are scaled unless told otherwise, and columns that number the records are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fedlayers.cli.app import main
from fl_core import data, runner
from fl_core.config import RunConfig, in_memory, resolve
from fl_core.data.registry import PATIENCE
from fl_core.data.roles import is_identifier
from fl_core.errors import UsageError
from tests.fl_core.test_tables import frame, samples, written


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return written(tmp_path / "t.csv", frame())


def test_own_tables_are_scaled_by_default(table: Path) -> None:
    assert resolve(RunConfig(dataset=str(table))).data.scale == "standard"
    assert resolve(RunConfig(dataset=str(table), scale="none")).data.scale == "none"
    found = samples(data.load(table), "train")
    assert found.mean(axis=0) == pytest.approx(0, abs=1e-5)
    assert found[:, :2].std(axis=0) == pytest.approx(1, abs=1e-5)
    assert samples(data.load(table, scale="none"), "train")[:, 0].mean() > 40


def test_runs_on_own_data_stop_when_they_no_longer_improve(table: Path) -> None:
    own = resolve(RunConfig(dataset=str(table)))
    assert (
        own.federation.patience,
        own.federation.rounds,
        own.execution.eval_every,
    ) == (PATIENCE, 100, 2)
    assert resolve(own) == own
    assert resolve(RunConfig(dataset=str(table), patience=0)).federation.patience == 0
    for config in (RunConfig(dataset="heart"), RunConfig(dataset="heart", patience=3)):
        assert resolve(config).federation.patience == (config.federation.patience or 0)
    ready = data.load(table)
    assert resolve(in_memory(RunConfig(), ready)).federation.patience == 0


def test_without_enough_validation_samples_only_what_was_asked_for_is_refused(
    tmp_path: Path,
) -> None:
    clients = [
        {"client": name, "a": k, "label": k / 7}
        for name, size in (("n", 40), ("s", 3))
        for k in range(size)
    ]
    config = RunConfig(
        dataset=str(written(tmp_path / "t.csv", pd.DataFrame(clients))),
        task="regression",
    )
    task = runner.assemble(config)
    assert task.config.federation.patience == 0
    assert any("validation" in note and "s" in note for note in task.said)
    with pytest.raises(UsageError, match=r"patience.*'?s'?.*--patience 0"):
        runner.assemble(config.with_keys(patience=3))


@pytest.mark.parametrize(
    "name", ["record_id", "PatientID", "patientid", "id", "stayId", "Subject ID", "MRN"]
)
def test_columns_are_identifiers_by_name_and_values(name: str) -> None:
    assert is_identifier(name, [str(k) for k in range(30, 0, -1)])
    assert is_identifier(name, np.arange(30.0))
    assert is_identifier(name, [f"P{k}" for k in range(30)])
    assert not is_identifier(name, ["1", "2", "2"])
    assert not is_identifier(name, np.arange(30.0) + 0.5)
    assert is_identifier(name, ["1", "2", "P3"])


def test_an_id_column_is_refused_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(
        tmp_path / "t.csv",
        frame().assign(record_id=range(1000, 1060), StayID=range(60)),
    )
    for words in (["run", "--rounds", "1"], ["choose", "--rounds", "1"]):
        with pytest.raises(SystemExit):
            main(
                [
                    *words,
                    "--dataset",
                    str(path),
                    "--exclude-columns",
                    "one",
                    "--out",
                    str(tmp_path / "out"),
                ]
            )
        said = capsys.readouterr().err
        assert "--exclude-columns one record_id StayID" in said
        assert "--keep-ids" in said
        assert not (tmp_path / "out").exists()
    assert data.load(path, exclude_columns=["record_id", "StayID"]).shape == (3,)
    assert data.load(path, keep_ids=True).shape == (5,)
    with pytest.raises(UsageError, match="record_id"):
        data.load(path, columns=["age", "record_id"])


WIDE = [f"lab_{k}" for k in range(40)]


@pytest.mark.parametrize(
    ("header", "likely"),
    [
        ([*WIDE, "died", "ward_name"], ["died", "--client-column ward_name"]),
        (["Hospital", *WIDE, "outcome"], ["outcome", "--client-column Hospital"]),
        ([*WIDE, "lable"], ["lable"]),
        (["y", *WIDE], ["y"]),
        ([*WIDE, "septic"], ["septic"]),
    ],
)
def test_a_label_that_is_not_there_names_the_likeliest_and_the_flags(
    tmp_path: Path, header: list[str], likely: list[str]
) -> None:
    path = tmp_path / "t.csv"
    lines = [header, "1" * len(header), "0" * len(header)]
    path.write_text("\n".join(map(",".join, lines)))
    for read in (data.recipe, data.load):
        with pytest.raises(UsageError, match=r"--label-column.*'label'") as refused:
            read(path)
        said = str(refused.value)
        assert f"--label-column {likely[0]}" in said
        assert all(each in said for each in likely)
        assert "lab_20" not in said
        assert len(said) < 300 + len(str(path))


def test_clients_number_their_records_each_for_itself() -> None:
    numbers, owner = [str(k % 20) for k in range(60)], np.arange(60) // 20
    assert is_identifier("record_id", numbers, owner)
    assert is_identifier("record_id", np.array(numbers, dtype=float), owner)
    assert not is_identifier(
        "visit_id", [str(k % 5) for k in range(60)], np.arange(60) // 5
    )
