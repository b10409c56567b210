"""Groups of clients: the grouping alone, planted groups, and federations in which there are none."""

from itertools import combinations

import numpy as np
import pytest
import torch

from diagnostics import groups
from diagnostics.groups import best_grouping, client_groups
from fl_core import tree
from fl_core.config import RunConfig
from fl_core.run import runner
from tests.conftest import refuses


def task_of(directions, seed=0):
    """Clients whose two classes differ along an axis of their direction."""
    draw = np.random.default_rng(seed)
    clients = {}
    for place, direction in enumerate(directions):
        y = np.arange(60) % 2
        x = draw.normal(size=(60, 8))
        x[:, direction] += 4 * y - 2
        clients[f"client {place}"] = (x, y)
    return runner.assemble(
        RunConfig(epochs=3, lr=0.01, seed=seed, patience=0), data=clients, model="mlp"
    )


def dense(similarity, labels):
    """The mean silhouette by its definition: (b - a) / max(a, b)."""
    distance, own = 1 - similarity, np.array(labels)
    values = []
    for i, label in enumerate(labels):
        means = {
            group: distance[i, (own == group) & (np.arange(len(own)) != i)].mean()
            for group in set(labels)
        }
        a = means.pop(label)
        b = min(means.values())
        values.append((b - a) / max(a, b))
    return float(np.mean(values))


def cosines(vectors):
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return unit @ unit.T


def test_the_best_grouping_has_the_silhouette_of_its_definition():
    """Whatever the order of the clients. Equal clients have no groups."""
    draw = np.random.default_rng(0)
    centres = np.repeat(np.eye(3), 3, axis=0) @ draw.normal(size=(3, 20))
    similarity = cosines(centres + 0.1 * draw.normal(size=(9, 20)))
    found, silhouette = best_grouping(similarity)
    assert found.tolist() == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert silhouette == pytest.approx(dense(similarity, found.tolist()))
    assert silhouette > dense(similarity, [1, 1, 1, 2, 2, 2, 2, 2, 2])
    vectors, order = draw.normal(size=(7, 5)), draw.permutation(7)
    first, one = best_grouping(cosines(vectors))
    second, other = best_grouping(cosines(vectors[order]))
    assert one == pytest.approx(other)
    for i, j in combinations(range(7), 2):
        together = first[order[i]] == first[order[j]]
        assert together == (second[i] == second[j])
    found, silhouette = best_grouping(np.ones((5, 5)))
    assert set(found.tolist()) == {1}
    assert np.isnan(silhouette)


def test_planted_groups_are_found_and_updates_are_those_of_the_first_training():
    task = task_of([0, 3, 0, 3, 0, 3])
    found = client_groups(task, draws=5)
    assert list(found.of.values()) == [1, 2, 1, 2, 1, 2]
    assert len(found.nulls) == 5
    assert max(found.nulls) < found.silhouette
    assert "client 1, client 3, client 5" in found.text()
    models, _ = runner.train_first_round(task, groups.instruments().observers)
    weight = task.layers[0].weights[0]
    start = tree.named_tensors(task.model)[weight]
    a, b = (
        (tree.named_tensors(models[name])[weight] - start).detach().double().flatten()
        for name in ("client 0", "client 1")
    )
    cosine = float(torch.nn.functional.cosine_similarity(a, b, dim=0))
    assert found.similarity.loc["client 0", "client 1"] == pytest.approx(cosine)


def test_clients_alike_are_one_group_and_the_shuffling_ends_early(
    monkeypatch,
):
    ended = [client_groups(task_of([0] * 6, seed), draws=20) for seed in range(3)]
    assert not any(found.significant for found in ended)
    for found in ended:
        assert set(found.of.values()) == {1}
        assert len(found.nulls) < 20
        assert found.nulls[-1] >= found.silhouette > max(found.nulls[:-1], default=-2.0)
        assert found.text().startswith("No groups")


def test_what_cannot_be_grouped_is_refused(monkeypatch):
    for clients, asked, message in (
        (3, {}, "at least 4.*got 3"),
        (4, {"draws": 0}, "at least 1.*got 0"),
        (4, {"layer": "fc9"}, "'fc9'.*fc1"),
    ):
        with refuses(message):
            client_groups(task_of([0] * clients), **asked)
    task, train = task_of([0] * 4), runner.train_first_round
    weight = task.layers[0].weights[0]

    def stand_still(task, observers):
        """A client does not move the layer."""
        models, measured = train(task, observers)
        start = tree.named_tensors(task.model)[weight].detach()
        tree.named_tensors(models["client 2"])[weight].data.copy_(start)
        return models, measured

    monkeypatch.setattr(runner, "train_first_round", stand_still)
    with refuses(r"'fc1'.*of client 2\."):
        client_groups(task, draws=1)
