"""All doors to a run's model lead to one round: its best one under a stopping rule, else the last."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import fedlayers as fl
from diagnostics.measure import diagnose_run
from fl_core import tree
from fl_core.records.store import Run
from fl_core.run import initial
from tests.made import mlp, separated


@pytest.mark.parametrize("patience", [3, 0])
@pytest.mark.parametrize("algorithm", ["fedavg", "fedper"])
def test_all_doors_lead_to_one_model(algorithm, patience, tmp_path):
    data, run, rounds = (
        {"a": separated(120, 5, seed=1), "b": separated(150, 5, seed=2)},
        tmp_path / "run",
        30,
    )
    from_python = {"data": data, "model": mlp(5, 8, 3)}
    result = fl.run(
        **from_python, algorithm=algorithm, rounds=rounds if patience else 3,
        patience=patience, lr=0.05, out=run, progress=False,
    )  # fmt: skip
    kind = "global" if algorithm == "fedavg" else "personal"
    stored = Run(run)
    round = stored.used_round(kind)
    if patience:
        assert round == stored.best_round(kind) < stored.rounds[-1]
    else:
        assert round == "last"
    right = {name: tree.state_dict(model) for name, model in result.models.items()}
    digests = {name: tree.digest(state) for name, state in right.items()}

    loaded, task = fl.load_models(run, which=kind, **from_python)
    assert {n: tree.digest(tree.state_dict(m)) for n, m in loaded.items()} == digests

    file = tmp_path / "a.safetensors"
    exported = fl.export(run, file, client="a", **from_python)
    assert tree.digest(load_file(file)) == digests["a"]
    assert exported.about["run"]["round"] == (round if patience else 3)

    test = next(c.test for c in task.data.clients if c.name == "a")
    with torch.no_grad():
        loss = nn.functional.cross_entropy(loaded["a"].eval()(test.x), test.y)
    scored = result.scores.loc[(kind, "a"), "loss"]
    assert float(loss) == pytest.approx(scored, rel=1e-5)

    report = diagnose_run(
        run, ["weight_magnitude"], which=kind, progress=False, **from_python
    )
    assert set(report.frame["round"]) == {round if patience else 3}

    clients = task.data.clients
    samples = {client.name: (client.test.x, client.test.y) for client in clients}
    pairs = [
        fl.cross_scores(models, samples).matrix("loss") for models in (result, loaded)
    ]
    assert pairs[0].equals(pairs[1])

    if algorithm == "fedavg":
        fresh = mlp(5, 8, 3)
        initial.start(fresh, run, test.x[:2])
        assert tree.digest(tree.state_dict(fresh)) == digests["a"]
