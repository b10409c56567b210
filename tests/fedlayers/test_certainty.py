"""How sure a race is, and its first line: numbers and words on scores whose truth is known."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

from fedlayers.studies.arms import Arm, arms_of
from fedlayers.studies.inference import (
    ALL_DIVERGED,
    DECIDED,
    NOTHING,
    UNDECIDED,
    VERDICTS,
    infer,
    rank_arms,
)
from fedlayers.studies.sentences import NOTHING_BETTER, answers
from fl_core.layers import Layer

LAYERS = tuple(Layer(name, (f"{name}.weight",)) for name in ("fc1", "fc2", "fc3"))
NAMES = ("nothing", "first_1", "first_2", "all")
ARMS = arms_of(NAMES, LAYERS)


def judged_of(
    means: list[float], deviation: float | list[float], seeds: int, draw: int = 0
) -> pd.DataFrame:
    deviations = np.broadcast_to(deviation, len(means))[:, None]
    noise = np.random.default_rng(draw).normal(0, deviations, (len(means), seeds))
    return pd.DataFrame(
        {
            "arm": NAMES[arm],
            "seed": seed,
            "macro_f1": mean + noise[arm, seed],
            "loss": 1 - mean,
            "score": mean + noise[arm, seed],
        }
        for arm, mean in enumerate(means)
        for seed in range(seeds)
    )


def within_of(variance: float) -> pd.DataFrame:
    return pd.DataFrame(np.eye(4) * variance, index=NAMES, columns=NAMES)


def test_the_verdict_follows_the_scatter() -> None:
    for means, deviation, verdict, left in (
        ([0.4, 0.6, 0.5], 0.01, DECIDED, 1),
        ([0.5] * 3, 0.002, UNDECIDED, 3),
        ([0.5, 0.51, 0.2], 0.02, UNDECIDED, 2),
    ):
        seen = infer(judged_of(means, deviation, 6))
        assert (seen.verdict, len(seen.remaining)) == (verdict, left)
        assert verdict in VERDICTS


def test_one_pair_has_students_interval_and_two_parts_of_variance() -> None:
    from scipy import stats

    judged = judged_of([0.4, 0.5], 0.01, 5)
    grid = judged.pivot(index="seed", columns="arm", values="macro_f1")
    paired = grid["first_1"] - grid["nothing"]
    for variance in (0.0, 0.0004):
        line = infer(judged, within_of(variance)).differences.iloc[0]
        error = math.sqrt((paired.var() + 2 * variance) / 5)
        assert line["difference"] == pytest.approx(paired.mean())
        assert line["high"] - line["low"] == pytest.approx(
            2 * stats.t.ppf(0.975, 4) * error
        )
        assert line["p_value"] == pytest.approx(
            2 * stats.t.sf(paired.mean() / error, 4)
        )


def test_wrong_exclusions_stay_below_five_percent() -> None:
    """Equal arms. Validation splits of two seeds share a fifth of their samples."""
    draw = np.random.default_rng(0)
    for seeds, between, sampling in ((3, 0.02, 0.0), (3, 0.01, 0.03), (1, 0.0, 0.02)):
        wrong = 0
        for _ in range(100):
            own = math.hypot(between, math.sqrt(0.8) * sampling)
            noise = draw.normal(0, own, (4, seeds))
            noise += draw.normal(0, math.sqrt(0.2) * sampling, (4, 1))
            judged = judged_of([0.5] * 4, 0.0, seeds)
            judged["macro_f1"] += noise.ravel()
            judged["score"] = judged["macro_f1"]
            race = infer(judged, within_of(sampling**2))
            wrong += race.differences["excluded"].any()
        assert wrong <= 0.05 * 100 + 5


def test_one_seed_without_samples_excludes_nothing() -> None:
    seen = infer(judged_of([0.2, 0.8, 0.5], 0.0, 1))
    assert (seen.verdict, len(seen.remaining)) == (UNDECIDED, 3)
    assert math.isnan(seen.at_stake())


def test_arms_that_failed_or_are_refused_cannot_lead() -> None:
    judged = judged_of([0.4, 0.9, 0.5, 0.6], 0.01, 4)
    judged.loc[
        (judged["arm"] == "first_1") & (judged["seed"] == 2), ["macro_f1", "score"]
    ] = math.nan
    assert rank_arms(judged)[-1] == "first_1"
    assert infer(judged).leader == "all"
    assert infer(judged, refused=["all"]).leader == "first_2"
    assert infer(judged, refused=NAMES).verdict == NOTHING
    judged.loc[judged["seed"] == 0, ["macro_f1", "score"]] = math.nan
    assert infer(judged).verdict == ALL_DIVERGED


def head_of(means: list[float], seeds: int, refused: tuple[str, ...] = ()) -> str:
    judged = judged_of(means, 0.004, seeds)
    race = infer(judged, within_of(1e-5), refused)
    return answers(race, ARMS, "nothing").head


def test_the_first_line_has_three_cases() -> None:
    split = "Federate fc1, fc2; keep fc3 local"
    assert head_of([0.3, 0.4, 0.6, 0.3], 4).startswith(f"{split}: every other arm is")
    line = head_of([0.3, 0.6, 0.6001, 0.3], 4)
    assert "better than both extremes" in line
    assert head_of([0.3, 0.4, 0.6, 0.3], 1).endswith("in this run only.")
    undecided = head_of([0.5, 0.5, 0.5, 0.5], 4)
    assert undecided.startswith("Undecided between ")
    assert "the leader is" in undecided
    assert "may lose up to" in undecided
    assert head_of([0.5] * 4, 4, NAMES) == NOTHING_BETTER
    assert "Share nothing" in head_of([0.9, 0.4, 0.3, 0.3], 4)


def test_no_fallback_says_share_nothing() -> None:
    for means in ([0.5] * 4, [0.49, 0.5, 0.5, 0.5], [0.5, 0.4, 0.5, 0.3]):
        assert "hare nothing" not in head_of(means, 3)


@pytest.mark.parametrize(
    ("arm", "extreme"),
    [
        ("nothing", "nothing"),
        ("first_1", ""),
        ("all", "all"),
        ("local", "nothing"),
        ("fedavg", "all"),
        ("ditto", ""),
    ],
)
def test_the_extremes_are_known_by_what_they_share(arm: str, extreme: str) -> None:
    found: Arm = arms_of([arm, "first_2"], LAYERS)[0]
    assert found.extreme == extreme
