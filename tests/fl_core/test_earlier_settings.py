"""Runs and exports with the settings of earlier versions are read; such a run is not continued."""

import json

import numpy as np
import pandas as pd
import pytest

import fedlayers as fl
from fl_core.data.inputs import Inputs
from fl_core.data.reading import Reading, current
from fl_core.data.table.prepare import read_table
from fl_core.records.store import Run
from tests.conftest import refuses
from tests.faults.injected import edit
from tests.made import frame, written

EARLIER = {
    "separator": ";",
    "encoding": "utf-8",
    "decimal": ".",
    "thousands": None,
    "missing": ["-9"],
    "keep_ids": True,
    "fold_case": True,
    "word_columns": ["bed"],
    "date_columns": ["day"],
    "label_numbers": False,
}


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A run with the configuration of an earlier version: semicolons, marks, record numbers, dates, and capitals."""
    folder = tmp_path_factory.mktemp("earlier")
    table = frame(holes=True).assign(record_id=range(60), bed=[1, 2] * 30)
    table = table.assign(day=19_000.0 + np.arange(60), sex=["f", "m", "m a"] * 20)
    path = written(folder / "t.csv", table, sep=";", na_rep="NA")
    keys = {
        "csv": {"sep": ";", "keep_default_na": True},
        "columns": ["age", "dose", "one", "record_id", "bed", "day", "sex"],
        "categories": ["bed"],
        "impute": "median",
    }
    fl.run(dataset=str(path), rounds=1, out=folder / "run", progress=False, **keys)
    expected = fl.load_models(folder / "run")[1].data.digest
    edit(folder / "run", csv=None, categories=None, columns=None, **EARLIER)
    days = pd.Timestamp("1970-01-01") + pd.to_timedelta(table["day"], "D")
    table["day"] = days.dt.strftime("%d.%m.%Y")
    table["sex"] = ["F", "m", " M  a"] * 20
    written(path, table, sep=";", na_rep="NA")
    return folder, expected


def test_a_run_of_an_earlier_version_is_read_and_exported(stored, tmp_path):
    folder, expected = stored
    assert Run(folder / "run").verify()
    assert fl.load_models(folder / "run")[1].data.digest == expected
    exported = fl.export(folder / "run", tmp_path / "model.safetensors")
    assert len(fl.predict(exported.path, folder / "t.csv").outputs) == 60


def test_it_is_not_continued(stored):
    message = (
        "separator, missing, word_columns, keep_ids, fold_case, date_columns"
        ".*csv={'sep': ';'}.*table\\['day'\\] ="
    )
    with refuses(message):
        fl.resume(stored[0] / "run", progress=False)


def test_only_stored_settings_change_cells():
    for options in ({"earlier": {"fold_case": True}}, {"date_columns": ["day"]}):
        with refuses("unknown option of csv"):
            Reading(csv=options)


def test_an_export_of_an_earlier_version_reads_new_rows_as_then():
    reading = {"label_column": "label", **EARLIER}
    about = {"shape": [3], "reading": reading}
    about["preprocessing"] = {"columns": ["age", "bed"], "categories": [[], ["1"]]}
    inputs = Inputs.from_json(json.loads(json.dumps(about)))
    assert inputs.reading.csv["sep"] == ";"
    assert inputs.reading.csv["keep_default_na"] is True
    rows = pd.DataFrame({"age": [50.0, 61.0], "bed": [1, 2]})
    for read in (inputs, Inputs.from_json(inputs.to_json())):
        assert read.samples(rows).x.tolist() == [[50, 1, 0], [61, 0, 1]]
        assert read.reading.csv["earlier"] == {
            "date_columns": ["day"],
            "fold_case": True,
        }


@pytest.mark.parametrize("kind", ["text.parquet", "dates.parquet", "text.jsonl"])
def test_files_that_say_how_they_are_written_are_read_as_then(tmp_path, kind):
    """Dates are days since 1970, and words have small letters, whatever the file."""
    day = pd.date_range("2023-01-01", periods=60)
    table = frame().assign(day=day.strftime("%d.%m.%Y"), sex=["F", "m", " M"] * 20)
    if kind.startswith("dates"):
        table["day"] = day
    path = tmp_path / kind
    if path.suffix == ".jsonl":
        table.to_json(path, orient="records", lines=True)
    else:
        table.to_parquet(path, index=False)
    with refuses("dates"):
        read_table(path, Reading(columns=["age", "day", "sex"]))
    stored = {"separator": ",", "fold_case": True, "date_columns": ["day"]}
    stored["columns"] = ["age", "day", "sex"]
    source = read_table(path, Reading(**current(stored, is_csv=False)[0]))
    days = source.x[:, source.columns.index("day")]
    assert days.tolist() == list(range(19_358, 19_418))
    assert source.categories[source.columns.index("sex")] == ("f", "m")
