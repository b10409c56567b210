"""One round of federated training against the same arithmetic written plainly, in float64."""

import pytest
import torch

from fl_core import tree
from fl_core.plan import LayerPlan
from tests.identities.plainly import (
    EPOCHS,
    EVERYONE,
    average,
    check_close,
    initial,
    played,
    states,
    trained,
)

HEAD = {"fc3.weight", "fc3.bias"}


def server(run):
    """Return the server's model after the round, every tensor of which moved."""
    return run.checkpoints[0].server.trees["model"]


@pytest.mark.parametrize(("momentum", "decay"), [(0.0, 0.0), (0.9, 0.0), (0.9, 0.1)])
def test_fedavg(momentum, decay):
    global_model = server(played("fedavg", momentum=momentum, weight_decay=decay))
    local = [trained(c, initial(), momentum=momentum, decay=decay) for c in EVERYONE]
    check_close(global_model, average(local))
    assert all(
        not torch.equal(global_model[n], value) for n, value in initial().items()
    )


@pytest.mark.parametrize("strength", [0.01, 1.0])
def test_fedprox_and_ditto(strength):
    start, plain = initial(), [trained(c, initial()) for c in EVERYONE]
    pulled = [
        trained(c, start, bend=lambda n, w: strength * (w - start[n])) for c in EVERYONE
    ]
    prox = played("fedprox", options={"mu": strength})
    check_close(server(prox), average(pulled))
    ditto = played("ditto", options={"lam": strength})
    check_close(server(ditto), average(plain))
    for state, wanted in zip(states(ditto, 0), pulled, strict=True):
        check_close(state["personal"], wanted)


def test_fedper():
    run, local = played("fedper"), [trained(c, initial()) for c in EVERYONE]
    check_close(server(run), average(local) | tree.select(initial(), HEAD))
    for state, head in zip(states(run, 0), local, strict=True):
        check_close(state["model"], {n: head[n] for n in HEAD})


def test_fedrep():
    options = {"head_epochs": EPOCHS}
    run = played("fedrep", epochs=2 * EPOCHS, momentum=0.9, options=options)
    local = []
    for c, state in enumerate(states(run, 0)):
        first = trained(c, initial(), momentum=0.9, moving=HEAD, stream="head")
        local.append(trained(c, first, momentum=0.9, moving=set(first) - HEAD))
        check_close(state["model"], {n: first[n] for n in HEAD})
    check_close(server(run), average(local) | tree.select(initial(), HEAD))


def test_fedbabu():
    layers = played("fedbabu").task.layers
    plan, body = LayerPlan.prefix(layers, 1), {"fc1.weight", "fc1.bias"}
    run = played("fedbabu", plan=plan, weight_decay=0.1)
    local = [trained(c, initial(), decay=0.1, moving=body) for c in EVERYONE]
    check_close(server(run), initial() | tree.select(average(local), body))
