"""The answer and its views agree: headline, bullets, table, JSON and the next command name one way."""

import json
import math
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from docs.answers import ACTIONS, NAMES, PLANS
from fedlayers.decision import answer as words
from fedlayers.decision.table import BASE_RATE, FEDAVG
from fedlayers.decision.verdict import answer
from fedlayers.decision.ways import ALONE, NONE, SHARE_ALL, SHARE_SOME
from tests.fedlayers.decision.made import table_of

NUMBER = r"(?<![\w.])\d+\.\d+"


def made(means, **how):
    """Return the answer of a table with these means."""
    table = table_of(means, **how)
    tuning = {FEDAVG: (1, 0.01), "head_local": (2, 0.01)}
    return answer(
        table, table, ACTIONS, PLANS, task="classification", tuning=tuning, next="next"
    )


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.floats(0.05, 1.5), min_size=len(NAMES), max_size=len(NAMES)),
    st.sampled_from((1, 3)),
    st.sampled_from((0.02, 0.2, 1.0)),
    st.integers(0, 9999),
)
def test_every_view_of_random_losses_names_one_way(means, seeds, noise, seed):
    one = made(
        dict(zip(NAMES, means, strict=True)), seeds=seeds, noise=noise, seed=seed
    )
    stored = json.loads(json.dumps(one.to_json()))
    head = one.headline()
    assert stored["way"] == one.way == (one.best.way if one.way else "")
    assert stored["headline"] == head
    assert one.text().replace("\n", " ").startswith(head.split(". ")[0][:60])
    assert one.action == (ACTIONS[one.way] if one.way else NONE)
    assert one.plan is PLANS.get(one.way)
    starts = {
        SHARE_ALL: "Share",
        SHARE_SOME: "Keep fc3 local and share fc1 and fc2",
        ALONE: "Do not federate",
        NONE: "No way is better",
    }
    assert head.startswith(starts[one.action])
    assert len(head.split()) <= 60, head
    assert len(re.findall(NUMBER, head)) <= 8, head
    assert len(" ".join([head, *words.bullets(one)]).split()) <= words.WORDS
    lines = one.text().splitlines()
    assert len(lines) <= words.LINES
    assert max(map(len, lines)) <= words.WIDTH


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.floats(0.05, 1.5), min_size=len(NAMES), max_size=len(NAMES)),
    st.sampled_from((1, 3)),
    st.integers(0, 9999),
)
def test_printed_numbers_add_up_and_shown_is_what_the_interval_says(means, seeds, seed):
    one = made(dict(zip(NAMES, means, strict=True)), seeds=seeds, seed=seed)
    table = one.shown().set_index("way")
    score, gap = table.columns[:2]
    best = float(table.iloc[0][score])
    for line in one.lines[1:]:
        printed = table.loc[line.way]
        numbers = [
            float(digits) for digits in re.findall(r"[-+]?\d+\.\d+", printed[gap])
        ]
        value = float(printed[score])
        assert numbers[0] == pytest.approx(value - best, abs=1e-9)
        if len(numbers) == 3:
            low, high = numbers[1:]
            assert low <= numbers[0] <= high
            assert line.shown == (low > 0 or high < 0)
            assert (printed["note"] == "no significant difference") != line.shown
        else:
            assert math.isnan(line.low)
            assert not line.shown


def test_a_difference_that_is_printed_twice_is_the_same():
    one = made(dict(zip(NAMES, (1.0, 0.3, 0.9, 0.5, 0.4, 0.8, 0.7, 0.6), strict=True)))
    local = one.line("local")
    assert words.difference(one, local, reverse=True).split()[0] in one.headline()
    assert f"{local.difference:+.{one.digits}f}" in one.shown().to_string()


def test_a_base_rate_that_is_not_beaten_on_test_samples_is_in_the_first_sentence():
    table = table_of({BASE_RATE: 0.5, FEDAVG: 0.3, "local": 0.4}, noise=0.3, n=40)
    parts = dict(table.parts)
    parts[0, FEDAVG, "test"] = parts[0, BASE_RATE, "test"]
    table = type(table)(parts, table.score, table.overlap, table.clients)
    one = answer(table, table, ACTIONS, PLANS, task="classification")
    assert one.way == FEDAVG
    assert "not shown to be better than the base rate" in one.headline()


def test_a_pooled_model_is_named_only_where_it_is_shown_to_be_better():
    means = dict.fromkeys(NAMES, 0.8) | {BASE_RATE: 1.5, FEDAVG: 0.5}
    assert made(means | {"linear_pooled": 0.1}).pooled.way == "linear_pooled"
    assert made(means | {"linear_pooled": 0.9}).pooled is None
    assert made(means | {"linear_pooled": 0.1}).way == FEDAVG
    two = means | {"linear_pooled": 0.2, "boosting_pooled": 0.1}
    assert made(two).pooled.way == "boosting_pooled"


def test_clients_that_lose_are_named_and_the_fallback_is_shown_on_validation():
    table = table_of({BASE_RATE: 2.0, FEDAVG: 0.5, "local": 0.9}, n=300)
    parts = dict(table.parts)
    for split in ("validation", "test"):
        worse = parts[0, FEDAVG, split]
        value = worse.value.copy()
        value[worse.client == 0] += 1.0
        mean = float(worse.weight @ value)
        parts[0, FEDAVG, split] = worse._replace(value=value, mean=mean)
    table = type(table)(parts, table.score, table.overlap, table.clients)
    one = answer(table, table, ACTIONS, PLANS, task="classification")
    assert one.way == FEDAVG
    assert one.clients == {
        "client 0": "loses",
        "client 1": "gains",
        "client 2": "gains",
    }
    assert one.fallback == ("client 0",)
    assert "Shown to lose against training alone: client 0." in one.text()


def test_a_difference_is_shown_where_its_interval_is_on_one_side_of_0():
    one = made(dict(zip(NAMES, (1.0, 0.3, 0.9, 0.5, 0.4, 0.8, 0.7, 0.6), strict=True)))
    intervals = {(0.1, 0.2): True, (-0.2, -0.1): True, (-0.1, 0.1): False}
    intervals |= {(0.0, 0.1): False, (math.nan, math.nan): False}
    for (low, high), shown in intervals.items():
        assert one.lines[1]._replace(low=low, high=high).shown is shown


def test_the_smallest_difference_is_half_of_the_interval_to_local_training():
    one = made(dict(zip(NAMES, (1.0, 0.3, 0.9, 0.5, 0.4, 0.8, 0.7, 0.6), strict=True)))
    local = one.line("local")
    assert local is not one.best
    assert one.smallest == (local.high - local.low) / 2 > 0


def test_clients_are_said_to_gain_nothing_only_where_none_gains_and_none_loses():
    sentence = "No single client is shown to gain over local training."
    one = made({BASE_RATE: 2.0, FEDAVG: 0.5, "local": 0.5}, noise=1.0)
    none = dict.fromkeys(("a", "b"), "unclear")
    for clients, wanted in (
        (none, True),
        (none | {"b": "gains"}, False),
        (none | {"b": "loses"}, False),
    ):
        changed = replace(one, clients=clients)
        assert (sentence in words.bullets(changed)) is wanted


@pytest.mark.parametrize(
    ("score", "word"), [("loss", "log loss"), ("accuracy", "accuracy %")]
)
def test_the_score_that_ranks_is_named(score, word):
    sign = 1 if score == "loss" else -1
    means = {BASE_RATE: 0.5 + sign * 0.3, FEDAVG: 0.5 - sign * 0.3, "local": 0.5}
    one = made(means, score=score)
    assert one.way == FEDAVG
    assert f"Test {word}" in one.headline()
    counted = "test samples" if score == "loss" else "blocks of test samples"
    assert words.legend(one).startswith(f"{one.samples} {counted},")
