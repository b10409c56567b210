"""What a run returns: scores, plan, models, a picture, and a readable summary."""

from __future__ import annotations

import pytest
import torch

import fedlayers as fl
from fl_core.training import evaluate
from tests.conftest import TOY, network


@pytest.fixture(scope="module", params=["memory", "disk"])
def result(request, tmp_path_factory):
    out = None if request.param == "memory" else tmp_path_factory.mktemp("result") / "run"
    return fl.run(
        out=out, algorithm="fedper", rounds=2, batch_size=8, data=TOY, model=network("plain"), lr=0.05, progress=False
    )


def test_its_scores_are_those_of_its_models(result):
    for client in TOY.clients:
        with torch.no_grad():
            logits = result.models[client.name](client.test.x)
        criterion = result.engine.client_runner.criterion
        expected = evaluate.scores(logits, client.test.y, criterion, TOY.positive_index)
        for metric in ("accuracy", "macro_f1"):
            assert result.scores.loc[("personal", client.name), metric] == pytest.approx(expected[metric])


def test_it_has_the_plan_and_the_rounds(result):
    assert (result.done, result.plan) == (2, result.engine.algorithm.plan)
    assert set(result.to_frame()["round"]) == {0, 1, 2}


def test_its_text_is_short_and_names_the_main_score(result):
    lines = repr(result).splitlines()
    assert 2 < len(lines) < 6
    assert any("macro_f1" in line and "personal" in line for line in lines)
    assert (str(result.path) in repr(result)) == (result.path is not None)


def test_its_picture_is_of_the_main_score(result):
    assert "macro" in result.plot().get_ylabel().lower()


def test_a_stopped_run_reports_the_best_round():
    result = fl.run(
        algorithm="fedavg", rounds=4, patience=1, eval_every=1, batch_size=8, data=TOY, model=network("plain"), lr=0.5,
        optimizer="sgd", progress=False,
    )  # fmt: skip
    best = result.engine.stopping.best["global"]
    frame = result.to_frame()
    rows = frame[(frame["round"] == best) & (frame["split"] == "test") & (frame["model"] == "global")]
    expected = rows[rows["metric"] == "macro_f1"].set_index("client")["value"]
    assert result.scores.loc["global"]["macro_f1"].to_dict() == expected.to_dict()
