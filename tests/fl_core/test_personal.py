"""Personalised algorithms of one file each: their limits, their steps, and what their clients keep."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fl_core import runner, tree
from fl_core.algorithms import Round, State
from fl_core.algorithms.base import Message
from fl_core.errors import UsageError
from tests.conftest import CONFIG, TOY, client_runner_of, network, play

HARD: dict[str, Any] = {
    "momentum": 0.9,
    "weight_decay": 0.05,
    "lr": 0.1,
    "rounds": 3,
    "participation": 0.5,
}


@pytest.mark.parametrize("kind", ["plain", "norm"])
@pytest.mark.parametrize(
    "options", [{"adapt": False, "alpha": 0.0}, {"adapt": False, "alpha": 0.7}, {}]
)
def test_apfls_global_model_is_fedavgs(options: dict[str, Any], kind: str) -> None:
    assert play(algorithm="apfl", options=options, model=kind, **HARD).server() == (
        play(algorithm="fedavg", model=kind, **HARD).server()
    )


@pytest.mark.parametrize("kind", ["plain", "norm"])
def test_apfl_with_no_share_is_fedavg_and_with_all_of_it_local(kind: str) -> None:
    for alpha, alone in ((0.0, "fedavg"), (1.0, "local")):
        mixed = play(
            algorithm="apfl",
            options={"adapt": False, "alpha": alpha},
            model=kind,
            **HARD,
        )
        wanted = play(algorithm=alone, model=kind, **HARD)
        assert mixed.evaluated() == wanted.evaluated()


def test_apfls_share_follows_its_gradient_within_its_bounds() -> None:
    """After one step from alpha = 1/2 with v = w nothing has moved it; later it stays a share."""
    played = play(algorithm="apfl", rounds=3, lr=2.0)
    shares = [
        float(state.trees["share"]["alpha"])
        for each in played.checkpoints
        for state in each.clients.values()
    ]
    assert all(0 <= share <= 1 for share in shares)
    assert len(set(shares)) > 1
    once = play(algorithm="apfl", rounds=1, batch_size=1000)
    assert {
        float(state.trees["share"]["alpha"])
        for state in once.checkpoints[0].clients.values()
    } == {0.5}


@pytest.mark.parametrize("kind", ["plain", "norm"])
def test_fedala_that_learns_nothing_is_fedavg_at_the_server(kind: str) -> None:
    options = {"first": 0, "later": 0, "layers": 2}
    adaptive = play(algorithm="fedala", options=options, model=kind, **HARD)
    assert adaptive.server() == play(algorithm="fedavg", model=kind, **HARD).server()
    assert (
        play(algorithm="fedala", options={"layers": 2}, model=kind, **HARD).server()
        != adaptive.server()
    )


def test_fedalas_weights_take_the_step_of_the_papers_equation() -> None:
    """Against autograd through W itself: one pass over one batch, from W = 1."""
    options = {"first": 1, "share": 1.0, "rate": 0.5, "layers": 2}
    config = CONFIG.with_keys(algorithm="fedala", options=options, batch_size=1000)
    task = runner.assemble(config, data=TOY, model=network("plain"))
    algorithm, client_runner = task.algorithm(None), client_runner_of(task)
    client_runner.use(algorithm)
    own, received = (tree.state_dict(network("plain", seed)) for seed in (1, 2))
    state = State({"model": own})
    ctx = client_runner._context(algorithm, 0, 1, {})
    begun = algorithm.client_start(
        state, Message({"model": received}), ctx, Round(1), 0
    )
    names = ("fc2.bias", "fc2.weight", "fc3.bias", "fc3.weight")
    weights = {name: torch.ones_like(own[name]).requires_grad_() for name in names}
    mixed = received | {
        n: own[n] + (received[n] - own[n]) * w for n, w in weights.items()
    }
    model, split = network("plain"), TOY.clients[0].train
    loss = torch.nn.functional.cross_entropy(
        torch.func.functional_call(model, mixed, (split.x,)), split.y
    )
    grads = torch.autograd.grad(loss, list(weights.values()))
    assert set(state.trees["weights"]) == set(names)
    for (name, weight), grad in zip(weights.items(), grads, strict=True):
        wanted = (weight - 0.5 * grad).clamp(0, 1).detach()
        torch.testing.assert_close(state.trees["weights"][name], wanted)
        torch.testing.assert_close(
            begun[name], own[name] + (received[name] - own[name]) * wanted
        )
    assert torch.equal(begun["fc1.weight"], received["fc1.weight"])


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("apfl", {"alpha": 1.5}, "apfl.*alpha.*1.5"),
        ("fedala", {"share": 0}, "share .*0.0"),
        ("fedala", {"window": 1}, "window .*1"),
        ("fedala", {"leyers": 1}, "fedala 'leyers'.*'layers'"),
    ],
)
def test_options_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        runner.assemble(
            CONFIG.with_keys(algorithm=name, options=options),
            data=TOY,
            model=network("plain"),
        )


@pytest.mark.parametrize("kind", ["drop", "norm"])
def test_mr_mtl_without_a_pull_is_local_and_with_one_is_not(kind: str) -> None:
    wanted = play(algorithm="local", model=kind, **HARD).evaluated()
    assert (
        play(algorithm="mr_mtl", options={"lam": 0}, model=kind, **HARD).evaluated()
        == wanted
    )
    assert (
        play(algorithm="mr_mtl", options={"lam": 1}, model=kind, **HARD).evaluated()
        != wanted
    )


def test_mr_mtls_first_step_has_the_gradient_of_the_penalised_loss() -> None:
    """From an own model w and a received mean: w - lr (grad loss(w) + lam (w - mean)), against autograd in float64."""
    config = CONFIG.with_keys(
        algorithm="mr_mtl", options={"lam": 0.3}, batch_size=1000, lr=0.1
    )
    task = runner.assemble(config, data=TOY, model=network("plain"))
    own, mean = (tree.state_dict(network("plain", seed)) for seed in (1, 2))
    algorithm, client_runner = task.algorithm(None), client_runner_of(task)
    ctx = client_runner._context(algorithm, 0, 1, mean)
    state, message = State({"model": own}), Message({"model": mean})
    start = algorithm.client_start(state, message, ctx, Round(1), 0)
    assert tree.digest(start) == tree.digest(own)
    params = {name: tensor.double().requires_grad_() for name, tensor in own.items()}
    split = TOY.clients[0].train
    model = network("plain").double()
    fit = torch.nn.functional.cross_entropy(
        torch.func.functional_call(model, params, (split.x.double(),)), split.y
    )
    pull = sum(
        0.15 * (param - mean[name].double()).square().sum()
        for name, param in params.items()
    )
    wanted = torch.autograd.grad(fit + pull, list(params.values()))
    live = {name: tensor.clone().requires_grad_() for name, tensor in own.items()}
    found = torch.autograd.grad(
        algorithm.method("pulled_loss")(live, (split.x, split.y), ctx),
        list(live.values()),
    )
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-6)
