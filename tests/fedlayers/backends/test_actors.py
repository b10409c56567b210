"""Clients of one run as actors of a cluster that this process plays, and of a real one."""

from __future__ import annotations

import re
import sys
import time
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

import fedlayers as fl
from fedlayers.backends import cluster as actors
from fl_core.config import RunConfig
from fl_core.errors import DivergedError, RunError, WorkerError
from fl_core.rounds.recorder import read_pace
from tests.conftest import refuses
from tests.faults.injected import contents
from tests.fedlayers import command

pytestmark = pytest.mark.filterwarnings("ignore:client", "ignore:node .* is lost")
CONFIG = RunConfig(
    dataset="heart",
    algorithm="playerfl",
    rounds=3,
    eval_every=1,
    checkpoint_every=1,
    stack="off",
)


class RayActorError(Exception):
    """As Ray's: the actor's process or node is gone."""


class ObjectLostError(Exception):
    """The node ended that had the answer."""


class Reference:
    """A reference to a value in Ray's store. Methods receive the value itself."""

    def __init__(self, value):
        self.value = value


class Method:
    """A method of an actor, called at once; what comes of it is kept until it is asked for."""

    def __init__(self, call):
        self.call = call

    def remote(self, *arguments):
        return Reference(
            self.call(*(getattr(argument, "value", argument) for argument in arguments))
        )


class Actor:
    """As Ray's handle of an actor."""

    def __init__(self, cluster, inner):
        lacks, version = cluster.lacks, cluster.version
        error = RayActorError(f"traceback\n{lacks}")
        self.hello = Method(lambda: error if lacks else ("far", version))
        self.use = Method(inner.use)
        self.run = Method(lambda *given: cluster.loss() or inner.run(*given))


@dataclass
class Cluster:
    """As much of Ray as is used, with so many free CPUs; the first jobs' actors are lost before they answer.

    Attributes:
        free: CPUs. lost: how many actors are still to be lost. version: of the nodes. lacks: why an actor cannot begin.
        made, killed: actors. ready: references that have been waited for and not read.
    """

    free: int = 2
    lost: int = 0
    version: str = actors.__version__
    lacks: str = ""
    made: list[Actor] = field(default_factory=list)
    killed: list[Actor] = field(default_factory=list)
    ready: list[Reference] = field(default_factory=list)
    exceptions = SimpleNamespace(
        RayActorError=RayActorError, ObjectLostError=ObjectLostError
    )

    def loss(self):
        if self.lost:
            self.lost -= 1
            return (RayActorError, ObjectLostError)[self.lost % 2]()
        return None

    def remote(self, **asked):
        assert asked == {"num_cpus": 1, "num_gpus": 0, "max_restarts": 0}

        def made(kind):
            def start(packed):
                inner = kind(packed.value)
                for client in inner._client_runner.data.clients:
                    assert client.train.x.is_meta, "an actor has no samples"
                self.made.append(Actor(self, inner))
                return self.made[-1]

            return SimpleNamespace(remote=start)

        return made

    def put(self, value):
        return Reference(value)

    def get(self, reference):
        if isinstance(reference, list):
            self.ready += reference
            return [self.get(part) for part in reference]
        assert reference in self.ready, "waits for one, while another is ready"
        self.ready.remove(reference)
        if isinstance(reference.value, Exception):
            raise reference.value
        return reference.value

    def wait(self, references):
        ready = references[-1:]  # the last first: order is not Ray's to keep
        assert references, "waits for nobody, for ever"
        assert not self.ready, "waits, while one is ready"
        self.ready += ready
        return ready, references[:-1]

    def kill(self, actor):
        self.killed.append(actor)

    def is_initialized(self):
        return True

    def available_resources(self):
        return {"CPU": float(self.free)}


@pytest.fixture
def played(monkeypatch):
    cluster = Cluster()
    monkeypatch.setitem(sys.modules, "ray", cluster)
    monkeypatch.setitem(sys.modules, "ray.exceptions", cluster.exceptions)
    return cluster


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    out = tmp_path_factory.mktemp("here") / "run"
    fl.run(CONFIG, out, progress=False)
    return contents(out)


@pytest.mark.parametrize(("free", "lost", "made"), [(0, 0, 1), (3, 2, 3), (9, 0, 4)])
def test_a_run_has_the_same_files_whoever_trains_and_whoever_is_lost(
    tmp_path,
    played,
    here,
    free,
    lost,
    made,
):
    played.free, played.lost = free, lost
    began = time.perf_counter()
    fl.run(CONFIG, tmp_path / "run", backend="ray")
    took = time.perf_counter() - began
    parts = read_pace(tmp_path / "run/timing.jsonl").seconds
    assert all(0 <= seconds <= took for seconds in parts.values())
    assert contents(tmp_path / "run") == here
    assert (len(played.made), len(played.killed)) == (made, made - lost)


def test_when_all_are_lost_the_run_stops_and_goes_on_elsewhere(tmp_path, played, here):
    played.lost = 2
    with pytest.raises(WorkerError, match=r"node far .*lost"):
        fl.run(CONFIG, tmp_path / "run", backend="ray")
    fl.resume(tmp_path / "run", backend="ray")
    assert contents(tmp_path / "run") == here


def test_an_error_where_a_client_is_trained_is_raised_here(tmp_path, played):
    with pytest.raises(DivergedError, match="client '"):
        fl.run(
            CONFIG,
            tmp_path / "run",
            backend="ray",
            lr=1e30,
            optimizer="sgd",
            algorithm="fedavg",
        )
    assert len(played.killed) == 2


def test_another_version_is_refused_by_the_nodes_name(tmp_path, played):
    played.version = "0.0.1"
    with refuses(r"node far .*0\.0\.1"):
        fl.run(CONFIG, backend="ray")
    assert len(played.killed) == 2


def test_an_actor_that_cannot_begin_is_told_in_one_line(played):
    played.lacks = "ModuleNotFoundError: No module named 'mine'"
    with refuses(r"ModuleNotFoundError: .*'mine'", RunError):
        fl.run(CONFIG, backend="ray")
    assert len(played.killed) == 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--backend local:2", "'local:2'"),
        ("--backend ray --workers 2", "workers"),
        ("--backend ray --stack on", "stack"),
    ],
)
def test_places_that_do_not_train_clients_are_refused_before_anything_is_written(
    tmp_path, capsys, flags, message
):
    out = tmp_path / "run"
    with pytest.raises(SystemExit, match="2"):
        command(f"run --dataset heart --rounds 1 --out {out} {flags}")
    assert re.search(message, capsys.readouterr().err)
    assert not out.exists()
