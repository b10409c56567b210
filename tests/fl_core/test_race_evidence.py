"""The evidence of a race in a plan: what it holds, how it is shown, and what a forged file may not hold."""

import json
import math
from dataclasses import replace

import pytest

from fl_core.display import MANY
from fl_core.errors import UsageError
from fl_core.plan import LayerPlan
from fl_core.race_evidence import ArmEvidence, RaceEvidence
from tests.fl_core.test_plan import PLAN

ARMS = (
    ArmEvidence("half", 0.62, 0.30, 0.8),
    ArmEvidence("nothing", 0.58, 0.31, -0.1, 0.04, -0.01, 0.09, 0.2),
    ArmEvidence("all", None, None, None),
)
RACE = RaceEvidence(
    "macro_f1", 20, (0, 1, 2), "no significant difference", "nothing", ARMS
)
RACED = PLAN.with_shared(["fc1"], rule="race", race=RACE)


def test_a_plan_keeps_the_evidence_of_its_race(tmp_path):
    RACED.save(tmp_path / "plan.json")
    plan = LayerPlan.load(tmp_path / "plan.json")
    assert plan == RACED
    assert plan.why.race == RACE
    assert LayerPlan.from_json(RACED.to_json()) == RACED
    stored = json.loads((tmp_path / "plan.json").read_text())
    stored["why"]["race"]["arms"][0]["value"] = 0.99
    assert LayerPlan.from_json(stored).is_edited


def test_print_shows_the_evidence_in_a_few_lines():
    shown = str(RACED).splitlines()
    assert shown[0] == repr(RACED)
    assert len(shown) <= 7
    by_arm = {line.split()[0]: line for line in shown[2:5]}
    assert "62.0" in by_arm["half"]
    assert "[-1.0, 9.0]" in by_arm["nothing"]
    assert "used" in by_arm["nothing"]
    assert "used" not in by_arm["half"]
    assert "failed" in by_arm["all"]
    assert RACED.why.data[:12] in shown[-1]
    many = tuple(replace(ARMS[0], name=f"arm\n{k}") for k in range(3 * MANY))
    assert (
        len(str(RACED.with_shared([], race=replace(RACE, arms=many))).splitlines())
        <= MANY + 5
    )


def test_every_seed_of_a_run_can_be_in_a_plan(tmp_path):
    plan = RACED.with_shared([], race=replace(RACE, seeds=(-1, 2**63)))
    plan.save(tmp_path / "plan.json")
    assert LayerPlan.load(tmp_path / "plan.json") == plan


ARM = RACE.to_json()["arms"][0]


@pytest.mark.parametrize(
    "change",
    [
        {"metric": "none_such"},
        {"metric": 3},
        {"rounds": -1},
        {"rounds": "20"},
        {"seeds": ["0"]},
        {"verdict": None},
        {"used": ["half"]},
        {"extra": 1},
        {"arms": {}},
        {"arms": ["half"]},
        {"arms": [{**ARM, "value": "high"}]},
        {"arms": [{**ARM, "value": True}]},
        {"arms": [{**ARM, "low": math.nan}]},
        {"arms": [{**ARM, "high": math.inf}]},
        {"arms": [{**ARM, "score": 10**400}]},
        {"arms": [{**ARM, "name": 1}]},
        {"arms": [{**ARM, "__class__": "x"}]},
        {"arms": [{name: value for name, value in ARM.items() if name != "loss"}]},
    ],
)
def test_a_forged_race_is_refused(change):
    forged = RACED.to_json()
    forged["why"]["race"] |= change
    with pytest.raises(UsageError):
        LayerPlan.from_json(forged)
