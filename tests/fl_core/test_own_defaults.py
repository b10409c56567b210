"""Own tables are scaled unless told otherwise, and columns that number the records are refused."""

import warnings

import pandas as pd
import pytest

from fedlayers.cli.app import main
from fl_core import data
from fl_core.config import RunConfig, resolve
from fl_core.data.registry import PATIENCE
from fl_core.run import runner
from tests.conftest import refuses
from tests.made import frame, samples, written


@pytest.fixture
def table(tmp_path):
    return written(tmp_path / "t.csv", frame())


def test_own_tables_are_scaled_by_default(table):
    assert resolve(RunConfig(dataset=str(table))).data.scale == "standard"
    assert resolve(RunConfig(dataset=str(table), scale="none")).data.scale == "none"
    scaled = samples(data.load(table), "train")
    assert scaled.mean(axis=0) == pytest.approx(0, abs=1e-5)
    assert scaled[:, :2].std(axis=0) == pytest.approx(1, abs=1e-5)
    assert samples(data.load(table, scale="none"), "train")[:, 0].mean() > 40


def test_runs_on_own_data_stop_when_they_no_longer_improve(table):
    resolved = resolve(RunConfig(dataset=str(table)))
    assert (
        resolved.federation.patience,
        resolved.federation.rounds,
        resolved.execution.eval_every,
    ) == (PATIENCE, 100, 2)
    assert resolve(resolved) == resolved
    assert resolve(RunConfig(dataset=str(table), patience=0)).federation.patience == 0
    for config in (RunConfig(dataset="heart"), RunConfig(dataset="heart", patience=3)):
        assert resolve(config).federation.patience == (config.federation.patience or 0)
    ready = data.load(table)
    assert resolve(RunConfig(), ready).federation.patience == 0


def test_without_enough_validation_samples_only_what_was_asked_for_is_refused(
    tmp_path,
):
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
    with refuses(r"patience.*'?s'?.*patience=0"):
        runner.assemble(config.with_keys(patience=3))


@pytest.mark.parametrize(
    ("name", "unique"), [("subject", False), ("Fall-Nr", True), ("lab_nr", True)]
)
def test_an_identifier_is_refused_with_the_remedy_that_fits(
    tmp_path, capsys, name, unique
):
    """One without repeats is left out. The rows of one that repeats stay in one split, or a warning says so."""
    values = range(60) if unique else [k // 6 for k in range(60)]
    path = written(tmp_path / "t.csv", frame().assign(**{name: values}))
    together = f"group_column='{name}'"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out = data.load(path, exclude_columns=[name])
    assert any(together in str(warning.message) for warning in caught) != unique
    assert name not in out.preprocessing.columns
    only = written(tmp_path / "o.csv", pd.read_csv(path)[[name, "label"]])
    with pytest.raises(SystemExit):
        main(["check", str(only)])
    error = "".join(capsys.readouterr())
    assert f"column '{name}'" in error
    assert "like an identifier" in error


WIDE = [f"lab_{k}" for k in range(40)]


@pytest.mark.parametrize(
    ("header", "likely"),
    [
        ([*WIDE, "died", "ward_name"], ["died", "client_column='ward_name'"]),
        (["Hospital", *WIDE, "outcome"], ["outcome", "client_column='Hospital'"]),
        ([*WIDE, "lable"], ["lable"]),
    ],
)
def test_a_label_that_is_not_there_names_the_likeliest_and_the_flags(
    tmp_path, header, likely
):
    path = tmp_path / "t.csv"
    lines = [header, "1" * len(header), "0" * len(header)]
    path.write_text("\n".join(map(",".join, lines)))
    for read in (data.recipe, data.load):
        with refuses(r"label_column.*'label'") as refused:
            read(path)
        message = str(refused.value)
        assert f"label_column='{likely[0]}'" in message
        assert all(name in message for name in likely)
        assert "lab_20" not in message
        assert len(message) < 300 + len(str(path))
