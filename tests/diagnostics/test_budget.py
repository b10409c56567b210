"""A budget changes no value: a row is as without one, or has no value, or another label and an error."""

from __future__ import annotations

import math
import time
from types import SimpleNamespace
from unittest.mock import patch

import pandas as pd
import pytest
import torch
from torch import nn

import fedlayers as fl
from diagnostics.metrics.base import METRICS
from fl_core.data.federated import Split
from fl_core.training.phases import Training
from tests.conftest import with_slow
from tests.made import mlp, normal

pytestmark = pytest.mark.filterwarnings("ignore")

CLIENTS = ("a", "b", "c")
COMPARED = ("a", "b", "c", "d", "e")
"""The clients of metrics of pairs: of half of the time at least two are read."""
SHARES = (0, 0.03, 0.15, 0.35, 0.5, 0.65, 0.85, 0.97)
"""Budgets, as shares of the time that a metric takes."""
NOTHING_AT_HALF = {"clients_differ", "layer_cost"}
"""Metrics without a value at half of their time: all of it goes into what their values share."""
KEYS = ["variant", "layer", "client", "client_b", "split"]


def network(seed: int) -> nn.Module:
    return mlp(5, 6, 5, 3, norm=True, seed=seed)


class Ticks:
    """A clock that each look advances by a second."""

    def __init__(self) -> None:
        self.looks = 0

    def monotonic(self) -> float:
        self.looks += 1
        return float(self.looks)


def measured(name: str, budget: float | None = None) -> tuple[pd.DataFrame, int]:
    """Return a metric's rows, and how often it looked at the clock."""
    clients = COMPARED if METRICS[name].pairs else CLIENTS
    models = {client: network(k) for k, client in enumerate(clients)}
    data = {
        client: (normal(24, 5, seed=k), torch.arange(24) % 3)
        for k, client in enumerate(clients)
    }
    options = {}
    if METRICS[name].shared:
        models = dict.fromkeys(clients, network(0))
        test = {
            client: Split(normal(30, 5, seed=9 + k), torch.arange(30) % 3)
            for k, client in enumerate(clients)
        }
        options = {name: {"test": test, "training": Training(lr=0.05, batch_size=16)}}
    if name == "update_magnitude":
        options = {name: {"start": network(7)}}
    if name == "hessian_spectrum":
        options = {name: {"k": 1, "tol": 0.5}}
    ticks = Ticks()
    clock = SimpleNamespace(**vars(time) | {"monotonic": ticks.monotonic})
    how = {"batch": 8, "progress": False, "options": options, "budget": budget}
    with (
        patch("diagnostics.measurement.time", clock),
        patch("diagnostics.diagnosis.time", clock),
    ):
        frame = fl.diagnose(models, data, name, **how).frame
    columns = [key for key in KEYS if key in frame]
    return frame.astype(dict.fromkeys(columns, str)).set_index(columns), ticks.looks


SLOW = (
    "hessian_spectrum",
    "hessian_trace",
    "linear_probe",
    "knn_probe",
    "layer_tuning",
)


@pytest.mark.parametrize("name", with_slow(sorted(METRICS), SLOW))
def test_a_budget_changes_no_value(name: str) -> None:
    _, looks = measured(name, 1e9)
    whole, _ = measured(name)
    for share in SHARES:
        frame, _ = measured(name, share * looks)
        reached = frame[frame["status"] == "ok"]
        assert set(reached.index) <= set(whole.index)
        for key, row in reached.iterrows():
            right = whole.loc[key]
            label = (row["estimator"], row["n_samples"])
            if label == (right["estimator"], right["n_samples"]):
                same = math.isclose(row["value"], right["value"], rel_tol=1e-12)
                assert same or row["value"] == right["value"], (share, key)
            else:
                assert row["estimator"] != right["estimator"], (share, key)
                assert row["stderr"] > 0, (share, key)
        if share == 0.5:
            assert len(reached) or name in NOTHING_AT_HALF
        if share == 0:
            assert not len(reached)


@pytest.mark.parametrize(
    "name", ["ggn_trace", pytest.param("hessian_trace", marks=pytest.mark.slow)]
)
def test_a_part_of_the_samples_is_within_its_error(name: str) -> None:
    _, looks = measured(name, 1e9)
    whole, _ = measured(name)
    ratios = []
    for share in (0.3, 0.45, 0.6, 0.7):
        frame, _ = measured(name, share * looks)
        part = frame[
            (frame["status"] == "ok") & frame["estimator"].str.contains(" on ")
        ]
        off = part["value"] - whole.loc[part.index, "value"]
        ratios += (off / part["stderr"]).tolist()
    assert len(ratios) >= 4
    assert pd.Series(ratios).abs().median() < 2
