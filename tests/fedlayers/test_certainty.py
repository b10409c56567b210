"""How sure a race is, and its three answers: codes and numbers on scores whose truth is known."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

from fedlayers.studies.answers import NO, OPEN, YES, Answers, answers
from fedlayers.studies.arms import Arm, arms_of
from fedlayers.studies.inference import (
    ALL_DIVERGED,
    DECIDED,
    DISAGREE,
    LEVEL_ARMS,
    NOTHING_LEARNED,
    ONE_RACE,
    VERDICTS,
    Inference,
    infer,
    leader_of,
    rank_arms,
)
from fl_core import statistics
from fl_core.layers import Layer

LAYERS = tuple(Layer(name, (f"{name}.weight",)) for name in ("a", "b", "c"))
NAMES = ("nothing", "first_1", "first_2", "all")
ARMS = arms_of(NAMES, LAYERS)


def judged_of(
    means: list[float], deviation: float | list[float], seeds: int, draw: int = 0
) -> pd.DataFrame:
    deviations = np.broadcast_to(deviation, len(means))[:, None]
    noise = np.random.default_rng(draw).normal(0, deviations, (len(means), seeds))
    return pd.DataFrame(
        {
            "arm": f"arm{arm}",
            "seed": seed,
            "macro_f1": mean + noise[arm, seed],
            "score": mean + noise[arm, seed],
        }
        for arm, mean in enumerate(means)
        for seed in range(seeds)
    )


def raced(
    means: list[float], deviation: float, seeds: int, skill: float = math.nan
) -> pd.DataFrame:
    """The same of the arms that share nothing, one layer, two layers, and all, with their skill."""
    judged = judged_of(means, deviation, seeds)
    names = {f"arm{k}": name for k, name in enumerate(NAMES)}
    return judged.assign(
        arm=judged["arm"].map(names), skill=skill + 0.01 * judged["seed"]
    )


def answered(judged: pd.DataFrame) -> tuple[Inference, Answers, Arm]:
    """A race's answers where the arm that comes first among the usable ones of :data:`NAMES` is used."""
    race = infer(judged)
    used = next(arm for arm in ARMS if arm.name in race.usable)
    return race, answers(race, ARMS, used), used


# --- which arms are significantly worse -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("means", "deviation", "verdict", "left"),
    [
        ([0.4, 0.6, 0.5], 0.01, DECIDED, 1),
        ([0.5] * 3, 0.002, LEVEL_ARMS, 3),
        ([0.5, 0.51, 0.2], 0.02, LEVEL_ARMS, 2),
    ],
)
def test_the_verdict_follows_the_scatter(
    means: list[float], deviation: float, verdict: str, left: int
) -> None:
    seen = infer(judged_of(means, deviation, 6))
    assert (seen.verdict, len(seen.remaining)) == (verdict, left)
    assert verdict in VERDICTS


def test_differences_are_those_of_each_pairs_own_spread() -> None:
    judged = judged_of([0.4, 0.5, 0.55], [0.001, 0.03, 0.002], 5)
    seen = infer(judged)
    grid = judged.pivot(index="arm", columns="seed", values="macro_f1")
    found = statistics.pairwise(grid.to_numpy())
    assert seen.remaining[0] == "arm2"
    for line in seen.differences.itertuples():
        other = grid.index.get_loc(line.arm)
        expected = [
            found.difference[2, other],
            found.low[2, other],
            found.high[2, other],
            found.p_value[2, other],
        ]
        assert [line.difference, line.low, line.high, line.p_value] == pytest.approx(
            expected
        )
        assert line.excluded == (line.arm not in seen.remaining)


def test_an_arm_that_collapsed_changes_nothing_for_the_others() -> None:
    """Neither by its spread nor by its skill: only one more pair is corrected for."""
    judged = judged_of([0.4, 0.5, 0.6], 0.01, 6).assign(skill=0.2)
    judged["skill"] += 0.01 * judged["seed"]
    collapsed = judged[judged["arm"] == "arm0"].assign(
        arm="arm3", macro_f1=lambda t: t["seed"] % 2 * 0.3, score=-9.0
    )
    both = infer(
        pd.concat(
            [judged, collapsed.assign(skill=-0.9 + 0.3 * (collapsed["seed"] % 2))]
        )
    )
    assert both.remaining == infer(judged).remaining == ("arm2",)
    assert both.above_chance.value == infer(judged).above_chance.value
    assert both.above_chance.significant


def test_of_arms_left_none_is_significantly_worse_than_another() -> None:
    """The leader scatters so much that nothing is shown of it; of two quiet arms one is shown to be worse."""
    judged = judged_of([0.60, 0.50, 0.45], [0.3, 0.001, 0.001], 6, draw=2)
    judged["score"] = judged["arm"].map({"arm0": 1.0, "arm1": 0.5, "arm2": 0.0})
    seen = infer(judged)
    assert (seen.verdict, seen.remaining) == (LEVEL_ARMS, ("arm0", "arm1"))
    assert seen.at_stake("arm1") == seen.pairs["high"]["arm0", "arm1"] > 0


def test_one_race_says_nothing_of_its_certainty() -> None:
    seen = infer(judged_of([0.2, 0.6], 0.0, 1))
    assert (seen.verdict, seen.remaining, seen.usable) == (
        ONE_RACE,
        ("arm1", "arm0"),
        ("arm1",),
    )
    assert seen.differences["low"].isna().all()
    assert seen.differences["difference"].tolist() == pytest.approx([0.4])
    assert math.isnan(seen.at_stake("arm1"))


def test_an_arm_above_the_leader_that_leads_by_its_loss_is_left() -> None:
    judged = judged_of([0.34, 0.40, 0.20], 0.005, 100).assign(
        score=lambda lines: lines["arm"] == "arm0"
    )
    seen = infer(judged)
    assert (seen.verdict, seen.remaining, seen.usable) == (
        DISAGREE,
        ("arm0", "arm1"),
        ("arm0",),
    )
    line = seen.differences.set_index("arm").loc["arm1"]
    assert line["high"] < 0
    assert seen.at_stake("arm0") == pytest.approx(-line["low"])


def test_an_arm_that_failed_cannot_lead() -> None:
    judged = judged_of([0.9, 0.5, 0.4], 0.01, 3)
    judged.loc[
        (judged["arm"] == "arm0") & (judged["seed"] == 1), ["macro_f1", "score"]
    ] = np.nan
    assert leader_of(judged) == "arm1"
    assert infer(judged).remaining[0] == "arm1"
    assert "arm0" not in infer(judged).remaining


def test_where_every_arm_failed_with_some_seed_nothing_is_decided() -> None:
    """The fewest failures come first, then the scores of the seeds that there are; one that always failed is out."""
    judged = judged_of([0.5, 0.9, 0.4, 0.6], 0.01, 3)
    for arm, seeds in {
        "arm0": (0, 1, 2),
        "arm1": (0, 1),
        "arm2": (0,),
        "arm3": (2,),
    }.items():
        judged.loc[
            (judged["arm"] == arm) & judged["seed"].isin(seeds), ["macro_f1", "score"]
        ] = np.nan
    assert rank_arms(judged) == ["arm3", "arm2", "arm1", "arm0"]
    seen = infer(judged)
    assert (seen.verdict, seen.remaining, seen.usable) == (
        ALL_DIVERGED,
        ("arm3", "arm2", "arm1"),
        ("arm3",),
    )
    excluded = dict(
        zip(seen.differences["arm"], seen.differences["excluded"], strict=True)
    )
    assert excluded == {"arm2": False, "arm1": False, "arm0": True}


@pytest.mark.parametrize("seeds", [1, 3])
@pytest.mark.parametrize("first", ["arm0", "arm1"])
def test_macro_f1_breaks_a_tie_of_it_against_loss(seeds: int, first: str) -> None:
    """Of two arms one has a score of +1 - 1 and one of -1 + 1, however much they differ; rounding does not lead."""
    judged = judged_of([0.5, 0.5], 0.0, seeds)
    judged["macro_f1"] += 0.1 * (judged["arm"] == first)
    judged["score"] = np.where(judged["arm"] == first, -1e-16, 1e-16)
    assert leader_of(judged) == first
    assert "tie" in infer(judged).tie


def test_equal_arms_are_in_their_order_and_no_tie_is_said_to_be_broken() -> None:
    judged = judged_of([0.5, 0.5, 0.4], 0.0, 2)
    assert rank_arms(judged) == ["arm0", "arm1", "arm2"]
    assert infer(judged).tie == ""
    assert infer(judged_of([0.5, 0.4], 0.0, 2)).tie == ""


# --- three answers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("means", "deviation", "seeds", "skill", "codes", "used"),
    [
        ([0.5, 0.6, 0.7, 0.2], 0.01, 6, 0.2, (YES, DECIDED, YES), "first_2"),
        ([0.5, 0.7, 0.7, 0.2], 0.01, 6, 0.2, (YES, LEVEL_ARMS, YES), "first_1"),
        ([0.7, 0.6, 0.5, 0.2], 0.01, 6, 0.2, (NO, DECIDED, YES), "nothing"),
        ([0.2, 0.5, 0.6, 0.7], 0.01, 6, 0.2, (NO, DECIDED, YES), "all"),
        ([0.7, 0.7, 0.7, 0.2], 0.01, 6, 0.2, (OPEN, LEVEL_ARMS, YES), "nothing"),
        ([0.5, 0.6, 0.7, 0.2], 0.01, 6, math.nan, (YES, DECIDED, OPEN), "first_2"),
        ([0.5, 0.6, 0.7, 0.2], 0.01, 6, -0.2, (OPEN, NOTHING_LEARNED, NO), "nothing"),
        ([0.5, 0.6, 0.7, 0.2], 0.01, 1, 0.2, (OPEN, ONE_RACE, OPEN), "first_2"),
    ],
)
def test_the_three_answers(
    means: list[float],
    deviation: float,
    seeds: int,
    skill: float,
    codes: tuple[str, ...],
    used: str,
) -> None:
    _, said, arm = answered(raced(means, deviation, seeds, skill))
    assert (said.split, said.which, said.guessing) == codes
    assert tuple(said.codes.values()) == codes
    assert arm.name == used
    words = " ".join([said.head, *said.lines])
    assert arm.words in words.lower()
    assert "nan" not in words


def test_the_words_carry_the_races_numbers() -> None:
    race, said, used = answered(raced([0.5, 0.7, 0.7, 0.2], 0.01, 6, 0.2))
    leader = race.differences.set_index("arm")["difference"]
    assert f"{100 * leader['nothing']:.1f} points better" in said.lines[0]
    assert f"{100 * leader['all']:.1f} points" in said.lines[0]
    assert f"{100 * race.at_stake(used.name):.1f} points" in said.lines[1]
    assert f"{100 * race.above_chance.low:.1f}" in said.lines[2]


def test_one_seed_sounds_no_more_certain_than_three() -> None:
    one = answered(raced([0.5, 0.6, 0.7, 0.2], 0.01, 1, 0.2))[1]
    words = " ".join([one.head, *one.lines])
    assert "uncertainty" in one.head
    for claim in ("better", "significant", "%"):
        assert claim not in words


def test_without_an_extreme_or_a_split_the_first_question_is_not_asked() -> None:
    judged = judged_of([0.5, 0.7], 0.01, 6)
    splits = arms_of(("first_1", "first_2"), LAYERS)
    judged["arm"] = judged["arm"].map({"arm0": "first_1", "arm1": "first_2"})
    assert answers(infer(judged), splits, splits[1]).split == ""


@pytest.mark.parametrize(
    ("means", "seeds", "guessing"),
    [
        ([-0.3, -171.7], 3, NO),
        ([-0.3, -171.7], 1, OPEN),
        ([0.3, -171.7], 3, YES),
        ([0.01, -0.1], 3, NO),
    ],
)
def test_a_regression_is_held_against_the_mean_and_led_as_ever(
    means: list[float], seeds: int, guessing: str
) -> None:
    """Its differences are numbers and no points, and none is hidden by an arm whose R2 has no lower end."""
    judged = judged_of(means, 0.02, seeds).assign(
        macro_f1=lambda lines: lines["macro_f1"] - 0.03
    )
    judged = judged.rename(columns={"macro_f1": "r2"})
    judged["arm"] = judged["arm"].map({"arm0": "first_1", "arm1": "all"})
    race = infer(judged)
    assert race.verdict != NOTHING_LEARNED
    assert race.remaining[0] == "first_1"
    said = answers(race, ARMS, ARMS[1])
    assert said.guessing == guessing
    assert "points" not in " ".join(said.lines)
    assert any("predicting the mean" in line for line in said.lines) == (
        guessing != OPEN or means[0] < 0
    )


@pytest.mark.parametrize(
    ("arm", "extreme"), [*zip(NAMES, ("nothing", "", "", "all"), strict=True)]
)
def test_the_extremes_are_known_by_what_they_share(arm: str, extreme: str) -> None:
    assert next(each for each in ARMS if each.name == arm).extreme == extreme
    assert [each.extreme for each in arms_of(("local", "fedavg", "ditto"), LAYERS)] == [
        "nothing",
        "all",
        "",
    ]


def test_skewed_scores_of_unequal_spread_are_excluded_more_often() -> None:
    """As the docstring of ``infer`` says: of four arms with the same mean one is excluded in 8 to 11 % of races."""
    spreads = np.array([1.0, 2.0, 3.0, 4.0])[:, None]
    draws = spreads * (np.random.default_rng(0).exponential(size=(4000, 4, 5)) - 1)
    excluded = (statistics.pairwise(draws).p_value <= 0.05).any(axis=(1, 2))
    assert 0.08 <= excluded.mean() <= 0.11
