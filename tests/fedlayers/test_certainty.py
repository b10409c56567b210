"""How sure a race is, and its first line: numbers and words on scores whose truth is known."""

import math
from itertools import combinations, product

import numpy as np
import pandas as pd
import pytest

from fedlayers.studies.arms import arms_of
from fedlayers.studies.choice import answers, infer
from fedlayers.studies.first_screen import (
    DECIDED,
    NONE_SHOWN,
    NOTHING,
    NOTHING_BETTER,
    UNDECIDED,
    UNSHOWN,
)
from fl_core.errors import RunError
from fl_core.layers import Layer
from fl_core.statistics import Estimate

LAYERS = tuple(Layer(name, (f"{name}.weight",)) for name in ("fc1", "fc2", "fc3"))
NAMES = ("nothing", "first_1", "first_2", "all")
ARMS = arms_of(NAMES, LAYERS)


def judged_of(means, deviation, seeds):
    deviations = np.broadcast_to(deviation, len(means))[:, None]
    noise = np.random.default_rng(0).normal(0, deviations, (len(means), seeds))
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


def sampled_of(variance, names=NAMES):
    """Return what many samples say of each pair, whose scores have that variance each."""
    one = Estimate(math.nan, math.sqrt(2 * variance) or math.nan, 1e6)
    return dict.fromkeys(combinations(names, 2), one)


def test_the_verdict_follows_the_scatter():
    for means, deviation, verdict, left in (
        ([0.4, 0.6, 0.5], 0.01, DECIDED, 1),
        ([0.5] * 3, 0.002, UNDECIDED, 3),
        ([0.5, 0.51, 0.2], 0.02, UNDECIDED, 2),
    ):
        seen = infer(judged_of(means, deviation, 6))
        assert (seen.verdict, len(seen.remaining)) == (verdict, left)


def test_one_pair_has_students_interval_and_two_parts_of_variance():
    from scipy import stats

    judged = judged_of([0.4, 0.5], 0.01, 5)
    grid = judged.pivot(index="seed", columns="arm", values="macro_f1")
    paired = grid["first_1"] - grid["nothing"]
    for sampling in (0.0, 0.0004, 1.0):
        line = infer(judged, sampled_of(sampling), overlap=0.2).differences.iloc[0]
        seeds = max(paired.var(), 0.8 * 2 * sampling) / 5
        samples = 0.2 * 2 * sampling
        free = (seeds + samples) ** 2 / (seeds**2 / 4 + samples**2 / 1e6)
        error = math.sqrt(seeds + samples)
        assert line["difference"] == pytest.approx(paired.mean())
        assert line["high"] - line["low"] == pytest.approx(
            2 * stats.t.ppf(0.975, free) * error, rel=1e-4
        )
        assert line["p_value"] == pytest.approx(
            2 * stats.t.sf(paired.mean() / error, free), rel=1e-3
        )


@pytest.mark.parametrize("draws", [1, pytest.param(100, marks=pytest.mark.slow)])
def test_wrong_exclusions_stay_below_five_percent(draws):
    """Equal arms, one of them with another spread; splits of two seeds share a fifth of their samples.

    ``parts`` are the deviations between seeds and of sampling.
    """
    draw, wrong = np.random.default_rng(0), []
    for spread in (0.3, 1.0, 3.0):
        for arms, seeds, parts in product(
            (3, 6), (1, 2, 3, 5), ((1.0, 0.0), (1.0, 1.0), (0.0, 1.0))
        ):
            between, sampling = parts if seeds > 1 else (0.0, 1.0)
            names = [f"arm {k}" for k in range(arms)]
            own = np.r_[spread, np.ones(arms - 1)][:, None] * between
            samples = sampled_of(sampling**2, names)
            for _ in range(draws):
                deviation = np.hypot(own, math.sqrt(0.8) * sampling)
                values = deviation * draw.normal(size=(arms, seeds))
                values += math.sqrt(0.2) * sampling * draw.normal(size=(arms, 1))
                table = pd.DataFrame(values, names).rename_axis("arm")
                judged = table.melt(ignore_index=False, var_name="seed").reset_index()
                judged["score"] = judged["macro_f1"] = judged["value"]
                race = infer(judged, samples, overlap=0.2)
                wrong.append(race.differences["excluded"].any())
    error = math.sqrt(0.05 * 0.95 / len(wrong))
    assert np.mean(wrong) <= 0.05 + 2 * error
    if draws > 50:
        assert max(map(np.mean, np.split(np.array(wrong), 9))) <= 0.05


def test_arms_that_failed_or_are_refused_cannot_lead_and_failed_ones_stay_open():
    judged = judged_of([0.4, 0.9, 0.5, 0.6], 0.01, 4)
    assert infer(judged).verdict == DECIDED
    judged.loc[
        (judged["arm"] == "first_1") & (judged["seed"] == 2), ["macro_f1", "score"]
    ] = math.nan
    race = infer(judged)
    assert (race.leader, race.verdict) == ("all", UNDECIDED)
    assert (race.remaining, race.unfinished) == (("all",), ("first_1",))
    assert infer(judged, refused=["all"]).leader == "first_2"
    assert infer(judged, refused=NAMES).verdict == NOTHING
    assert infer(judged, better=[]).verdict == UNSHOWN
    rest = [name for name in NAMES if name != "first_1"]
    race = infer(judged, refused=rest)
    assert (race.verdict, race.unfinished) == (NOTHING, ("first_1",))
    judged.loc[judged["seed"] == 0, ["macro_f1", "score"]] = math.nan
    with pytest.raises(RunError, match="every arm diverged"):
        infer(judged)


def test_three_seeds_borrow_the_spread_of_other_pairs():
    """The pair's own variance is near 0 by chance, or large by chance."""
    for own in (1e-9, 0.06):
        noise = np.array([[0.5, -0.5, 0.0], [0.5 + own, -0.5, 0.0 - own]])
        rest = np.random.default_rng(3).normal(0, 0.02, (2, 3))
        values = np.r_[noise, rest] + np.array([[0.65], [0.6], [0.4], [0.4]])
        lines = [
            (arm, s, v, v)
            for arm, row in zip(NAMES, values, strict=True)
            for s, v in enumerate(row)
        ]
        judged = pd.DataFrame(lines, columns=["arm", "seed", "macro_f1", "score"])
        pairs = [values[a] - values[b] for a, b in combinations(range(4), 2)]
        pooled = np.mean([each.var(ddof=1) for each in pairs])
        mine = (values[0] - values[1]).var(ddof=1)
        error = math.sqrt((6 * pooled + 2 * mine) / 8 / 3)
        line = infer(judged).differences.set_index("arm").loc["first_1"]
        from scipy import stats

        half = stats.t.ppf(1 - 0.025 / 6, 6) * error
        assert line["high"] - line["difference"] == pytest.approx(half)


def head_of(means, seeds, refused=(), **how):
    judged = judged_of(means, 0.004, seeds)
    race = infer(judged, sampled_of(1e-5), refused, **how)
    head = answers(race, ARMS, "nothing").head
    assert head.startswith("Undecided") == (race.verdict == UNDECIDED)
    assert head.startswith("Undecided, one seed: ") == (
        race.verdict == UNDECIDED and seeds == 1
    )
    return head


def test_the_first_line_says_what_the_verdict_says():
    for seeds in (1, 4):
        line = head_of([0.3, 0.4, 0.6, 0.3], seeds)
        assert line.startswith("Keep fc3 local and share fc1, fc2")
        assert line.endswith("by one seed.") == (seeds == 1)
        undecided = head_of([0.5, 0.5, 0.5, 0.5], seeds)
        assert "3 other ways may be as good" in undecided
        assert head_of([0.5] * 4, seeds, NAMES) == NOTHING_BETTER
        assert head_of([0.9, 0.4, 0.3, 0.3], seeds, better=[]) == NONE_SHOWN
    assert "Train alone" in head_of([0.9, 0.4, 0.3, 0.3], 4)
