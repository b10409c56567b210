"""Features against dense float64 references: collecting, reducing, holding out, and the classes' scatter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from sklearn.linear_model import LogisticRegression
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from diagnostics.measurement import ClientModel
from diagnostics.representation.features import (
    NoValue,
    collect,
    constant,
    folds_of,
    holdout_of,
    reduce_to_span,
    scatter_ratio,
    standardise,
)
from fl_core.errors import UsageError
from fl_core.layers import layers_of
from tests.diagnostics.calls import separability
from tests.networks import Wired


def cnn(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(48, 4)
    )  # fmt: skip


def images(n: int = 20, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, 1, 6, 6, generator=g), torch.arange(n) % 4


def blobs(
    n: int, d: int, classes: int = 3, gap: float = 1.0, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    y = np.arange(n) % classes
    return rng.normal(size=(n, d)) + gap * rng.normal(size=(classes, d))[y], y


@pytest.mark.parametrize("batch", [None, 7, 3])
def test_outputs_are_those_of_the_modules_although_a_relu_works_in_place(
    batch: int | None,
) -> None:
    model, (x, y) = cnn().eval(), images()
    found = collect(model, ["0", "1", "4"], (x, y), batch=batch)
    with torch.no_grad():
        conv = model[0](x)
        norm = model[1](conv)
        logits = model[4](norm.clamp(min=0).flatten(1))
    for path, expected in (("0", conv), ("1", norm), ("4", logits)):
        np.testing.assert_allclose(
            found.at(path), expected.flatten(1).numpy(), atol=1e-6
        )
    assert found.y.tolist() == y.tolist()
    np.testing.assert_allclose(
        collect(model, ["4"], (x, y), at="input").at("4"),
        norm.clamp(min=0).flatten(1).numpy(),
        atol=1e-6,
    )


def test_a_shuffling_loader_keeps_features_and_labels_together_and_a_subset_is_one_of_the_whole() -> (
    None
):
    model, (x, y) = cnn().eval(), images()
    y = torch.arange(20) % 4
    by_label = {k: collect(model, ["4"], (x, y)).at("4")[k] for k in range(20)}
    found = collect(model, ["4"], DataLoader(TensorDataset(x, y), 6, shuffle=True))
    for row, label in zip(found.at("4"), found.y, strict=True):
        assert any(
            np.allclose(row, by_label[k], atol=1e-6) for k in range(20) if y[k] == label
        )
    some = collect(model, ["4"], (x, y), samples=9, batch=4, seed=3)
    assert len(some.y) == len(set(some.sample)) == 9
    for k, row, label in zip(some.sample, some.at("4"), some.y, strict=True):
        np.testing.assert_allclose(row, by_label[k], atol=1e-6)
        assert label == y[k]
    assert (
        collect(model, ["4"], (x, y), samples=9, seed=4).sample.tolist()
        != some.sample.tolist()
    )


def odd() -> Wired:
    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        m.none(None)
        m.nan(x / 0)
        return m.head(x) + m.total(x.sum(0))

    parts = {
        "total": nn.Linear(4, 1),
        "head": nn.Linear(4, 3),
        "spare": nn.Linear(1, 1),
    }
    return Wired(run, **parts, none=nn.Identity(), nan=nn.Identity())


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("total", "first"),
        ("spare", "computed"),
        ("none", "computed"),
        ("nan", "finite"),
    ],
)
def test_what_has_no_features_says_why(path: str, words: str) -> None:
    found = collect(
        odd(), [path, "head"], (torch.randn(5, 4), torch.zeros(5, dtype=torch.long))
    )
    assert found.at("head").shape == (5, 3)
    with pytest.raises(NoValue, match=words):
        found.at(path)


def test_bad_requests_are_named() -> None:
    for how, words in (
        ({"paths": ["5"]}, "module '5'"),
        ({"at": "side"}, "side"),
        ({"data": (images()[0], images()[1] + 1)}, "label 4"),
    ):
        with pytest.raises(UsageError, match=words):
            collect(**{"model": cnn(), "paths": ["0"], "data": images(), **how})  # type: ignore[arg-type]


@pytest.mark.parametrize(("n", "d"), [(12, 40), (12, 12), (20, 5)])
def test_reduced_features_keep_all_inner_products_and_the_regression(
    n: int, d: int
) -> None:
    x, y = blobs(n, d)
    others, _ = blobs(9, d, seed=1)
    a, b = standardise(x, others)
    assert np.allclose(a.mean(0), 0)
    assert np.allclose(a.std(0), 1)
    p, q = reduce_to_span(a, b)
    assert p.shape[1] <= min(n, d)
    np.testing.assert_allclose(p @ p.T, a @ a.T, atol=1e-10 * d)
    np.testing.assert_allclose(q @ p.T, b @ a.T, atol=1e-9 * d)
    exact = {"tol": 1e-10, "max_iter": 5000}
    full = LogisticRegression(**exact).fit(a, y).predict_proba(b)
    short = LogisticRegression(**exact).fit(p, y).predict_proba(q)
    np.testing.assert_allclose(short, full, atol=1e-6)


def test_a_feature_that_varies_by_rounding_only_counts_as_constant() -> None:
    x = np.full((6, 2), 1e3, dtype=np.float32)
    x[0, 0] = np.nextafter(x[0, 0], np.float32(np.inf))
    assert constant(x)
    assert (standardise(x)[0] == 0).all()
    x[:, 1] += np.arange(6, dtype=np.float32)
    assert not constant(x)
    assert (standardise(x)[0][:, 0] == 0).all()


@settings(max_examples=60, deadline=None)
@given(
    y=st.lists(st.integers(0, 3), min_size=2, max_size=60),
    k=st.integers(2, 7),
    seed=st.integers(0, 5),
)
def test_folds_are_even_in_size_and_in_every_class(
    y: list[int], k: int, seed: int
) -> None:
    labels = np.array(y)
    fold = folds_of(labels, k, seed)
    sizes = np.bincount(fold, minlength=min(k, len(y)))
    assert sizes.min() >= 1
    assert np.ptp(sizes) <= 1
    for label in set(y):
        assert np.ptp(np.bincount(fold[labels == label], minlength=len(sizes))) <= 1
    assert (fold == folds_of(labels, k, seed)).all()


@settings(max_examples=60, deadline=None)
@given(
    y=st.lists(st.integers(0, 3), min_size=2, max_size=60), share=st.floats(0.05, 0.95)
)
def test_held_out_samples_are_the_share_that_was_asked_for_in_every_class(
    y: list[int], share: float
) -> None:
    labels = np.array(y)
    held = holdout_of(labels, share, 0) == 0
    assert held.sum() == min(max(round(len(y) * share), 1), len(y) - 1)
    for label in set(y):
        n = (labels == label).sum()
        assert abs(held[labels == label].sum() - n * held.mean()) <= 2


def dense(x: np.ndarray, y: np.ndarray) -> float:
    """Trace of the two scatter matrices, as they are defined."""
    x = x.astype(np.float64)
    mean, between, within = (
        x.mean(0),
        np.zeros((x.shape[1],) * 2),
        np.zeros((x.shape[1],) * 2),
    )
    for label in np.unique(y):
        own = x[y == label]
        between += len(own) * np.outer(own.mean(0) - mean, own.mean(0) - mean)
        within += (own - own.mean(0)).T @ (own - own.mean(0))
    return float(np.trace(between) / np.trace(within))


@settings(max_examples=30, deadline=None)
@given(
    n=st.integers(7, 40), d=st.integers(1, 9), gap=st.floats(0, 5), scale=st.sampled_from([1e-6, 1.0, 1e6]),
    offset=st.sampled_from([0.0, 50.0]),
)  # fmt: skip
def test_scatter_is_that_of_the_matrices_under_any_scale_and_offset(
    n: int, d: int, gap: float, scale: float, offset: float
) -> None:
    x, y = blobs(n, d, gap=gap)
    turn, _ = np.linalg.qr(np.random.default_rng(5).normal(size=(d, d)))
    value, error = scatter_ratio(scale * (x @ turn + offset), y)
    assert value == pytest.approx(dense(x, y), rel=1e-8)
    assert error is None or error >= 0


def test_the_error_of_the_scatter_is_that_of_a_jackknife_and_of_the_right_size() -> (
    None
):
    x, y = blobs(60, 4)
    groups = folds_of(y, 10, 0)
    left_out = np.array([dense(x[groups != k], y[groups != k]) for k in range(10)])
    assert scatter_ratio(x, y)[1] == pytest.approx(
        np.sqrt(0.9 * np.square(left_out - left_out.mean()).sum())
    )
    centres = np.random.default_rng(1).normal(size=(3, 4))
    rng = np.random.default_rng(2)
    found = np.array(
        [scatter_ratio(rng.normal(size=(60, 4)) + centres[y], y) for _ in range(200)],
        dtype=float,
    )
    assert np.sqrt(np.square(found[:, 1]).mean()) == pytest.approx(
        found[:, 0].std(), rel=0.25
    )


def test_a_scatter_whose_second_class_is_one_sample_has_no_known_error() -> None:
    """Without that sample there is one class and no ratio, not a ratio of 0."""
    x = np.random.default_rng(0).normal(size=(30, 5))
    value, error = scatter_ratio(x, np.array([0] * 29 + [1]))
    assert value > 0
    assert error is None
    assert scatter_ratio(x, np.array([0] * 28 + [1] * 2))[1] is not None


@pytest.mark.parametrize(
    ("x", "y", "words"),
    [
        (np.ones((4, 2)), [0, 1, 0, 1], "constant"),
        (np.random.default_rng(0).normal(size=(4, 2)), [1, 1, 1, 1], "one class"),
        (np.array([[0.0], [1.0], [0.0], [1.0]]), [0, 1, 0, 1], "scatter"),
        (np.array([[0.0], [np.nan]]), [0, 1], "finite"),
    ],
)
def test_where_there_is_no_scatter_the_reason_is_given(
    x: np.ndarray, y: list[int], words: str
) -> None:
    with pytest.raises(NoValue, match=words):
        scatter_ratio(x, np.array(y))


def rows(
    subjects: list[ClientModel], **how: Any
) -> dict[tuple[str, str, str], dict[str, Any]]:
    found = separability(subjects, layers_of(subjects[0].model, images()[0][:2]), **how)
    return {(row["variant"], row["client"], row["layer"]): row for row in found}


def test_separability_of_each_client_and_of_all_together() -> None:
    model, a, b = cnn().eval(), images(20, 1), images(16, 2)
    found = rows([ClientModel("a", model, a, 20), ClientModel("b", model, b, 16)])
    x = {
        name: collect(model, ["4"], data).at("4") for name, data in (("a", a), ("b", b))
    }
    assert found["own", "a", "4"]["value"] == pytest.approx(dense(x["a"], a[1].numpy()))
    together = dense(np.concatenate([x["a"], x["b"]]), torch.cat([a[1], b[1]]).numpy())
    assert found["pooled", "", "4"]["value"] == pytest.approx(together)
    assert found["pooled", "", "4"]["n_samples"] == 36


def test_a_client_of_one_class_has_no_scatter_but_counts_in_the_pool() -> None:
    (x, y), model = images(20), cnn()
    found = rows(
        [
            ClientModel("a", model, (x[y == 0], y[y == 0]), 5),
            ClientModel("b", model, (x[y > 0], y[y > 0]), 15),
        ]
    )
    assert found["own", "a", "4"]["value"] is None
    assert found["own", "a", "4"]["status"].startswith(
        "output of layer '4' at client 'a': "
    )
    whole = rows([ClientModel("all", model, (x, y), 20)])["own", "all", "4"]["value"]
    assert found["pooled", "", "4"]["value"] == pytest.approx(whole, rel=1e-6)


def test_groups_are_in_one_fold():
    seed = 3
    groups = np.repeat(np.arange(40), 5)[np.random.default_rng(seed).permutation(200)]
    y = groups % 3
    for fold in (folds_of(y, 5, seed, groups), holdout_of(y, 0.2, seed, groups)):
        assert all(len(set(fold[groups == k])) == 1 for k in range(40))
        assert np.bincount(fold + 1).max() <= 160
    assert np.bincount(folds_of(y, 5, seed, groups)).tolist() == [40] * 5
