"""How sure a race is, and its first line: numbers and words on scores whose truth is known."""

import math
from itertools import product

import numpy as np
import pandas as pd
import pytest

from fedlayers.studies.arms import arms_of
from fedlayers.studies.choice import (
    DECIDED,
    NOTHING,
    NOTHING_BETTER,
    SPREAD,
    UNDECIDED,
    VERDICTS,
    answers,
    infer,
    rank_arms,
)
from fl_core.errors import RunError
from fl_core.layers import Layer

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


def within_of(variance):
    return pd.DataFrame(np.eye(4) * variance, index=NAMES, columns=NAMES)


def test_the_verdict_follows_the_scatter():
    for means, deviation, verdict, left in (
        ([0.4, 0.6, 0.5], 0.01, DECIDED, 1),
        ([0.5] * 3, 0.002, UNDECIDED, 3),
        ([0.5, 0.51, 0.2], 0.02, UNDECIDED, 2),
    ):
        seen = infer(judged_of(means, deviation, 6))
        assert (seen.verdict, len(seen.remaining)) == (verdict, left)
        assert verdict in VERDICTS


def test_one_pair_has_students_interval_and_two_parts_of_variance():
    """Tukey's interval of a single pair is Student's."""
    from scipy import stats

    judged = judged_of([0.4, 0.5], 0.01, 5)
    grid = judged.pivot(index="seed", columns="arm", values="macro_f1")
    paired = grid["first_1"] - grid["nothing"]
    for sampling in (0.0, 0.0004, 1.0):
        line = infer(judged, within_of(sampling), overlap=0.2).differences.iloc[0]
        between = max(SPREAD * paired.var(), 2 * sampling) / 5
        error = math.sqrt(between + 0.2 * 2 * sampling)
        assert line["difference"] == pytest.approx(paired.mean())
        assert line["high"] - line["low"] == pytest.approx(
            2 * stats.t.ppf(0.975, 4) * error, rel=1e-4
        )
        assert line["p_value"] == pytest.approx(
            2 * stats.t.sf(paired.mean() / error, 4), rel=1e-3
        )


@pytest.mark.parametrize("draws", [3, pytest.param(100, marks=pytest.mark.slow)])
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
            within = pd.DataFrame(np.eye(arms) * sampling**2, names, names)
            for _ in range(draws):
                deviation = np.hypot(own, math.sqrt(0.8) * sampling)
                values = deviation * draw.normal(size=(arms, seeds))
                values += math.sqrt(0.2) * sampling * draw.normal(size=(arms, 1))
                table = pd.DataFrame(values, names).rename_axis("arm")
                judged = table.melt(ignore_index=False, var_name="seed").reset_index()
                judged["score"] = judged["macro_f1"] = judged["value"]
                race = infer(judged, within, overlap=0.2)
                wrong.append(race.differences["excluded"].any())
    assert np.mean(wrong) <= 0.05
    if draws > 50:
        assert max(map(np.mean, np.split(np.array(wrong), 9))) <= 0.05


def test_arms_that_failed_or_are_refused_cannot_lead():
    judged = judged_of([0.4, 0.9, 0.5, 0.6], 0.01, 4)
    judged.loc[
        (judged["arm"] == "first_1") & (judged["seed"] == 2), ["macro_f1", "score"]
    ] = math.nan
    assert rank_arms(judged)[-1] == "first_1"
    assert infer(judged).leader == "all"
    assert infer(judged, refused=["all"]).leader == "first_2"
    assert infer(judged, refused=NAMES).verdict == NOTHING
    judged.loc[judged["seed"] == 0, ["macro_f1", "score"]] = math.nan
    with pytest.raises(RunError, match="every arm diverged"):
        infer(judged)


def head_of(means, seeds, refused=()):
    judged = judged_of(means, 0.004, seeds)
    race = infer(judged, within_of(1e-5), refused)
    return answers(race, ARMS, "nothing").head


def test_the_first_line_has_three_cases():
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
    line = head_of(
        [0.3, 0.4, 0.6, 0.3], 4, [each for each in NAMES if each != "first_2"]
    )
    assert line == f"{split}: every other arm is refused."


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
def test_the_extremes_are_known_by_what_they_share(arm, extreme):
    found = arms_of([arm, "first_2"], LAYERS)[0]
    assert found.extreme == extreme
