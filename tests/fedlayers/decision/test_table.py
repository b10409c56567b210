"""The table of losses and the rule: differences against their definition, and what is recommended."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from fedlayers.decision.table import (
    BASE_RATE,
    FEDAVG,
    TEST,
    VALIDATION,
    LossTable,
    candidates,
    mean_alone,
    recommended,
)
from fl_core.statistics import Estimate, mean_over_seeds, stratified_mean
from tests.fedlayers.decision.made import part, table_of

MEANS = {BASE_RATE: 1.0, FEDAVG: 0.5, "local": 0.6, "head_local": 0.3}


def test_a_gain_of_one_seed_is_the_stratified_mean_of_paired_losses():
    table = table_of(MEANS)
    one, other = (table.parts[0, way, TEST] for way in ("head_local", FEDAVG))
    gain = table.gain("head_local", FEDAVG, TEST)
    plain = stratified_mean(other.value - one.value, one.weight, one.group, one.client)
    assert gain.value == pytest.approx(other.mean - one.mean)
    assert gain.error == pytest.approx(plain.error, rel=1e-6)


def test_a_gain_over_seeds_adds_the_variance_of_shared_samples_once():
    table = table_of(MEANS, seeds=3)
    means = {way: table.means(way, TEST) for way in MEANS}
    gain = table.gain("head_local", FEDAVG, TEST)
    pairs = [
        means[one] - means[other]
        for k, one in enumerate(MEANS)
        for other in list(MEANS)[k + 1 :]
    ]
    spread = math.sqrt(np.mean([gap.var(ddof=1) for gap in pairs]))
    errors = []
    for seed in range(3):
        first, second = (table.parts[seed, w, TEST] for w in ("head_local", FEDAVG))
        values = second.value - first.value
        estimate = stratified_mean(values, first.weight, first.group, first.client)
        errors.append(estimate)
    within = math.sqrt(np.mean([one.error**2 for one in errors]))
    sampled = Estimate(math.nan, within, np.mean([one.free for one in errors]))
    plain = mean_over_seeds(
        means[FEDAVG] - means["head_local"],
        sampled,
        Estimate(math.nan, spread, 6.0),
        1.0,
    )
    assert gain == pytest.approx(plain, rel=1e-6)
    assert gain.error >= within


@pytest.mark.parametrize("loss", [2.0, 1e7])
def test_a_way_that_broke_down_in_one_seed_changes_no_other_difference(loss):
    """Its spread over seeds is no measure of theirs, so the others stay candidates."""
    table = table_of(MEANS, seeds=3)
    parts = dict(table.parts)
    for split in (VALIDATION, TEST):
        sound = parts[1, "local", split]
        parts[1, "local", split] = sound._replace(mean=loss, value=sound.value + loss)
    broken = replace(table, parts=parts)
    without = {key: one for key, one in table.parts.items() if key[1] != "local"}
    alone = replace(table, parts=without)
    for split in (VALIDATION, TEST):
        pair = "head_local", FEDAVG, split
        assert broken.gain(*pair) == alone.gain(*pair)
    assert recommended(broken, [*MEANS]) == "head_local"
    assert recommended(broken, [FEDAVG, "local"]) == FEDAVG


def test_a_higher_score_is_better_where_the_score_says_so():
    table = table_of(MEANS, score="accuracy")
    assert table.gain(FEDAVG, "head_local", VALIDATION).value > 0
    assert replace(table, score="loss").gain(FEDAVG, "head_local", TEST).value < 0


def test_a_way_without_a_seed_is_not_compared():
    table = table_of(MEANS, seeds=2)
    parts = {key: one for key, one in table.parts.items() if key[:2] != (1, "local")}
    assert "local" not in replace(table, parts=parts).ways


def test_fedavg_stays_unless_it_is_beaten_by_half_a_standard_error():
    ways = [FEDAVG, "local", "head_local"]
    assert recommended(table_of(MEANS), ways) == "head_local"
    same = table_of({**MEANS, "head_local": 0.5}, seed=1)
    leader = min(ways, key=lambda way: same.mean(way, VALIDATION))
    gain = same.gain(leader, FEDAVG, VALIDATION)
    wanted = leader if gain.value > gain.error / 2 else FEDAVG
    assert recommended(same, ways) == wanted
    equal = table_of(MEANS)
    parts = dict(equal.parts)
    for split in (VALIDATION, TEST):
        parts[0, "head_local", split] = parts[0, FEDAVG, split]
    assert recommended(replace(equal, parts=parts), ["head_local", FEDAVG]) == FEDAVG


def test_nothing_is_recommended_that_is_not_better_than_the_base_rate():
    bad = table_of({BASE_RATE: 0.5, FEDAVG: 0.5, "local": 0.7})
    assert recommended(bad, [FEDAVG, "local"]) is None
    some = table_of({BASE_RATE: 0.5, FEDAVG: 0.9, "local": 0.2})
    assert recommended(some, [FEDAVG, "local"]) == "local"


def test_one_sample_has_no_spread_so_nothing_is_claimed():
    client = np.array([0])
    parts = {
        (0, way, VALIDATION): part([loss], client)
        for way, loss in ((BASE_RATE, 1.0), (FEDAVG, 0.1))
    }
    table = LossTable(parts, "loss", {VALIDATION: 1.0}, ("a",))
    assert candidates(table, [FEDAVG]) == []


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(0.05, 2.0), min_size=4, max_size=4),
    st.integers(1, 3),
    st.integers(0, 99),
)
def test_the_rule_names_a_candidate_and_never_one_worse_than_fedavg(means, seeds, seed):
    names = (BASE_RATE, FEDAVG, "local", "head_local")
    table = table_of(dict(zip(names, means, strict=True)), seeds, seed=seed)
    way = recommended(table, names[1:])
    order = candidates(table, names[1:])
    assert (way is None) == (not order)
    if way is not None and FEDAVG in order:
        assert table.mean(way, VALIDATION) <= table.mean(FEDAVG, VALIDATION)


def test_clients_are_compared_by_their_own_samples():
    table = table_of(MEANS, seeds=2)
    gains = table.by_client("head_local", FEDAVG, TEST)
    assert list(gains) == list(table.clients)
    for number, gain in enumerate(gains.values()):
        values = []
        for seed in (0, 1):
            one, other = (table.parts[seed, w, TEST] for w in ("head_local", FEDAVG))
            of_client = one.client == number
            values.append((other.value[of_client] - one.value[of_client]).mean())
        assert gain.value == pytest.approx(np.mean(values))


def test_a_score_without_samples_has_a_difference_without_an_error_of_its_own():
    one, other = mean_alone(0.25), mean_alone(0.5)
    assert (one.mean, one.samples) == (0.25, 0)
    assert one.above(other) is None
    assert one.group.dtype == one.client.dtype == np.int64
