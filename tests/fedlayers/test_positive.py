"""AUROC and AUPRC of two classes name their class: in rows, tables, the terminal and pictures; a flag chooses it."""

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import average_precision_score

from diagnostics import plots
from diagnostics.plots.page import figure_of
from fedlayers.decision.compare import compare
from fedlayers.decision.comparison import headline
from fedlayers.decision.losses import SeedLosses
from fedlayers.decision.simple import baseline_rows, predictors
from fedlayers.run_result import scores_text
from fl_core import rows
from fl_core.config import RunConfig
from fl_core.rows import OF_CLASS
from fl_core.run import runner
from fl_core.run.restore import load_models
from fl_core.training.evaluate import predict
from tests.conftest import refuses


@pytest.fixture
def wards(tmp_path):
    """A table of two wards, where few died."""
    draw = np.random.default_rng(0)
    died = draw.random(240) < 0.25
    table = pd.DataFrame(
        draw.normal(size=(240, 3)) + died[:, None], columns=list("abc")
    )
    table["client"], table["label"] = (
        np.where(np.arange(240) % 2, "north", "south"),
        np.where(died, "died", "survived"),
    )
    table.to_csv(tmp_path / "wards.csv", index=False)
    return str(tmp_path / "wards.csv")


def test_the_positive_class_is_chosen_and_named(wards, tmp_path):
    scores = {}
    for positive, named in ((None, "survived"), ("died", "died")):
        config = RunConfig(dataset=wards, rounds=1, positive=positive)
        engine = runner.run(config, tmp_path / named)
        frame = rows.read(tmp_path / named / "rows.jsonl")[1]
        scored = frame[frame["metric"].isin(OF_CLASS)]
        assert set(scored["variant"]) == {named}
        assert set(frame.loc[frame["metric"] == "macro_f1", "variant"]) == {""}
        last = frame.query("round == 1 and split == 'test' and model == 'global'")
        scores[named] = last.set_index(["metric", "client"])["value"]
        model = load_models(tmp_path / named, which="global")[0]["north"]
        split = engine.data.client("north").test
        place = engine.data.classes.index(named)
        p = predict(model, split.x).softmax(1)[:, place].numpy()
        expected = average_precision_score(split.y == place, p)
        assert scores[named]["auprc", "north"] == pytest.approx(expected)
        assert repr(named) in scores_text(frame, 1)
    survived, died = (scores[name]["auroc", "north"] for name in ("survived", "died"))
    assert died == pytest.approx(survived)


def test_a_comparison_and_its_pictures_name_the_class(wards, tmp_path):
    config = RunConfig(dataset=wards, rounds=1, positive="died")
    how = {"score": "auprc", "baselines": True}
    comparison = compare(config, ("local", "fedavg"), (0,), tmp_path / "c", **how)
    assert comparison.positive == "died"
    assert "AUPRC of 'died'" in comparison.text()
    assert set(pd.read_csv(tmp_path / "c/table.csv")["positive"]) == {"died"}
    drawn = figure_of(plots.learning(comparison.frame, "auroc"))
    assert "'died'" in drawn.axes[0].get_ylabel()
    losses = SeedLosses(runner.assemble(config))
    pooled, *_ = predictors(losses)
    naive = rows.frame(baseline_rows(losses, pooled))
    assert set(naive.loc[naive["metric"].isin(OF_CLASS), "variant"]) == {"died"}


def test_a_client_without_both_classes_is_left_out_of_the_mean_by_name(wards, tmp_path):
    table = pd.read_csv(wards)
    west = table.head(40).assign(client="west", label="survived")
    pd.concat([table, west]).to_csv(wards, index=False)
    config = RunConfig(dataset=wards, rounds=1, positive="died")
    how = {"score": "auroc"}
    comparison = compare(config, ("local", "fedavg"), (0,), tmp_path / "c", **how)
    aurocs = headline(comparison.frame).query(
        "algorithm == 'fedavg' and metric == 'auroc'"
    )
    both = aurocs[aurocs["client"] != "west"]
    mean = np.average(both["value"], weights=both["n_train"].astype(float))
    assert comparison.table.set_index("algorithm")["auroc"]["fedavg"] == pytest.approx(
        mean
    )
    assert comparison.table["fairness"].notna().all()
    run = comparison.frame[comparison.frame["algorithm"] == "fedavg"]
    for text in (comparison.text(), scores_text(run, 1)):
        assert "AUROC leaves out west" in text
    assert f"{mean:.4f}" in scores_text(run, 1)


def test_what_is_no_class_of_two_is_refused(wards):
    with refuses("'alive'"):
        runner.assemble(RunConfig(dataset=wards, positive="alive"))
    with refuses("two classes"):
        runner.assemble(RunConfig(dataset="heart", positive="0"))
