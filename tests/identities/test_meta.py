"""FedRoD, Per-FedAvg and pFedMe: their limits, and one round against the same arithmetic written plainly."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fl_core import models, seeds, tree
from fl_core.models.extended import TwoHeads, split_head
from fl_core.run import runner
from tests.conftest import CONFIG, TOY, client_runner_of, network, play
from tests.identities.plainly import (
    BATCH,
    EVERYONE,
    LR,
    SEED,
    average,
    batches,
    check_close,
    gradient,
    initial,
    played as run_exact,
    states,
)

TRAIN = TOY.clients[0].train


def moved_along(weights, along, by):
    return {name: value + by * along[name] for name, value in weights.items()}


def test_pfedme_is_its_definition():
    lam, rate, inner, decay, beta = 3.0, 0.07, 3, 0.01, 1.6
    options = {"lam": lam, "personal_lr": rate, "inner_steps": inner}
    played = run_exact("pfedme", options=options | {"decay": decay, "beta": beta})
    copies = []
    for client, state in enumerate(states(played, 0)):
        w = theta = initial()
        for x, y in batches(client):
            for _ in range(inner):
                grads = gradient(theta, x, y)
                theta = {
                    n: t - rate * (grads[n] + lam * (t - w[n]) + decay * t)
                    for n, t in theta.items()
                }
            w = {n: tensor - LR * lam * (tensor - theta[n]) for n, tensor in w.items()}
        copies.append(w)
        check_close(state["personal"], theta)
    mean, start = average(copies), initial()
    wanted = {n: (1 - beta) * start[n] + beta * mean[n] for n in mean}
    check_close(played.checkpoints[0].server.trees["model"], wanted)


def test_per_fedavg_is_its_definition():
    alpha, beta = 0.3, 0.08
    played = run_exact("per_fedavg", options={"alpha": alpha, "beta": beta})
    trained = []
    for client in EVERYONE:
        w, train = initial(), TOY.clients[client].train
        inner = seeds.torch_generator(SEED, "batches", 0, client, "main/inner")
        for x, y in batches(client):
            batch = torch.randperm(len(train), generator=inner)[:BATCH]
            first = gradient(w, train.x[batch].double(), train.y[batch])
            v = gradient(moved_along(w, first, -alpha), x, y)
            w = moved_along(w, v, -beta)
        trained.append(w)
    check_close(played.checkpoints[0].server.trees["model"], average(trained))


def test_the_personal_model_is_one_step_of_descent_on_training_samples():
    config = CONFIG.with_keys(algorithm="per_fedavg", options={"alpha": 0.3}, rounds=2)
    played = play(config)
    for checkpoint in played.checkpoints:
        start = checkpoint.server.trees["model"]
        for k, client in enumerate(TOY.clients):
            draws = seeds.torch_generator(0, "batches", checkpoint.round, k, "adapt")
            chosen = torch.randperm(len(client.train), generator=draws)[:8]
            personal = checkpoint.models["personal"][client.name]
            net = network("plain")
            tree.load(net, start)
            F.cross_entropy(
                net(client.train.x[chosen]), client.train.y[chosen]
            ).backward()
            for name, param in net.named_parameters():
                assert param.grad is not None
                torch.testing.assert_close(
                    personal[name],
                    param.detach() - 0.3 * param.grad,
                    rtol=1e-5,
                    atol=1e-7,
                )


def rod():
    with seeds.torch_seeded(0):
        model = TwoHeads(*split_head(network("plain"), models.example(TOY.shape)))
        nn.init.normal_(model.personal.weight)
    return model


def losses(model, gamma, labels, y=None):
    """The sum that is trained on the first client's batch, and the algorithm's task."""
    task = runner.assemble(
        CONFIG.with_keys(algorithm="fedrod", options={"gamma": gamma}),
        data=TOY,
        model=network("plain"),
    )
    client_runner, algorithm = client_runner_of(task), task.algorithm(None)
    client_runner.algorithm = algorithm
    tree.load(client_runner.workspace.model, tree.state_dict(model))
    ctx = client_runner._context(0, 0, {})
    ctx.labels = labels
    x, y = TRAIN.x[:8], TRAIN.y[:8] if y is None else y
    return algorithm.loss(
        client_runner.workspace.params, (x, y), ctx
    ), client_runner.workspace.params


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0])
def test_fedrods_objective_and_its_gradients(gamma):
    """The extractor and the generic head follow the balanced loss alone, the personal head the other one alone."""
    model, (x, y) = rod(), (TRAIN.x[:8], TRAIN.y[:8])
    labels = TRAIN.y
    loss, params = losses(model, gamma, labels)
    counts = torch.tensor([(labels == k).sum() for k in range(3)])
    z = model.body(x)
    generic = model.generic(z)
    balanced = F.cross_entropy(generic + gamma * counts.log(), y)
    personal = F.cross_entropy(generic + model.personal(z), y)
    torch.testing.assert_close(loss, balanced + personal)
    names = [name for name, _ in model.named_parameters()]
    mine = torch.autograd.grad(loss, [params[name] for name in names])
    for name, torch_gradient in zip(names, mine, strict=True):
        part = personal if name.startswith("personal") else balanced
        leaf = model.get_parameter(name)
        (wanted,) = torch.autograd.grad(part, leaf, retain_graph=True)
        torch.testing.assert_close(torch_gradient, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("gamma", [0.1, 1.0])
def test_classes_that_a_client_does_not_hold_have_no_part_in_the_balanced_loss(
    gamma,
):
    model, (x, y) = rod(), (TRAIN.x[:8], TRAIN.y[:8])
    present = sorted(set(y.tolist()))
    absent = next(k for k in range(3) if k not in present[:2])
    y = torch.where(y == absent, present[0], y)
    loss, _ = losses(model, gamma, y, y)
    z, remaining = model.body(x), [k for k in range(3) if k != absent]
    prior = gamma * torch.tensor([float((y == k).sum()) for k in remaining]).log()
    generic = model.generic(z)
    balanced = F.cross_entropy(
        generic[:, remaining] + prior, torch.searchsorted(torch.tensor(remaining), y)
    )
    torch.testing.assert_close(
        loss, balanced + F.cross_entropy(generic + model.personal(z), y)
    )
