"""Tuned defaults are the planted best values, leave a family out when they are judged, and give way to what is set."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedlayers.cli.main import main
from fedlayers.leaderboard import defaults
from fedlayers.leaderboard.federations import FEDERATIONS
from fedlayers.leaderboard.runs import STORED, read
from fl_core.config import RunConfig
from fl_core.errors import UsageError
from tests.fedlayers.leaderboard.planted import FOUR, row, tuning


@pytest.mark.parametrize(("value", "keep"), [(None, False), (1.0, True), (0.01, False)])
def test_planted_settings_are_found(value: float | None, keep: bool) -> None:
    rows = [each for name in FOUR for each in tuning(name, "ditto", 0.01, value, keep)]
    wanted = {"lr": 0.01, "keep_optimizer": keep} | ({} if value is None else {"lam": value})
    assert defaults.tuned_default("ditto", rows) == wanted


def test_a_rate_is_the_one_with_the_best_mean_rank_and_of_equal_ones_the_lower() -> None:
    one, other = tuning("values", "fedavg", 0.003), tuning("stops", "fedavg", 0.03)
    assert defaults.tuned_default("fedavg", [*one, *other])["lr"] == 0.003  # first and third; 0.01 is third and second
    assert defaults.tuned_default("fedavg", [*one, *tuning("stops", "fedavg", 0.001)])["lr"] == 0.001


def test_two_federations_of_a_family_count_as_one() -> None:
    digits = [each for name in ("digits_turned", "digits_dirichlet") for each in tuning(name, "fedavg", 0.03)]
    others = [each for name in ("values", "stops") for each in tuning(name, "fedavg", 0.001)]
    assert defaults.tuned_default("fedavg", [*digits, *others])["lr"] == 0.001
    assert defaults.tuned_default("fedavg", [*digits, *others[: len(others) // 2]], without="values")["lr"] == 0.03


def test_unfinished_tuning_and_scored_runs_do_not_count() -> None:
    whole, part = tuning("values", "ditto", 0.01), tuning("stops", "ditto", 0.001)[:-1]
    scored = row("heart", "ditto", 11, {}, setting={"lr": 0.001, "keep_optimizer": True}, validation=1.0)
    assert defaults.tuned_default("ditto", [*whole, *part, scored])["lr"] == 0.01
    with pytest.raises(UsageError, match="Ditto must have finished tuning"):
        defaults.tuned_default("ditto", part)


def test_every_tuned_default_of_the_stored_rows_is_a_value_that_was_tried() -> None:
    rows = read(STORED)
    for name in defaults.TUNED.values():
        found = defaults.tuned_default(name, rows)
        tried = [setting for each in defaults.trials(rows, name).values() for setting, _ in each]
        assert all(any(setting.get(key) == value for setting in tried) for key, value in found.items())


def test_what_is_set_stays() -> None:
    config = RunConfig(dataset="heart", algorithm="fedala", lr=0.5, keep_optimizer=True, options={"layers": 1})
    assert defaults.with_tuned_defaults(config) == (config, {})
    filled, taken = defaults.with_tuned_defaults(RunConfig(dataset="heart", algorithm="fedala"))
    assert taken == defaults.tuned_default("fedala", read(STORED))
    assert {"lr": filled.lr, "keep_optimizer": filled.keep_optimizer, **filled.options} == taken


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm": "feddyn"}, "algorithm with tuned defaults 'feddyn'"),
        ({"algorithm": "ditto", "optimizer": "sgd"}, "optimizer must be adamw for tuned defaults; got sgd"),
    ],
)
def test_what_was_not_tuned_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        defaults.with_tuned_defaults(RunConfig(dataset="heart", **changes))


def test_a_run_records_the_settings_that_it_took(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    main(["run", "--dataset", "heart", "--algorithm", "ditto", "--rounds", "1", "--tuned-defaults", "--lr", "0.02",
          "--out", str(out)])  # fmt: skip
    stored = json.loads((out / "config.json").read_text())
    wanted = {key: each for key, each in defaults.tuned_default("ditto", read(STORED)).items() if key != "lr"}
    note = f"tuned defaults of ditto: {defaults.in_words(wanted)}"
    assert note in capsys.readouterr().out
    assert stored["command"].endswith(f"  # {note}")
    assert (stored["lr"], stored["keep_optimizer"]) == (0.02, wanted["keep_optimizer"])
    assert stored["options"] == {key: each for key, each in wanted.items() if key != "keep_optimizer"}


def test_families_are_those_of_the_federations() -> None:
    assert {FEDERATIONS[name].family for name in FOUR} == set(FOUR)
