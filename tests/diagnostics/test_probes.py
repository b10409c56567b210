"""Probes of a layer's features against their definitions in float64, sample by sample."""

from collections import defaultdict

import numpy as np
import pytest
import scipy.optimize
import scipy.spatial
import scipy.special
import torch
from sklearn.linear_model import LogisticRegression
from torch import nn

from diagnostics.measure import diagnose
from diagnostics.representation.features import collect, folds_of
from diagnostics.representation.probes import accuracy_error, logistic
from fl_core.data.federated import Split
from tests.diagnostics.made import pair
from tests.made import mlp

C = 3


def report(metric="linear_probe", models=None, data=None, **options):
    models = (
        {"a": mlp(4, 40, 3, seed=0), "b": mlp(4, 40, 3, seed=1)}
        if models is None
        else models
    )
    data = {"a": pair(30, 0), "b": pair(21, 1)} if data is None else data
    return diagnose(models, data, metric, options={metric: options})


def only(found, **where):
    frame = found.frame
    for name, value in where.items():
        frame = frame[frame[name] == value]
    (row,) = frame.to_dict("records")
    return row


def expected(x, y, test):
    """Standardise, and minimise |W|^2 / 2 + the summed cross-entropy; of two classes W is one vector."""
    x, test = ((part.astype(float) - x.mean(0)) / x.std(0) for part in (x, test))
    of_class = y[:, None] == np.unique(y)
    wide = of_class.shape[1] if of_class.shape[1] > 2 else 1

    def logits(w, x):
        z = x @ w[1:] + w[0]
        return z if wide > 1 else np.hstack([0 * z, z])

    def objective(flat):
        w = flat.reshape(-1, wide)
        z = scipy.special.log_softmax(logits(w, x), axis=1)
        g = (np.exp(z) - of_class)[:, -wide:]
        slope = np.vstack([g.sum(0), x.T @ g + w[1:]])
        return (w[1:] ** 2).sum() / 2 - z[of_class].sum(), slope.ravel()

    start = np.zeros((x.shape[1] + 1) * wide)
    best = scipy.optimize.minimize(objective, start, jac=True, tol=1e-12).x
    return np.unique(y)[logits(best.reshape(-1, wide), test).argmax(1)]


def test_guessing_and_balanced_accuracy_stand_next_to_it():
    """Noise with 95 to 5 labels scores .95, which a constant has, too."""
    x, y = torch.randn(200, 5), (torch.arange(200) % 20 == 0).long()
    frame = report("knn_probe", {"a": mlp(4, 40, 3)}, {"a": (x[:, :4], y)}).frame
    for who in ("own", "pooled"):
        values = frame[(frame["variant"] == f"{who}_guessing")]["value"]
        assert np.allclose(values, 0.95)
        values = frame[(frame["variant"] == f"{who}_balanced")]["value"]
        assert values.max() < 0.6


def brute(x, y, test, distance):
    """The most frequent label of the five nearest."""
    apart = scipy.spatial.distance.cdist(test.astype(float), x.astype(float), distance)
    nearest = np.argsort(apart, axis=1, kind="stable")[:, :5]
    return np.array([np.bincount(y[row]).argmax() for row in nearest])


WAYS = {
    "linear": ("linear_probe", {}, expected, "C=1"),
    "cosine": ("knn_probe", {}, lambda *d: brute(*d, "cosine"), "cosine"),
    "euclidean": (
        "knn_probe",
        {"distance": "euclidean"},
        lambda *d: brute(*d, "euclidean"),
        "euclidean",
    ),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("held", ["folds", "test"])
def test_values_are_those_of_a_reference_sample_by_sample(way, held):
    metric, options, reference, estimator = WAYS[way]
    models, data = (
        {"a": mlp(4, 40, 3, seed=0), "b": mlp(4, 40, 3, seed=1)},
        {"a": pair(30, 0), "b": pair(21, 1)},
    )
    tests = {"a": pair(11, 7), "b": pair(13, 8)}
    held_out, ends, draw = {
        "folds": (4, "4 folds", folds_of),
        "test": (tests, "given test data", None),
    }[held]
    rows = report(metric, models, data, **{held: held_out}, **options)
    for layer in ("0", "2"):

        def of(client, data, layer=layer):
            x = collect(models[client], [layer], data[client]).at(layer)
            return x, data[client][1].numpy()

        def split(client, number, of=of):
            x, y = of(client, data)
            if draw is None:
                return x, y, *of(client, tests)
            out = draw(y, held_out, 0) == number
            return x[~out], y[~out], x[out], y[out]

        hits = defaultdict(list)
        for k in range(4 if held == "folds" else 1):
            parts = [split(client, k) for client in models]
            train = [np.concatenate([part[j] for part in parts]) for j in (0, 1)]
            for client, (x, y, test, labels) in zip(models, parts, strict=True):
                pooled = reference(*train, test) == labels
                hits["own", client].append(reference(x, y, test) == labels)
                hits["pooled", client].append(pooled)
                hits["pooled", ""].append(pooled)
        for (variant, client), of_client in hits.items():
            right = np.concatenate(of_client)
            row = only(rows, variant=variant, client=client, layer=layer)
            assert row["value"] == right.mean()
            assert row["n_samples"] == len(right)
            assert row["stderr"] == accuracy_error(right)
            assert row["estimator"].endswith(ends)
            assert estimator in row["estimator"]


def test_two_classes_have_one_vector_of_weights():
    (x, y), (test, _) = (tuple(map(np.asarray, pair(40, k))) for k in (2, 3))
    assert logistic(x, y % 2, test).tolist() == expected(x, y % 2, test).tolist()


def test_separable_classes_are_all_right_and_drawn_labels_are_chance():
    x, y = pair(300)
    apart = x + 20 * nn.functional.one_hot(y, 4)
    drawn = torch.randint(C, (300,), generator=torch.Generator().manual_seed(5))
    place = {"variant": "own", "layer": "0"}
    for metric in ("linear_probe", "knn_probe"):
        assert only(report(metric, mlp(4, 40, 3), (apart, y)), **place)["value"] == 1
        row = only(report(metric, mlp(4, 40, 3), (x, drawn)), **place)
        assert abs(row["value"] - 1 / C) < 4 * row["stderr"]
    right = np.random.default_rng(0).random((2000, 50)) < 0.8
    stated = np.mean([accuracy_error(row) for row in right])
    assert stated == pytest.approx(right.mean(1).std(), rel=0.05)


def test_the_pool_s_part_of_a_client_is_held_out_in_folds_of_its_own(
    monkeypatch,
):
    """However many such parts a client's samples make: a part must not be one of the folds."""
    sizes = []

    def noted(x, y, test, *rest):
        sizes.append((len(x), len(test)))
        return logistic(x, y, test, *rest)

    monkeypatch.setattr("diagnostics.metrics.of_features.logistic", noted)
    data = {name: pair(24, k) for k, name in enumerate("ab")}
    for folds in (2, 3, 4, 6):
        sizes.clear()
        frame = report(data=data, samples=24, folds=folds).frame
        assert set(frame["status"]) == {"ok"}
        pooled = frame[(frame["variant"] == "pooled") & (frame["layer"] == "0")]
        assert sorted(pooled["n_samples"]) == [12, 12, 24]
        fold_sizes = (24 - 24 // folds, 24 // folds)
        assert (
            sizes == [fold_sizes] * folds * 2 * 3
        )  # two layers; two clients and the pool


def test_a_fit_that_stops_early_is_said_in_the_row(
    monkeypatch,
):
    def hasty(**how):
        return LogisticRegression(**{**how, "max_iter": 1})

    monkeypatch.setattr("sklearn.linear_model.LogisticRegression", hasty)
    assert only(report(), variant="own", client="a", layer="0")["estimator"].endswith(
        "5 of 5 fits not converged"
    )


def test_what_cannot_be_probed_says_at_which_layer_and_client():
    data = (pair(6)[0], torch.ones(6).long())
    for metric in ("linear_probe", "knn_probe"):
        rows = report(metric, [mlp(4, 40, 3), mlp(4, 40, 3, seed=1)], [data, pair()])
        row = only(rows, variant="own", client="client_0", layer="2")
        assert np.isnan(row["value"])
        assert row["status"].startswith("output of layer '2' at client 'client_0'")
        assert "samples of one class" in row["status"]
        pooled = rows.frame[rows.frame["variant"] == "pooled"]
        assert set(pooled["status"]) == {"ok"}  # its few samples count there


def test_a_dead_layer_gives_the_most_frequent_class_and_no_neighbours():
    dead, (x, y) = mlp(4, 40, 3), pair(40)
    nn.init.zeros_(dead[2].weight)
    y = torch.where(torch.arange(40) < 28, 0, y)
    place = {"variant": "own", "layer": "2"}
    row = only(report("linear_probe", dead, (x, y)), **place)
    assert row["value"] == pytest.approx(float((y == 0).double().mean()))
    status = only(report("knn_probe", dead, (x, y)), **place)["status"]
    assert status.startswith("output of layer '2' at client 'client_0': constant")
    dead[0].bias.data[0] = torch.inf
    rows = report("linear_probe", {"a": mlp(4, 40, 3), "b": dead})
    assert only(rows, variant="own", client="a", layer="0")["status"] == "ok"
    status = only(rows, variant="pooled", client="", layer="0")["status"]
    assert status == "output of layer '0' at client 'b': not finite"


def test_a_patient_s_rows_do_not_train_and_test_one_probe():
    """Labels are coin tosses for each of 80 patients with five alike rows: only memory could tell them."""
    draw = np.random.default_rng(0)
    rows = np.repeat(np.arange(80), 5)
    x = draw.normal(size=(80, 6))[rows] + draw.normal(size=(400, 6)) * 1e-3
    x, label = torch.tensor(x).float(), torch.tensor(draw.integers(0, 2, 80)[rows])
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 2))
    nn.init.eye_(model[0].weight)
    values, errors = zip(
        *(
            (row["value"], row["stderr"])
            for groups in (None, rows)
            for rows_of_probe in [report("knn_probe", model, Split(x, label, groups))]
            for row in [only(rows_of_probe, layer="0", variant="own")]
        ),
        strict=True,
    )
    assert errors[1] > 1.8 * errors[0]
    assert values[0] > 0.9
    assert 0.3 < values[1] < 0.7
