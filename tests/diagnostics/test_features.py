"""Features against dense float64 references: collecting, reducing, holding out, and the classes' scatter."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from diagnostics.measurement import ClientModel
from diagnostics.representation.features import (
    NoValue,
    collect,
    folds_of,
    reduce_to_span,
    scatter_ratio,
    standardise,
)
from fl_core.layers import layers_of
from tests.conftest import refuses
from tests.diagnostics.calls import separability
from tests.made import Wired


def cnn():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(48, 4)
    )  # fmt: skip


def images(n=20, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, 1, 6, 6, generator=g), torch.arange(n) % 4


def blobs(n, d, gap=1.0, seed=0):
    rng = np.random.default_rng(seed)
    y = np.arange(n) % 3
    return rng.normal(size=(n, d)) + gap * rng.normal(size=(3, d))[y], y


def test_a_loader_keeps_features_and_labels_together_and_a_subset_is_of_the_whole():
    model, (x, _) = cnn().eval(), images()
    y = torch.arange(20)
    whole = collect(model, ["4"], (x, y % 4)).at("4")
    loader = DataLoader(TensorDataset(x, y % 4), 6, shuffle=True)
    features = collect(model, ["4"], loader)
    order = [int(np.abs(whole - row).sum(1).argmin()) for row in features.at("4")]
    assert sorted(order) == y.tolist()
    assert features.y.tolist() == [k % 4 for k in order]
    some = collect(model, ["4"], (x, y % 4), samples=9, batch=4, seed=3)
    assert len(some.y) == len(set(some.sample)) == 9
    np.testing.assert_allclose(some.at("4"), whole[some.sample], atol=1e-6)
    assert some.y.tolist() == (some.sample % 4).tolist()


def odd():
    def run(m, x):
        m.none(None)
        m.nan(x / 0)
        return m.head(x) + m.total(x.sum(0))

    parts = {
        "total": nn.Linear(4, 1),
        "head": nn.Linear(4, 3),
        "spare": nn.Linear(1, 1),
    }
    return Wired(run, **parts, none=nn.Identity(), nan=nn.Identity())


def test_what_has_no_features_says_why():
    data = (torch.randn(5, 4), torch.zeros(5, dtype=torch.long))
    why = {"total": "first", "spare": "computed", "none": "computed", "nan": "finite"}
    features = collect(odd(), [*why, "head"], data)
    assert features.at("head").shape == (5, 3)
    for path, words in why.items():
        with pytest.raises(NoValue, match=words):
            features.at(path)
    for x, words in (
        (np.ones((4, 2)), "constant"),
        (np.full((4, 2), np.nan), "finite"),
    ):
        with pytest.raises(NoValue, match=words):
            scatter_ratio(x, np.array([0, 1, 0, 1]))
    with refuses("module '5'"):
        collect(cnn(), ["5"], images())


def test_reduced_features_keep_all_inner_products():
    for n, d in ((12, 40), (12, 12), (20, 5)):
        x, _ = blobs(n, d)
        a, b = standardise(x, blobs(9, d, seed=1)[0])
        assert np.allclose(a.mean(0), 0)
        assert np.allclose(a.std(0), 1)
        p, q = reduce_to_span(a, b)
        assert p.shape[1] <= min(n, d)
        np.testing.assert_allclose(p @ p.T, a @ a.T, atol=1e-10 * d)
        np.testing.assert_allclose(q @ p.T, b @ a.T, atol=1e-9 * d)


def dense(x, y):
    """Trace of the two scatter matrices, as they are defined."""
    x, between, within = x.astype(np.float64), 0.0, 0.0
    for label in np.unique(y):
        of_class = x[y == label]
        apart = of_class.mean(0) - x.mean(0)
        between += len(of_class) * np.trace(np.outer(apart, apart))
        within += np.trace(
            (of_class - of_class.mean(0)).T @ (of_class - of_class.mean(0))
        )
    return float(between / within)


@settings(max_examples=30, deadline=None)
@given(
    n=st.integers(7, 40), d=st.integers(1, 9), gap=st.floats(0, 5), scale=st.sampled_from([1e-6, 1.0, 1e6]),
    offset=st.sampled_from([0.0, 50.0]),
)  # fmt: skip
def test_scatter_is_that_of_the_matrices_under_any_scale_and_offset(
    n, d, gap, scale, offset
):
    x, y = blobs(n, d, gap=gap)
    turn, _ = np.linalg.qr(np.random.default_rng(5).normal(size=(d, d)))
    value, error = scatter_ratio(scale * (x @ turn + offset), y)
    assert value == pytest.approx(dense(x, y), rel=1e-8)
    assert error is None or error >= 0


def test_the_error_of_the_scatter_is_that_of_a_jackknife_and_of_the_right_size():
    x, y = blobs(60, 4)
    groups = folds_of(y, 10, 0)
    left_out = np.array([dense(x[groups != k], y[groups != k]) for k in range(10)])
    expected = np.sqrt(0.9 * np.square(left_out - left_out.mean()).sum())
    assert scatter_ratio(x, y)[1] == pytest.approx(expected)
    rng = np.random.default_rng(2)
    centres = rng.normal(size=(3, 4))[y]
    ratios = [scatter_ratio(rng.normal(size=(60, 4)) + centres, y) for _ in range(200)]
    values, errors = np.array(ratios, dtype=float).T
    assert np.sqrt(np.square(errors).mean()) == pytest.approx(values.std(), rel=0.25)
    # without a class's only sample there is one class and no ratio, not a ratio of 0
    for count, has_error in ((1, False), (2, True)):
        value, error = scatter_ratio(x, (np.arange(60) < count).astype(int))
        assert value > 0
        assert (error is not None) == has_error


def rows(subjects, **how):
    listed = separability(
        subjects, layers_of(subjects[0].model, images()[0][:2]), **how
    )
    return {(row["variant"], row["client"], row["layer"]): row for row in listed}


def test_separability_of_each_client_and_of_all_together():
    model, a, b = cnn().eval(), images(20, 1), images(16, 2)
    values = rows([ClientModel("a", model, a, 20), ClientModel("b", model, b, 16)])
    x = [collect(model, ["4"], data).at("4") for data in (a, b)]
    of_client = values["own", "a", "4"]["value"]
    assert of_client == pytest.approx(dense(x[0], a[1].numpy()))
    together = dense(np.concatenate(x), torch.cat([a[1], b[1]]).numpy())
    assert values["pooled", "", "4"]["value"] == pytest.approx(together)
    (x, y), one = a, a[1] == 0
    parts = [
        ClientModel(n, model, (x[m], y[m]), 9) for n, m in (("a", one), ("b", ~one))
    ]
    values, whole = rows(parts), rows([ClientModel("all", model, a, 20)])
    assert values["own", "a", "4"]["value"] is None
    pooled = values["pooled", "", "4"]["value"]  # a client of one class counts there
    assert pooled == pytest.approx(whole["own", "all", "4"]["value"], rel=1e-6)
