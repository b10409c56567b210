"""What each measurement knows: shares and odd ones out by hand, verdicts on made-up curves, and one real federation."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from diagnostics import measure
from figures.decision import nulls
from figures.decision.curves import NULLS, OTHER, SAME_DECISION, gone, odd_one_out, shapes, summary
from fl_core import rows, runner

LAYERS = ("l1", "l2", "l3")
REAL = (1.0, 2.0, 6.0)


def test_what_is_left_by_hand():
    """Real (-2, -1, 3), of size 14; a null with the same curve leaves nothing, a flat one all."""
    curves = shapes(pd.DataFrame({"": REAL, "null labels 1": REAL, "null labels 2": REAL}, index=LAYERS), log=False)
    assert curves[0] == pytest.approx([-2, -1, 3])
    assert gone(curves) == 0
    assert gone(np.vstack([curves[0], np.zeros(3)])) == 1
    assert gone(np.array([[-2.0, -1, 3], [-2.0, 0, 2]])) == pytest.approx(2 / 14)
    draws = np.array([[0.0, 1, -1], [0.0, -1, 1]])  # either's other differs from it by 8, from the real one by 24 and 8
    away = np.mean([((curves[0] - draws[1]) ** 2).sum(), ((curves[0] - draws[0]) ** 2).sum()])
    assert gone(np.vstack([curves[:1], draws])) == pytest.approx((away - 8) / 14)
    assert np.isnan(gone(np.zeros((3, 3))))


def test_logarithms_are_taken_where_all_values_allow_it_and_layers_without_values_are_left_out():
    table = pd.DataFrame({"": [1.0, 10.0, np.nan], "a": [10.0, 100.0, 1.0]}, index=LAYERS)
    assert shapes(table, log=True) == pytest.approx(np.array([[-0.5, 0.5]] * 2))
    table.loc["l1", ""] = 0.0
    assert shapes(table, log=True)[0] == pytest.approx([-5, 5])


def test_the_odd_one_out_is_the_furthest_from_the_mean_of_the_others():
    close = [[0.0, 1], [0.1, 0.9], [-0.1, 1.1]]
    assert odd_one_out(np.array([[3.0, -2], *close]))
    assert not odd_one_out(np.array([[0.0, 1], *close]))


def made_up(knows: dict[str, float], seeds: int = 2) -> pd.DataFrame:
    """Curves of grad_norm: draws differ by noise, the real one from a null by as much as is said."""
    generator, lines = np.random.default_rng(0), []
    shape = np.array([1.0, 2.0, 4.0])
    for run in nulls.SETS:
        for seed in range(seeds):
            about = {"run": run, "seed": seed, "variant": "norm"}
            curves = {"": shape}
            for null in ("labels", "clients"):
                bent = shape * np.array([1, 1 + knows[null], 1])
                curves |= {f"null {null} {k}": bent * generator.uniform(0.99, 1.01, 3) for k in range(1, 4)}
            curves["null fresh 1"] = shape * np.array([1, 1, 1 + knows["fresh"]])
            curves |= {f"{OTHER} {k}": curves["null fresh 1"] * generator.uniform(0.9, 1.1, 3) for k in (1, 2)}
            lines += [
                rows.row("grad_norm", float(value), model=model, layer=layer, **about)
                for model, curve in curves.items()
                for layer, value in zip(LAYERS, curve, strict=True)
            ]
            lines += [
                rows.row("layer_cost", 1.0 + k, model=model, layer=layer, **{**about, "variant": "parameters"})
                for model in curves
                for k, layer in enumerate(LAYERS)
            ]
            lines.append(rows.row(SAME_DECISION, 1.0, model="labels", **{**about, "variant": "grad_norm"}))
    return rows.frame(lines)


@pytest.mark.parametrize(
    "knows", [{"labels": 1.0, "clients": 0.0, "fresh": 1.0}, {"labels": 0.0, "clients": 1.0, "fresh": 0.0}]
)
def test_a_metric_is_said_to_know_what_bends_its_curve(knows):
    frame = made_up(knows)
    table = summary(frame).set_index(["metric", "null"])
    for null, bend in knows.items():
        line = table.loc[("grad_norm", null)]
        assert bool(line["verdict"]) == bool(bend)
        assert line["gone"] > 0.1 if bend else line["gone"] < 0.02
        assert line["runs"] == 2 * (len(nulls.SETS) - (null == "clients"))
    assert table.loc["layer_cost"]["verdict"].tolist() == [False] * 3
    drawing = nulls._draw({"seeds": 2, "missing": [], "failed": {}}, frame)
    assert (
        f"| grad_norm | knows {'the labels and training' if knows['labels'] else 'how clients differ'} |"
        in drawing.text
    )
    assert "| layer_cost | describes the network alone |" in drawing.text
    plt.close("all")


def test_a_federation_is_measured_with_its_nulls_and_other_starts(monkeypatch, tmp_path):
    """Fewer metrics than there are; the stored curves are those of the reports, the decisions those of select."""
    wanted = ("grad_norm", "cka", "federation_sensitivity")
    members = {name: nulls.METRICS.members()[name] for name in wanted}
    monkeypatch.setattr(nulls, "METRICS", SimpleNamespace(members=lambda: members))
    task = runner.assemble(replace(nulls.configurations()["heart"], seed=0))
    frame = nulls._measure(task, "heart", tmp_path)
    marks = {"", "null fresh 1", *(f"null {n} {k}" for n in ("labels", "clients") for k in range(1, 4))}
    marks |= {f"{OTHER} {k}" for k in (1, 2)}
    curves = frame[frame["metric"] != SAME_DECISION]
    assert set(curves["model"]) == marks
    report = measure.diagnose_task(task, wanted, progress=False)
    values = report.values("grad_norm")
    mean = (values * task.data.weights).sum(axis=1) / sum(task.data.weights)
    own = curves[(curves["metric"] == "grad_norm") & (curves["model"] == "")]
    assert own["value"].to_numpy(float) == pytest.approx(mean.to_numpy(), rel=1e-5)
    starts = curves[(curves["metric"] == "grad_norm") & curves["model"].isin(["null fresh 1", f"{OTHER} 1"])]
    assert starts["value"].nunique() == 2 * len(values)
    told = frame[frame["metric"] == SAME_DECISION]
    assert set(told["model"]) >= set(NULLS)
    assert told["value"].dropna().between(0, 1).all()
