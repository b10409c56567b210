"""The exact test of whether clients differ: a dense reference, its level and its power by simulation."""

import itertools

import numpy as np
import pytest

from diagnostics.tuning import permutation
from diagnostics.tuning.permutation import CrossLosses, blocks, permutation_test
from tests.conftest import refuses, with_slow


def fitted(draw, train, validation, shift=0.0, groups=1, seeds=1, kinds=1):
    """Return losses of clients that each estimate a mean in two dimensions, by least squares.

    Args:
        train, validation: samples of each client.
        shift: distance between the clients' true means. groups: samples that are one patient's.
    """
    clients = len(train)
    means = shift * draw.normal(size=(clients, 2))
    total = np.add(train, validation)
    owner = np.repeat(np.arange(clients), total)
    patient = np.arange(len(owner)) // groups
    x = means[owner] + draw.normal(size=(len(owner), 2))
    x += 2.0 * draw.normal(size=(patient.max() + 1, 2))[patient] * (groups > 1)
    losses_of_seeds = []
    for _ in range(seeds):
        order = draw.random(patient.max() + 1)[patient]
        ranked = np.lexsort((patient, order, owner))
        starts = np.cumsum(total) - total
        validation_rows = np.concatenate(
            [
                ranked[a : a + n]
                for a, n in zip(starts.tolist(), validation, strict=True)
            ]
        )
        learned = np.setdiff1d(np.arange(len(owner)), validation_rows)
        models = np.stack(
            [
                [x[learned[owner[learned] == k]].mean(axis=0) * factor for k in range(clients)]
                for factor in np.linspace(1, 0.8, kinds)
            ]
        )  # fmt: skip
        losses = ((x[validation_rows] - models[:, :, None]) ** 2).sum(axis=-1)
        losses_of_seeds.append(
            CrossLosses(
                losses,
                owner[validation_rows],
                np.array(train, float),
                patient[validation_rows],
            )
        )
    return losses_of_seeds


def dense(one, dealt):
    """Return each kind's lead by the definition, sample by sample."""
    kinds, clients, n = one.losses.shape
    there = set(dealt.tolist())
    whole = sum(one.share[k] for k in there)
    leads = np.zeros(kinds)
    for i in range(n):
        of_client = dealt[i]
        others = [k for k in range(clients) if k != of_client]
        gap = one.losses[:, others, i].mean(axis=1) - one.losses[:, of_client, i]
        leads += one.share[of_client] / whole / (dealt == of_client).sum() * gap
    return leads


def test_the_p_value_is_that_of_a_dense_loop():
    draw = np.random.default_rng(0)
    (one,) = fitted(draw, [20, 8, 12], [5, 7, 4], shift=0.5, kinds=2)
    result = permutation_test([one], deals=99, seed=3)
    assert result.leads == pytest.approx(dense(one, one.client))
    owner = one.client[np.argsort(one.group)]
    dealt = permutation._deals(owner, [range(3)], 3, 99)[
        :, np.argsort(np.argsort(one.group))
    ]
    null = np.stack([dense(one, line) for line in dealt[1:]])
    standard = (result.leads - null.mean(axis=0)) / null.std(axis=0)
    largest = ((null - null.mean(axis=0)) / null.std(axis=0)).max(axis=1)
    assert result.p_value == (1 + (largest >= standard.max()).sum()) / 100
    assert result.standardised == pytest.approx(standard)
    assert result.samples == 16
    assert result.smallest == pytest.approx(
        null[:, result.kind].mean()
        + np.sort(largest)[-5] * null.std(axis=0)[result.kind]
    )


UNEQUAL = [2, 3, 4, 60, 240], [20] * 5
"""Training and validation samples of clients whose models differ in quality."""
CASES = {
    "equal clients": ([20] * 5, [6] * 5, {}),
    "equal validation, unequal training": (*UNEQUAL, {}),
    "three seeds": ([20] * 4, [6] * 4, {"seeds": 3}),
    "patients of four samples": ([24] * 4, [16] * 4, {"groups": 4}),
    "several kinds of models": ([12] * 3, [9] * 3, {"kinds": 7}),
    "ten clients in two blocks": ([12] * 10, [4] * 10, {}),
}


@pytest.mark.parametrize(
    "name", with_slow(CASES, ("three seeds", "several kinds of models"))
)
def test_clients_that_do_not_differ_are_called_different_in_5_percent(name):
    """Of 1,000 federations at most 5 % and two standard errors, 1.4 %."""
    train, validation, how = CASES[name]
    draw = np.random.default_rng(1)
    called = 0
    for number in range(1000):
        seeds = fitted(draw, train, validation, **how)
        result = permutation_test(seeds, blocks(len(train), 0), seed=number, deals=99)
        called += result.shown
    assert 0.01 * 1000 < called <= 0.064 * 1000


def test_a_sample_takes_the_weight_of_the_client_it_is_dealt_to():
    """With weights that stay at the samples equal clients of unequal training sets would be called different."""
    draw, fixed = np.random.default_rng(1), 0
    for number in range(50):
        (one,) = fitted(draw, *UNEQUAL)
        dealt = permutation._deals(one.client, [range(5)], number, 99)
        gaps = (one.losses[0].sum(axis=0) - one.losses[0]) / 4 - one.losses[0]
        weight = one.share[one.client]
        leads = (weight * gaps[dealt, np.arange(100)]).sum(axis=1)
        fixed += (leads[1:] >= leads[0]).sum() < 5
    assert fixed > 20


def test_clients_that_differ_are_shown_and_more_seeds_show_more():
    draw = np.random.default_rng(2)
    shown = {1: 0, 3: 0}
    for seeds in shown:
        for number in range(60):
            result = permutation_test(
                fitted(draw, [20] * 4, [5] * 4, shift=0.4, seeds=seeds),
                seed=number,
                deals=199,
            )
            shown[seeds] += result.shown
    assert 20 < shown[1] < shown[3]
    (one,) = fitted(draw, [20] * 4, [5] * 4, shift=2.0)
    assert (
        permutation_test([one]).text().startswith("Clients differ (p = .001): on its")
    )


def test_equal_models_and_clients_without_samples_show_nothing():
    losses = np.broadcast_to(np.random.default_rng(0).random(12), (2, 3, 12))
    share = np.array([1.0, 2.0, 3.0])
    result = permutation_test([CrossLosses(losses, np.repeat([0, 2], 6), share)])
    assert (result.p_value, result.leads) == (1.0, pytest.approx((0.0, 0.0)))
    assert "12 validation samples" in result.text()


def test_the_weight_of_a_sample_within_its_client_counts():
    """A sample of weight 2 counts as two equal ones of a group do."""
    (one,) = fitted(np.random.default_rng(3), [9, 9], [4, 4], shift=1.0)
    twice = np.repeat(np.arange(8), [2, 1, 1, 1, 1, 1, 3, 1])
    weight = np.bincount(twice).astype(float)
    weighted = CrossLosses(one.losses, one.client, one.share, one.group, weight)
    repeated = CrossLosses(
        one.losses[:, :, twice], one.client[twice], one.share, one.group[twice]
    )
    first, second = (permutation_test([losses]) for losses in (weighted, repeated))
    assert first.p_value == second.p_value
    assert first.leads == pytest.approx(second.leads)


def test_what_cannot_be_tested_is_refused():
    draw = np.random.default_rng(0)
    (one,) = fitted(draw, [9, 9], [4, 4])
    plain = CrossLosses(one.losses, one.client, one.share)
    with refuses("group must be given"):
        permutation_test([plain, plain])
    other = CrossLosses(one.losses, 1 - one.client, one.share, one.group)
    with refuses("one client in all seeds"):
        permutation_test([one, other])
    with refuses("at least 2 clients"):
        permutation_test([CrossLosses(one.losses, 0 * one.client, one.share)])
    with refuses("finite within a block"):
        permutation_test([CrossLosses(one.losses * np.nan, one.client, one.share)])


@pytest.mark.parametrize("clients", [2, 9, 10, 23])
def test_every_client_is_in_one_block(clients):
    parts = blocks(clients, 4)
    assert sorted(itertools.chain(*parts)) == list(range(clients))
    assert max(map(len, parts)) <= (9 if clients <= 9 else 5)
    assert min(map(len, parts)) >= 2
