"""Several rounds of mixtures, half of the clients taking part, against the same arithmetic written plainly in float64.

Whoever was not sampled stands where it stood, on both sides; who never was counts with the common start.
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fl_core import models
from fl_core.algorithms import TaskInfo, find
from fl_core.algorithms.pfedla import PFedLA
from fl_core.layers import layers_of
from tests.conftest import TOY
from tests.identities.plainly import (
    CLIENTS,
    EPOCHS,
    EVERYONE,
    SEED,
    check_close,
    exact,
    initial,
    played,
    sampled,
    states,
    trained as local_steps,
)

ROUNDS, N = 5, len(CLIENTS)


def flat(model):
    return np.concatenate([model[name].numpy().ravel() for name in sorted(model)])


def mixed(weights, of):
    """sum_j weights_j theta_j."""
    return {
        name: sum(w * model[name] for w, model in zip(weights, of, strict=True))
        for name in of[0]
    }


def half(name, **options):
    run = played(name, ROUNDS, participation=0.5, options=options)
    drawn = [sampled(run, index) for index in range(ROUNDS)]
    assert {len(clients) for clients in drawn} == {2}
    assert len({client for clients in drawn for client in clients}) > 2
    return run


@pytest.mark.parametrize("start", ["own", "cloud"])
@pytest.mark.parametrize("name", ["fedamp", "heurfedamp"])
def test_fedamp_is_the_papers(name, start):
    lam, alpha, sigma = 2.0, 3.0, 4.0
    run = half(
        name, lam=lam, alpha=alpha, sigma=sigma, decay=0.5, decay_every=2, start=start
    )
    models = [initial() for _ in EVERYONE]
    for index in range(ROUNDS):
        strength, vectors, trained = (
            alpha * 0.5 ** (index // 2),
            [flat(w) for w in models],
            list(models),
        )
        for i in sampled(run, index):
            others = np.array([j != i for j in EVERYONE])
            if name == "fedamp":
                gaps = np.array([((vectors[i] - v) ** 2).sum() for v in vectors])
                strength = min(strength, sigma / (N - 1))
                row = others * strength / sigma * np.exp(-gaps / sigma)
            else:
                cosines = [
                    v @ vectors[i] / np.linalg.norm(v) / np.linalg.norm(vectors[i])
                    for v in vectors
                ]
                row = others * np.exp(sigma * np.array(cosines))
                row *= (1 - 1 / N) / row.sum()
            row[i] = 1 - row.sum()
            cloud = mixed(row, models)

            def pull(n, w, cloud=cloud, by=lam / strength):
                return by * (w - cloud[n])

            begun = models[i] if start == "own" else cloud
            trained[i] = local_steps(i, begun, index, bend=pull)
        models = trained
        for state, wanted in zip(states(run, index), models, strict=True):
            check_close(state["model"], wanted, 1e-10)


def test_fedfomo_is_the_papers():
    """With everyone who has replied on offer."""
    run, net = half("fedfomo", downloads=N, epsilon=0), exact()

    def loss(model, client):
        split = TOY.clients[client].validation
        return float(
            F.cross_entropy(torch.func.functional_call(net, model, (split.x,)), split.y)
        )

    models, starts, heard, helped = (
        [initial() for _ in EVERYONE],
        [initial() for _ in EVERYONE],
        set[int](),
        0,
    )
    for index in range(ROUNDS):
        trained = list(models)
        for i in sampled(run, index):
            row = np.zeros(N)
            for j in heard - {i}:
                gap = np.linalg.norm(flat(models[j]) - flat(models[i]))
                row[j] = max(0.0, (loss(models[i], i) - loss(models[j], i)) / gap)
            helped += bool(row.any())
            starts[i] = mixed(row / row.sum(), models) if row.any() else models[i]
            trained[i] = local_steps(i, starts[i], index)
        models, heard = trained, heard | set(sampled(run, index))
        for i, state in enumerate(states(run, index)):
            check_close(state["model"], models[i], 1e-9)
            if i in heard:
                check_close(state["mixed"], starts[i], 1e-9)
    assert helped


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("pfedla", {}),
        ("heurpfedla", {"k": 1}),
        ("heurpfedla", {"k": 2}),
    ],
)
def test_pfedla_is_the_papers(name, options):
    """Bar theta = sum_j alpha_j theta_j layer by layer; v, psi go lr J^T (theta - bar theta); k layers are kept."""
    options = {"lr": 60.0, "embedding": 7, "hidden": 9, **options}
    run, units, n_kept = (
        half(name, **options),
        ("fc1", "fc2", "fc3"),
        options.get("k", 0),
    )
    layers = layers_of(exact(), models.example(TOY.shape))
    drawn = find(name)(
        TaskInfo(layers, frozenset(), TOY.weights, EPOCHS, SEED),
        None,
        options,
    )
    assert isinstance(drawn, PFedLA)
    server = drawn.server_state(initial())
    nets = [
        {n: t.double() for n, t in drawn.network(server, i).items()} for i in EVERYONE
    ]

    def alpha(net):
        hidden = net["embedding"]
        for k in range(3):
            hidden = (net[f"trunk.{k}.weight"] @ hidden + net[f"trunk.{k}.bias"]).relu()
        rows = (net["heads.weight"] @ hidden + net["heads.bias"]).view(len(units), N)
        return rows.softmax(1)

    client_models, first = [initial() for _ in EVERYONE], [alpha(net) for net in nets]
    rate = options["lr"]
    for index in range(ROUNDS):
        trained, learned = list(client_models), list(nets)
        for i in sampled(run, index):
            leaves = {n: t.clone().requires_grad_() for n, t in nets[i].items()}
            weights = alpha(leaves)
            itself = weights[:, i].tolist()
            retained = sorted(
                range(len(units)), key=lambda unit, itself=itself: -itself[unit]
            )[:n_kept]
            bar = {
                f"{unit}.{kind}": client_models[i][f"{unit}.{kind}"]
                if u in retained
                else sum(
                    weights[u, j] * client_models[j][f"{unit}.{kind}"] for j in EVERYONE
                )
                for u, unit in enumerate(units)
                for kind in ("weight", "bias")
            }
            received = {n: torch.as_tensor(t).detach() for n, t in bar.items()}
            trained[i] = local_steps(i, received, index)
            gain = torch.stack(
                [(bar[n] * (trained[i][n] - received[n])).sum() for n in bar]
            ).sum()
            steps = torch.autograd.grad(gain, list(leaves.values()))
            learned[i] = {
                n: (t + rate * step).detach()
                for (n, t), step in zip(leaves.items(), steps, strict=True)
            }
        client_models, nets = trained, learned
        for i in EVERYONE:
            server = run.checkpoints[index].server.trees
            upload = server.get(f"client/{i}", initial())
            check_close(
                upload, client_models[i], 1e-6
            )  # networks are drawn and kept in float32
    moved = [
        float((alpha(net) - before).abs().max())
        for net, before in zip(nets, first, strict=True)
    ]
    assert max(moved) > 0.02
