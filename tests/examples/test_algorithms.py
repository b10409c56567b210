"""The algorithms from outside: named by their place, run, resumed, verified, and equal to what they contain."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fl_core import runner, tree
from fl_core.algorithms import Round, State
from fl_core.algorithms.base import ALGORITHMS, Message
from fl_core.config import RunConfig
from fl_core.errors import UsageError
from fl_core.initial import start
from fl_core.models import build, example
from fl_core.records import store
from fl_core.stored_models import load_models
from tests.conftest import CONFIG, TOY, client_runner_of, network, play
from tests.fl_core.test_runner import contents, cut_back

APFL, FEDALA = "examples.algorithms.apfl:APFL", "examples.algorithms.fedala:FedALA"
OUTSIDE = (APFL, FEDALA)
HEART = RunConfig(dataset="heart", rounds=3, epochs=1, eval_every=1, checkpoint_every=1)
HARD: dict[str, Any] = {"momentum": 0.9, "weight_decay": 0.05, "lr": 0.1, "rounds": 3, "participation": 0.5}


@pytest.mark.filterwarnings("ignore:client")
@pytest.mark.parametrize("name", OUTSIDE)
def test_it_runs_is_verified_and_goes_on_to_the_same_bits(name: str, tmp_path: Path) -> None:
    whole = tmp_path / "whole" / "run"
    engine = runner.run(replace(HEART, algorithm=name), whole, progress=False)
    assert {row["algorithm"] for row in store.Run(whole).rows()[1].to_dict("records")} == {engine.algorithm.name}
    assert engine.algorithm.name == ALGORITHMS[name].name
    (tmp_path / "part").mkdir()
    part = cut_back(whole, tmp_path / "part", after=1)
    refusal = rf"'{name}'.*--allow-code {name}"
    with pytest.raises(UsageError, match=refusal):
        runner.resume(part, progress=False)
    with pytest.raises(UsageError, match=refusal):
        load_models(part, which="personal")
    assert runner.resume(part, allow_code=[name], progress=False).done == 3
    assert store.Run(part).verify() == store.Run(whole).verify()
    assert contents(part) == contents(whole)
    (ours, _), (theirs, _) = (load_models(run, which="personal", allow_code=name) for run in (whole, part))
    assert {k: tree.digest(tree.state_dict(m)) for k, m in ours.items()} == {
        k: tree.digest(tree.state_dict(m)) for k, m in theirs.items()
    }


@pytest.mark.filterwarnings("ignore:client")
@pytest.mark.parametrize("name", OUTSIDE)
def test_workers_give_the_same_bits(name: str) -> None:
    ways = [runner.run(replace(HEART, algorithm=name, rounds=2, workers=count), progress=False) for count in (0, 2)]
    assert ways[0].rows == ways[1].rows
    assert tree.digest(ways[0].server.trees["model"]) == tree.digest(ways[1].server.trees["model"])


def test_a_directory_does_not_choose_what_is_imported_below_a_schedule_or_for_a_start(tmp_path: Path) -> None:
    config = replace(CONFIG, algorithm="vanilla", rounds=1, options={"base": APFL})
    runner.run(config, tmp_path / "run", data=TOY, model=network("plain"), progress=False)
    with pytest.raises(UsageError, match=rf"'{APFL}'.*option base"):
        load_models(tmp_path / "run", data=TOY, model=network("plain"))
    load_models(tmp_path / "run", data=TOY, model=network("plain"), allow_code=[APFL])


@pytest.mark.filterwarnings("ignore:client")
def test_a_run_of_an_outside_algorithm_with_a_global_model_can_be_started_from(tmp_path: Path) -> None:
    runner.run(replace(HEART, algorithm=APFL, rounds=1), tmp_path / "apfl", progress=False)
    model = build("heart_mlp", (10,), 5, seed=3)
    start(model, tmp_path / "apfl", example((10,)))
    wanted = store.Run(tmp_path / "apfl").checkpoint().server.trees["model"]
    assert tree.digest(tree.state_dict(model)) == tree.digest(wanted)
    runner.run(replace(HEART, algorithm=FEDALA, rounds=1), tmp_path / "fedala", progress=False)
    with pytest.raises(UsageError, match="global model"):
        start(model, tmp_path / "fedala", example((10,)))


@pytest.mark.parametrize("kind", ["plain", "norm"])
@pytest.mark.parametrize("options", [{"adapt": False, "alpha": 0.0}, {"adapt": False, "alpha": 0.7}, {}])
def test_apfls_global_model_is_fedavgs(options: dict[str, Any], kind: str) -> None:
    assert play(algorithm=APFL, options=options, model=kind, **HARD).server() == (
        play(algorithm="fedavg", model=kind, **HARD).server()
    )


@pytest.mark.parametrize("kind", ["plain", "norm"])
def test_apfl_with_no_share_is_fedavg_and_with_all_of_it_local(kind: str) -> None:
    for alpha, alone in ((0.0, "fedavg"), (1.0, "local")):
        mixed = play(algorithm=APFL, options={"adapt": False, "alpha": alpha}, model=kind, **HARD)
        wanted = play(algorithm=alone, model=kind, **HARD)
        assert mixed.evaluated() == wanted.evaluated()


def test_apfls_share_follows_its_gradient_within_its_bounds() -> None:
    """After one step from alpha = 1/2 with v = w nothing has moved it; later it stays a share."""
    played = play(algorithm=APFL, rounds=3, lr=2.0)
    shares = [float(state.trees["share"]["alpha"]) for each in played.checkpoints for state in each.clients.values()]
    assert all(0 <= share <= 1 for share in shares)
    assert len(set(shares)) > 1
    once = play(algorithm=APFL, rounds=1, batch_size=1000)
    assert {float(state.trees["share"]["alpha"]) for state in once.checkpoints[0].clients.values()} == {0.5}


@pytest.mark.parametrize("kind", ["plain", "norm"])
def test_fedala_that_learns_nothing_is_fedavg_at_the_server(kind: str) -> None:
    options = {"first": 0, "later": 0, "layers": 2}
    adaptive = play(algorithm=FEDALA, options=options, model=kind, **HARD)
    assert adaptive.server() == play(algorithm="fedavg", model=kind, **HARD).server()
    assert play(algorithm=FEDALA, options={"layers": 2}, model=kind, **HARD).server() != adaptive.server()


def test_fedalas_weights_take_the_step_of_the_papers_equation() -> None:
    """Against autograd through W itself: one pass over one batch, from W = 1."""
    options = {"first": 1, "share": 1.0, "rate": 0.5, "layers": 2}
    config = replace(CONFIG, algorithm=FEDALA, options=options, batch_size=1000)
    task = runner.assemble(config, data=TOY, model=network("plain"))
    algorithm, client_runner = task.algorithm(None), client_runner_of(task)
    client_runner.use(algorithm)
    own, received = (tree.state_dict(network("plain", seed)) for seed in (1, 2))
    state = State({"model": own})
    ctx = client_runner._context(algorithm, 0, 1, {})
    begun = algorithm.client_start(state, Message({"model": received}), ctx, Round(1), 0)
    names = ("fc2.bias", "fc2.weight", "fc3.bias", "fc3.weight")
    weights = {name: torch.ones_like(own[name]).requires_grad_() for name in names}
    mixed = received | {n: own[n] + (received[n] - own[n]) * w for n, w in weights.items()}
    model, split = network("plain"), TOY.clients[0].train
    loss = torch.nn.functional.cross_entropy(torch.func.functional_call(model, mixed, (split.x,)), split.y)
    grads = torch.autograd.grad(loss, list(weights.values()))
    assert set(state.trees["weights"]) == set(names)
    for (name, weight), grad in zip(weights.items(), grads, strict=True):
        wanted = (weight - 0.5 * grad).clamp(0, 1).detach()
        torch.testing.assert_close(state.trees["weights"][name], wanted)
        torch.testing.assert_close(begun[name], own[name] + (received[name] - own[name]) * wanted)
    assert torch.equal(begun["fc1.weight"], received["fc1.weight"])


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (APFL, {"alpha": 1.5}, "apfl.*alpha.*1.5"),
        (FEDALA, {"share": 0}, "share .*0.0"),
        (FEDALA, {"window": 1}, "window .*1"),
        (FEDALA, {"leyers": 1}, "fedala 'leyers'.*'layers'"),
    ],
)
def test_options_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        runner.assemble(replace(CONFIG, algorithm=name, options=options), data=TOY, model=network("plain"))
