"""Where no candidate does better than guessing nothing is decided, however much they differ in macro-F1."""

import math

import numpy as np
import pandas as pd
import pytest

from fedlayers.studies import above_chance
from fedlayers.studies.inference import DECIDED, NOTHING_LEARNED, ONE_RACE, infer
from fl_core.data import from_clients, load

ARMS = {"nothing": 0.30, "half": 0.25, "all": 0.20}


def race(gains=None) -> pd.DataFrame:
    """Three arms that differ clearly in macro-F1, with the given balanced accuracies above guessing by seed."""
    lines = [
        {"arm": arm, "seed": seed, "macro_f1": f1, "score": f1}
        for arm, f1 in ARMS.items()
        for seed in range(3)
    ]
    jitter = np.random.default_rng(0).normal(0, 0.002, len(lines))
    judged = pd.DataFrame(lines).assign(macro_f1=lambda t: t["macro_f1"] + jitter)
    return (
        judged
        if gains is None
        else judged.assign(skill=judged["seed"].map(dict(enumerate(gains))))
    )


@pytest.mark.parametrize(
    ("gains", "verdict", "left"),
    [
        (None, DECIDED, 1),
        ((math.nan,) * 3, DECIDED, 1),
        ((0.10, 0.12, 0.11), DECIDED, 1),
        ((0.02, -0.03, 0.01), NOTHING_LEARNED, 3),
        ((-0.1, -0.1, -0.1), NOTHING_LEARNED, 3),
    ],
)
def test_a_race_decides_only_where_something_was_learned(gains, verdict, left):
    sure = infer(race(gains))
    assert (sure.verdict, len(sure.remaining)) == (verdict, left)
    assert sure.differences["excluded"].sum() == 3 - left


def test_one_seed_cannot_show_that_something_was_learned():
    lines = race((0.2, 0.2, 0.2)).query("seed == 0")
    assert above_chance.best_of(lines).significant is None
    assert infer(lines).verdict == ONE_RACE


@pytest.mark.parametrize("seeds", [2, 3])
@pytest.mark.parametrize("together", [True, False])
def test_guessing_is_taken_for_learning_in_at_most_one_of_twenty(seeds, together):
    """Four candidates without skill, that deviate together (they share a seed's split) or each by itself."""
    draw, arms, races = np.random.default_rng(0), 4, 200
    lines = pd.DataFrame(
        [(arm, seed) for arm in range(arms) for seed in range(seeds)],
        columns=["arm", "seed"],
    )
    of_seeds = draw.normal(0, 0.02, (races, 1 if together else arms, seeds))
    gains = np.broadcast_to(of_seeds, (races, arms, seeds)).reshape(races, -1)
    wrong = np.mean(
        [above_chance.best_of(lines.assign(skill=gain)).significant for gain in gains]
    )
    assert wrong <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / races)


def test_a_candidate_far_below_guessing_hides_nothing_of_the_others():
    """Such as one model for clients that have different classes."""
    judged = race((0.10, 0.12, 0.11))
    judged.loc[judged["arm"] == "all", "skill"] -= 0.9
    assert above_chance.best_of(judged).significant
    assert above_chance.best_of(judged).value == pytest.approx(0.11)


def test_a_candidate_that_failed_takes_no_seed_from_the_others():
    judged = race((0.10, 0.12, 0.11))
    without = judged[judged["arm"] != "all"]
    judged.loc[
        (judged["arm"] == "all") & (judged["seed"] == 1), ["macro_f1", "score", "skill"]
    ] = math.nan
    assert above_chance.best_of(judged) == above_chance.best_of(without)
    assert above_chance.best_of(judged).significant


def test_predictions_that_do_not_look_reach_no_more_than_guessing():
    """The mean over draws of brute-force balanced accuracies, of predictors with any preference, is at most 1 / k."""
    draw = np.random.default_rng(0)
    for preference in ([1, 0, 0], [0.5, 0.3, 0.2], [0, 0.1, 0.9]):
        labels = np.array([0] * 30 + [1] * 8 + [2] * 2)
        reached = [
            np.mean(
                [
                    (draw.choice(3, 40, p=preference) == labels)[labels == k].mean()
                    for k in range(3)
                ]
            )
            for _ in range(800)
        ]
        assert np.mean(reached) == pytest.approx(1 / 3, abs=0.03)


def test_guessing_counts_the_classes_of_validation_and_leaves_out_a_client_with_one():
    data = load("heart")
    guesses = above_chance.guessing_accuracy(data)
    for client in data.clients:
        classes = len(client.validation.y.unique())
        assert guesses.get(client.name) == (1 / classes if classes > 1 else None)
    x = np.random.default_rng(0).normal(size=(40, 3))
    one = from_clients(
        {"mixed": (x, np.arange(40) % 2), "single": (x, np.zeros(40, int))}
    )
    assert above_chance.guessing_accuracy(one) == {"mixed": 0.5}


def test_what_is_above_guessing_is_the_mean_by_training_samples_over_clients_that_have_it():
    rows = pd.DataFrame(
        {"client": list("abc"), "value": [0.6, 0.5, math.nan], "n_train": [30, 10, 5]}
    )
    assert above_chance.score_above_chance(
        rows, {"a": 0.5, "b": 0.25, "c": 0.5}
    ) == pytest.approx((30 * 0.1 + 10 * 0.25) / 40)
    assert above_chance.score_above_chance(rows, {"a": 0.5}) == pytest.approx(0.1)
    assert math.isnan(above_chance.score_above_chance(rows, {}))
