"""FedLAMA: which layers are due, which are long, and that no local work is ever thrown away."""

from functools import cache

import pytest

from fl_core import tree
from fl_core.algorithms import Round, State
from fl_core.algorithms.scheduling import DISCREPANCY, INTERVALS, FedLAMA, long_layers
from tests.conftest import TOY, network, play

CLIENTS = [client.name for client in TOY.clients]
SETTINGS = {
    "long layers": {"rounds": 7, "options": {"phi": 3}},
    "half the clients": {"rounds": 7, "participation": 0.5, "momentum": 0.9},
    "two rounds are one unit": {"rounds": 9, "options": {"tau": 2}},
    "batch norm": {"rounds": 5, "model": "norm", "optimizer": "adamw", "lr": 0.01},
    "batch norm, local": {"rounds": 5, "model": "norm", "batchnorm": "local"},
}
settings = pytest.mark.parametrize("setting", SETTINGS)
NOWHERE = None  # FedLAMA asks nothing of the place where a client is


@cache
def played(setting):
    return play(algorithm="fedlama", eval_every=9, **SETTINGS[setting])


def rounds(
    setting,
):
    """Every round: server and clients before it, the server after it, and the models that local training gave."""
    run = played(setting)
    algorithm = run.engine.algorithm
    assert isinstance(algorithm, FedLAMA)
    initial = tree.state_dict(network(SETTINGS[setting].get("model", "plain")))
    server, clients = (
        algorithm.server_state(initial),
        {name: algorithm.client_state(initial, c) for c, name in enumerate(CLIENTS)},
    )
    for index, checkpoint in enumerate(run.checkpoints):
        local = checkpoint.models["local"]
        sampled = tuple(CLIENTS.index(name) for name in local)
        yield (
            algorithm,
            Round(index, sampled=sampled),
            server,
            clients,
            checkpoint.server,
            local,
        )
        server, clients = checkpoint.server, checkpoint.clients


@settings
def test_local_work_is_never_thrown_away(setting):
    """A client goes on from where it left every layer that it has not sent since it trained it."""
    waiting = {}
    went_on = 0
    for algorithm, rnd, server, clients, _, local in rounds(setting):
        due = algorithm.of_layers(algorithm.due_layers(server, rnd))
        for client in rnd.sampled:
            name = CLIENTS[client]
            state = State(dict(clients[name].trees), dict(clients[name].meta))
            begun = algorithm.client_start(
                state,
                algorithm.server_message(server, client, rnd),
                NOWHERE,
                rnd,
                client,
            )
            client_model = {**clients[name].trees["model"], **waiting.get(name, {})}
            assert tree.digest(begun) == tree.digest(
                {**server.trees["model"], **client_model}
            )
            went_on += len(waiting.get(name, {}))
            waiting[name] = {
                n: local[name][n] for n in algorithm.shared(rnd, client) - due
            }
    assert went_on
    if SETTINGS[setting].get("participation", 1) == 1:
        assert not any(waiting.values()), (
            "in the end all of it is in the server's model"
        )


@settings
def test_intervals_follow_the_discrepancies_of_the_clients(setting):
    chosen = 0
    noted = {}
    for algorithm, rnd, server, _, after, local in rounds(setting):
        tau, phi = algorithm.config.tau, algorithm.config.phi
        intervals = server.meta.get(INTERVALS, {})
        sizes = {}
        for layer in algorithm.task_info.layers:
            sizes[layer.name] = sum(
                after.trees["model"][n].numel() for n in layer.parameters
            )
            if layer.name in algorithm.due_layers(server, rnd):
                apart = [
                    sum(
                        float(
                            (t[n].double() - after.trees["model"][n].double())
                            .square()
                            .sum()
                        )
                        for n in layer.parameters
                    )
                    for t in local.values()
                ]
                interval = intervals.get(layer.name, tau)
                noted[layer.name] = (
                    sum(apart) / len(apart) / interval / sizes[layer.name]
                )
        assert after.meta[DISCREPANCY] == pytest.approx(noted, rel=1e-5)
        if (rnd.index + 1) % (tau * phi):
            assert after.meta.get(INTERVALS, {}) == intervals
        else:
            long = long_layers(noted, sizes)
            assert after.meta[INTERVALS] == {
                name: tau * (phi if name in long else 1) for name in sizes
            }
            chosen += len(long)
        observed = {o.layer: o.value for o in algorithm.observations(after, rnd)}
        assert observed == algorithm.intervals(after)
        assert list(observed) == [layer.name for layer in algorithm.task_info.layers]
    assert chosen
