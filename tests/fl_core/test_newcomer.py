"""A client that took no part in training gets the shared layers and a few epochs of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import fedlayers as fl
from fedlayers.cli.main import main
from fl_core import rows, runner, tree
from fl_core.data import FederatedData
from fl_core.layers import layers_of
from fl_core.records import writing
from fl_core.training import evaluate
from tests.conftest import CONFIG, TOY, network

SAMPLES = {
    c.name: (torch.cat([c.train.x, c.validation.x, c.test.x]), torch.cat([c.train.y, c.validation.y, c.test.y]))
    for c in TOY.clients
}
LEFT = "b"


def left_out(out: Path | None = None, own_epochs: tuple[int, ...] = (0, 1, 2, 5), **changes: Any) -> fl.RunResult:
    """A run without one client, which tries its model at the end."""
    config = replace(CONFIG, leave_out_client=LEFT, lr=0.1, **changes)
    return fl.run(config, out, data=SAMPLES, model=network("plain"), progress=False, own_epochs=own_epochs)


def plan(shared: int) -> fl.LayerPlan:
    layers = layers_of(network("plain"), TOY.clients[0].train.x[:2])
    return fl.LayerPlan(layers, ()).with_first(shared)


def alone_federation(data: FederatedData) -> FederatedData:
    assert data.left_out is not None
    return replace(data, clients=(data.left_out,), left_out=None)


def values(result: fl.RunResult, model: str, epochs: int, split: str = "test") -> dict[str, float]:
    assert result.newcomer is not None
    frame = result.newcomer.frame
    chosen = frame[(frame["model"] == model) & (frame["variant"] == str(epochs)) & (frame["split"] == split)]
    return chosen.set_index("metric")["value"].to_dict()


def test_it_takes_no_part_in_training():
    """The run is that of the other clients alone."""
    result = left_out(algorithm="fedavg")
    rest = {name: pair for name, pair in SAMPLES.items() if name != LEFT}
    others = fl.run(replace(CONFIG, lr=0.1), data=rest, model=network("plain"), progress=False)
    assert LEFT not in set(result.to_frame()["client"])
    ours, theirs = (each.engine.data.clients for each in (result, others))
    assert [client.name for client in ours] == [client.name for client in theirs] == ["a", "c", "d"]


def test_with_everything_shared_and_no_own_epochs_it_scores_the_global_model():
    result = left_out(algorithm="fedavg")
    client = result.engine.data.left_out
    model = result.models["a"]
    with torch.no_grad():
        expected = evaluate.scores(model(client.test.x), client.test.y, result.engine.client_runner.criterion, 1)
    found = values(result, "joined", 0)
    assert found
    assert found == {name: pytest.approx(expected[name], abs=1e-7) for name in found}


@pytest.mark.parametrize("epochs", [1, 2, 5])
def test_with_nothing_shared_it_is_local_training_from_the_start(epochs):
    """Bit for bit, whatever the others did."""
    result = fl.run(
        replace(CONFIG, algorithm="fedper", leave_out_client=LEFT, lr=0.1),
        data=SAMPLES,
        model=network("plain"),
        plan=plan(0),
        progress=False,
    )
    local = replace(CONFIG, algorithm="local", lr=0.1, rounds=epochs, epochs=1)
    alone = runner.run(local, data=alone_federation(result.engine.data), model=network("plain"), progress=False)
    for split in ("validation", "test"):
        last = [r for r in alone.rows if r["round"] == epochs and r["model"] == "personal" and r["split"] == split]
        expected = {r["metric"]: r["value"] for r in last}
        for model in ("joined", "alone"):
            found = values(result, model, epochs, split)
            assert found
            assert found == {name: expected[name] for name in found}


def test_its_own_layers_train_on_frozen_shared_ones():
    result = fl.run(
        replace(CONFIG, algorithm="fedper", leave_out_client=LEFT, lr=0.1),
        data=SAMPLES,
        model=network("plain"),
        plan=plan(2),
        progress=False,
        own_epochs=(3,),
    )
    made = result.newcomer
    assert set(made.frame["model"]) == {"joined", "joined_head", "alone"}
    chosen = tree.state_dict(made.model)
    shared = {
        name: tensor for name, tensor in result.engine.server.trees["model"].items() if name.startswith(("fc1", "fc2"))
    }
    same = all(torch.equal(chosen[name], tensor) for name, tensor in shared.items())
    assert same == (made.best[0] == "joined_head")


def test_nothing_is_fitted_on_it():
    """Columns are scaled by the others' training samples."""
    draw = np.random.default_rng(0)
    frame = pd.DataFrame(
        {"client": np.repeat(["a", "b", "c"], 40), "u": draw.normal(size=120), "v": draw.normal(size=120)}
    )
    frame["label"] = (frame["u"] > 0).astype(int)
    frame.loc[frame["client"] == "b", "u"] += 100
    task = fl.assemble(replace(CONFIG, leave_out_client="b"), data=frame)
    assert abs(task.data.preprocessing.centre[0]) < 1
    assert float(task.data.left_out.test.x[:, 0].mean()) > 50
    assert task.data.digest != fl.assemble(CONFIG, data=frame).data.digest


def test_its_scores_are_stored_with_the_run_and_resume_gives_them_again(tmp_path):
    result = left_out(tmp_path / "run", algorithm="fedavg")
    stored = rows.read(tmp_path / "run" / "left_out.jsonl")[1]
    pd.testing.assert_frame_equal(stored, result.newcomer.frame)
    assert set(stored["status"]) == {"ok"}
    assert result.newcomer.text() in repr(result)
    assert len(result.newcomer.text().splitlines()) == 1
    again = fl.resume(tmp_path / "run", data=SAMPLES, model=network("plain"), progress=False)
    pd.testing.assert_frame_equal(again.newcomer.frame, result.newcomer.frame)


def test_a_new_client_joins_a_finished_run_as_if_it_had_been_left_out(tmp_path):
    """Given the same samples in the same splits, both ways give the same scores."""
    rest = {name: pair for name, pair in SAMPLES.items() if name != LEFT}
    model = network("plain")
    fl.run(replace(CONFIG, algorithm="fedper", lr=0.1), tmp_path / "run", data=rest, model=model, progress=False)
    made = fl.join(
        tmp_path / "run",
        SAMPLES[LEFT],
        client=LEFT,
        epochs=(0, 2),
        out=tmp_path / "b.safetensors",
        data=rest,
        model=model,
    )
    assert {"joined", "joined_head", "alone"} == set(made.frame["model"])
    assert set(made.frame["variant"]) == {"0", "2", "3"}
    new = SAMPLES[LEFT][0]
    with torch.no_grad():
        expected = made.model(new)
    assert torch.equal(fl.predict(tmp_path / "b.safetensors", new.numpy(), model=model).outputs, expected)


def test_a_new_client_joins_a_run_that_still_trains(tmp_path):
    """It gets the newest checkpoint. The lock that the run holds does not matter, for nothing is written."""
    rest = {name: pair for name, pair in SAMPLES.items() if name != LEFT}
    config, model = replace(CONFIG, algorithm="fedper", rounds=3), network("plain")
    short, whole = (tmp_path / name for name in ("short", "whole"))
    runner.run(config, short, data=rest, model=model, progress=False, until=2)
    fl.run(replace(config, rounds=2), whole, data=rest, model=model, progress=False)
    with writing.reopen(short):
        running = fl.join(short, SAMPLES[LEFT], client=LEFT, epochs=(0, 1), data=rest, model=model)
    ended = fl.join(whole, SAMPLES[LEFT], client=LEFT, epochs=(0, 1), data=rest, model=model)
    assert set(running.frame["round"]) == {2}
    first, second = (f[f["model"] != "alone"].drop(columns="run") for f in (running.frame, ended.frame))
    pd.testing.assert_frame_equal(first, second)


def test_a_table_joins_with_the_preparation_of_the_run(tmp_path, monkeypatch, capsys):
    frame = pd.read_csv("fl_core/data/named/heart.csv")
    monkeypatch.chdir(tmp_path)
    frame[frame["hospital"] != "va"].to_csv("three.csv", index=False)
    va = frame[frame["hospital"] == "va"]
    va.to_csv("va.csv", index=False)
    asked = {"client_column": "hospital", "label_column": "num", "impute": "median", "lr": 0.01}
    fl.run(dataset="three.csv", rounds=2, algorithm="fedper", out="run", progress=False, **asked)
    main(["join", "run", "--data", "va.csv", "--client", "va", "--own-epochs", "0", "1", "--out", "va.safetensors"])
    assert fl.predict("va.safetensors", "va.csv").labels
    by_file = fl.join("run", "va.csv", client="va", epochs=(0, 1))
    assert by_file.text() in capsys.readouterr().out
    by_frame = fl.join("run", va, client="va", epochs=(0, 1))
    pd.testing.assert_frame_equal(by_file.frame, by_frame.frame)
    frame.to_csv("four.csv", index=False)
    for whole in ("four.csv", frame):
        pd.testing.assert_frame_equal(by_file.frame, fl.join("run", whole, client="va", epochs=(0, 1)).frame)
    with pytest.raises(fl.UsageError, match="cleveland, hungarian, switzerland, va"):
        fl.join("run", "four.csv", epochs=(0, 1))
    assert by_file.table.loc[[0, 1], "joined"].between(0, 1).all()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"leave_out_client": "z"}, "unknown client to leave out 'z'"),
        ({"algorithm": "fedamp"}, "one common model"),
        ({"algorithm": "fedrod"}, "one common model"),
        ({"algorithm": "pfedhn"}, "one common model"),
    ],
)
def test_what_no_new_client_can_use_is_refused(changes, said):
    with pytest.raises(fl.UsageError, match=said):
        fl.run(
            replace(CONFIG, **{"leave_out_client": LEFT, **changes}),
            data=SAMPLES,
            model=network("plain"),
            progress=False,
        )


def test_it_trains_with_the_run_s_class_weights_and_may_lack_a_class():
    x, y = SAMPLES[LEFT]
    data = {**SAMPLES, LEFT: (x, torch.zeros_like(y))}
    config = replace(CONFIG, leave_out_client=LEFT, class_weights="balanced")
    result = fl.run(config, data=data, model=network("plain"), progress=False, own_epochs=(1,))
    assert {"joined", "alone"} == set(result.newcomer.frame.dropna(subset="value")["model"])
    weights = result.engine.client_runner.criterion.weights
    named = replace(config, class_weights=",".join(map(str, weights)))
    again = fl.run(named, data=data, model=network("plain"), progress=False, own_epochs=(1,))
    pd.testing.assert_frame_equal(again.newcomer.frame, result.newcomer.frame)


def test_what_it_cannot_train_with_is_refused_before_the_run(tmp_path):
    out = tmp_path / "run"
    with pytest.raises(fl.UsageError, match="epochs"):
        left_out(out, own_epochs=(-1,))
    with pytest.raises(fl.UsageError, match="leave_out_client"):
        fl.run(CONFIG, out, data=SAMPLES, model=network("plain"), progress=False, own_epochs=(3,))
    done = tmp_path / "done"
    fl.run(CONFIG, done, data=SAMPLES, model=network("plain"), progress=False)
    with pytest.raises(fl.UsageError, match="leave_out_client"):
        fl.resume(done, data=SAMPLES, model=network("plain"), progress=False, own_epochs=(3,))
    few = {**SAMPLES, LEFT: tuple(each[:3] for each in SAMPLES[LEFT])}
    config = replace(CONFIG, leave_out_client=LEFT)
    with pytest.raises(fl.UsageError, match=f"'{LEFT}'.*batches"):
        fl.run(config, out, data=few, model=network("norm"), progress=False)
    assert not out.exists()


def test_a_federation_that_was_prepared_with_it_is_refused():
    prepared = fl.from_clients(
        {name: (x.flatten(1).numpy(), y.numpy()) for name, (x, y) in SAMPLES.items()}, scale="standard"
    )
    with pytest.raises(fl.UsageError, match="leave_out_client"):
        fl.run(replace(CONFIG, leave_out_client=LEFT), data=prepared, progress=False)
    task = fl.assemble(replace(CONFIG, leave_out_client=LEFT), data=TOY, model=network("plain"))
    assert task.data.left_out is TOY.client(LEFT)


def test_under_a_stopping_rule_it_starts_from_the_best_round(tmp_path):
    """With a directory or without, it gets the same."""
    changes = {"algorithm": "fedavg", "patience": 2, "rounds": 8, "eval_every": 1, "lr": 0.5, "optimizer": "sgd"}
    config = replace(CONFIG, leave_out_client=LEFT, **changes)
    made = [
        fl.run(config, out, data=SAMPLES, model=network("plain"), progress=False, own_epochs=(0, 1))
        for out in (None, tmp_path / "run")
    ]
    memory, disk = (each.newcomer.frame.drop(columns="run") for each in made)
    rule = made[0].engine.stopping
    assert set(memory["round"]) == {rule.best[rule.main]} != {made[0].done}
    pd.testing.assert_frame_equal(memory, disk)
