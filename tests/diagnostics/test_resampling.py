"""Resampled batches against measurements of the redrawn data, and the decisions that are made of them."""

import json
from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import binom
from torch import nn

from diagnostics.curve import curve_of, stability
from diagnostics.measure import SENSITIVITY, diagnose
from diagnostics.measurement import ClientModel, whole_groups
from diagnostics.metrics.of_gradients import GradSimilarity, GradVariance
from diagnostics.null import PARTS, draws, mark_resample, split_resamples
from diagnostics.report import Report, explain
from diagnostics.select import RULES, select
from diagnostics.sensitivity import (
    Sensitivity,
    SensitivityAccumulator,
    _Client,
    _Recorded,
    recorded_rows,
)
from fl_core.layers import Layer, layers_of
from fl_core.rows import frame, row
from fl_core.training import losses
from tests.diagnostics.calls import one_pass as measure
from tests.made import labelled, mlp

CE = losses.build("cross_entropy")
pair = partial(labelled, dtype=torch.float64)


def net(seed=0):
    return mlp(4, 6, 3, act=nn.Tanh, seed=seed).double()


def values(found, variant):
    return [r["value"] for r in found if r["variant"] == variant]


def of_a(data, metrics, groups=None, **how):
    """The rows of one client's model."""
    layers = layers_of(net(), data[0])
    subject = ClientModel("a", net(), data, 9, groups)
    return measure([subject], layers, metrics, loss=CE, **how)


@pytest.mark.parametrize("n_batches", [2, 13])
def test_a_resample_is_the_measurement_of_the_redrawn_batches(n_batches):
    """Thirteen batches are dealt to ten parts: batches 0 and 10 are drawn together."""
    x, y = pair(3 * n_batches)
    parts = min(n_batches, PARTS)
    for metric, variant in (
        (Sensitivity(), "after"),
        (Sensitivity(reduce="mean_of_tensors", tensors="all"), "importance"),
    ):
        how = {"batch": 3, "seed": 5}
        measured_rows = of_a((x, y), [metric], resamples=4, **how)
        plain = [r["value"] for r in of_a((x, y), [metric], **how)]
        plain_rows, again = split_resamples(frame(measured_rows))
        assert plain_rows["value"].tolist() == pytest.approx(plain, rel=1e-12)
        for number, times in enumerate(draws(parts, 4, 5, "a"), 1):
            redrawn = [b for b in range(n_batches) for _ in range(times[b % PARTS])]
            index = torch.tensor([3 * b + k for b in redrawn for k in range(3)])
            rows = of_a((x[index], y[index]), [metric], batch=3)
            expected = values([r for r in rows if r["client"]], variant)
            resampled = values(measured_rows, f"{variant}, resample {number}")
            assert resampled == pytest.approx(expected, rel=1e-10)
        ends = f", {parts} parts of the batches redrawn"
        assert again["estimator"].str.endswith(ends).all()
        assert set(again["client"]) == {"a"}


def test_rows_of_one_patient_are_drawn_together():
    """Each patient has two rows, far apart. A resample of one batch has both."""
    x, y = (torch.cat([part, part]) for part in pair(12))
    patients = np.arange(24) % 12
    whole = [b.tolist() for _, b in whole_groups((x, torch.arange(24)), patients, 6)]
    order = [row for part in whole for row in part]
    assert sorted(order) == list(range(24))
    assert all(
        sorted((row + 12) % 24 for row in part) == sorted(part) for part in whole
    )
    how = {"batch": 6, "seed": 5, "resamples": 3}
    grouped = of_a((x, y), [Sensitivity()], patients, **how)
    plain = of_a((x[order], y[order]), [Sensitivity()], **how)
    for number in range(1, 4):
        variant = f"importance, resample {number}"
        assert values(grouped, variant) == pytest.approx(values(plain, variant))


def test_metrics_of_one_pass_share_its_resamples_and_pairs_have_none():
    subjects = [
        ClientModel(name, net(k), pair(12, seed=k), 12) for k, name in enumerate("ab")
    ]
    layers, how = layers_of(net(), pair(2)[0]), {"loss": CE, "batch": 3}
    metrics = [GradVariance(), GradSimilarity(), Sensitivity()]
    together = measure(subjects, layers, metrics, resamples=3, **how)
    alone = measure(subjects, layers, metrics[2:], resamples=3, **how)
    assert alone == [r for r in together if r["metric"] == alone[0]["metric"]]
    again = set(split_resamples(frame(together))[1]["metric"])
    assert again == {"federation_sensitivity"}


def test_clients_with_one_batch_are_named_by_the_measurement_and_by_the_plan():
    models = {name: net(k) for k, name in enumerate(("large", "small"))}
    data = {"large": pair(12, 0), "small": pair(4, 1)}
    how = {"options": {"resamples": 3}}
    for batch, named, message in (
        (4, "small", "clients and batches of large"),
        (16, "large, small", "at least 2 batches"),
    ):
        with pytest.warns(UserWarning, match=f"{named}.*batch"):
            report = diagnose(models, data, SENSITIVITY, batch=batch, **how)
        plan = select(report)
        assert message in explain(plan, full=True)


def test_training_is_resampled_by_its_steps():
    layers = [Layer("l", ("w",)), Layer("m", ("v",))]
    seen, one = SensitivityAccumulator(layers), {"w": torch.ones(2), "v": torch.ones(3)}
    for k in range(12):
        seen.update(one, {**one, "w": (k + 1) * one["w"]})
    result = json.loads(json.dumps(seen.result()))
    assert [part["steps"] for part in result["parts"]] == [2, 2] + [1] * 8
    how = {"n_train": {"a": 7}, "resamples": 6, "seed": 3}
    rows = recorded_rows({"a": result}, layers, **how)
    curve = [1, 1 + 1 / np.mean(np.arange(1, 13) ** 2)]
    assert values(rows, "training") == pytest.approx(curve * 2)
    for number, times in enumerate(draws(10, 6, 3, "a"), 1):
        steps = [k for k in range(12) for _ in range(times[k % 10])]
        mean = np.mean([(k + 1) ** 2 for k in steps])
        importance = values(rows, f"importance, resample {number}")
        assert importance == pytest.approx([mean, 1])
        training = values(rows, f"training, resample {number}")
        assert training == pytest.approx([1, 1 + 1 / mean])
    once = recorded_rows({"a": result}, layers, n_train={"a": 7})
    assert not any("resample" in r["variant"] for r in once)
    one = _Client("a", 7, 7, result)
    plain = _Recorded("weights", "pooled").table(layers, [one], {})
    assert {r["variant"] for r in plain} == {"training", "importance"}


LAYERS = tuple(
    Layer(name, (f"{name}.weight",), (), name) for name in ("l1", "l2", "l3")
)
N = 4000


def table(clients, stderr=None):
    """Of each client its values, then those of its resamples."""
    lines = []
    shared = {"variant": "x", "n_train": 1, "estimator": "e"}
    for client, curves in clients.items():
        for number, curve in enumerate(curves):
            client_rows = [
                row("m", v, client=client, layer=layer.name, stderr=stderr, **shared)
                for layer, v in zip(LAYERS, curve, strict=True)
            ]
            lines += (
                mark_resample(client_rows, number, len(curves) - 1)
                if number
                else client_rows
            )
    return frame(lines)


def likely(share, probability):
    low, high = binom.interval(1 - 1e-6, N, probability)
    return bool(low <= round(share * N) <= high)


def decided(found):
    curve = curve_of(LAYERS, found, "m", "x")
    return stability(curve, RULES["sensitivity_ratio"].cut, 1.3, 2, 0, resamples=N)


def test_decisions_over_resamples_are_as_likely_as_their_draws():
    """The errors of the rows are not counted beside resamples. A resample without a value decides nothing."""
    late, early = [1.0, 1.0, 2.0], [1.0, 2.0, 2.0]
    rows = table({"a": [late, late, early, late, late]}, stderr=5.0)
    curve = curve_of(LAYERS, rows, "m", "x")
    assert curve.redrawn == {("a",): [late, early, late, late]}
    stable = decided(rows)
    assert stable["of"] == "batches"
    assert likely(stable["agreement"], 3 / 4)
    assert likely(stable["cuts"]["l1"], 1 / 4)
    # S_2 is 1 + what a's resample adds with a alone, 1 with b alone, half of it with both; the cut is at 1.3
    a, b = [[1.0, s, 3.0] for s in (1.0, 1.5, 1.7)], [[1.0, 1.0, 3.0]] * 3
    stable = decided(table({"a": a, "b": b}))
    assert stable["of"] == "clients and batches"
    assert likely(stable["cuts"]["l1"], 1 / 4 + 1 / 2 * 1 / 2)
    rows = table({"a": [late] * 3})
    broken = (rows["variant"] == "x, resample 2") & (rows["layer"] == "l2")
    rows.loc[broken, ["value", "status"]] = [np.nan, "not finite"]
    assert likely(decided(rows)["undecided"], 1 / 2)


def test_resamples_go_to_disk_and_into_the_evidence_but_not_into_the_frame(
    tmp_path,
):
    models = {name: net(k) for k, name in enumerate("abc")}
    data = {name: pair(24, k) for k, name in enumerate("abc")}
    metrics = ("grad_variance", "federation_sensitivity", "weight_magnitude")
    how = {"metrics": metrics, "batch": 4}
    plain = diagnose(models, data, **how)
    how["options"] = {"resamples": 5}
    report, path = diagnose(models, data, **how), tmp_path / "rows.jsonl"
    pd.testing.assert_frame_equal(plain.frame, report.frame, rtol=1e-12)
    assert plain.resamples.empty
    # resamples, clients, layers, variants
    assert len(report.resamples) == 5 * 3 * 2 * 2
    assert report.resamples.columns.equals(report.frame.columns)
    assert [*report.resamples.index] == [*range(60)]
    assert (plain.header["command"], report.header["command"]) == ("diagnose",) * 2
    report.write(path)
    again = Report.read(path)
    assert again.frame.equals(report.frame)
    assert again.resamples.equals(report.resamples)
    plan = select(report)
    assert select(path) == plan
    assert plan.shared == select(plain).shared
    assert "the clients and batches:" in explain(plan, full=True)
    assert "resamples=" in explain(select(plain), full=True)
