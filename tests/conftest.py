"""What several test files need: one thread, small federations, small networks, and a run that remembers every round."""

import copy
import importlib
import os
import sys
import tempfile
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings
from torch import nn

from diagnostics.measure import instruments
from fl_core import models, tree
from fl_core.algorithms import Round, find
from fl_core.config import RunConfig
from fl_core.data import Source, partitions
from fl_core.data.federated import gather
from fl_core.errors import UsageError
from fl_core.records import store
from fl_core.records.store import Checkpoint
from fl_core.rounds.clients import LocalClients, Serial
from fl_core.rounds.engine import Engine, Schedule
from fl_core.rows import Row
from fl_core.run import runner
from fl_core.run.runner import Task
from fl_core.seeds import torch_seeded
from tests.clean_tree import (  # noqa: F401 (hooks of pytest)
    pytest_sessionfinish,
    pytest_sessionstart,
    pytest_terminal_summary,
)

FROM_OUTSIDE = ("_PROXY", "RAY_", "MPL", "COLUMNS", "NO_COLOR", "DONTWRITEBYTECODE")
"""Parts of the names of variables of a user's shell that tests and their processes do not read."""
for variable in [*os.environ]:
    if any(part in variable.upper() for part in FROM_OUTSIDE):
        del os.environ[variable]

torch.set_num_threads(1)
settings.register_profile("fedlayers", deadline=None)
settings.load_profile("fedlayers")

SIZES = (30, 45, 28, 40)
CONFIG = RunConfig(
    rounds=3,
    epochs=1,
    batch_size=8,
    lr=0.05,
    loss="cross_entropy",
    eval_every=1,
    checkpoint_every=1,
    optimizer="sgd",
)


WORKER_BYTES = 2 * 2**30


def pytest_xdist_auto_num_workers():
    """Return the number of workers of ``-n auto``: one a core that this process may use, and one for each 2 GiB."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(len(os.sched_getaffinity(0)), memory // WORKER_BYTES))


class on_first_use:  # noqa: N801
    """A module that is imported when something of it is used, which collecting the tests need not wait for.

    pytest asks each name of a file for its class, which would load a module of ``importlib.util.LazyLoader``.
    """

    def __init__(self, name):
        self._name = name

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(importlib.import_module(self._name), name)


def refuses(message, kind=UsageError):
    """What is called within must be refused, in words that match."""
    return pytest.raises(kind, match=message)


def every_other(names, start=0, of=2):
    """One of two, or of so many, in ``make test``, from that one on; the others are slow.

    A property of every algorithm takes a run of each: those that begin elsewhere hold for what others leave out.
    """
    return [
        pytest.param(name, marks=[pytest.mark.slow] * ((k + start) % of > 0))
        for k, name in enumerate(names)
    ]


def with_slow(names, slow):
    """Values of a test's parameter, of which some are left to the slow tests."""
    return [
        pytest.param(name, marks=[pytest.mark.slow] * (name in slow)) for name in names
    ]


def samples(
    sizes=SIZES,
    shape=(1, 6, 6),
    classes=3,
    seed=0,
):
    """Samples of clients named a, b, c, ...: noise with a learnable linear rule behind the labels."""
    sizes, random = list(sizes), np.random.default_rng(seed)
    x = random.standard_normal((sum(sizes), *shape)).astype(np.float32)
    y = (
        (x.reshape(len(x), -1) @ random.standard_normal((int(np.prod(shape)), classes)))
        .argmax(1)
        .astype(np.int64)
    )
    names = tuple(chr(ord("a") + k) for k in range(len(sizes)))
    owner = np.repeat(np.arange(len(sizes)), sizes)
    return Source(
        "toy", x, y, tuple(f"class {k}" for k in range(classes)), owner, names
    )


def federation(*args, seed=0, **keys):
    """Clients with so many samples each, of :func:`samples`."""
    source = samples(*args, seed=seed, **keys)
    return gather(source, partitions.make(source, "natural", seed=seed))


TOY = federation()


BLOCKS = {
    "vit": {"patch": 3, "depth": 3, "width": 8, "heads": 2},
    "mixer": {"patch": 3, "depth": 3, "width": 8},
}


def kind_for(algorithm, kind):
    """The kind of network, or a small transformer where the algorithm needs blocks that the kind does not have."""
    return "vit" if find(algorithm).needs_blocks and kind not in BLOCKS else kind


def network(kind, seed=0):
    """Return three or four layers on samples of TOY.

    Kinds: ``plain``, ``drop`` with dropout, ``norm`` with batch normalisation, ``unused`` with a layer that no
    forward pass reaches, and three residual blocks, ``vit`` and ``mixer``.
    """
    if kind in BLOCKS:
        return models.build(kind, (1, 6, 6), 3, seed=seed, options=BLOCKS[kind])
    with torch_seeded(seed):
        flat = ("flat", nn.Flatten())
        if kind == "norm":
            return nn.Sequential(
                OrderedDict(
                    conv=nn.Conv2d(1, 4, 3, bias=False),
                    bn1=nn.BatchNorm2d(4),
                    relu1=nn.ReLU(),
                    flat=nn.Flatten(),
                    fc1=nn.Linear(64, 8, bias=False),
                    bn2=nn.BatchNorm1d(8),
                    relu2=nn.ReLU(),
                    fc2=nn.Linear(8, 3),
                )
            )
        parts = [flat, ("fc1", nn.Linear(36, 8)), ("relu1", nn.ReLU())]
        if kind == "drop":
            parts += [("drop", nn.Dropout(0.4))]
        parts += [
            ("fc2", nn.Linear(8, 6)),
            ("relu2", nn.ReLU()),
            ("fc3", nn.Linear(6, 3)),
        ]
        model = nn.Sequential(OrderedDict(parts))
        if kind == "unused":
            return Unused(model)
        return model


class Unused(nn.Module):
    """A network beside a layer that it never calls."""

    def __init__(self, used):
        super().__init__()
        self.used, self.spare = used, nn.Linear(2, 2)

    def forward(self, x):
        return self.used(x)


@dataclass
class Recorder:
    """A writer that keeps everything in memory."""

    path: Path
    rows: list[Row] = field(default_factory=list)
    checkpoints: list[Checkpoint] = field(default_factory=list)
    saved: int | None = None

    def add_rows(self, new):
        self.rows += new

    def checkpoint(self, checkpoint, changed=None):
        models = {
            kind: dict(models_of_kind)
            for kind, models_of_kind in checkpoint.models.items()
        }
        self.checkpoints.append(
            copy.deepcopy(
                replace(checkpoint, clients=dict(checkpoint.clients), models=models)
            )
        )

    def add_timing(self, record):
        pass


@dataclass
class Played:
    """A finished run with its state after every round."""

    task: Task
    engine: Engine
    rows: list[Row]
    checkpoints: list[Checkpoint]

    def server(self):
        """Digest of the server's model after each round."""
        return [tree.digest(c.server.trees["model"]) for c in self.checkpoints]

    def models(self, which):
        """Digest of every client's model of that name after each round."""
        return [
            [
                tree.digest(
                    self.engine.algorithm.models(c.server, state, Round(c.round))[which]
                )
                for state in c.clients.values()
            ]
            for c in self.checkpoints
        ]

    def evaluated(self):
        """Digest of the model that exists for every client after every round."""
        return self.models(self.engine.algorithm.evaluates)

    def everything(self):
        """Digests and meta data of all that a checkpoint holds."""
        return [
            {
                "server": _digests(c.server.trees) | {"meta": c.server.meta},
                "clients": {
                    name: _digests(s.trees) | {"meta": s.meta}
                    for name, s in c.clients.items()
                },
                "models": {kind: _digests(models) for kind, models in c.models.items()},
            }
            for c in self.checkpoints
        ]

    def values(self, metric, **columns):
        """(round, client) -> value of the rows with these columns."""
        chosen = [
            r
            for r in self.rows
            if r["metric"] == metric and all(r[k] == v for k, v in columns.items())
        ]
        value_of = {(r["round"], r["client"]): r["value"] for r in chosen}
        assert len(value_of) == len(chosen), "the columns do not single rows out"
        return value_of


def _digests(trees):
    return {name: tree.digest(entries) for name, entries in trees.items()}


def client_runner_of(task, borrowed=None):
    """Where a task's clients run."""
    return task.client_runner((borrowed or instruments()).observers)


def play(
    config=CONFIG,
    *,
    data=TOY,
    model="plain",
    plan=None,
    executor=None,
    borrowed=None,
    trace=(),
    **changes,
):
    """Run to the end in this process (or in ``executor``), remembering every round.

    Args:
        trace: round and client of lost replies.
    """
    if "config_plan" in changes:
        changes["plan"] = changes.pop("config_plan")
    config = config.with_keys(**changes)
    if isinstance(model, str):
        model = network(kind_for(config.federation.algorithm, model))
    task = runner.assemble(config, data=data, model=model, plan=plan)
    borrowed = borrowed or instruments()
    client_runner = client_runner_of(task, borrowed)
    initial = tree.state_dict(task.model)
    schedule = Schedule(
        task.config.federation.rounds or 1,
        config.federation.participation,
        config.execution.eval_every or 1,
        1,
    )
    schedule.keeps = True
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        if trace:
            patch.setattr(
                "fl_core.rounds.clients.is_lost",
                lambda _, index, client, rate: (index + 1, client) in trace,
            )
        recorder = Recorder(Path(folder, "run"))
        algorithm = task.algorithm(task.plan)
        executor = executor or Serial(client_runner)
        clients = LocalClients(
            client_runner, executor, initial, dropout=config.federation.client_dropout
        )
        listeners = runner.listeners_of(task, client_runner, borrowed, recorder)
        engine = Engine(algorithm, task.data, initial, clients, schedule, listeners)
        engine.run()
    return Played(task, engine, recorder.rows, recorder.checkpoints)


@pytest.fixture(scope="session", autouse=True)
def files_need_not_outlive_a_power_cut():
    """A disk takes 10 ms to confirm a file, and tests write many thousands; processes that they start still wait."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def the_commit_of_a_folder_is_asked_for_once():
    """Git reads all files for it, and each stored run has it."""
    commit = store.commit

    @cache
    def commit_of(folder):
        return commit()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "commit", lambda: commit_of(os.getcwd()))
        yield


@pytest.fixture
def own_members(monkeypatch):
    """Members that a test adds to a registry are gone after it."""

    def keep(registry):
        registry.names()  # imports the package's own, which must outlive the test
        for name in ("_members", "_origins"):
            monkeypatch.setattr(registry, name, dict(getattr(registry, name)))

    return keep


@pytest.fixture(autouse=True)
def no_picture_stays_open():
    """Pictures that a test leaves open are closed after it, lest matplotlib warns of their number in another."""
    yield
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")
