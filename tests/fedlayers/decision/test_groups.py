"""The way that trains one model a group of clients: the groups are those of the clients' names."""

from types import SimpleNamespace

import pytest
import torch

from fedlayers.decision.choose import _groups as shown_groups
from fedlayers.decision.training import _grouped_way
from fl_core.algorithms import Round, registry
from fl_core.algorithms.base import State
from tests.conftest import refuses
from tests.fl_core.test_fedamp import N, noise, problem


def trained(groups, significant=True, names="abcd"):
    """Return what a decision has trained, with the groups of its clients."""
    clients = [SimpleNamespace(name=name) for name in names]
    task = SimpleNamespace(data=SimpleNamespace(clients=clients))
    alike = SimpleNamespace(groups=groups, significant=significant)
    return SimpleNamespace(question=SimpleNamespace(task=task), alike=alike)


def test_clients_are_grouped_by_their_names():
    groups = {"d": 2, "b": 1, "a": 2, "c": 1}
    assert _grouped_way(trained(groups)).options == {"groups": [2, 1, 1, 2]}
    assert shown_groups(trained(groups)) == (("d", "a"), ("b", "c"))
    assert shown_groups(trained(groups, significant=False)) == ()
    with refuses("no groups of clients are shown"):
        _grouped_way(trained(groups, significant=False))


@pytest.mark.parametrize("groups", [(1, 2, 1, 2), (1, 1, 1, 1), (1, 2, 3, 4)])
def test_each_layer_of_a_client_s_model_is_the_mean_of_its_group(groups):
    assert len(groups) == N
    algorithm = registry()["grouped"](problem(), None, {"groups": groups})
    uploads = {f"client/{client}": noise(client + 1) for client in range(N)}
    server = State({"model": noise(0), **uploads})
    sizes = algorithm.task_info.n_train
    for client in range(N):
        sent = algorithm.server_message(server, client, Round(1)).trees["model"]
        same = [k for k in range(N) if groups[k] == groups[client]]
        total = sum(sizes[k] for k in same)
        for name, tensor in sent.items():
            parts = [uploads[f"client/{k}"][name].double() * sizes[k] for k in same]
            assert torch.allclose(tensor.double(), sum(parts) / total, atol=1e-6)
