"""Probes of a layer's features against scikit-learn's own pipeline and brute force, sample by sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn

from diagnostics.measure import diagnose
from diagnostics.metrics.base import METRICS
from diagnostics.report import Report
from diagnostics.representation.features import collect, folds_of, holdout_of
from diagnostics.representation.probes import accuracy_error, logistic
from fedlayers.cli.app import main
from fl_core.data.federated import Split
from fl_core.errors import UsageError
from tests.diagnostics.calls import knn_probe, linear_probe

C = 3


def net(seed: int = 0, width: int = 40) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, C))


def pair(n: int = 30, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % C
    return torch.randn(n, 4, generator=g) + 1.2 * nn.functional.one_hot(y, 4), y


def report(
    metric: str = "linear_probe", models: Any = None, data: Any = None, **options: Any
) -> Report:
    models = {"a": net(0), "b": net(1)} if models is None else models
    data = {"a": pair(30, 0), "b": pair(21, 1)} if data is None else data
    return diagnose(models, data, metric, progress=False, options={metric: options})


def only(found: Report, **where: str) -> dict[str, Any]:
    frame = found.frame
    for name, value in where.items():
        frame = frame[frame[name] == value]
    (row,) = frame.to_dict("records")
    return row


def expected(x: np.ndarray, y: np.ndarray, test: np.ndarray) -> np.ndarray:
    """Standardise and regress, without any reduction, to a tight tolerance."""
    if len(set(y)) == 1:
        return np.full(len(test), y[0])
    model = make_pipeline(
        StandardScaler(), LogisticRegression(C=1.0, tol=1e-9, max_iter=5000)
    )
    return model.fit(x.astype(np.float64), y).predict(test.astype(np.float64))


def brute(
    x: np.ndarray, y: np.ndarray, test: np.ndarray, distance: str, k: int = 5
) -> np.ndarray:
    x, test = x.astype(np.float64), test.astype(np.float64)
    if distance == "cosine":
        apart = 1 - (test @ x.T) / np.outer(
            np.linalg.norm(test, axis=1), np.linalg.norm(x, axis=1)
        )
    else:
        apart = np.linalg.norm(test[:, None] - x, axis=2)
    return np.array(
        [np.bincount(y[np.argsort(row, kind="stable")[:k]]).argmax() for row in apart]
    )


WAYS = {
    "linear_probe": ({}, expected),
    "knn_probe": ({}, lambda *data: brute(*data, "cosine")),
    "euclidean": ({"distance": "euclidean"}, lambda *data: brute(*data, "euclidean")),
}


@pytest.mark.parametrize("layer", ["0", "2"])
@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("held", ["folds", "holdout", "test"])
def test_values_are_those_of_a_reference_sample_by_sample(
    way: str, held: str, layer: str
) -> None:
    options, reference = WAYS[way]
    metric = "linear_probe" if way == "linear_probe" else "knn_probe"
    models, data = {"a": net(0), "b": net(1)}, {"a": pair(30, 0), "b": pair(21, 1)}
    tests = {"a": pair(11, 7), "b": pair(13, 8)}
    how: dict[str, Any] = {
        "folds": {"folds": 4},
        "holdout": {"holdout": 0.3},
        "test": {"test": tests},
    }[held]
    found = report(metric, models, data, **how, **options)
    x = {c: collect(models[c], [layer], data[c]).at(layer) for c in models}
    y = {c: data[c][1].numpy() for c in models}
    fold = {
        c: folds_of(y[c], 4, 0)
        if held == "folds"
        else holdout_of(y[c], 0.3, 0)
        if held == "holdout"
        else None
        for c in models
    }

    def split(client: str, number: int) -> tuple[np.ndarray, ...]:
        if held == "test":
            return (
                x[client],
                y[client],
                collect(models[client], [layer], tests[client]).at(layer),
                tests[client][1].numpy(),
            )
        out = fold[client] == number
        return x[client][~out], y[client][~out], x[client][out], y[client][out]

    numbers = range(4 if held == "folds" else 1)
    for client in models:
        parts = [split(client, k) for k in numbers]
        right = np.concatenate([reference(a, b, c) == d for a, b, c, d in parts])
        row = only(found, variant="own", client=client, layer=layer)
        assert row["value"] == right.mean()
        assert row["n_samples"] == len(right)
        assert row["stderr"] == accuracy_error(right)
    hits: dict[str, list[np.ndarray]] = {c: [] for c in models}
    for k in numbers:
        parts = [split(client, k) for client in models]
        train = [np.concatenate([part[j] for part in parts]) for j in (0, 1)]
        for client, part in zip(models, parts, strict=True):
            hits[client].append(reference(*train, part[2]) == part[3])
    together = {c: np.concatenate(own) for c, own in hits.items()}
    for client in models:
        assert (
            only(found, variant="pooled", client=client, layer=layer)["value"]
            == together[client].mean()
        )
    whole = only(found, variant="pooled", client="", layer=layer)
    assert whole["value"] == np.concatenate(list(together.values())).mean()
    said = {"folds": "4 folds", "holdout": "holdout 0.3", "test": "given test data"}[
        held
    ]
    assert whole["estimator"].endswith(said)
    assert (
        "euclidean"
        if way == "euclidean"
        else "cosine"
        if metric == "knn_probe"
        else "C=1"
    ) in whole["estimator"]


@pytest.mark.parametrize("d", [5, 80])
def test_reducing_the_features_changes_no_prediction(d: int) -> None:
    rng = np.random.default_rng(0)
    y = np.arange(40) % 4
    x = rng.normal(size=(40, d)) + rng.normal(size=(4, d))[y]
    test = rng.normal(size=(200, d))
    plain = logistic(x, y, test, reduce=False, tol=1e-9)
    assert (logistic(x, y, test, reduce=True, tol=1e-9) == plain).all()
    assert (logistic(x, y, test) == plain).mean() > 0.99


@pytest.mark.parametrize("metric", ["linear_probe", "knn_probe"])
def test_separable_classes_are_all_right_and_drawn_labels_are_chance(
    metric: str,
) -> None:
    x, y = pair(300)
    apart = x + 20 * nn.functional.one_hot(y, 4)
    assert (
        only(report(metric, net(), (apart, y)), variant="own", layer="0")["value"] == 1
    )
    drawn = torch.randint(C, (300,), generator=torch.Generator().manual_seed(5))
    row = only(report(metric, net(), (x, drawn)), variant="own", layer="0")
    assert abs(row["value"] - 1 / C) < 4 * row["stderr"]
    assert row["stderr"] == pytest.approx(np.sqrt(2 / 9 / 300), rel=0.1)


def test_the_error_of_an_accuracy_is_never_nothing_and_of_the_right_size() -> None:
    assert 0 < accuracy_error(np.ones(20, dtype=bool)) < 0.06
    rng = np.random.default_rng(0)
    right = rng.random((2000, 50)) < 0.8
    assert np.mean([accuracy_error(row) for row in right]) == pytest.approx(
        right.mean(1).std(), rel=0.05
    )


def test_a_subset_is_drawn_from_each_client_and_the_pool_holds_equally_many() -> None:
    found = report(samples=20)
    assert only(found, variant="own", client="a", layer="0")["n_samples"] == 20
    assert [
        only(found, variant="pooled", client=c, layer="0")["n_samples"]
        for c in ("a", "b", "")
    ] == [10, 10, 20]
    assert report(samples=20).frame.equals(found.frame)


@pytest.mark.parametrize("folds", [2, 3, 4, 6])
def test_the_pool_s_part_of_a_client_is_held_out_in_folds_of_its_own(
    folds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many such parts a client's samples make: a part must not be one of the folds."""
    sizes: list[tuple[int, int]] = []

    def noted(x: Any, y: Any, test: Any, *rest: Any) -> Any:
        sizes.append((len(x), len(test)))
        return logistic(x, y, test, *rest)

    monkeypatch.setattr("diagnostics.metrics.of_features.logistic", noted)
    data = {name: pair(24, k) for k, name in enumerate("ab")}
    found = report(data=data, samples=24, folds=folds)
    assert set(found.frame["status"]) == {"ok"}
    assert [
        only(found, variant="pooled", client=c, layer="0")["n_samples"]
        for c in ("a", "b", "")
    ] == [12, 12, 24]
    assert (
        sizes == [(24 - 24 // folds, 24 // folds)] * folds * 2 * 3
    )  # two layers; two clients and the pool


def test_one_model_on_many_clients_data_is_probed_on_each_and_on_all() -> None:
    found = report("linear_probe", net(), {"x": pair(30), "y": pair(30, 2)})
    assert set(found.frame["client"]) == {"x", "y", ""}
    alone = report("linear_probe", net(), {"x": pair(30)})
    assert (
        only(alone, variant="own", layer="2", client="x")["value"]
        == only(found, variant="own", layer="2", client="x")["value"]
        == only(alone, variant="pooled", layer="2", client="")["value"]
    )


def test_a_fit_that_stops_early_is_said_in_the_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def hasty(**how: Any) -> LogisticRegression:
        return LogisticRegression(**{**how, "max_iter": 1})

    monkeypatch.setattr("diagnostics.representation.probes.LogisticRegression", hasty)
    assert only(report(), variant="own", client="a", layer="0")["estimator"].endswith(
        "5 of 5 fits not converged"
    )


@pytest.mark.parametrize("metric", ["linear_probe", "knn_probe"])
@pytest.mark.parametrize(
    ("data", "words"),
    [
        (pair(1), "1 samples, at least 2"),
        ((pair(6)[0], torch.ones(6).long()), "samples of one class"),
    ],
)
def test_what_cannot_be_probed_says_at_which_layer_and_client(
    metric: str, data: Any, words: str
) -> None:
    found = report(metric, [net(), net(1)], [data, pair()])
    row = only(found, variant="own", client="client_0", layer="2")
    assert np.isnan(row["value"])
    assert row["status"].startswith("output of layer '2' at client 'client_0'")
    assert words in row["status"]
    for client in ("client_0", "client_1", ""):  # its few samples count in the pool
        assert only(found, variant="pooled", client=client, layer="2")["status"] == "ok"


@pytest.mark.parametrize(("sizes", "samples"), [((1, 30), 2000), ((2, 3), 2)])
def test_a_client_of_which_nothing_is_held_out_has_no_value(
    sizes: tuple[int, int], samples: int
) -> None:
    """Its one sample trains the pooled probe; where that is so of every client, nobody has a value there."""
    data = {
        name: pair(n, k) for k, (name, n) in enumerate(zip("ab", sizes, strict=True))
    }
    found = report(data=data, holdout=0.3, samples=samples)
    row = only(found, variant="pooled", client="a", layer="2")
    assert np.isnan(row["value"])
    assert row["status"].endswith("no held-out samples")
    whole = only(found, variant="pooled", client="", layer="2")
    assert whole["status"].endswith("no held-out samples" if samples == 2 else "ok")


def test_a_dead_layer_gives_the_most_frequent_class_and_no_neighbours() -> None:
    dead = net()
    nn.init.zeros_(dead[2].weight)
    x, y = pair(40)
    y = torch.where(torch.arange(40) < 28, 0, y)
    share = float((y == 0).double().mean())
    assert only(report("linear_probe", dead, (x, y)), variant="own", layer="2")[
        "value"
    ] == pytest.approx(share)
    row = only(report("knn_probe", dead, (x, y)), variant="own", layer="2")
    assert row["status"].startswith(
        "output of layer '2' at client 'client_0': constant"
    )


def test_a_client_without_features_leaves_the_pool_without_a_value() -> None:
    broken = net(1)
    broken[0].bias.data[0] = torch.inf
    found = report("linear_probe", {"a": net(), "b": broken})
    assert only(found, variant="own", client="a", layer="0")["status"] == "ok"
    for variant, client in (("own", "b"), ("pooled", "a"), ("pooled", "")):
        status = only(found, variant=variant, client=client, layer="0")["status"]
        assert status == "output of layer '0' at client 'b': not finite"


@pytest.mark.parametrize(
    ("metric", "options", "words"),
    [
        ("linear_probe", {"C": 0}, "C.*above 0"),
        ("linear_probe", {"holdout": 1.0}, "holdout"),
        (
            "linear_probe",
            {"holdout": 0.5, "test": {"a": pair(), "b": pair()}},
            "one of the two",
        ),
        ("linear_probe", {"folds": 1}, "at least 2"),
        ("linear_probe", {"samples": 1}, "at least 2"),
        ("separability", {"samples": 1}, "at least 2"),
        ("linear_probe", {"test": {"a": pair()}}, "client .*'b'"),
        (
            "linear_probe",
            {"test": {"a": pair(), "b": (pair()[0], pair()[1] + 5)}},
            "label 7",
        ),
        ("knn_probe", {"neighbours": 0}, "at least 1"),
        ("knn_probe", {"distance": "cosin"}, "mean 'cosine'"),
    ],
)
def test_bad_options_are_named(
    metric: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        report(metric, **options)


@pytest.mark.parametrize("metric", ["linear_probe", "knn_probe", "separability"])
def test_a_report_draws_them(metric: str) -> None:
    found = report(metric)
    ax = found.plot(metric)
    assert ax.has_data()
    assert METRICS[metric].variant == "own"
    assert "own" in ax.get_ylabel()


def test_the_command_judges_on_what_the_clients_did_not_train_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["linear_probe", "knn_probe", "separability"]
    assert main(
        ["diagnose", "--dataset", "heart", "--metrics", *names, "--out", str(tmp_path)]
    ) in (0, None)
    assert "linear_probe" in capsys.readouterr().out
    frame = Report.read(tmp_path / "rows.jsonl").frame
    assert set(frame["metric"]) == set(names)
    assert set(frame["status"]) == {"ok"}
    probes = frame[(frame["metric"] != "separability") & (frame["variant"] == "own")]
    assert all(name.endswith("given test data") for name in probes["estimator"])
    assert probes.drop_duplicates("client")["n_samples"].tolist() == [
        49,
        42,
        8,
        21,
    ]  # their validation samples


def test_the_functions_take_what_every_metric_takes() -> None:
    for metric in (linear_probe, knn_probe):
        assert metric([], []) == []


def test_a_patient_s_rows_do_not_train_and_test_one_probe():
    """Labels are coin tosses for each of 80 patients with five alike rows: only memory could tell them."""
    draw = np.random.default_rng(0)
    rows = np.repeat(np.arange(80), 5)
    x = draw.normal(size=(80, 6))[rows] + draw.normal(size=(400, 6)) * 1e-3
    label = draw.integers(0, 2, 80)[rows]
    found = {}
    for name, groups in (("rows", None), ("patients", rows)):
        data = Split(torch.tensor(x).float(), torch.tensor(label), groups)
        model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 2))
        with torch.no_grad():
            model[0].weight.copy_(torch.eye(6))
        report = diagnose({"a": model}, {"a": data}, ("knn_probe",))
        frame = report.frame
        found[name] = float(frame[(frame.layer == "0") & (frame.variant == "own")]["value"].iloc[0])  # fmt: skip
        found[f"error by {name}"] = float(frame["stderr"].max())
    assert found["error by patients"] > 1.8 * found["error by rows"]
    assert found["rows"] > 0.9
    assert 0.3 < found["patients"] < 0.7
