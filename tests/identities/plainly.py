"""Local training written plainly in float64, next to runs of the package in float64."""

from collections import OrderedDict

import numpy as np
import torch
from torch import nn

from fl_core import seeds, tree
from tests.conftest import TOY, network, play

SEED, LR, BATCH, EPOCHS, ROUNDS = 3, 0.05, 8, 2, 3
CLIENTS = [client.name for client in TOY.clients]
EVERYONE = range(len(CLIENTS))


class Exact(nn.Sequential):
    """A network that computes in float64."""

    def forward(self, x):
        return super().forward(x.double())


def exact():
    return Exact(OrderedDict(network("plain").named_children())).double()


def initial():
    return tree.state_dict(exact())


def zeros():
    return {name: torch.zeros_like(value) for name, value in initial().items()}


def played(algorithm, rounds=1, **changes):
    """Run the package, with two epochs a round."""
    keys = {"epochs": EPOCHS, "lr": LR, "batch_size": BATCH, "seed": SEED} | changes
    keys |= {"model": exact(), "stack": "off", "eval_every": rounds}
    return play(algorithm=algorithm, rounds=rounds, **keys)


def sampled(run, index):
    """Return the clients that took part in a round."""
    return [CLIENTS.index(name) for name in run.checkpoints[index].models["local"]]


def states(run, index):
    """Return what each client holds after a round."""
    return [state.trees for state in run.checkpoints[index].clients.values()]


def batches(client, index=0, epochs=EPOCHS, stream="main"):
    """Return the batches of a client's round."""
    train = TOY.clients[client].train
    draws = seeds.torch_generator(SEED, "batches", index, client, stream)
    orders = [torch.randperm(len(train), generator=draws) for _ in range(epochs)]
    parts = [part for order in orders for part in order.split(BATCH)]
    return [(train.x[part].double(), train.y[part]) for part in parts]


def gradient(weights, x, y, names=()):
    """Return the gradient of the cross-entropy with respect to the named tensors, or all."""
    names = sorted(names or weights)
    leaves = {n: w.clone().requires_grad_(n in names) for n, w in weights.items()}
    hidden = x.flatten(1)
    for fc in ("fc1", "fc2", "fc3"):
        hidden = hidden @ leaves[f"{fc}.weight"].T + leaves[f"{fc}.bias"]
        hidden = hidden if fc == "fc3" else hidden.clamp(min=0)
    loss = -hidden.log_softmax(1)[torch.arange(len(y)), y].mean()
    grads = torch.autograd.grad(loss, [leaves[n] for n in names])
    return dict(zip(names, grads, strict=True))


def trained(
    client,
    start,
    index=0,
    *,
    epochs=EPOCHS,
    momentum=0.0,
    decay=0.0,
    moving=(),
    stream="main",
    bend=lambda name, w: 0,
):
    """Return the weights after a round of w <- w - lr (gradient + bend(name, w)), with momentum and decay."""
    weights, speed = dict(start), zeros()
    for x, y in batches(client, index, epochs, stream):
        for n, grad in gradient(weights, x, y, moving).items():
            w = weights[n]
            speed[n] = momentum * speed[n] + grad + bend(n, w) + decay * w
            weights[n] = w - LR * speed[n]
    return weights


def average(trees, weights=TOY.weights):
    """Return the weighted mean, by numpy."""
    return {
        name: torch.from_numpy(
            np.average([t[name].numpy() for t in trees], axis=0, weights=weights)
        )
        for name in trees[0]
    }


def check_close(found, wanted, atol=1e-12):
    assert found.keys() == wanted.keys()
    for name in wanted:
        assert found[name].dtype == torch.float64
        torch.testing.assert_close(found[name], wanted[name], rtol=0, atol=atol)
