"""The benchmark's rows and lines, held against fl.regret and a calculation by hand."""

import numpy as np
import pandas as pd
import pytest
from scipy import stats

import fedlayers as fl
from diagnostics import regret
from figures.decision import known, rules


@pytest.fixture(scope="module")
def rows():
    return pd.read_parquet(rules.ROWS)


def test_the_stored_lines_are_made_from_the_rows(rows):
    lines = rules.lines(rows).round(3)
    stored = regret.read_benchmark()
    pd.testing.assert_frame_equal(lines, stored[lines.columns], check_dtype=False)
    assert regret.BENCHMARK.stat().st_size < 200_000


def test_the_constants_and_a_line_by_hand(rows):
    """From the two files alone: points below the best plan, a mean over the seeds that have rows."""
    truth = pd.read_csv(regret.TRUTH, keep_default_na=False)
    truth["accuracy"] = truth["accuracy"].astype(float)
    stored = pd.read_csv(regret.BENCHMARK, keep_default_na=False)
    stored = stored.set_index([*regret.LINE])
    mine = rows[(rows["metric"] == "cka") & (rows["rule"] == "top")]
    mine = mine[mine["rounds"] == 5]
    for name, part in mine.groupby("federation"):
        lost = {"fedavg": [], "head_local": [], "random": [], "top": []}
        for seed, shared in zip(part["seed"], part["shared"], strict=True):
            own = truth[(truth["federation"] == name) & (truth["seed"] == seed)]
            points = own.set_index("shared")["accuracy"]
            full = max(points.index, key=len)
            head = full.rpartition("+")[0]
            lost["fedavg"].append(points.max() - points[full])
            lost["head_local"].append(points.max() - points[head])
            lost["random"].append(points.max() - points.mean())
            lost["top"].append(points.max() - points[shared])
        for constant in ("fedavg", "head_local", "random"):
            value = float(stored.loc[("", constant, 0), name])
            assert value == pytest.approx(np.mean(lost[constant]), abs=6e-4)
        value = stored.loc[("cka", "top", 5), name]
        if (part["why"] == "").all():
            assert float(value) == pytest.approx(np.mean(lost["top"]), abs=6e-4)
        else:
            assert value == ""


def test_each_federation_has_three_seeds_but_tweets(rows):
    """Its first ones, with all rounds."""
    for name, own in rows.groupby("federation")["seed"].unique().items():
        assert len(own) == (2 if name == "tweets_adapters" else 3)
        assert [*own] == regret.known_seeds(name)[: regret.BENCHMARK_SEEDS]
    assert {*rows["federation"]} == {*regret.federations()}
    counts = rows.groupby(["federation", "seed"])["rounds"].nunique()
    assert (counts == len(rules.ROUNDS)).all()
    page = known.PAGE.read_text(encoding="utf-8")
    assert "by three seeds a federation, tweets by two." in page
    lost = []
    for name in regret.federations():
        if regret.source_of(name) == "fashion":
            lost += [regret.truth_of(name, seed).head_local for seed in range(3)]
    dead = sum(points > 40 for points in lost)
    assert f"In {dead} of {len(lost)} seeds of Fashion-MNIST a local head" in page


@pytest.mark.parametrize(
    ("metric", "rule"), [("grad_norm", "top"), ("cka", "largest_rise")]
)
def test_a_line_is_what_the_benchmark_says_of_the_rule(rows, metric, rule):
    result = fl.regret(rule, metric=metric, federations="known_outlier", seeds=1)
    stored = rows[(rows["federation"] == "known_outlier") & (rows["seed"] == 0)]
    stored = stored[(stored["metric"] == metric) & (stored["rule"] == rule)]
    stored = stored[stored["rounds"] == 1].iloc[0]
    line = result.rows.iloc[0]
    assert (line["shared"], line["rule"]) == (stored["shared"], stored["lost"])


def test_every_layer_metric_has_lines_or_a_reason(rows):
    metrics = {
        name
        for name, metric in fl.METRICS.members().items()
        if metric.compute.__module__.startswith("diagnostics.")
    }
    assert {*rows["metric"]} == metrics - {*rules.NO_LAYERS}
    assert (rows["lost"].isna() == (rows["why"] != "")).all()


def test_the_held_out_half_judges_by_a_paired_test():
    table = regret.read_benchmark()
    names = [n for n in table if n not in (*regret.LINE, "plans", *regret.PUBLIC)]
    head = table[table["rule"] == "head_local"].iloc[0]
    judged = rules.judged()
    best = regret.ranked_lines()[0]
    line = table[(table["metric"] == best.metric) & (table["rule"] == best.rule)]
    line = line[line["rounds"] == best.rounds].iloc[0]
    gains = [head[name] - line[name] for name in names]
    assert len(judged) == rules.BEST
    first = judged.iloc[0]
    assert first["gain"] == pytest.approx(np.mean(gains))
    if any(gains):
        p = stats.ttest_rel([head[n] for n in names], [line[n] for n in names]).pvalue
        assert p <= first["p"] <= 1
    else:
        assert first["p"] == 1
