"""What a run returns: scores, plan, models, a picture, and a readable summary."""

from pathlib import Path

import pytest
import torch

import fedlayers as fl
from fl_core.rounds.steering import rule_of
from fl_core.training import evaluate
from tests.conftest import TOY, network, refuses


@pytest.fixture(scope="module", params=["memory", "disk"])
def result(request, tmp_path_factory):
    out = (
        None if request.param == "memory" else tmp_path_factory.mktemp("result") / "run"
    )
    return fl.run(
        out=out,
        algorithm="fedper",
        rounds=2,
        batch_size=8,
        data=TOY,
        model=network("plain"),
        lr=0.05,
    )


def check_models(result):
    """The scores that a result reports are those that its models have."""
    kinds = result.scores.index.get_level_values("model")
    kind = "personal" if "personal" in kinds else "global"
    for client in TOY.clients:
        with torch.no_grad():
            logits = result.models[client.name](client.test.x)
        criterion = result.engine.clients.client_runner.criterion
        expected = evaluate.scores(logits, client.test.y, criterion, TOY.positive_index)
        scores = result.scores.loc[(kind, client.name)]
        for metric in ("accuracy", "macro_f1", "loss"):
            assert scores[metric] == pytest.approx(expected[metric])


def test_its_scores_are_those_of_its_models(result):
    check_models(result)


def test_it_has_the_plan_and_the_rounds(result):
    assert (result.done, result.plan) == (2, result.engine.algorithm.plan)
    assert set(result.to_frame()["round"]) == {0, 1, 2}


def test_it_stands_for_its_folder(result, tmp_path):
    if result.path is None:
        with refuses("run directory; got none"):
            fl.export(result, tmp_path / "m.safetensors")
    else:
        assert Path(result) == result.path


def test_its_picture_is_of_the_main_score(result):
    assert "macro" in result.plot().get_ylabel().lower()


@pytest.mark.parametrize("algorithm", ["fedavg", "fedper"])
@pytest.mark.parametrize("stored", [False, True])
def test_a_stopped_run_returns_scores_and_models_of_the_best_round(
    algorithm, stored, tmp_path
):
    how = {"rounds": 10, "patience": 1, "eval_every": 1, "batch_size": 8, "lr": 2.0}
    how |= {"optimizer": "sgd", "out": tmp_path / "run" if stored else None}
    net = network("plain")
    result = fl.run(data=TOY, model=net, algorithm=algorithm, **how)
    rule = rule_of(result.engine)
    best = rule.best[rule.main]
    assert best < result.done
    rows = result.to_frame().query(
        f"round == {best} and split == 'test' and model == '{rule.main}'"
    )
    expected = rows[rows["metric"] == "macro_f1"].set_index("client")["value"]
    assert result.scores.loc[rule.main]["macro_f1"].to_dict() == expected.to_dict()
    check_models(result)


def test_its_layer_map_is_that_of_its_measurement(result, monkeypatch):
    asked = []

    class Measured:
        def layer_map(self, width):
            return width

    def through_time(*given, **options):
        asked.append((given, options))
        return Measured()

    monkeypatch.setattr("diagnostics.through_time.through_time", through_time)
    assert result.layer_map(8.0, draws=3) == 8.0
    assert result.layer_map() == 16.0
    assert asked == [((result,), {"draws": 3}), ((result,), {})]
