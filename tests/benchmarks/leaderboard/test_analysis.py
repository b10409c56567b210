"""The tables of the leaderboard find planted winners and ties."""

from itertools import combinations

import numpy as np
import pytest
from scipy import stats

from benchmarks.leaderboard import analysis
from benchmarks.leaderboard.federations import FEDERATIONS
from benchmarks.leaderboard.methods import BOUNDS, METHODS, SCORED
from tests.benchmarks.leaderboard.planted import row, rows
from tests.conftest import refuses

EIGHT = list(FEDERATIONS)[:8]


def planted(federation, method, seed, client):
    """Ditto leads by 5 points, SCAFFOLD lacks 5; the advice is FedAvg fine-tuned; all federations differ in level."""
    shift = {
        "ditto": 0.05,
        "scaffold": -0.05,
        "centralised": 0.2,
        "majority": -0.2,
    }.get(method, 0.0)
    level = 0.4 + 0.02 * EIGHT.index(federation)
    same = "fedavg_finetuned" if method == "advice" else method
    return (
        level
        + shift
        + np.random.default_rng([EIGHT.index(federation), *same.encode(), seed]).normal(
            0, 0.002
        )
    )


RUNS = analysis.scored_runs(rows(EIGHT, planted))


def test_a_planted_winner_is_first_and_better():
    ranked = [name for name in analysis.table(RUNS).index if name not in BOUNDS]
    assert (ranked[0], ranked[-1]) == ("ditto", "scaffold")
    gaps = analysis.differences(RUNS, "fedavg_finetuned")
    assert gaps.loc["ditto", "verdict"] == analysis.BETTER
    assert gaps.loc["scaffold", "verdict"] == analysis.WORSE
    assert gaps.loc["ditto", "difference"] == pytest.approx(0.05, abs=0.003)
    assert not set(BOUNDS) & set(gaps.index)
    assert "Ditto" in analysis.lead(RUNS)[0]


def test_the_smallest_visible_difference_is_half_a_corrected_t_interval():
    values = analysis.by_family(RUNS).drop(index=list(BOUNDS)).to_numpy()
    of_pairs = [one - other for one, other in combinations(values, 2)]
    quantile = stats.t.ppf(1 - 0.05 / 2 / 20, values.shape[1] - 1)
    wanted = np.median(
        [quantile * each.std(ddof=1) / np.sqrt(len(each)) for each in of_pairs]
    )
    assert analysis.smallest_visible(RUNS) == pytest.approx(wanted)
    assert f"about {100 * wanted:.0f} points" in analysis.lead(RUNS)[0]


def test_a_tie_is_practically_equal():
    gaps = analysis.differences(RUNS, "fedavg_finetuned")
    assert gaps.loc["advice", ["difference", "low", "high"]].tolist() == [0, 0, 0]
    assert gaps.loc["advice", "p_value"] == 1
    assert set(gaps.drop(index=["ditto", "scaffold"])["verdict"]) == {analysis.EQUAL}


def test_differences_are_those_of_a_paired_t_test_over_families_with_holm():
    values = analysis.by_family(RUNS)
    gaps = analysis.differences(RUNS, "advice")
    raw = {
        name: stats.ttest_rel(values.loc[name], values.loc["advice"]).pvalue
        for name in gaps.index
    }
    order = sorted(
        (name for name in raw if name != "fedavg_finetuned"), key=raw.__getitem__
    )
    least = raw[order[0]] * len(gaps)
    assert gaps.loc[order[0], "p_value"] == pytest.approx(min(1, least))
    interval = stats.ttest_rel(
        values.loc["fedavg"], values.loc["advice"]
    ).confidence_interval()
    assert gaps.loc["fedavg", ["low", "high"]].tolist() == pytest.approx(list(interval))


def test_scores_are_means_by_training_samples_with_the_worst_client_and_the_share_below_local():
    def score(federation, method, seed, client):
        return {"local": (0.5, 0.5), "ditto": (0.4, 0.8)}.get(method, (0.5, 0.5))[
            client
        ]

    found = analysis.table(analysis.scored_runs(rows(EIGHT, score)))
    line = found.loc["ditto"]
    assert (
        line["macro_f1"]
        == line["accuracy"]
        == pytest.approx((10 * 0.4 + 30 * 0.8) / 40)
    )
    assert line["loss"] == pytest.approx(1 - line["macro_f1"])
    assert (line["worst"], line["below"]) == pytest.approx((0.4, 0.5))
    assert (line["sent"], line["computed"], line["stored"]) == (1e6, 2e9, 3e3)
    assert found.loc["local", "below"] == 0


def test_seeds_and_federations_of_one_family_count_once():
    two = ["heart", "digits_turned", "digits_dirichlet"]
    levels = {"heart": 0.2, "digits_turned": 0.6, "digits_dirichlet": 0.8}
    runs = analysis.scored_runs(rows(two, lambda federation, *_: levels[federation]))
    assert analysis.by_family(runs).loc["ditto"].to_dict() == pytest.approx(
        {"heart": 0.2, "digits": 0.7}
    )
    assert analysis.table(runs).loc["ditto", "macro_f1"] == pytest.approx(0.45)


def test_a_federation_enters_once_all_methods_are_complete():
    found = rows(EIGHT[:2], planted)
    missing = [
        each
        for each in found
        if (each["federation"], each["method"]) != (EIGHT[1], "ditto")
    ]
    assert set(analysis.scored_runs(missing)["federation"]) == {EIGHT[0]}
    with refuses(r"all 23 methods.*--run"):
        analysis.scored_runs(missing[1:])


def test_a_run_that_diverged_has_the_scores_of_the_majority_class():
    found = [each for each in rows(EIGHT[:1], planted) if each["method"] != "pfedme"]
    found += [
        row(EIGHT[0], "pfedme", seed, None, status="diverged: NaN") for seed in SCORED
    ]
    runs = analysis.scored_runs(found)
    means = runs.groupby("method")["macro_f1"].mean()
    assert means["pfedme"] == means["majority"]


def test_a_score_without_a_value_makes_what_rests_on_it_nan():
    found = rows(EIGHT[:1], planted)
    for each in found:
        if each["method"] == "ditto":
            each["clients"]["c1"] = [None, None, None, 30]
    line = analysis.table(analysis.scored_runs(found)).loc["ditto"]
    assert line[["worst", "below"]].isna().all()


def test_one_family_has_differences_without_intervals():
    runs = analysis.scored_runs(rows(EIGHT[:1], planted))
    gaps = analysis.differences(runs, "fedavg_finetuned")
    assert gaps["difference"].notna().all()
    assert gaps[["low", "high", "p_value"]].isna().all(axis=None)
    assert set(gaps["verdict"]) == {analysis.OPEN}
    assert "first look" in analysis.lead(runs)[-2]


def test_winners_and_how_badly_they_predict():
    def score(federation, method, seed, client):
        best = {"heart": "ditto", "chile": "apfl"}.get(federation, "fedper")
        return 0.6 if method == best else 0.5

    runs = analysis.scored_runs(rows(["heart", "chile", "aids", "stops"], score))
    won = analysis.winners(runs)
    assert won["best"].to_dict() == {
        "heart": "ditto",
        "chile": "apfl",
        "aids": "fedper",
        "stops": "fedper",
    }
    assert won["agree"].tolist() == [1, 1, 1, 1]
    assert won["next"].tolist() == pytest.approx([0.1] * 4)
    lost = analysis.prediction(runs)
    assert lost["the best method of the other families"] == pytest.approx(
        0.05
    )  # FedPer, wrong in two of four
    assert lost["always FedAvg with fine-tuning"] == pytest.approx(0.1)
    ranked = len(METHODS) - len(BOUNDS)
    assert lost["a random method"] == pytest.approx(0.1 * (ranked - 1) / ranked)
