"""Workers and a run in two parts give the bits of one process; stacks give them up to rounding."""

import json
from functools import cache

import pytest

from diagnostics.measure import instruments
from fl_core import runner, tree
from fl_core.algorithms import find, registry
from fl_core.batched import BatchedClients
from fl_core.records.store import Run
from fl_core.workers import Workers
from tests.conftest import (
    CONFIG,
    TOY,
    Played,
    client_runner_of,
    every_other,
    kind_for,
    network,
    play,
)

ALL = sorted(registry())
COMMON = {
    "rounds": 2,
    "participation": 0.5,
    "client_dropout": 0.3,
    "eval_every": 2,
}
TRAININGS = [
    ("drop", {"momentum": 0.9, "weight_decay": 0.01}),
    ("norm", {"optimizer": "adamw", "lr": 0.01, "keep_optimizer": True}),
]
"""A model with dropout, and one with batch normalisation. Algorithms take turns."""
QUICK = {"fedavg", "fedper", "playerfl", "ditto", "scaffold", "fedlama", "pfedhn"}
EACH = [
    pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow])
    for name in ALL
]


def how(name):
    """Return the model and the keys with which an algorithm trains here."""
    kind, keys = TRAININGS[ALL.index(name) % 2]
    return kind, {**COMMON, **keys}


@cache
def reference(name):
    """Return the run in one process."""
    kind, keys = how(name)
    played = play(algorithm=name, model=kind, **keys)
    digests = {
        str(each["clients"]) + str(each["server"]) for each in played.everything()
    }
    assert len(digests) == 2, "every round must change something"
    return played


@pytest.fixture(scope="module")
def workers():
    """Two processes for all algorithms, since new ones start slowly."""
    task = runner.assemble(CONFIG, data=TOY, model=network("plain"))
    pool = Workers(client_runner_of(task), 2)
    yield pool
    pool.close()


@pytest.mark.parametrize("name", every_other(ALL, of=3))
def test_workers(name, workers):
    kind, keys = how(name)
    config = CONFIG.with_keys(algorithm=name, **keys)
    task = runner.assemble(config, data=TOY, model=network(kind_for(name, kind)))
    workers.serve(client_runner_of(task))
    found = play(algorithm=name, model=kind, executor=workers, **keys)
    assert found.everything() == reference(name).everything()
    assert found.rows == reference(name).rows


@pytest.mark.parametrize("name", EACH)
def test_two_parts(name, tmp_path):
    kind, keys = how(name)
    config = CONFIG.with_keys(algorithm=name, checkpoint_every=1, **keys)
    own = {
        "data": TOY,
        "model": network(kind_for(name, kind)),
        "instruments": instruments(),
        "progress": False,
    }
    out = tmp_path / "run"
    runner.run(config, out, until=1, **own)
    engine = runner.resume(out, **own)
    whole = reference(name)
    found = Played(whole.task, engine, [], [Run(out).checkpoint("last")])
    parts, one = (
        json.dumps(each.everything()[-1], sort_keys=True) for each in (found, whole)
    )
    assert parts == one
    lines = (out / "rows.jsonl").read_text("utf-8").splitlines()[1:]
    assert [json.loads(line) for line in lines] == whole.rows


STACKED = [name for name in ALL if not find(name).needs_blocks]


@pytest.mark.parametrize("name", every_other(STACKED, 1, of=3))
def test_stacks(name):
    """Sums of a stack round in another order."""
    keys = {**COMMON, "momentum": 0.9, "keep_optimizer": True}
    config = CONFIG.with_keys(algorithm=name, **keys)
    task = runner.assemble(config, data=TOY, model=network("plain"))
    stack = BatchedClients(client_runner_of(task))
    found, wanted = (
        play(algorithm=name, executor=each, **keys) for each in (stack, None)
    )
    for ours, theirs in zip(found.checkpoints, wanted.checkpoints, strict=True):
        for mine, other in (
            (ours.server.trees, theirs.server.trees),
            *((ours.models[k], trees) for k, trees in theirs.models.items()),
            *((ours.clients[k].trees, s.trees) for k, s in theirs.clients.items()),
        ):
            far = {key: tree.distance(mine[key], each) for key, each in other.items()}
            assert far == pytest.approx(dict.fromkeys(mine, 0), abs=1e-4)
    for ours, theirs in zip(found.rows, wanted.rows, strict=True):
        assert ours | {"value": 0} == theirs | {"value": 0}
        assert ours["value"] == pytest.approx(theirs["value"], rel=1e-4, abs=1e-5)
