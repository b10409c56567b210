"""Runs, and clients of one run, on a Ray cluster of two nodes of this machine. One is killed in the middle."""

import socket

import numpy as np
import pytest

import fedlayers as fl
from fedlayers.backends import cluster
from fedlayers.decision.compare import compare
from fl_core.config import RunConfig
from fl_core.records.store import Run
from tests.faults.injected import contents

CONFIG = RunConfig(
    dataset="heart", rounds=80, checkpoint_every=2, eval_every=40, stack="off"
)
PORTS = (
    "metrics_agent_port",
    "dashboard_agent_listen_port",
    "runtime_env_agent_port",
    "metrics_export_port",
)


def free_ports():
    """Ports for a node, which starts sooner if it need not find them."""
    servers = [socket.create_server(("", 0)) for _ in PORTS]
    ports = {
        name: server.getsockname()[1]
        for name, server in zip(PORTS, servers, strict=True)
    }
    for open_server in servers:
        open_server.close()
    return ports


TRIES = 3
"""A node gives itself up if it has not started within 15 seconds, which a busy machine may take."""
SECONDS = 300
"""How long a node that has started may take to join the others."""


@pytest.fixture
def two_nodes():
    """A cluster of a head and another node, with a CPU each."""
    ray = cluster.reachable("")
    from ray.cluster_utils import Cluster

    for left in reversed(range(TRIES)):
        nodes = Cluster()
        try:
            for _ in range(2):
                nodes.add_node(
                    wait=False,
                    num_cpus=1,
                    include_dashboard=False,
                    object_store_memory=10**8,
                    **free_ports(),
                )
            nodes.wait_for_nodes(timeout=SECONDS)
            break
        except (
            Exception
        ):  # Ray has no one kind of error for a node that does not start in time
            nodes.shutdown()
            if not left:
                raise
    try:
        yield nodes
    finally:
        ray.shutdown()
        nodes.shutdown()


@pytest.fixture
def killed(two_nodes, monkeypatch):
    """Kill the other node once a run there has a checkpoint here. Name the run and its round."""
    (other,) = two_nodes.worker_nodes
    nodes = []
    events = cluster.Cluster.events

    def killing(self, running):
        for handle, run in running.items():
            there = handle.node == other.node_id
            if there and any(run.path.glob("checkpoints/*.json")) and not nodes:
                two_nodes.remove_node(other, allow_graceful=False)
                nodes.append((run.name, Run(run.path).rounds[-1]))
        return events(self, running)

    monkeypatch.setattr(cluster.Cluster, "events", killing)
    return nodes


@pytest.mark.slow
def test_a_lost_nodes_run_goes_on_elsewhere_to_the_same_bits(
    tmp_path, two_nodes, killed
):
    with pytest.warns(UserWarning, match="is lost") as caught:
        theirs = compare(
            CONFIG,
            ["local", "playerfl"],
            [0, 1],
            tmp_path / "ray",
            backend=f"ray:{two_nodes.address}",
        )
    ((name, killed_round),) = killed
    assert 0 < killed_round < 80, "the node was killed within the run"
    assert any(f"is lost: {name} " in str(warning.message) for warning in caught)
    ours = compare(CONFIG, ["local", "playerfl"], [0, 1], tmp_path / "here")
    assert contents(tmp_path / "ray") == contents(tmp_path / "here")
    assert ours.table.equals(theirs.table)


@pytest.mark.slow
def test_a_lost_nodes_clients_are_trained_elsewhere_to_the_same_bits(
    tmp_path, two_nodes, monkeypatch
):
    run = cluster.Actors.run

    def killing(self, requests):
        for reply in run(self, requests):
            if reply.message.trees:  # of training: the other node has begun a client
                for other in list(two_nodes.worker_nodes):
                    two_nodes.remove_node(other, allow_graceful=False)
            yield reply

    monkeypatch.setattr(cluster.Actors, "run", killing)
    with pytest.warns(UserWarning, match="is lost: its client is trained elsewhere"):
        fl.run(CONFIG, tmp_path / "ray/run", backend=f"ray:{two_nodes.address}")
    assert not two_nodes.worker_nodes
    fl.run(CONFIG, tmp_path / "here/run")
    assert contents(tmp_path / "ray/run") == contents(tmp_path / "here/run")


@pytest.mark.slow
def test_300_clients_of_a_model_of_5_mb_go_on_without_a_node(
    tmp_path, two_nodes, monkeypatch
):
    """One round. The other node is killed after a third of its clients, whose replies fill 1.5 GB in all."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(300, 12, 8)).astype(np.float32)
    y = (x[:, :, 0] > 0).astype(np.int64)
    data = fl.from_clients({f"client {k:03d}": (x[k], y[k]) for k in range(300)})
    keys = {"model": "mlp", "model_options": {"sizes": [1100, 1100]}, "epochs": 1}
    keys |= {"rounds": 1, "eval_every": 1, "stack": "off", "progress": False}
    run, replies = cluster.Actors.run, []

    def killing(self, requests):
        for reply in run(self, requests):
            if reply.message.trees:
                replies.append(
                    sum(p.nbytes for p in reply.message.trees["model"].values())
                )
            if len(replies) == 100:
                for other in list(two_nodes.worker_nodes):
                    two_nodes.remove_node(other, allow_graceful=False)
            yield reply

    monkeypatch.setattr(cluster.Actors, "run", killing)
    place = f"ray:{two_nodes.address}"
    with pytest.warns(UserWarning, match="is lost: its client is trained elsewhere"):
        there = fl.run(data=data, out=tmp_path / "ray/run", backend=place, **keys)
    assert not two_nodes.worker_nodes
    assert len(replies) == 300
    assert min(replies) > 4.8e6
    here = fl.run(data=data, out=tmp_path / "here/run", **keys)
    assert contents(tmp_path / "ray/run") == contents(tmp_path / "here/run")
    assert there.to_frame().equals(here.to_frame())
