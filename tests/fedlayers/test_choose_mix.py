"""The mixture of a race: its weights and log loss against a dense reference, its file, and what has none."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import optimize, special

from fedlayers.studies import mixture
from fedlayers.studies.choice import Choice
from fedlayers.studies.choose import choose
from fedlayers.studies.race import Entry
from fl_core.config import RunConfig
from fl_core.errors import CorruptError, UsageError
from fl_core.exported_model import export
from fl_core.mixture import FILE, Mixture, load
from fl_core.records.store import Run
from fl_core.storage.files import sign
from fl_core.stored_models import load_models
from tests.fl_core.test_survival_and_labels import TASKS, frame

CONFIG = RunConfig(dataset="heart", rounds=4, eval_every=1, lr=0.01)


@pytest.fixture(scope="module")
def raced(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Choice]:
    out = tmp_path_factory.mktemp("mix") / "out"
    return out, choose(CONFIG, out, mix=True)


def probabilities(out: Path, arm: str) -> np.ndarray:
    """Return what an arm's models give the true classes of all validation samples, by a way of its own."""
    models, task = load_models(out / "arms" / f"{arm}-0", which="personal")
    found = []
    for client in task.data.clients:
        with torch.no_grad():
            outputs = models[client.name].eval()(client.validation.x).double().numpy()
        found.append(special.softmax(outputs, axis=1)[np.arange(len(client.validation)), client.validation.y.numpy()])
    return np.concatenate(found)


def test_weights_and_log_losses_are_those_of_a_dense_reference(raced: tuple[Path, Choice]) -> None:
    out, choice = raced
    found = choice.mixture
    assert found is not None
    arms = list(found.evidence["losses"])
    table = np.stack([probabilities(out, arm) for arm in arms])
    clients = load_models(out / "arms" / "half-0", which="personal")[1].data.clients
    counts = np.concatenate([np.full(len(c.validation), len(c.train) / len(c.validation)) for c in clients])

    def loss(weights: Any) -> float:
        return -float(np.average(np.log(weights @ table), weights=counts))

    reference = optimize.minimize(
        loss, np.full(4, 0.25), bounds=[(0, 1)] * 4, method="SLSQP", options={"ftol": 1e-14},
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1},
    )  # fmt: skip
    by_name = {member.name: member.weight for member in found.members}
    weights = np.array([by_name.get(arm, 0) for arm in arms])
    assert weights.sum() == pytest.approx(1)
    assert loss(weights) == pytest.approx(reference.fun, abs=1e-3)  # small weights are left out
    assert found.evidence["loss"] == pytest.approx(loss(weights), abs=1e-6)
    assert found.evidence["loss"] < found.evidence["losses"][choice.winner.name]
    for arm, weight in zip(arms, np.eye(4), strict=True):
        assert found.evidence["losses"][arm] == pytest.approx(loss(weight), abs=1e-6)


def test_it_is_told_and_stored_and_stays_when_the_command_runs_again(raced: tuple[Path, Choice]) -> None:
    out, choice = raced
    found = choice.mixture
    assert found is not None
    assert load(out) == found
    assert json.loads((out / "choice.json").read_text())["mixture"] == found.to_json()
    assert f"needs {len(found.members)} models, " in choice.text()
    assert found.n_bytes == len(found.members) * 4 * sum(
        parameter.numel() for parameter in load_models(out / "arms" / "half-0", which="personal")[0]["va"].parameters()
    )
    before = (out / FILE).read_bytes()
    again = choose(CONFIG, out, mix=True)
    assert again.mixture == found
    assert (out / FILE).read_bytes() == before


def test_what_is_exported_has_the_log_loss_of_the_race(raced: tuple[Path, Choice], tmp_path: Path) -> None:
    out, choice = raced
    assert choice.mixture is not None
    lost, sizes = [], []
    for client in load_models(out / "arms" / "half-0", which="personal")[1].data.clients:
        model = export(out, tmp_path / client.name, client=client.name).model()
        with torch.no_grad():
            lost.append(float(torch.nn.functional.nll_loss(model(client.validation.x), client.validation.y)))
        sizes.append(len(client.train))
    assert np.average(lost, weights=sizes) == pytest.approx(choice.mixture.evidence["loss"], abs=1e-9)


def test_every_candidate_is_trained_to_its_stop(tmp_path: Path) -> None:
    told: list[str] = []
    config = replace(CONFIG, rounds=60, patience=1, eval_every=3)
    arms = ("nothing", "all_but_last")
    choice = choose(config, tmp_path / "out", arms=arms, mix=True, complete=False, tell=told.append)
    assert any("a mixture needs all" in line for line in told)
    assert choice.inference.early is None
    assert all(Run(tmp_path / "out" / "arms" / f"{arm}-0").finished for arm in arms)


def test_one_run_is_its_own_mixture(raced: tuple[Path, Choice]) -> None:
    out, choice = raced
    config = replace(CONFIG, algorithm="fedper")
    arm = next(arm for arm in choice.arms if arm.name == "half")
    found = mixture.fit_mixture([Entry(arm, config, out / "arms" / "half-0")], "half")
    assert [(member.name, member.weight) for member in found.members] == [("half", 1.0)]
    assert found.evidence["loss"] == found.evidence["losses"]["half"]
    assert "needs 1 model, " in mixture.describe_mixture(found, out)


@pytest.mark.parametrize("task", TASKS)
def test_a_task_without_one_class_a_sample_has_no_mixture(task: str, tmp_path: Path) -> None:
    frame().to_csv(tmp_path / "t.csv", index=False)
    config = RunConfig(dataset=str(tmp_path / "t.csv"), task=task, rounds=2, model="mlp", **TASKS[task])
    with pytest.raises(UsageError, match=rf"classes; got {task}"):
        choose(config, tmp_path / "out", mix=True)
    assert not (tmp_path / "out").exists()


def test_what_has_no_whole_models_here_has_no_mixture(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"got race_fraction=0\.6"):
        choose(CONFIG, tmp_path / "out", mix=True, race_fraction=0.6)
    with pytest.raises(UsageError, match="got sites"):
        choose(replace(CONFIG, patience=0), tmp_path / "out", mix=True, link=object())  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="at least two arms; got 1"):
        choose(CONFIG, tmp_path / "out", arms=["half"], mix=True)


MEMBER = {"name": "a", "weight": 1.0, "path": "arms/a-0", "digest": "0" * 64, "n_bytes": 1}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": 0.5}, "sum 1"),
        ({"weight": -1.0}, "sum 1"),
        ({"weight": True}, "finite number"),
        ({"path": "../a"}, "lie in its folder"),
        ({"path": "arms/.."}, "lie in its folder"),
        ({"path": "arms/../../a"}, "lie in its folder"),
        ({"path": "/etc/passwd"}, "lie in its folder"),
        ({"path": "arms/a\0"}, "lie in its folder"),
        ({"digest": "x"}, "digest"),
        ({"n_bytes": -1}, "whole number"),
    ],
)
def test_a_file_with_other_contents_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    data = {**Mixture(()).to_json(), "members": [{**MEMBER, **change}]}
    (tmp_path / FILE).write_bytes(sign(data))
    with pytest.raises(CorruptError, match=message):
        load(tmp_path)


def test_a_file_that_is_damaged_or_newer_or_missing_is_refused(raced: tuple[Path, Choice], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="choose --mix"):
        load(tmp_path)
    kept = (raced[0] / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(kept.replace(b'"half"', b'"hald"'))
    with pytest.raises(CorruptError, match="digest"):
        load(tmp_path)
    for change, message in (
        ({"format": "fedlayers.mixture/2"}, "update yours"),
        ({"format": "x"}, "must have the format"),
    ):
        (tmp_path / FILE).write_bytes(sign({**Mixture(()).to_json(), **change}))
        with pytest.raises(UsageError, match=message):
            load(tmp_path)
    for change in ({"kind": "else"}, {"kind": []}, {"members": []}):
        data = {**Mixture(()).to_json(), "members": [MEMBER], **change}
        (tmp_path / FILE).write_bytes(sign(data))
        with pytest.raises(CorruptError):
            load(tmp_path)
    (tmp_path / FILE).write_bytes(sign({**Mixture(()).to_json(), "members": [MEMBER, MEMBER]}))
    with pytest.raises(CorruptError):
        load(tmp_path)
