"""Scores of each client with intervals, ROC and calibration: against known values, and against a run's own rows."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch

from diagnostics import plots
from fedlayers.studies.harmless import (
    BINS,
    Predictions,
    predictions_of,
)
from fl_core import runner, statistics
from fl_core.config import RunConfig
from fl_core.errors import UsageError
from fl_core.records import store
from fl_core.training import evaluate
from fl_core.training.losses import build

SIZES = {"north": 200, "south": 60, "one class": 20}


def predictions() -> Predictions:
    """Two classes at three clients, with calibrated probabilities."""
    draw, probabilities, labels, clients = np.random.default_rng(0), {}, {}, []
    for name, n in SIZES.items():
        p = draw.uniform(size=n) if name != "one class" else np.full(n, 0.3)
        labels[name] = (
            (draw.uniform(size=n) < p).astype(np.int64)
            if name != "one class"
            else np.zeros(n, np.int64)
        )
        probabilities[name] = np.stack([1 - p, p], axis=1)
        test = SimpleNamespace(groups=None)
        clients.append(SimpleNamespace(name=name, train=range(3 * n), test=test))
    clients.append(SimpleNamespace(name="without test samples", train=range(5)))
    data: Any = SimpleNamespace(
        clients=clients, n_classes=2, positive_index=1, positive="died", absent=[2]
    )
    predicted = {name: p.argmax(axis=1) for name, p in probabilities.items()}
    task: Any = SimpleNamespace(data=data)
    return Predictions(probabilities, predicted, labels, task)


def test_each_client_has_a_line_with_intervals_around_its_scores() -> None:
    found = predictions()
    found.predicted["south"][0] = 2  # a class that nobody has
    table = found.table().set_index("client")
    assert list(table.index) == list(SIZES)
    assert (table["test"] == list(SIZES.values())).all()
    assert (table["train"] == 3 * table["test"]).all()
    assert (
        table["accuracy"].between(table["accuracy_low"], table["accuracy_high"]).all()
    )
    width = table["accuracy_high"] - table["accuracy_low"]
    assert 0.05 < width["north"] < width["south"] < 0.5
    for name, y in found.labels.items():
        logits = torch.from_numpy(np.eye(3)[found.predicted[name]])
        scores = evaluate.scores(
            logits, torch.from_numpy(y), build("cross_entropy"), absent=[2]
        )
        assert table.loc[name, "macro_f1"] == pytest.approx(scores["macro_f1"])
        assert table.loc[name, "accuracy"] == pytest.approx(scores["accuracy"])
        right = round(scores["accuracy"] * len(y))
        assert (
            table.loc[name, "accuracy_low"]
            == statistics.share_interval(right, len(y)).low
        )


def test_roc_curves_are_of_clients_with_both_classes_and_of_all() -> None:
    found = predictions()
    curves = found.roc()
    assert set(curves["client"]) == {"north", "south", ""}
    assert curves.groupby("client")["n"].first()[""] == sum(SIZES.values())
    y, logits = found.labels["north"], np.log(found.probabilities["north"])
    scores = evaluate.scores(
        torch.from_numpy(logits), torch.from_numpy(y), build("cross_entropy")
    )
    assert curves.loc[curves["client"] == "north", "auroc"].iloc[0] == pytest.approx(
        scores["auroc"]
    )
    ax = plots.roc(curves, positive="died")
    assert len(ax.lines) == 4
    assert "died" in ax.get_ylabel()
    plt.close("all")


def test_calibrated_probabilities_lie_at_the_line() -> None:
    groups = predictions().calibration()
    assert len(groups) == BINS
    assert groups["n"].sum() == sum(SIZES.values())
    assert groups["predicted"].is_monotonic_increasing
    assert (
        (groups["low"] <= groups["share"]) & (groups["share"] <= groups["high"])
    ).all()
    assert (groups["share"] - groups["predicted"]).abs().max() < 0.25
    rows = predictions()
    for client in rows.task.data.clients[:3]:  # patients of twenty rows
        client.test.groups = np.arange(SIZES[client.name]) // 20
    wider = rows.calibration()
    assert (wider["high"] - wider["low"]).sum() > (groups["high"] - groups["low"]).sum()
    ax = plots.calibration(groups)
    np.testing.assert_allclose(ax.lines[1].get_ydata(), groups["share"])
    plt.close("all")


def test_nothing_to_draw_is_refused() -> None:
    with pytest.raises(UsageError):
        plots.roc(predictions().roc().iloc[:0])
    with pytest.raises(UsageError):
        plots.calibration(predictions().calibration().iloc[:0])


def test_predictions_of_a_run_have_the_scores_of_its_rows(tmp_path: Path) -> None:
    config = RunConfig(dataset="heart", algorithm="fedper", rounds=2, eval_every=1)
    runner.run(config, tmp_path / "run", progress=False)
    table = predictions_of(tmp_path / "run").table().set_index("client")
    frame = store.Run(tmp_path / "run").rows()[1]
    frame = frame[
        (frame["round"] == 2)
        & (frame["split"] == "test")
        & (frame["model"] == "personal")
    ]
    for name in ("macro_f1", "accuracy"):
        own = frame[frame["metric"] == name].set_index("client")["value"]
        assert table[name].to_dict() == pytest.approx(own.to_dict())
