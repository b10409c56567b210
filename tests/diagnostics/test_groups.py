"""Groups of clients: the grouping alone, planted groups, and federations in which there are none."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch

from diagnostics import groups
from diagnostics.groups import best_grouping, client_groups
from fl_core import runner, tree
from fl_core.config import RunConfig, in_memory
from fl_core.errors import UsageError
from fl_core.runner import Task


def task_of(directions: list[int], seed: int = 0) -> Task:
    """Clients whose two classes differ along an axis of their direction."""
    draw = np.random.default_rng(seed)
    clients: dict[str, Any] = {}
    for place, direction in enumerate(directions):
        y = np.arange(60) % 2
        x = draw.normal(size=(60, 8))
        x[:, direction] += 4 * y - 2
        clients[f"client {place}"] = (x, y)
    return runner.assemble(
        in_memory(RunConfig(epochs=3, lr=0.01, seed=seed, patience=0), clients, "mlp")
    )


def dense(similarity: np.ndarray, labels: list[int]) -> float:
    """The mean silhouette by its definition: (b - a) / max(a, b), and 0 for a client alone."""
    distance, values = 1 - similarity, []
    for i, own in enumerate(labels):
        means = {
            group: np.mean(
                [
                    distance[i, j]
                    for j, other in enumerate(labels)
                    if other == group and j != i
                ]
                or [np.nan]
            )
            for group in set(labels)
        }
        a, b = (
            means.pop(own),
            min(value for group, value in means.items() if group != own),
        )
        values.append(0.0 if np.isnan(a) else (b - a) / max(a, b))
    return float(np.mean(values))


def test_the_best_grouping_has_the_silhouette_of_its_definition() -> None:
    draw = np.random.default_rng(0)
    vectors = np.repeat(np.eye(3), 3, axis=0) @ draw.normal(
        size=(3, 20)
    ) + 0.1 * draw.normal(size=(9, 20))
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    found, silhouette = best_grouping(unit @ unit.T)
    assert found.tolist() == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert silhouette == pytest.approx(dense(unit @ unit.T, found.tolist()))
    merged = [1, 1, 1, 2, 2, 2, 2, 2, 2]
    assert silhouette > dense(unit @ unit.T, merged)


def test_the_order_of_clients_does_not_matter() -> None:
    draw = np.random.default_rng(1)
    vectors = draw.normal(size=(7, 5))
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    order = draw.permutation(7)
    (first, one), (second, other) = (
        best_grouping(unit @ unit.T),
        best_grouping(unit[order] @ unit[order].T),
    )
    assert one == pytest.approx(other)
    assert all(
        (first[order[i]] == first[order[j]]) == (second[i] == second[j])
        for i, j in combinations(range(7), 2)
    )


def test_equal_clients_have_no_groups() -> None:
    found, silhouette = best_grouping(np.ones((5, 5)))
    assert set(found.tolist()) == {1}
    assert np.isnan(silhouette)


def test_planted_groups_are_found_and_updates_are_those_of_the_first_training() -> None:
    task = task_of([0, 3, 0, 3, 0, 3])
    found = client_groups(task, draws=5)
    assert list(found.of.values()) == [1, 2, 1, 2, 1, 2]
    assert len(found.nulls) == 5
    assert max(found.nulls) < found.silhouette
    assert "client 1, client 3, client 5" in found.text()
    models, _ = runner.train_first_round(
        task, {"federation_sensitivity": groups.SensitivityAccumulator}
    )
    weight = task.layers[0].weights[0]
    start = tree.named_tensors(task.model)[weight]
    a, b = (
        tree.named_tensors(models[name])[weight] - start
        for name in ("client 0", "client 1")
    )
    cosine = torch.nn.functional.cosine_similarity(
        a.detach().double().flatten(), b.detach().double().flatten(), dim=0
    )
    assert found.similarity.loc["client 0", "client 1"] == pytest.approx(float(cosine))


def test_clients_alike_are_one_group_and_the_shuffling_ends_early(
    monkeypatch: Any,
) -> None:
    ended = [client_groups(task_of([0] * 6, seed), draws=20) for seed in range(3)]
    assert not any(found.significant for found in ended)
    for found in ended:
        assert set(found.of.values()) == {1}
        assert len(found.nulls) < 20
        assert found.nulls[-1] >= found.silhouette > max(found.nulls[:-1], default=-2.0)
        assert found.text().startswith("No groups")


def test_updates_that_are_equal_show_no_groups(monkeypatch: Any) -> None:
    monkeypatch.setattr(
        groups,
        "pdist",
        lambda moved, metric: np.zeros(len(moved) * (len(moved) - 1) // 2),
    )
    found = client_groups(task_of([0] * 4))
    assert (found.nulls, found.significant, np.isnan(found.silhouette)) == (
        (),
        False,
        True,
    )
    assert "the same update" in found.text()


@pytest.mark.parametrize(
    ("clients", "asked", "message"),
    [
        (3, {}, "at least 4.*got 3"),
        (4, {"draws": 0}, "at least 1.*got 0"),
        (4, {"layer": "fc9"}, "'fc9'.*fc1"),
    ],
)
def test_what_cannot_be_grouped_is_refused(
    clients: int, asked: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        client_groups(task_of([0] * clients), **asked)


@pytest.mark.parametrize("wrong", [0.0, float("nan")])
def test_a_client_that_does_not_move_the_layer_is_named(
    wrong: float, monkeypatch: Any
) -> None:
    task, train = task_of([0] * 4), runner.train_first_round

    def stand_still(task: Task, observers: Any) -> Any:
        models, measured = train(task, observers)
        with torch.no_grad():
            moved = tree.named_tensors(models["client 2"])[task.layers[0].weights[0]]
            moved.copy_(
                tree.named_tensors(task.model)[task.layers[0].weights[0]] + wrong
            )
        return models, measured

    monkeypatch.setattr(runner, "train_first_round", stand_still)
    with pytest.raises(UsageError, match=r"'fc1'.*of client 2\."):
        client_groups(task, draws=1)
