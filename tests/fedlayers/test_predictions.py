"""Each client's test scores with intervals, ROC and calibration: against known values, and against a run's own rows."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import roc_auc_score

from diagnostics import plots
from fedlayers.studies.harmless import Bench
from fedlayers.studies.report import BINS, calibration, roc_curves
from fl_core import statistics
from fl_core.config import RunConfig
from fl_core.errors import UsageError
from fl_core.records import store
from fl_core.run import runner

SIZES = {"north": 200, "south": 60, "one class": 20}


def samples():
    """Two classes at three clients, with calibrated probabilities."""
    draw, parts = np.random.default_rng(0), []
    for name, n in SIZES.items():
        p = draw.uniform(size=n) if name != "one class" else np.full(n, 0.3)
        y = (draw.uniform(size=n) < p) & (name != "one class")
        parts.append(pd.DataFrame({"client": name, "positive": y, "probability": p}))
    found = pd.concat(parts, ignore_index=True)
    return found.assign(group=found.index)


def test_roc_curves_are_of_clients_with_both_classes_and_of_all():
    table = samples()
    curves = roc_curves(table)
    assert set(curves["client"]) == {"north", "south", ""}
    assert curves.groupby("client")["n"].first()[""] == sum(SIZES.values())
    own = table[table["client"] == "north"]
    expected = roc_auc_score(own["positive"], own["probability"])
    found = curves.loc[curves["client"] == "north", "auroc"].iloc[0]
    assert found == pytest.approx(expected)
    ax = plots.roc(curves, positive="died")
    assert len(ax.lines) == 4
    assert "died" in ax.get_ylabel()
    with pytest.raises(UsageError):
        plots.roc(curves.iloc[:0])
    plt.close("all")


def test_calibrated_probabilities_lie_at_the_line():
    groups = calibration(samples())
    assert len(groups) == BINS
    assert groups["n"].sum() == sum(SIZES.values())
    assert groups["predicted"].is_monotonic_increasing
    assert groups["share"].between(groups["low"], groups["high"]).all()
    assert (groups["share"] - groups["predicted"]).abs().max() < 0.25
    patients = samples()
    wider = calibration(patients.assign(group=patients.index // 20))
    assert (wider["high"] - wider["low"]).sum() > (groups["high"] - groups["low"]).sum()
    ax = plots.calibration(groups)
    np.testing.assert_allclose(ax.lines[1].get_ydata(), groups["share"])
    ends = np.array(ax.collections[0].get_segments())[:, :, 1]
    np.testing.assert_allclose(ends, groups[["low", "high"]])
    with pytest.raises(UsageError):
        plots.calibration(groups.iloc[:0])
    plt.close("all")


def test_the_table_of_clients_has_the_scores_of_the_runs_rows(tmp_path):
    config = RunConfig(dataset="heart", algorithm="fedper", rounds=2, eval_every=1)
    task = runner.assemble(config)
    runner.run(config, tmp_path / "run", progress=False)
    bench = Bench(task)
    table = bench.of_clients({"model": bench.of_run(tmp_path / "run", "run")})
    table = table.set_index("client")
    frame = store.Run(tmp_path / "run").rows()[1]
    frame = frame[
        (frame["round"] == 2)
        & (frame["split"] == "test")
        & (frame["model"] == "personal")
    ]
    for name in ("macro_f1", "accuracy"):
        own = frame[frame["metric"] == name].set_index("client")["value"]
        assert table[name].to_dict() == pytest.approx(own.to_dict())
    for line in table.itertuples():
        right = round(line.accuracy * line.test)
        interval = statistics.share_interval(right, line.test)
        assert (line.accuracy_low, line.accuracy_high) == interval[1:]
