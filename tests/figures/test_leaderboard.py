"""The leaderboard's page has the tables of the stored rows, and its picture names the critical difference."""

from __future__ import annotations

import math

import pytest

from docs.lists import BLOCK
from fedlayers.leaderboard import analysis, defaults
from fedlayers.leaderboard.federations import FEDERATIONS
from fedlayers.leaderboard.methods import METHODS
from fedlayers.leaderboard.runs import STORED, complete, read
from figures import leaderboard
from fl_core.errors import UsageError
from tests.fedlayers.leaderboard import planted

EIGHT = list(FEDERATIONS)[:8]


def score(federation: str, method: str, seed: int, client: int) -> float:
    return 0.4 + 0.01 * list(METHODS).index(method) + 0.001 * EIGHT.index(federation)


RUNS = analysis.scored_runs(planted.rows(EIGHT, score))


def test_the_page_is_up_to_date():
    """``python -m figures.leaderboard`` brings it up to date."""
    text = leaderboard.PAGE.read_text(encoding="utf-8")
    assert leaderboard.updated(text, analysis.scored_runs(read(STORED))) == text
    assert [kind for _, kind, _ in BLOCK.findall(text)] == list(leaderboard.LISTS)


def test_stored_federations_are_complete():
    rows = read(STORED)
    assert rows
    assert all(complete(rows, name) for name in {row["federation"] for row in rows})


def test_the_answer_says_how_many_federations_are_there():
    assert f"8 of {len(FEDERATIONS)} registered" in leaderboard.answer(RUNS)


@pytest.mark.parametrize("kind", ["methods", "advice", "winners", "prediction"])
def test_a_list_is_a_table(kind):
    lines = leaderboard.LISTS[kind](RUNS).splitlines()
    assert len({line.count("|") for line in lines}) == 1
    assert "nan" not in lines[-1]


def test_a_page_with_an_unknown_list_is_refused():
    with pytest.raises(UsageError, match="did you mean 'methods'"):
        leaderboard.updated("<!-- list:method -->\n<!-- end -->", RUNS)


def test_the_picture_has_the_critical_difference(tmp_path):
    ranking = leaderboard.draw(RUNS, tmp_path / "ranks.png")
    assert (tmp_path / "ranks.png").stat().st_size > 0
    assert math.isfinite(ranking.critical)
    assert ranking.ranks.idxmin() == "advice"  # the last of METHODS before the bounds
    assert ranking.values.shape == (len(METHODS) - 2, 8)


def test_what_a_rate_loses_is_measured_where_it_was_not_chosen() -> None:
    """One family differs: it alone loses by the rate of the others, and they lose nothing by theirs."""
    best = dict.fromkeys(planted.FOUR, 0.01) | {"heart": 0.03}
    rows = [
        each
        for key in planted.FOUR
        for name in defaults.TUNED.values()
        for each in planted.tuning(key, name, best[key])
    ]
    found = leaderboard.lost_by_rate(rows)
    assert list(found.index) == list(leaderboard.WAYS)
    assert found.loc["tuned default", "mean"] == pytest.approx(0.02 / 4)
    assert found.loc["tuned default minus one rate", "mean"] == 0
    lost = {0.01: (0.009 + 0.007 + 0.02) / 4, 0.03: (0.029 + 0.027 + 0.02) / 4}
    assert found.loc["a random one of the rates", "mean"] == pytest.approx((3 * lost[0.01] + lost[0.03]) / 4)
    assert leaderboard.lost_by_rate([each for each in rows if each["federation"] == "heart"]).empty
