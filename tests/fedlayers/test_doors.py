"""The one import that a newcomer makes: every door opens, says what it is, and shows a run of itself."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from unittest.mock import DEFAULT, Mock

import pytest

import fedlayers as fl
from fedlayers import catalogue
from fl_core.errors import UsageError
from fl_core.tree import digest
from tests.conftest import TOY, network


@pytest.mark.parametrize("name", sorted(set(fl.__all__) - {"__version__"}))
def test_a_door_opens_and_says_what_it_is(name):
    assert name in dir(fl)
    door = getattr(fl, name)
    assert (door.__doc__ or "").strip(), name


def test_an_unknown_door_is_an_attribute_error():
    with pytest.raises(AttributeError, match="attribute 'diagnosis'"):
        getattr(fl, "diagnosis")  # noqa: B009


def test_run_takes_objects_in_the_place_of_names(tmp_path):
    plan = fl.LayerPlan.all_but_last(
        fl.layers_of(network("plain"), TOY.clients[0].train.x[:2])
    )
    result = fl.run(
        algorithm="fedper",
        rounds=1,
        batch_size=8,
        data=TOY,
        model=network("plain"),
        plan=plan,
        progress=False,
    )
    assert result.plan.digest == plan.digest
    plan.save(tmp_path / "plan.json")
    again = fl.run(
        fl.RunConfig(algorithm="fedper", rounds=3, batch_size=8),
        rounds=1,
        data=TOY,
        model=network("plain"),
        plan=tmp_path / "plan.json",
        progress=False,
    )
    assert (again.done, again.plan.digest) == (1, plan.digest)


def test_run_measures_and_decides_by_itself():
    result = fl.run(
        dataset="heart",
        model="heart_mlp",
        algorithm="fedper",
        plan="auto",
        rounds=1,
        progress=False,
    )
    assert result.plan.why.metric == "federation_sensitivity"


def test_run_obeys_the_winner_of_a_race(tmp_path):
    """The run is that of the winner's plan, and the race stands beside it."""
    asked = {
        "dataset": "heart",
        "algorithm": "fedper",
        "rounds": 4,
        "seed": 3,
        "progress": False,
    }
    chosen = fl.run(plan="choose", out=tmp_path / "run", **asked)
    plan = fl.LayerPlan.load(tmp_path / "run-race" / "plan.json")
    assert chosen.plan.digest == plan.digest
    assert (plan.why.rule, plan.why.seed) == ("race", 3)
    given = fl.run(plan=plan, **asked)
    assert digest(chosen.engine.server.trees["model"]) == digest(
        given.engine.server.trees["model"]
    )
    stored = fl.Run(tmp_path / "run")
    raced = (
        tmp_path
        / "run-race"
        / json.loads((tmp_path / "run-race" / "choice.json").read_text())["run"]
    )
    assert stored.rows()[1].equals(fl.Run(raced).rows()[1])  # it is not trained again
    assert stored.config["plan"] is None
    alone = fl.run(plan="choose", **asked)
    assert alone.scores.equals(chosen.scores)
    assert alone.models.keys() == chosen.models.keys()
    assert fl.resume(tmp_path / "run", progress=False).done == 4


def test_the_run_of_a_race_appears_at_once_or_not_at_all(tmp_path, monkeypatch):
    """The copy is stopped at each file. Afterwards the same call makes it."""
    asked = {"algorithm": "fedper", "rounds": 1, "progress": False}
    won, out = tmp_path / "won", tmp_path / "run"
    fl.run(out=won, **asked)
    out.mkdir()
    found = SimpleNamespace(run=won)
    monkeypatch.setattr("fedlayers.studies.choose.choose", lambda *_, **__: found)
    files = sum(path.is_file() for path in won.rglob("*"))
    for count in range(files + 1):
        stop = [DEFAULT] * count + [KeyboardInterrupt()]
        copy = Mock(side_effect=stop, wraps=shutil.copy2)
        with monkeypatch.context() as stopped, suppress(KeyboardInterrupt):
            stopped.setattr(
                "fedlayers.runs.copytree", partial(shutil.copytree, copy_function=copy)
            )
            fl.run(plan="choose", out=out, **asked)
        assert any(out.iterdir()) == (count == files)
    assert fl.Run(out).verify()[-1] == "1 of 1 rounds"


def test_what_no_race_can_decide_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"fedavg.*plan"):
        fl.run(plan="choose", rounds=1, out=tmp_path / "run", algorithm="fedavg")
    assert not list(tmp_path.iterdir())


def test_run_refuses_an_unknown_key_with_the_nearest():
    with pytest.raises(UsageError, match=r"'algoritm'.*'algorithm'"):
        fl.run(algoritm="fedavg")


@pytest.mark.parametrize("kind", catalogue.HOMES)
def test_a_name_from_outside_is_nobodys_to_correct(kind):
    assert catalogue.check(kind, "some_module:thing") == "some_module:thing"
    with pytest.raises(UsageError, match=f"{kind} 'nothing_such'"):
        catalogue.check(kind, "nothing_such")
