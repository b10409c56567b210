"""Regret: sums written out on made-up scores, and real runs whose scores, choices and files are looked up again."""

import math

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from matplotlib import pyplot as plt
from scipy import stats

from diagnostics import plots, select
from fedlayers.studies.regret import (
    RANDOM,
    REFERENCES,
    TRIED,
    Regret,
    regret,
)
from fl_core import rows
from fl_core.config import RunConfig
from fl_core.records import store
from tests.conftest import refuses

mpl.use("Agg")
HEART = RunConfig(dataset="heart", algorithm="fedper", rounds=2)
VALIDATION = {0: [0.2, 0.5, 0.8, 0.6], 1: [0.3, 0.7, 0.5, 0.1]}
TEST = {0: [0.1, 0.5, 0.6, 0.3], 1: [0.2, 0.8, 0.4, 0.1]}
DECISIONS = [
    ("near", 0, 2, "ok"),
    ("near", 1, 1, "ok"),
    ("far", 0, None, "a value is 0"),
    ("far", 1, 3, "ok"),
]


def made(score="macro_f1", test=None, decisions=DECISIONS, validation=None):
    test, validation = test or TEST, validation or VALIDATION
    scores = pd.DataFrame(
        [
            {
                "seed": s,
                "cut": k,
                "last": f"l{k}" if k else "",
                "validation": validation[s % 2][k],
                "test": v,
            }
            for s, values in test.items()
            for k, v in enumerate(values)
        ]
    )
    return Regret(
        score,
        ("l1", "l2", "l3"),
        scores,
        pd.DataFrame(decisions, columns=["rule", "seed", "cut", "status"]),
    )


def ends(a, b):
    """Return the ends of the t interval of two values."""
    half = stats.t.ppf(0.975, 1) * abs(a - b) / 2
    return (a + b) / 2 - half, (a + b) / 2 + half


def choice(result, rule, seed):
    found = result.choices[
        (result.choices["rule"] == rule) & (result.choices["seed"] == seed)
    ]
    assert len(found) == 1
    return found.iloc[0]


def test_regret_by_hand():
    """Cut 1 has the best mean, 0.65; cut 2 is best in seed 0 and loses nothing there, but 0.4 in seed 1."""
    result = made()
    assert result.best == 1
    near = choice(result, "near", 0)
    assert near[["cut", "best", "validation", "test"]].tolist() == [2, 1, 0.8, 0.6]
    assert near["regret"] == pytest.approx(0.5 - 0.6)
    assert choice(result, "near", 1)["regret"] == 0
    drawn = choice(result, RANDOM, 1)
    assert drawn["test"] == pytest.approx(0.6)
    assert drawn["regret"] == pytest.approx(0.2)
    assert math.isnan(choice(result, "far", 0)["regret"])
    known = [choice(result, name, 1)["test"] for name in REFERENCES[:3]]
    assert known == [0.2, 0.4, 0.1]


def test_the_table_is_the_mean_over_the_seeds_that_decided():
    table = made().table.set_index("rule")
    assert list(table.index) == ["near", "far", *REFERENCES]
    near = table.loc["near"]
    assert (near["seeds"], near["cuts"]) == (2, "2 1")
    found = near[["regret", "regret_low", "regret_high"]].tolist()
    assert found == pytest.approx([-0.05, *ends(-0.1, 0.0)])
    far = table.loc["far"]
    assert (far["seeds"], far["cuts"]) == (1, "3")
    assert far["regret"] == pytest.approx(0.7)
    assert math.isnan(far["regret_low"])
    nowhere = made(decisions=[("far", s, None, "a value is 0") for s in (0, 1)])
    assert math.isnan(nowhere.table.set_index("rule").loc["far", "regret"])
    assert "seed 1: a value is 0" in nowhere.text()


def test_of_a_loss_the_lowest_is_best():
    result = made("loss")
    assert result.best == 0
    assert choice(result, "near", 0)["regret"] == pytest.approx(0.6 - 0.1)
    assert choice(result, TRIED, 0)["cut"] == 0
    assert result.table.set_index("rule").loc[RANDOM, "regret"] == pytest.approx(
        0.575 - 0.15
    )


def test_what_scores_a_choice_chooses_nothing():
    """The best in validation is that of the validation split, wherever test scores are highest."""
    result = made(validation={0: [0.9, 0.2, 0.2, 0.2], 1: [0.1, 0.1, 0.1, 0.9]})
    assert [choice(result, TRIED, seed)["cut"] for seed in (0, 1)] == [0, 3]
    assert result.best == 1
    pd.testing.assert_series_equal(
        result.table["regret"][:6], made().table["regret"][:6]
    )


def test_a_score_that_is_missing_is_named():
    with refuses(r"macro_f1 .*cut 2 .*seed 0"):
        made(test={0: [0.1, 0.2, math.nan, 0.1]})


def test_every_cut_is_needed():
    with refuses(r"cuts .*0 to 3"):
        made(test={0: [0.1, 0.2, 0.3]})


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    out = tmp_path_factory.mktemp("regret") / "out"
    return out, regret(
        HEART, ("sensitivity_ratio", "cka=largest_jump"), (0, 1), out, progress=False
    )


def test_scores_are_those_of_the_runs(trained):
    out, result = trained
    assert len(result.scores) == 5 * 2
    assert result.layers == ("fc1", "fc2", "fc3", "fc4")
    for line in result.scores.itertuples():
        run = store.Run(out / "cuts" / f"{line.cut}-{line.seed}")
        assert run.rounds[-1] == 2
        table = run.rows()[1].query("metric == 'macro_f1' and round == 2")
        table = table[table["model"] == "personal"]
        for split in ("validation", "test"):
            own = table[table["split"] == split]
            expected = np.average(own["value"], weights=own["n_train"])
            assert getattr(line, split) == pytest.approx(expected, rel=1e-12)


def test_every_cut_shares_its_prefix(trained):
    out, result = trained
    last = result.scores.set_index(["seed", "cut"])["last"]
    for cut, name in enumerate(("", *result.layers)):
        table = store.Run(out / "cuts" / f"{cut}-0").rows()[1]
        sent = table[(table["metric"] == "bytes_up") & (table["client"] != "")]["value"]
        assert (sent.max() > 0) == (cut > 0)
        assert last[0, cut] == name


def test_rules_decide_on_what_was_measured(trained):
    out, result = trained
    for seed in (0, 1):
        path = out / "measured" / f"{seed}.jsonl"
        assert (
            choice(result, "sensitivity_ratio", seed)["cut"] == select.select(path).cut
        )
        expected = select.select(path, "largest_jump", metric="cka").cut
        assert choice(result, "cka=largest_jump", seed)["cut"] == expected
        assert rows.read(path)[0]["seed"] == seed


def test_files(trained):
    out, result = trained
    for name, table, column in (
        ("regret", result.choices, "regret"),
        ("scores", result.scores, "validation"),
        ("table", result.table, "regret"),
    ):
        stored = pd.read_csv(out / f"{name}.csv")[column].tolist()
        assert stored == pytest.approx(table[column].tolist(), nan_ok=True)


def test_picture_marks_each_choice_on_its_seeds_line():
    result = made()
    ax = plots.regret(result.scores, result.decisions)
    marked = {line.get_label(): line for line in ax.lines}
    assert marked["near"].get_ydata() == pytest.approx([0.6, 0.8])
    assert np.round(marked["near"].get_xdata()).tolist() == [2, 1]
    assert marked["far"].get_ydata() == pytest.approx([0.1])
    best = marked["best mean"]
    assert (best.get_xdata()[0], best.get_ydata()[0]) == (1, pytest.approx(0.65))
    means = pytest.approx([0.15, 0.65, 0.5, 0.2])
    assert marked["mean of 2 seeds"].get_ydata() == means
    plt.close("all")


def test_picture_refuses_what_it_cannot_show():
    result = made()
    with refuses("every cut"):
        plots.regret(result.scores.iloc[1:], result.decisions)
    with refuses(r"at 9 .*seed 0"):
        plots.regret(result.scores, result.decisions.assign(cut=9))
