"""Mixtures of the clients' models: their weights, what travels, and the networks on the server that give them."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fl_core import models, tree
from fl_core.algorithms import Message, Round, TaskInfo, Update, registry
from fl_core.algorithms.fedamp import FedAMP, FedFomo, HeurFedAMP, Mixing
from fl_core.algorithms.pfedla import PFedHN
from fl_core.layers import layers_of
from tests.conftest import TOY, network, play, refuses

MIXING = sorted(name for name, kind in registry().items() if issubclass(kind, Mixing))
CLIENTS = [client.name for client in TOY.clients]
N = len(CLIENTS)


def problem(kind="plain", clients=N, **changes):
    listed = layers_of(network(kind), models.example(TOY.shape))
    return replace(
        TaskInfo(listed, frozenset(), tuple(range(20, 20 + clients)), 1, 0), **changes
    )


def noise(seed, scale=1.0):
    """A model around the common start."""
    draw = torch.Generator().manual_seed(seed)
    start = tree.state_dict(network("plain").double())
    return {
        n: t + scale * torch.randn(t.shape, generator=draw, dtype=t.dtype)
        if t.is_floating_point()
        else t
        for n, t in start.items()
    }


def updates(uploads):
    return [
        Update(client, 1, Message({"model": upload}))
        for client, upload in uploads.items()
    ]


def heard(algorithm, uploads):
    """The server after these uploads."""
    server = algorithm.server_state(tree.state_dict(network("plain").double()))
    Mixing.aggregate(algorithm, server, updates(uploads), Round(0))
    return server


@pytest.mark.parametrize("name", MIXING)
def test_weights_are_recorded_whenever_all_clients_are_evaluated(name):
    played = play(algorithm=name, model="norm", participation=0.5, eval_every=2)
    algorithm = played.engine.algorithm
    assert isinstance(algorithm, Mixing)
    rows = [r for r in played.rows if r["metric"] == "aggregation_weight"]
    assert {r["round"] for r in rows} == {0, 2, 3}
    recorded = {
        tuple(r[key] for key in ("round", "client", "layer", "client_b")): r["value"]
        for r in rows
    }
    assert len(recorded) == 3 * N * N * len(algorithm.units)
    for done in (0, 2, 3):
        server = played.checkpoints[done - 1].server if done else None
        for place, client in enumerate(CLIENTS):
            for k, unit in enumerate(algorithm.units):
                row = [recorded[done, client, unit.name, other] for other in CLIENTS]
                assert min(row) >= 0
                assert sum(row) == pytest.approx(1, abs=1e-6)
                if server:
                    wanted = algorithm.weights(server, place, Round(done))[k]
                    assert row == wanted.tolist()


def test_fedfomo_asks_for_those_who_helped_and_explores():
    clients = 9
    affinity = {"0": {str(c): float(c) for c in range(1, clients)}}
    uploads = {c: noise(c) for c in range(clients) if c != 8}  # 8 has not replied yet

    def peers(index, **options):
        algorithm = FedFomo(problem(clients=clients), None, {"downloads": 3, **options})
        server = heard(algorithm, uploads)
        server.meta["affinity"] = affinity
        return sorted(map(int, algorithm.server_message(server, 0, Round(index)).trees))

    assert peers(0, epsilon=0) == peers(7) == [5, 6, 7]
    assert peers(0, downloads=50, epsilon=1) == [1, 2, 3, 4, 5, 6, 7]
    drawn = [tuple(peers(k, epsilon=1, epsilon_step=0)) for k in range(60)]
    assert {c for senders in drawn for c in senders} == set(range(1, 8))
    assert all(len(set(senders)) == 3 for senders in drawn)
    some = np.mean(
        [peers(k, epsilon=0.3, epsilon_step=0) != [5, 6, 7] for k in range(200)]
    )
    assert (
        0.3 < some < 0.75
    )  # 1 - 0.7^3 = 0.66 explore, and some of those draw the best all the same


def test_fedfomos_affinities_add_up():
    algorithm = FedFomo(problem())
    server = algorithm.server_state(noise(0))
    peers = [str(c) for c in range(1, N)]
    server.trees |= {f"client/{c}": noise(1) for c in peers}  # it received these
    for uploaded_weights in ({"1": 3.0, "2": -1.0}, {"1": -1.0, "3": 1.0}, {"2": 0.0}):
        weights = dict.fromkeys(peers, 0.0) | uploaded_weights
        message = Message({"model": noise(1)}, {"weights": weights})
        algorithm.aggregate(server, [Update(0, 1, message)], Round(1))
    for wrong in ({}, {"1": 1.0}, {**weights, "9": 1.0}, {**weights, "1": None}, None):
        message = Message({"model": noise(1)}, {"weights": wrong})
        with refuses("client 'north': weights must be a number for each model"):
            algorithm.aggregate(server, [Update(0, 1, message, "north")], Round(1))
    assert server.meta["affinity"] == {"0": {"1": 0.75 - 0.5, "2": -0.25, "3": 0.5}}


@pytest.mark.parametrize("clip", [50.0, 0.5])
def test_pfedhns_steps_are_torchs_sgd_client_after_client(clip):
    algorithm = PFedHN(problem(), None, {"hidden": 7, "clip": clip})
    server = algorithm.server_state(tree.state_dict(network("plain").double()))
    leaves = {
        n: t.clone().requires_grad_() for n, t in server.trees["hypernetwork"].items()
    }
    optimizer = torch.optim.SGD(
        leaves.values(), lr=0.01, momentum=0.9, weight_decay=1e-3
    )
    assert leaves["embeddings"].shape == (N, 1 + N // 4)
    for index in range(2):
        deltas = {c: noise(10 * index + c, 0.3) for c in (2, 0, 3)}
        for client, delta in deltas.items():
            hidden = leaves["embeddings"][client]
            for k in range(4):
                hidden = (
                    leaves[f"trunk.{k}.weight"] @ hidden + leaves[f"trunk.{k}.bias"]
                )
                hidden = hidden.clamp(min=0) if k < 3 else hidden
            gain = sum(
                (
                    delta[n].flatten()
                    * (leaves[f"heads.{n}.weight"] @ hidden + leaves[f"heads.{n}.bias"])
                ).sum()
                for n in delta
            )
            optimizer.zero_grad()
            gain.backward()
            torch.nn.utils.clip_grad_norm_(list(leaves.values()), clip)
            optimizer.step()
        replies = [
            Update(c, 1, Message({"delta": tree.clone(delta)}))
            for c, delta in deltas.items()
        ]
        hypernetwork = dict(server.trees["hypernetwork"])
        before = tree.clone(hypernetwork)
        algorithm.aggregate(server, replies, Round(index))
        for reply, delta in zip(
            replies, deltas.values(), strict=True
        ):  # steps are in place, on copies
            assert tree.digest(reply.message.trees["delta"]) == tree.digest(delta)
        assert tree.digest(hypernetwork) == tree.digest(before)
    for name, wanted in leaves.items():
        torch.testing.assert_close(
            server.trees["hypernetwork"][name], wanted.detach(), rtol=0, atol=1e-10
        )


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [(FedAMP, {}), (HeurFedAMP, {})],
)
def test_frozen_parameters_make_no_clients_alike(algorithm, options):
    """One layer is frozen, 100 times as long as what trains: weights are as if it were not there."""
    facts = problem()
    still = replace(facts.layers[0], frozen=facts.layers[0].parameters)
    uploads = {c: noise(c) for c in range(N)}
    short = {
        c: {**upload, **dict.fromkeys(still.parameters, torch.zeros(()))}
        for c, upload in uploads.items()
    }
    large = {
        name: torch.full_like(uploads[0][name], 100.0) for name in still.parameters
    }
    mixing = algorithm(replace(facts, layers=(still, *facts.layers[1:])), None, options)
    for client in range(N):
        weights = [
            mixing.weights(heard(mixing, received), client, Round(0)).tolist()
            for received in (
                short,
                {c: {**upload, **large} for c, upload in uploads.items()},
            )
        ]
        assert weights[0] == weights[1]
