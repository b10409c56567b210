"""Predictions name the records of their table, and an export picks the model that the run evaluates."""

import pandas as pd
import pytest

from fedlayers.cli.app import main
from fl_core.config import RunConfig
from fl_core.run import exported_model, runner
from tests.conftest import refuses
from tests.made import frame, written


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    return written(
        tmp_path_factory.mktemp("table") / "t.csv",
        frame().assign(record_id=[f"P{k:03}" for k in range(60)], bed=5),
    )


@pytest.fixture(scope="module")
def run(table):
    config = RunConfig(
        dataset=str(table),
        rounds=1,
        batch_size=8,
        exclude_columns=["record_id", "bed"],
    )
    runner.run(config, table.parent / "fedavg", progress=False)
    return table.parent / "fedavg"


def test_predictions_carry_the_records_names(run, table, tmp_path):
    exported_model.export(run, tmp_path / "a.safetensors")
    out = tmp_path / "predictions.csv"
    for words, names in (
        ([], ["record_id"]),
        (["--id-columns", "bed", "age"], ["bed", "age"]),
    ):
        main(
            [
                "predict",
                str(tmp_path / "a.safetensors"),
                "--data",
                str(table),
                "--out",
                str(out),
                *words,
            ]
        )
        predicted = pd.read_csv(out)
        assert list(predicted.columns)[: 2 + len(names)] == [
            "sample",
            *names,
            "predicted",
        ]
        for name in names:
            assert (
                predicted[name].astype(str).tolist()
                == pd.read_csv(table)[name].astype(str).tolist()
            )
    predictions = exported_model.predict(tmp_path / "a.safetensors", pd.read_csv(table))
    assert (
        predictions.frame()["record_id"].tolist()
        == pd.read_csv(table)["record_id"].tolist()
    )
    with refuses("'bed'"):
        exported_model.predict(tmp_path / "a.safetensors", table, ids=["beds"])
    with refuses("table"):
        exported_model.predict(
            tmp_path / "a.safetensors",
            frame()[["age", "dose", "one"]].to_numpy(),
            ids=["bed"],
        )


def test_an_unknown_id_column_is_refused_with_the_nearest(run, table, tmp_path, capsys):
    exported_model.export(run, tmp_path / "a.safetensors")
    with pytest.raises(SystemExit):
        main([
            "predict", str(tmp_path / "a.safetensors"), "--data", str(table),
            "--id-columns", "bedd",
        ])  # fmt: skip
    assert "did you mean 'bed'?" in capsys.readouterr().err
