"""Layers through time, and their picture."""

import copy

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch

import fedlayers as fl
from diagnostics import through_time
from diagnostics.plots.maps import PANELS, band, panels_of
from diagnostics.report import Report
from fedlayers.runs import default_instruments
from fl_core import rows
from fl_core.run import runner
from tests.conftest import refuses
from tests.made import mlp

METRICS = ["weight_divergence", "grad_norm"]
SMALL = {"algorithm": "fedavg", "rounds": 3, "epochs": 1, "progress": False}


def hospitals(*, alike):
    """Return four clients with one rule for all labels, or with a rule of their own each."""
    draw = np.random.default_rng(0)
    clients = {}
    for k, name in enumerate("abcd"):
        x = draw.normal(size=(80, 6)).astype("float32")
        rule = x[:, 0] if alike else x[:, k] * (-1) ** k
        clients[name] = x, (rule > 0).astype(int)
    return clients


def test_the_bands_of_a_map_hold_one_more_draw_at_all_points_in_95_percent():
    draw, inside = np.random.default_rng(0), 0
    scale = np.array([0.1, 1.0, 5.0])
    for _ in range(400):
        good = True
        for _panel in range(PANELS):
            tables = draw.normal(size=(5, 6, 3)) * scale
            *nulls, further = map(pd.DataFrame, tables)
            low, high = band(nulls)
            good &= bool(((further >= low) & (further <= high)).all(axis=None))
        inside += good
    assert 0.93 <= inside / 400 <= 0.98


def test_rows_are_those_of_each_round_and_a_second_call_measures_the_rest(
    tmp_path, monkeypatch
):
    out = tmp_path / "run"
    fl.run(dataset="heart", out=out, **SMALL)
    seen, measure = [], through_time.diagnose_models
    monkeypatch.setattr(
        through_time,
        "diagnose_models",
        lambda *a, **k: seen.append(k["context"]["round"]) or measure(*a, **k),
    )
    some = fl.through_time(out, METRICS, rounds=[1], progress=False)
    whole = fl.through_time(out, METRICS, progress=False)
    again = fl.through_time(out, METRICS, progress=False)
    assert seen == [1, 2, 3]
    assert some.frame["round"].unique().tolist() == [1]
    pd.testing.assert_frame_equal(again.frame, whole.frame, check_dtype=False)
    for number in (1, 2, 3):
        alone = fl.diagnose(out, metrics=METRICS, round=number, progress=False)
        rows = whole.of_rounds([number])
        assert rows.frame["value"].tolist() == alone.frame["value"].tolist()
        assert rows.values("grad_norm").equals(alone.values("grad_norm"))

    def asked_again(**options):
        """Measure round 1, and return whether kept rows were read."""
        before = len(seen)
        arguments = {"rounds": [1], "progress": False, **options}
        fl.through_time(out, METRICS, **arguments)
        return len(seen) == before

    ends = torch.zeros(2, 2000, 13)
    ends[1, 1000] = 1
    for probe in ends:
        for kind in (probe, probe.double().numpy()):
            assert not asked_again(probe=(kind, torch.zeros(2000)))
            assert asked_again(probe=(copy.copy(kind), torch.zeros(2000)))
    loss = torch.nn.CrossEntropyLoss()
    assert not asked_again(loss=loss)
    assert not asked_again(loss=loss)
    with refuses("out must be left out.*CrossEntropyLoss"):
        asked_again(loss=loss, out=tmp_path / "rows")


def test_a_run_measures_while_it_trains_and_resumes_to_the_same_rows(tmp_path):
    keys = SMALL | {"dataset": "heart", "measure": METRICS, "measure_every": 2}
    plain = fl.run(dataset="heart", **SMALL)
    whole = fl.run(**keys, out=tmp_path / "whole")
    config = fl.RunConfig(**{k: v for k, v in keys.items() if k != "progress"})
    runner.run(
        config, tmp_path / "parts", instruments=default_instruments, until=2, progress=False
    )  # fmt: skip
    parts = fl.resume(tmp_path / "parts", progress=False)
    frames = [report.to_frame().drop(columns="run") for report in (whole, parts)]
    pd.testing.assert_frame_equal(*frames)
    measured = frames[0][frames[0]["metric"].isin(METRICS)]
    assert measured["round"].unique().tolist() == [2, 3]
    assert measured["algorithm"].unique().tolist() == ["fedavg"]
    pd.testing.assert_frame_equal(whole.scores, plain.scores)
    alone = fl.diagnose(tmp_path / "whole", metrics=METRICS, round=2, progress=False)
    assert (
        measured["value"][measured["round"] == 2].tolist()
        == alone.frame["value"].tolist()
    )
    for name in ("grad_nrom", "package.module:metric"):
        with refuses("unknown metric"):
            fl.run(**keys | {"measure": [name]}, out=tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_models_from_elsewhere_have_rounds_too():
    data = hospitals(alike=True)
    models = {number: {name: mlp(6, 8, 2) for name in data} for number in (3, 7)}
    report = fl.through_time(models, "weight_divergence", data, progress=False)
    assert report.frame["round"].unique().tolist() == [3, 7]
    for arguments, wrong, message in (
        (mlp(6, 8, 2), {}, "models must be a run directory"),
        (models, {"out": "rows"}, "out must be left out"),
        (models, {"clients": ["a"]}, "clients must be left out"),
        (models, {"draws": 1}, "draws must be at least 2"),
    ):
        with refuses(message):
            fl.through_time(arguments, "grad_norm", data, progress=False, **wrong)
    for width in (-3.0, float("nan"), 1e9):
        with refuses("width must be from 4 to 100"):
            report.layer_map(width=width)


@pytest.mark.slow
def test_the_layer_map_claims_nothing_of_noise_and_something_of_other_rules(tmp_path):
    claims = {}
    for alike in (True, False):
        data, out = hospitals(alike=alike), tmp_path / str(alike)
        result = fl.run(data=data, model=mlp(6, 8, 2), lr=0.05, out=out, **SMALL)
        report = fl.through_time(
            result, draws=8, progress=False, out=tmp_path / f"{alike}-again"
        )
        axes = report.layer_map(width=8).axes
        assert [ax.get_title().partition("\n")[0] for ax in axes] == [
            "gradients agree",
            "weights part",
        ]
        plt.close("all")
        claims[alike] = {
            p.title: p.outside.to_numpy().sum()
            for p in panels_of(report.layers, report.table)
        }
    assert not any(claims[True].values())
    assert claims[False]["gradients agree"]
    assert claims[False]["one classifier loses"]


def test_local_layers_are_shaded_and_zeros_are_hatched(tmp_path):
    out = tmp_path / "run"
    fl.run(dataset="heart", out=out, **SMALL | {"algorithm": "fedper"})
    report = fl.through_time(out, rounds=[1], progress=False)
    axes = report.layer_map().axes
    panels = panels_of(report.layers, report.table)
    assert panels[1].zero == ["fc1", "fc2", "fc3"]
    assert panels[0].low is None
    assert [sum(bool(p.get_hatch()) for p in ax.patches) for ax in axes] == [0, 3, 0]
    assert all(len([p for p in ax.patches if not p.get_hatch()]) == 1 for ax in axes)
    assert "no band" in axes[0].figure.texts[-1].get_text()


def test_clients_that_share_all_layers_have_a_null(tmp_path):
    out, settings = tmp_path / "run", SMALL | {"algorithm": "fedper"}
    layers = fl.assemble(fl.RunConfig(dataset="heart")).layers
    whole = fl.LayerPlan(layers, [layer.name for layer in layers])
    fl.run(dataset="heart", out=out, plan=whole, **settings)
    report = fl.through_time(out, rounds=[1], progress=False)
    assert all(
        panel.low is not None for panel in panels_of(report.layers, report.table)
    )


def test_reports_of_several_rounds_have_the_last_header_and_all_metrics():
    headers = (
        {"metrics": {"cka": {}, "grad_norm": {"a": 1}}, "layers": []},
        {"metrics": {"grad_norm": {"a": 2}}, "layers": [], "plan": "last"},
    )
    frames = [
        rows.frame([rows.row("cka", value, round=k)])
        for k, value in ((1, 0.5), (2, 0.25))
    ]
    joined = through_time._joined(*map(Report, frames, headers))
    assert joined.header == {
        "metrics": {"cka": {}, "grad_norm": {"a": 2}},
        "layers": [],
        "plan": "last",
    }
    assert joined.frame["value"].tolist() == [0.5, 0.25]
    assert joined.frame["round"].tolist() == [1, 2]
