"""Rates tuned before a race: what is tried, what is left, and what is kept."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fedlayers.studies.choose import choose
from fedlayers.studies.race import race_end, validation_scores
from fl_core.config import RunConfig
from fl_core.errors import UsageError
from fl_core.records import store

CONFIG = RunConfig(dataset="heart", rounds=4, eval_every=1, epochs=1)
ARMS = ("nothing", "all_but_last")


def test_every_arm_races_at_the_best_of_the_rates_that_are_left(tmp_path: Path) -> None:
    told: list[str] = []
    choice = choose(CONFIG, tmp_path, arms=ARMS, tune_rates=3, tell=told.append)
    assert told[0].startswith("at most 5 runs"), "three rates of one cut, two of the other"
    assert choice.rates is not None
    runs = {path.name: store.Run(path) for path in (tmp_path / "arms").iterdir()}
    assert len(runs) == choice.cost.runs == choice.measured.runs == 5
    scores = {}
    for name, run in runs.items():
        lines = [line for line in validation_scores(run.rows()[1]) if line["round"] <= race_end(CONFIG)][-3:]
        arm, _, rest = name.partition("-lr")
        scores[arm, float(rest.removesuffix("-0"))] = [
            sum(line[key] for line in lines) / len(lines) for key in ("macro_f1", "loss")
        ]
    tried = {(line.arm, line.lr): [line.macro_f1, line.loss] for line in choice.rates.table.itertuples()}
    assert tried.keys() == scores.keys()
    assert all(tried[key] == pytest.approx(scores[key]) for key in tried)
    first = [lr for arm, lr in scores if arm == "all_but_last"]
    assert sorted(first) == [0.015, 0.05, 0.15]
    z = {key: _standardised(scores, first, key) for key in first}
    assert {lr for arm, lr in scores if arm == "nothing"} == set(sorted(first, key=z.__getitem__)[1:])
    judged = choice.standing.judged.set_index("arm")
    for arm, lr in choice.rates.chosen.items():
        assert judged.loc[arm, "macro_f1"] == pytest.approx(scores[arm, lr][0])
    assert choice.run.name == f"{choice.winner.name}-lr{choice.rates.chosen[choice.winner.name]:g}-0"
    stored = json.loads((tmp_path / "choice.json").read_text())["rates"]
    assert stored["chosen"] == choice.rates.chosen
    if choice.plan is not None:
        assert choice.plan.why.detail["rates"]["chosen"] == choice.rates.chosen
    again = choose(CONFIG, tmp_path, arms=ARMS, tune_rates=3)
    assert again.rates is not None
    assert again.rates.chosen == choice.rates.chosen


def _standardised(scores: dict[tuple[str, float], list[float]], rates: list[float], lr: float) -> float:
    total = 0.0
    for k, sign in ((0, 1), (1, -1)):
        values = [scores["all_but_last", each][k] for each in rates]
        mean = sum(values) / len(values)
        spread = (sum((value - mean) ** 2 for value in values) / len(values)) ** 0.5
        total += sign * (scores["all_but_last", lr][k] - mean) / spread
    return total


def test_a_rate_that_is_given_is_kept(tmp_path: Path) -> None:
    told: list[str] = []
    choice = choose(replace(CONFIG, lr=0.01, rounds=1), tmp_path, arms=ARMS, tune_rates=4, tell=told.append)
    assert choice.rates is None
    assert any("0.01 is given" in line for line in told)
    assert sorted(path.name for path in (tmp_path / "arms").iterdir()) == ["all_but_last-0", "nothing-0"]


@pytest.mark.parametrize("count", [1, 6, -1])
def test_there_are_two_to_five_rates(count: int, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="2 to 5"):
        choose(CONFIG, tmp_path, tune_rates=count)
    assert not (tmp_path / "arms").exists()


def test_rates_are_not_tuned_where_each_seed_is_scored(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="each_seed"):
        choose(CONFIG, tmp_path, tune_rates=3, each_seed=True)
