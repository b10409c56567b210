"""Who is alike: the leads of pairs by hand, planted groups, and clients that form none."""

from itertools import combinations

import numpy as np
import pandas as pd
import pytest

from diagnostics.groups import Alike, alike, best_grouping
from diagnostics.tuning.permutation import CrossLosses, permutation_test


def losses_of(draw, centres, samples=20, spread=0.25):
    """Return losses of clients that estimate their centre, and each sample's client."""
    centres = np.array(centres, dtype=float)
    models = centres + spread * draw.normal(size=centres.shape)
    client = np.repeat(np.arange(len(centres)), samples)
    x = centres[client] + draw.normal(size=(len(client), centres.shape[1]))
    return ((x - models[:, None]) ** 2).sum(axis=-1), client


def names_of(count):
    return [f"client {k}" for k in range(count)]


def dense(distance, labels):
    """The mean silhouette by its definition: (b - a) / max(a, b)."""
    labels_array, values = np.array(labels), []
    for i, label in enumerate(labels):
        means = {
            group: distance[
                i, (labels_array == group) & (np.arange(len(labels_array)) != i)
            ].mean()
            for group in set(labels)
        }
        a = means.pop(label)
        b = min(means.values())
        values.append((b - a) / max(a, b))
    return float(np.mean(values))


def distances(vectors):
    return np.linalg.norm(vectors[:, None] - vectors, axis=-1)


def test_the_best_grouping_has_the_silhouette_of_its_definition():
    """Whatever the order of the clients. Equal clients have no groups."""
    draw = np.random.default_rng(0)
    centres = np.repeat(np.eye(3), 3, axis=0) @ draw.normal(size=(3, 20))
    distance = distances(centres + 0.1 * draw.normal(size=(9, 20)))
    grouping, silhouette = best_grouping(distance)
    assert grouping.tolist() == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert silhouette == pytest.approx(dense(distance, grouping.tolist()))
    assert silhouette > dense(distance, [1, 1, 1, 2, 2, 2, 2, 2, 2])
    vectors, order = draw.normal(size=(7, 5)), draw.permutation(7)
    first, one = best_grouping(distances(vectors))
    second, other = best_grouping(distances(vectors[order]))
    assert one == pytest.approx(other)
    for i, j in combinations(range(7), 2):
        assert (first[order[i]] == first[order[j]]) == (second[i] == second[j])
    grouping, silhouette = best_grouping(np.zeros((5, 5)))
    assert set(grouping.tolist()) == {1}
    assert np.isnan(silhouette)


def test_leads_are_those_by_hand_and_of_the_test_of_two_clients():
    draw = np.random.default_rng(1)
    losses, client = losses_of(draw, draw.normal(size=(5, 3)))
    result = alike(losses, client, names_of(5))
    for a, b in combinations(range(5), 2):
        own_a, own_b = client == a, client == b
        lead = (losses[b] - losses[a])[own_a].mean() + (losses[a] - losses[b])[
            own_b
        ].mean()
        assert result.leads.iloc[a, b] == pytest.approx(lead)
        assert result.leads.iloc[b, a] == pytest.approx(lead)
    two = np.isin(client, [0, 1])
    pair = CrossLosses(losses[None, :2][:, :, two], client[two], np.ones(2))
    assert 2 * permutation_test([pair], deals=19).lead == pytest.approx(
        result.leads.iloc[0, 1]
    )


@pytest.mark.parametrize(
    "labels",
    [
        [0, 1, 0, 1, 0, 1],
        pytest.param([0, 1, 2] * 4, marks=pytest.mark.slow),
        [0, 0, 0, 0, 0, 1],
    ],
)
def test_planted_groups_stand_out_and_are_named(labels):
    """At least 14 of 20 federations, and then exactly the planted ones; an outlier is a group of its own."""
    draw, right = np.random.default_rng(2), 0
    for seed in range(20):
        losses, client = losses_of(draw, 2 * np.eye(8)[labels])
        result = alike(losses, client, names_of(len(labels)), seed=seed)
        groups = list(result.groups.values())
        if result.significant:
            assert len(result.nulls) == 19
            planted = [list(dict.fromkeys(labels)).index(k) + 1 for k in labels]
            right += groups == planted
            order = [result.groups[name] for name in result.order]
            assert np.count_nonzero(np.diff(order)) == max(groups) - 1
        else:
            assert set(groups) == {1}
    assert right >= 14


@pytest.mark.parametrize("distance", [0.0, 2.0], ids=["equal", "all differ"])
def test_where_no_clients_belong_together_chance_shows_groups_in_1_of_20(distance):
    """Of 100 federations at most 5 % and two standard errors."""
    draw, claimed = np.random.default_rng(3), 0
    for seed in range(100):
        losses, client = losses_of(draw, distance * np.eye(6, 8))
        result = alike(losses, client, names_of(6), seed=seed)
        claimed += result.significant
        if not result.significant:
            assert (
                result.nulls[-1]
                >= result.silhouette
                > max(result.nulls[:-1], default=-2)
            )
            assert result.text().startswith("No groups")
    assert claimed <= 9


def test_groups_of_samples_are_dealt_whole():
    """Patients of five equal samples give what one sample of each gives, also in every deal."""
    draw = np.random.default_rng(4)
    losses, client = losses_of(draw, 0.3 * np.eye(6), samples=4)
    one = alike(losses, client, names_of(6))
    patient = np.repeat(np.arange(24), 5)
    five = alike(losses[:, patient], client[patient], names_of(6), patient)
    assert five.nulls == pytest.approx(one.nulls)
    np.testing.assert_allclose(five.leads, one.leads)
    loose = alike(losses[:, patient], client[patient], names_of(6))
    assert loose.nulls[0] != pytest.approx(one.nulls[0])


def test_few_or_equal_clients_have_no_groups():
    draw = np.random.default_rng(5)
    losses, client = losses_of(draw, np.eye(3))
    for few in (2, 3):
        part = client < few
        result = alike(losses[:few, part], client[part], names_of(few))
        assert set(result.groups.values()) == {1}
        assert len(result.order) == few
        assert "too few clients" in result.text()
    result = alike(np.ones((4, 8)), np.arange(8) // 2, names_of(4))
    assert not result.significant
    assert "equal" in result.text()


def test_six_clients_of_a_group_are_named_and_the_others_counted():
    groups = {f"c{k}": 1 + (k > 6) for k in range(13)}
    shown = Alike(pd.DataFrame(), groups, 0.9, (0.1, 0.2)).text()
    assert shown.endswith(
        ": c0, c1, c2, c3, c4, c5 and 1 more; c7, c8, c9, c10, c11, c12."
    )
    assert "(silhouette 0.90; at most 0.20 in 2 deals" in shown
