"""Every way of running gives the bits of one process: worker processes, and a run in two parts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from diagnostics.measure import instruments
from fl_core import runner
from fl_core.algorithms import registry
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
COMMON: dict[str, Any] = {
    "rounds": 2,
    "participation": 0.5,
    "client_dropout": 0.3,
    "eval_every": 2,
}
TRAININGS: list[tuple[str, dict[str, Any]]] = [
    ("drop", {"momentum": 0.9, "weight_decay": 0.01}),
    ("norm", {"optimizer": "adamw", "lr": 0.01, "keep_optimizer": True}),
]
"""A model with dropout, and one with batch normalisation. Algorithms take turns."""
QUICK = {"fedavg", "fedper", "playerfl", "ditto", "scaffold", "fedlama", "pfedhn"}
EACH = [
    pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow])
    for name in ALL
]


def how(name: str) -> tuple[str, dict[str, Any]]:
    """Return the model and the keys with which an algorithm trains here."""
    kind, keys = TRAININGS[ALL.index(name) % 2]
    return kind, {**COMMON, **keys}


@cache
def reference(name: str) -> Played:
    """Return the run in one process."""
    kind, keys = how(name)
    played = play(algorithm=name, model=kind, **keys)
    digests = {
        str(each["clients"]) + str(each["server"]) for each in played.everything()
    }
    assert len(digests) == 2, "every round must change something"
    return played


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    """Two processes for all algorithms, since new ones start slowly."""
    task = runner.assemble(CONFIG, data=TOY, model=network("plain"))
    pool = Workers(client_runner_of(task), 2)
    yield pool
    pool.close()


@pytest.mark.parametrize("name", every_other(ALL, of=3))
def test_workers(name: str, workers: Workers) -> None:
    kind, keys = how(name)
    config = CONFIG.with_keys(algorithm=name, **keys)
    task = runner.assemble(config, data=TOY, model=network(kind_for(name, kind)))
    workers.serve(client_runner_of(task))
    found = play(algorithm=name, model=kind, executor=workers, **keys)
    assert found.everything() == reference(name).everything()
    assert found.rows == reference(name).rows


@pytest.mark.parametrize("name", EACH)
def test_two_parts(name: str, tmp_path: Path) -> None:
    kind, keys = how(name)
    config = CONFIG.with_keys(algorithm=name, checkpoint_every=1, **keys)
    own: dict[str, Any] = {
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
