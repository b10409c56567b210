"""What is asked of Ray, with nodes that this process plays: one is lost in the middle, another has another version."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

import fedlayers as fl
from fedlayers.backends import cluster
from fedlayers.decision.jobs import TrainingJob, open_backend
from fl_core.config import RunConfig
from fl_core.errors import BusyError, RunError
from fl_core.records import writing
from tests.conftest import refuses
from tests.faults.injected import contents

pytestmark = pytest.mark.filterwarnings("ignore:client", "ignore:node .* is lost")
CONFIG = RunConfig(dataset="heart", rounds=3, eval_every=1, checkpoint_every=1)


class RayError(Exception):
    """As Ray's: something of the cluster is lost."""


class RayTaskError(RayError):
    """As Ray's: the task itself failed."""


@dataclass
class Nodes:
    """As much of Ray as is used: every task is on a node of its own, which is lost once it has sent a checkpoint.

    Attributes:
        lost: how many nodes are still to be lost.
        begun: checkpoints that each task was given to go on from.
        open: tasks that were neither ended nor cancelled.
        gone: what lost nodes are still at, which nobody hears.
    """

    lost: int = 0
    version: str = cluster.__version__
    begun: list[int] = field(default_factory=list)
    open: set[int] = field(default_factory=set)
    gone: list[Iterator[Any]] = field(default_factory=list)
    exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)

    def remote(self, **asked):
        assert asked.items() >= {"num_cpus": 1, "num_gpus": 0, "max_retries": 0}.items()
        return lambda function: SimpleNamespace(remote=self._started(function))

    def _started(self, function):
        def start(*arguments):
            work, parcels, sent = pickle.loads(pickle.dumps(arguments))
            self.begun.append(
                sum("checkpoints/" in name for parcel in parcels for name in parcel)
            )
            items = self._items(function(work, parcels, sent))
            self.open.add(id(items))
            return items

        return start

    def _items(self, said):
        for item in said:
            if isinstance(item, cluster.Hello):
                item = cluster.Hello((*item[:2], self.version))
            yield item
            if (
                self.lost
                and isinstance(item, dict)
                and any("checkpoints/" in name for name in item)
            ):
                self.lost -= 1
                self.gone.append(said)
                raise RayError("a node is gone")

    def wait(self, items, num_returns, **_):
        assert num_returns == 1, "waits for the slowest"
        return items[:1], items[1:]

    def get(self, item):
        return pickle.loads(pickle.dumps(item))

    def cancel(self, items, force):
        self.open.discard(id(items))
        items.close()

    def is_initialized(self):
        return True

    def cluster_resources(self):
        return {"CPU": 1.0}

    def nodes(self):
        return [{"Alive": True}]

    def get_runtime_context(self):
        return SimpleNamespace(get_node_id=lambda: "a node")


@pytest.fixture
def nodes(monkeypatch):
    network = Nodes()
    monkeypatch.setitem(sys.modules, "ray", network)
    monkeypatch.setitem(sys.modules, "ray.exceptions", network.exceptions)
    monkeypatch.setattr(cluster, "PERIOD", 0.01)
    return network


def compare(out, **how):
    algorithms = ["local", "playerfl"]
    fl.compare(CONFIG, algorithms, [0], out, command="typed", **how)


@pytest.mark.slow
def test_a_lost_nodes_run_goes_on_from_its_last_checkpoint_to_the_same_files(
    tmp_path, nodes
):
    nodes.lost = 1
    compare(tmp_path / "there", backend="ray")
    for unheard in nodes.gone:
        list(unheard)
    assert sorted(nodes.begun)[:2] == [0, 0]
    assert max(nodes.begun) > 0, "it went on from what had arrived"
    assert (len(nodes.begun), nodes.open) == (3, set())
    compare(tmp_path / "here")
    assert contents(tmp_path / "there/runs") == contents(tmp_path / "here/runs")


def test_a_node_of_another_version_is_refused_by_name_and_nothing_goes_on(
    tmp_path, nodes
):
    nodes.version = "0.0.1"
    with refuses(r"node .* 0\.0\.1"):
        fl.compare(CONFIG, ["local", "fedavg"], [0], tmp_path, backend="ray")
    assert not nodes.open


def test_what_a_node_cannot_import_is_told(tmp_path, nodes, monkeypatch):
    def failing(item):
        error = RayTaskError("a long traceback")
        error.cause = ModuleNotFoundError("No module named 'fedlayers'")
        raise error

    monkeypatch.setattr(nodes, "get", failing)
    with refuses(r"ModuleNotFoundError: .*'fedlayers'", RunError):
        fl.compare(CONFIG, ["local"], [0], tmp_path, backend="ray")


def test_a_run_that_another_process_writes_is_not_sent(tmp_path, nodes):
    with writing.create(tmp_path / "run", {}, {}, {}), open_backend("ray") as place:
        (result,) = place.results([TrainingJob(tmp_path / "run", CONFIG)])
    assert isinstance(result.error, BusyError)


def test_a_cluster_that_was_open_before_stays_open(nodes):
    """Nothing here shuts it down: these nodes could not be."""
    with open_backend("ray") as place:
        assert place.side_by_side == 1
