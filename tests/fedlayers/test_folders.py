"""``fedlayers runs`` lists runs with their scores, and ``fedlayers clean`` removes what resume does not need."""

from types import SimpleNamespace

import pytest

from fedlayers.cli import folders
from fl_core import tree
from fl_core.config import RunConfig
from fl_core.errors import CorruptError
from fl_core.records.store import Run
from fl_core.records.writing import clean
from fl_core.rounds.recorder import Recorder
from fl_core.rows import frame
from fl_core.run import runner
from fl_core.run.exported_model import export
from fl_core.run.restore import load_models
from tests.conftest import refuses
from tests.fedlayers import command

CONFIG = RunConfig(
    dataset="heart",
    algorithm="fedper",
    rounds=4,
    epochs=1,
    checkpoint_every=1,
    eval_every=1,
    stack="off",
)


def size(path):
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


@pytest.fixture
def interrupted(tmp_path):
    runner.run(CONFIG, tmp_path / "study/one", progress=False, until=3)
    return tmp_path / "study/one"


def test_a_cleaned_run_is_verified_and_resumed_to_the_same_bits(interrupted, tmp_path):
    before, expected = (
        size(interrupted),
        runner.run(CONFIG, tmp_path / "whole"),
    )
    freed = clean(interrupted)
    assert 0 < before - size(interrupted) <= freed
    run = Run(interrupted)
    assert run.rounds == [3]
    assert run.verify()
    assert clean(interrupted) == 0
    with refuses("got 2"):
        load_models(interrupted, 2)
    resumed = runner.resume(interrupted)
    assert (
        resumed.listener(Recorder).rows
        == [
            {**row, "run": resumed.listener(Recorder).rows[0]["run"]}
            for row in expected.listener(Recorder).rows
        ][-len(resumed.listener(Recorder).rows) :]
    )
    assert tree.digest(resumed.server.trees["model"]) == tree.digest(
        expected.server.trees["model"]
    )
    assert run.verify()
    assert clean(interrupted) > 0
    assert run.verify()
    assert run.rounds == [4]


def test_the_best_rounds_of_a_stopping_rule_stay(tmp_path):
    config = RunConfig(
        dataset="heart",
        algorithm="fedper",
        rounds=8,
        lr=0.05,
        checkpoint_every=1,
        eval_every=1,
        patience=2,
    )
    runner.run(config, tmp_path / "run")
    run = Run(tmp_path / "run")
    rule, before = run.stopping_rule(), run.rounds
    assert rule is not None
    clean(run.path)
    assert run.rounds == sorted({before[-1], *rule.best.values()})
    assert len(run.rounds) < len(before)
    assert run.verify()
    assert load_models(run.path, "best", "personal")[0]
    exported = export(run.path, tmp_path / "va.safetensors", client="va").about["run"]
    assert (exported["model"], exported["round"]) == ("personal", rule.best["personal"])


def test_a_damaged_run_is_left_as_it_is(interrupted):
    blob = next(
        entry["blob"]
        for entry in Run(interrupted).manifest(3)["states"].values()
        if entry["blob"]
    )
    (interrupted / f"blobs/{blob}.safetensors").write_bytes(b"x")
    before = size(interrupted)
    with pytest.raises(CorruptError):
        clean(interrupted)
    assert size(interrupted) == before


def test_a_clean_that_was_stopped_is_finished_by_the_next(interrupted, monkeypatch):
    from fl_core.storage import Folder

    remove, left = Folder.remove, [3]

    def stopped(self, path):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        remove(self, path)

    with monkeypatch.context() as patch:
        patch.setattr(Folder, "remove", stopped)
        with pytest.raises(KeyboardInterrupt):
            clean(interrupted)
    assert Run(interrupted).verify()
    clean(interrupted)
    named = {
        entry["blob"] for entry in Run(interrupted).manifest(3)["states"].values()
    } - {""}
    assert {path.stem for path in (interrupted / "blobs").iterdir()} == named


def test_a_study_writes_few_checkpoints(tmp_path, interrupted):
    """A run that ends or pauses within the least time has its last checkpoint alone, and the bits of any other."""
    path = tmp_path / "quick"
    runner.run(CONFIG, path, until=3, save_seconds=1e9)
    run, other = Run(path), Run(interrupted)
    assert (run.rounds, other.rounds) == ([3], [1, 2, 3])
    states = [stored_run.manifest(3)["states"] for stored_run in (run, other)]
    assert states[0] == states[1]
    assert run.rows()[1].drop(columns="run").equals(other.rows()[1].drop(columns="run"))
    runner.resume(path, save_seconds=1e9)
    assert run.rounds == [3, 4]
    assert run.verify()


def test_the_commands_go_through_a_folder(interrupted, capsys):
    study = interrupted.parent
    runner.run(
        RunConfig(dataset="heart", rounds=1, stack="off"),
        study / "arms/two",
        progress=False,
    )
    (study / "broken").mkdir()
    (study / "broken/config.json").write_text("{")
    command(f"runs {study}")
    lines = capsys.readouterr().out.splitlines()
    assert any(
        "arms/two" in line and "fedavg" in line and "1/1" in line and "0." in line
        for line in lines
    )
    assert any("one" in line and "fedper" in line and "3/4" in line for line in lines)
    assert any("broken" in line and "damaged" in line for line in lines)
    assert lines == [line.rstrip() for line in lines]
    command(f"clean {study}")
    printed = capsys.readouterr().out
    assert "MB" in printed
    assert Run(interrupted).rounds == [3]
    with pytest.raises(SystemExit):
        command(f"runs {study / 'nowhere'}")
    assert "nowhere" in capsys.readouterr().err


def test_a_run_without_a_score_has_none_in_the_list():
    assert folders._scores(SimpleNamespace(rows=lambda: (None, frame([])))) == {}
