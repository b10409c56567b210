"""Runs of the leaderboard: trials, resume, own algorithms, and rows of the same bits."""

import json
import math
from itertools import product

import pytest

from benchmarks.leaderboard import federations, runs
from benchmarks.leaderboard.__main__ import command
from benchmarks.leaderboard.federations import FEDERATIONS, Scene
from benchmarks.leaderboard.methods import (
    METHODS,
    RATES,
    SCORED,
    TUNING,
    best_setting,
    next_setting,
    own_method,
)
from fl_core.algorithms.fedper import FedPer
from tests.benchmarks.leaderboard import planted
from tests.conftest import refuses


class Mine(FedPer):
    """An own algorithm: FedPer under another name."""

    name = "mine"


def tried(method, score):
    """Return all settings that a method tries under a score of settings."""
    found = []
    while (setting := next_setting(method, found)) is not None:
        found.append((setting, score(setting)))
    return found


def test_at_most_eight_trials_rates_first_then_an_end_a_key_and_the_optimiser():
    for best, method in product((1e-4, 3e-3, 1.0), METHODS.values()):
        if method.kind != "train":
            continue
        trials = tried(method, lambda s, best=best: -abs(math.log(s["lr"] / best)))
        found = [setting for setting, _ in trials]
        own, wider = 2 if method.key else 0, best != 3e-3
        assert len(found) == 4 + wider + own + 1 <= 8
        assert [setting["lr"] for setting in found[:4]] == list(RATES)
        last = {1e-4: 3e-4, 3e-3: 3e-3, 1.0: 1e-1}[best]
        assert {setting["lr"] for setting in found[4:]} == {last}
        keys = [False] * (4 + wider) + [True] * own + [False]
        assert [method.key in setting for setting in found] == keys
        kept = [setting["keep_optimizer"] for setting in found]
        assert kept == [False] * (len(found) - 1) + [True]
        assert len({json.dumps(s, sort_keys=True) for s in found}) == len(found)
    found = tried(METHODS["ditto"], lambda s: s.get("lam", 0.1))
    assert found[-1][0]["lam"] == 1.0  # the optimiser at the best value of the key
    failed = [({"lr": 1}, math.nan), ({"lr": 2}, -5.0), ({"lr": 3}, -6.0)]
    assert best_setting(failed) == {"lr": 2}


def test_every_method_and_key_is_there():
    from dataclasses import fields

    from fl_core.algorithms.base import find

    for method in METHODS.values():
        if method.algorithm and method.key:
            options = fields(find(method.algorithm).Config)
            known = {"threshold", *(option.name for option in options)}
            assert method.key in known, method.title


@pytest.fixture(autouse=True)
def nothing_stored(monkeypatch, tmp_path_factory):
    """Let no test depend on the stored rows."""
    monkeypatch.setattr(
        runs, "STORED", tmp_path_factory.mktemp("stored") / "rows.parquet"
    )


@pytest.fixture
def quick(monkeypatch):
    """Make runs in no time: a row that depends on the setting alone."""

    def trained(scene, name, method, setting):
        clients = None if scene.seed == TUNING else {"a": [0.5, 0.5, 0.5, 3]}
        return planted.row(
            scene.name,
            name,
            scene.seed,
            clients,
            setting=setting,
            validation=setting.get("lr"),
        )

    monkeypatch.setattr(runs, "make_run", trained)


SOME = {name: METHODS[name] for name in ("fedavg", "fedprox", "majority")}


def test_runs_resume_after_any_run(quick, tmp_path):
    def made(name, **how):
        return runs.run(tmp_path / name, federations=["heart"], methods=SOME, **how)

    assert made("whole") == 6 + 3 + 8 + 3 + 3
    whole = runs.read(tmp_path / "whole")
    for done in (1, 8, 12, 22, 23):
        runs.add(tmp_path / f"{done}", *whole[:done])
        assert made(f"{done}") == 23 - done
        assert runs.read(tmp_path / f"{done}") == whole
    assert made("new", known=tmp_path / "whole") == 0  # known rows are not made again
    assert runs.read(tmp_path / "whole", tmp_path / "whole") == whole


def test_federations_without_their_tables_are_left_out_unless_named(quick, tmp_path):
    told, out = [], tmp_path / "out"
    methods = {"majority": METHODS["majority"]}
    runs.run(out, methods=methods, data_root=tmp_path, tell=told.append)
    files = {n for n, each in FEDERATIONS.items() if each.origin == federations.FILE}
    assert {row["federation"] for row in runs.read(out)} == set(FEDERATIONS) - files
    assert sum("is left out" in line for line in told) == len(files)
    with refuses(r"chile\.csv"):
        runs.run(out, federations=["chile"], data_root=tmp_path)


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(federations, "ROUNDS", 2)
    monkeypatch.setattr(federations, "EVERY", 1)


SETTING = {"lr": 0.01, "keep_optimizer": False}


def test_runs_are_scored_on_held_out_samples_with_costs(short):
    scene = Scene("diabetes", SCORED[0])
    row = runs.make_run(scene, "fedper", METHODS["fedper"], SETTING)
    assert row.keys() == runs.KEYS
    assert row["status"] == "ok"
    assert list(row["clients"]) == [client.name for client in scene.data.clients]
    counts = [values[-1] for values in row["clients"].values()]
    assert counts == list(scene.data.weights)
    head = 16 * 3 + 3
    body = 10 * 64 + 64 + 64 * 32 + 32 + 32 * 16 + 16
    # two rounds, both ways, four bytes a number
    assert (row["sent"], row["stored"]) == (2 * 2 * 4 * body, 4 * head)
    pooled = runs.make_run(scene, "centralised", METHODS["centralised"], SETTING)
    assert list(pooled["clients"]) == list(row["clients"])
    assert pooled["sent"] is None
    tuning = Scene("diabetes", TUNING)  # its runs are not scored
    row = runs.make_run(tuning, "local", METHODS["local"], SETTING)
    assert row["clients"] is None
    assert 0 <= row["validation"] <= 1


def test_the_advice_is_a_plan_and_a_rate_that_choose_tuned(short):
    scene = Scene("diabetes", TUNING)
    told = runs.make_run(scene, "advice", METHODS["advice"], {})["setting"]
    assert told["lr"] in RATES
    assert set(told["plan"]) <= {layer.name for layer in scene.task.layers}
    row = runs.make_run(Scene("diabetes", SCORED[0]), "advice", METHODS["advice"], told)
    assert row["clients"]


def test_an_own_algorithm_is_tuned_and_scored_alike(short, tmp_path):
    name = f"{__name__}:Mine"
    mine = {name: own_method(name)}
    methods = {**mine, "fedper": METHODS["fedper"]}
    runs.run(tmp_path / "rows", federations=["diabetes"], methods=methods)
    rows = runs.read(tmp_path / "rows")
    own = [row for row in rows if row["method"] == name]
    usual = [row for row in rows if row["method"] == "fedper"]
    # the same algorithm has the same bits
    assert own == [{**row, "method": name} for row in usual]
    ((stored, new),) = runs.repeat_runs(own, 1, methods=mine)
    assert stored == new
    with refuses("again must be from 1"):
        list(runs.repeat_runs([], 1))


def test_the_command_refuses_what_is_not_there(capsys):
    for words, told in (
        (["--federations", "hart"], "did you mean 'heart'"),
        (["--algorithm", "fedprxo"], "did you mean 'fedprox'"),
    ):
        with pytest.raises(SystemExit) as ended:
            command(words)
        assert ended.value.code == 2
        assert told in capsys.readouterr().err
