"""The tuned and finished study: what was run, and the arithmetic of regret on simulated rows."""

import re
from dataclasses import replace
from itertools import product

import numpy as np
import pandas as pd
import pytest

from figures.__main__ import main
from figures.decision import finished, finished_page, finished_regret, finished_ways
from figures.decision.finished import (
    CUTS,
    DECISION,
    DITTO,
    FORGETFUL,
    JOBS,
    MAIN_CUT,
    PERSONALISED,
    RESTARTS,
    STUDY,
)
from figures.decision.finished_ways import ARMS, RANDOM

pytestmark = pytest.mark.filterwarnings("ignore:client")
STUDY_NAMES = tuple(STUDY)[:8]
NAMES = ("nothing", "quarter", "half", MAIN_CUT, "all")


# --- the plan --------------------------------------------------------------------------------------------------


def test_the_study_has_enough_federations_families_rates_and_seeds():
    assert len(STUDY) >= 20
    assert len({each.family for each in STUDY.values()}) >= 14
    known = {
        "heart",
        "airline_tweets",
        "digits",
        "mnist",
        "fashion_mnist",
        "pacs",
        "fed_isic",
        "cifar10",
    }
    assert len({each.family for each in STUDY.values()} - known) >= 6
    assert sum(each.natural for each in STUDY.values()) > len(STUDY) / 2
    assert sum(each.extras for each in STUDY.values()) == 6
    for each in STUDY.values():
        assert len(each.rates) == 4
        assert list(each.rates) == sorted(each.rates)
        assert each.config.training.lr in each.rates


def test_every_run_is_named_once():
    assert [job.kind for job in finished.jobs("chile")] == [CUTS] * 4 + [RESTARTS] + [
        DITTO
    ] * 4 + [FORGETFUL] * 4
    assert JOBS["chile@0.003+forgetful"].config.training.keep_optimizer is False
    assert JOBS["chile@0.003+ditto"].config.federation.algorithm == DITTO


def test_its_rows_are_all_there_and_nothing_trains_it_again(tmp_path, capsys):
    header, _ = finished.ITEM.read(finished.ITEM.path())
    assert header["missing"] == []
    with pytest.raises(SystemExit):
        main(
            [
                finished.NAME,
                "--train",
                "--only",
                "chile@0.003+ditto",
                "--out",
                str(tmp_path),
            ]
        )
    assert re.search(
        r"decision\.finished .*stored rows.*Commit [0-9a-f]{8} has",
        capsys.readouterr().err,
    )


# --- regret on simulated rows ----------------------------------------------------------------------------------


def simulated(
    scores,
    federations=("chile", "smoking", "loans"),
    seeds=3,
    validation=None,
    decided=2.0,
) -> pd.DataFrame:
    """Packed rows in which a score is ``scores(federation, seed, cut, rate)``, in two clients of unequal size."""
    validation = validation or scores
    lines = []
    for name, seed in product(federations, range(seeds)):
        for job in finished.jobs(name):
            place = STUDY[name].rates.index(job.config.training.lr)
            variants = {
                RESTARTS: ["start 1", "start 2", "start 3"],
                DITTO: [DITTO],
            }.get(job.kind, list(NAMES))
            ends = [(job.kind, variant) for variant in variants]
            ends += [(PERSONALISED, "1 epochs")] if job.kind == CUTS else []
            for kind, variant in ends:
                about = {
                    "run": job.name,
                    "seed": seed,
                    "variant": variant,
                    "estimator": kind,
                }
                cut = variant if variant in NAMES else MAIN_CUT
                lines.append({**about, "metric": "stopped after", "value": 40.0})
                if kind in (CUTS, FORGETFUL):
                    lines.append(
                        {
                            **about,
                            "metric": "shared layers",
                            "value": float(NAMES.index(variant)),
                        }
                    )
                for split, of in (("validation", validation), ("held_out", scores)):
                    value = of(name, seed, cut, place)
                    for client, step, n_train in (("a", 0.3, 10), ("b", -0.1, 30)):
                        own = {
                            "client": client,
                            "n_train": n_train,
                            "split": split,
                            "metric": "macro_f1",
                        }
                        lines.append({**about, **own, "value": value + step})
            if (
                job.kind == CUTS
                and job.config.training.lr == STUDY[name].config.training.lr
            ):
                about = {
                    "run": job.name,
                    "seed": seed,
                    "variant": "sensitivity_ratio",
                    "estimator": "",
                }
                lines.append({**about, "metric": DECISION, "value": decided})
    return pd.DataFrame(lines)


LEVEL = {"nothing": 0.4, "quarter": 0.5, "half": 0.6, MAIN_CUT: 0.7, "all": 0.3}


def plain(name, seed, cut, rate):
    """The main cut is best, and the third rate by a tenth."""
    return LEVEL[cut] + 0.1 * (rate == 2)


def test_regrets_of_known_scores_are_exact():
    parts = finished_ways.parts_of(simulated(plain))
    assert [part.name for part in parts] == [
        "smoking",
        "chile",
        "loans",
    ]  # in the study's order
    assert parts[0].cuts.held_out[0, 3] == pytest.approx([0.7, 0.7, 0.8, 0.7])
    table = finished_regret.table(parts).set_index("way")
    expected = {
        RANDOM: 0.1, "mean of all cuts": 0.2, "nothing": 0.3, "half": 0.1, MAIN_CUT: 0.0, "all": 0.4,
        f"{MAIN_CUT}, rate not tuned": 0.1, "sensitivity_ratio": 0.1, "its network's usual cut": 0.1,
        "race of four, tuned": 0.0, "race of four, tuned: its plan": 0.0, "four cuts, one rate": 0.1,
        "four rates, one cut": 0.0, "four starts, one cut": 0.1, "every cut at every rate": 0.0,
        **dict.fromkeys(finished_regret.LATER, 0.0),
    }  # fmt: skip
    assert table["regret"].to_dict() == pytest.approx(expected)
    assert table.loc["all", "share"] == pytest.approx(4)
    assert table.loc["all", ["above", "below", "p"]].tolist() == [3, 0, 0.25]
    assert table.loc[MAIN_CUT, ["above", "below"]].tolist() == [0, 3]
    worth = finished_regret.worth(parts).set_index("what")["gain"]
    assert worth.tolist() == pytest.approx([0.1, 0, 0.1, 0, 0, 0, 0, 0, 0, 0])
    main = finished_regret.compared(parts, finished_regret.MAIN_COMPARISONS)
    assert main["gain"].tolist() == pytest.approx([0.1, 0, 0.1, 0.1])
    assert main[["above", "below"]].iloc[0].tolist() == [3, 0]
    assert set(finished_regret.winners(parts)["best"]) == {MAIN_CUT}
    assert set(finished_regret.winners(parts)["rate"]) == {1e-2}
    assert finished_regret.at_edge(parts) == 0
    costs = finished_regret.costs(parts).iloc[
        0
    ]  # every simulated run stops after as many rounds
    assert costs.to_dict() == {
        f"{MAIN_CUT}, rate not tuned": 1, MAIN_CUT: 5, "race of four, tuned": 20, "four cuts, one rate": 4,
        "four rates, one cut": 4, "four starts, one cut": 4, "every cut at every rate": 20,
        "four rates, then cuts at the best": 7, "four rates, then cuts at the best two": 10,
    }  # fmt: skip
    assert finished_regret.unstopped(parts) == 0


def test_a_seed_chooses_neither_its_own_rate_nor_its_own_best_cut():
    def misleading(name, seed, cut, rate):
        return plain(name, seed, cut, rate) + (
            0.9 if (seed, cut, rate) == (0, "half", 0) else 0
        )

    part = finished_ways.parts_of(simulated(misleading, ("chile",)))[0]
    assert part.cuts.rate(0, part.cut("half")) == 2
    assert part.cuts.variants[part.best_cut(0)] == MAIN_CUT
    assert part.cuts.rate(1, part.cut("half")) == 0
    assert part.cuts.variants[part.best_cut(1)] == "half"


def test_cuts_that_do_not_differ_have_no_regret_and_the_maximum_would_have_one():
    draw = np.random.default_rng(1)
    noise = {}

    def equal(name, seed, cut, rate):
        return 0.5 + noise.setdefault((name, seed, cut, rate), draw.normal(0, 0.03))

    frames = [
        finished_ways.parts_of(simulated(equal, tuple(STUDY)[:12]))
        for _ in range(2)
        if not noise.clear()
    ]
    regrets = [
        finished_regret.table(parts).set_index("way").loc[RANDOM, "regret"]
        for parts in frames
    ]
    naive = [
        np.mean(
            [
                part.cuts.held_out.mean(axis=0).max() - part.cuts.held_out.mean()
                for part in parts
            ]
        )
        for parts in frames
    ]
    assert abs(np.mean(regrets)) < 0.01
    assert np.mean(naive) > 0.03


def test_a_race_sees_validation_alone_and_its_plan_is_scored_in_other_seeds():
    def seen(name, seed, cut, rate):
        return plain(name, seed, cut, rate) + (
            0.5 if cut == "nothing" and seed == 0 else 0
        )

    part = finished_ways.parts_of(simulated(plain, ("chile",), validation=seen))[0]
    assert finished_ways.race()(part) == pytest.approx([0.5, 0.8, 0.8])
    scores = {0: 0.8, 1: 0.2, 2: 0.5}
    part = finished_ways.parts_of(
        simulated(lambda n, seed, cut, rate: scores[seed], ("chile",), validation=plain)
    )[0]
    assert finished_ways.race()(part) == pytest.approx([0.8, 0.2, 0.5])
    assert finished_ways.race(plan=True)(part) == pytest.approx([0.35, 0.65, 0.5])


def test_a_run_that_diverged_is_never_chosen_and_counts_as_the_worst():
    frame = simulated(plain, ("chile",))
    gone = (
        (frame["run"] == "chile@0.01")
        & (frame["variant"] == MAIN_CUT)
        & (frame["seed"] == 0)
    )
    frame = frame[~(gone & (frame["metric"] == "macro_f1"))]
    part = finished_ways.parts_of(frame)[0]
    assert part.cuts.rate(1, part.cut(MAIN_CUT)) != 2
    assert part.cuts.held_out[0, 3, 2] == pytest.approx(0.3)
    assert part.cuts.tuned(0, 3) == pytest.approx(0.3)  # which the other seeds chose


def test_rules_take_the_nearest_cut_and_their_constant_is_that_of_others():
    part, *others = finished_ways.parts_of(simulated(plain, decided=1.4))
    assert finished_ways.rule("sensitivity_ratio")(part) == pytest.approx(
        [0.6] * 3
    )  # quarter
    none = replace(part, decided={"sensitivity_ratio": np.array([np.nan] * 3)})
    assert finished_ways.rule("sensitivity_ratio")(none) == pytest.approx([0.8] * 3)
    constant = finished_ways.constant("sensitivity_ratio", [none, *others])
    assert constant(none) == pytest.approx([0.6] * 3)


def test_a_family_counts_once_and_small_sums_have_no_ratio():
    parts = finished_ways.parts_of(
        simulated(plain, ("digits_turned", "digits_dirichlet", "chile"))
    )
    values = {
        part.name: value for part, value in zip(parts, (0.1, 0.2, 0.4), strict=True)
    }
    means = finished_regret.by_family(parts, [values[part.name] for part in parts])
    assert means["chile"] == values["chile"]
    assert means["digits"] == pytest.approx(
        (values["digits_turned"] + values["digits_dirichlet"]) / 2
    )
    random = np.array([0.02, 0.04, 0.03, 0.05])
    share = finished_regret.ratio(random / 2, random)
    assert share == pytest.approx((0.5, 0.5, 0.5))
    assert np.isnan(finished_regret.ratio(random / 2, random / 10)).all()


def test_tables_may_be_of_some_federations_and_against_the_highest_cut():
    parts = finished_ways.parts_of(simulated(plain, ("chile", "heart", "seer")))
    for among, count in (
        (finished_regret.everyone, 3), (finished_regret.natural, 2), (finished_regret.new, 2),
        (finished_regret.first_look, 1),
    ):  # fmt: skip
        assert set(finished_regret.table(parts, among)["federations"]) == {count}
    assert finished_regret.highest(parts[0]) == pytest.approx([0.8] * 3)
    assert set(finished_regret.FIRST_LOOK) <= set(STUDY)


def test_arms_are_cuts_that_every_federation_has():
    assert set(ARMS) <= set(NAMES)


def test_a_search_over_rates_leaves_the_best_of_validation_to_the_other_cuts():
    def seen(name, seed, cut, rate):
        return plain(name, seed, cut, rate) + (
            0.5 if (cut, rate) == ("nothing", 0) else 0
        )

    part = finished_ways.parts_of(simulated(plain, ("chile",), validation=seen))[0]
    main, rates = part.cut(MAIN_CUT), [0, 1, 2, 3]
    tried = finished_ways.tried_pairs(part, 0, left=1)
    assert sorted(tried[:4]) == [(main, rate) for rate in rates]
    assert {rate for _, rate in tried[4:]} == {2}  # the rate that misleads is not left
    assert finished_ways.rates_then_cuts(1)(part) == pytest.approx([0.8] * 3)
    assert finished_ways.rates_then_cuts(2)(part) == pytest.approx(
        [0.4] * 3
    )  # it is, among two


def test_a_shorter_patience_is_read_from_the_stored_curves():
    about = {
        "run": "chile@0.001",
        "seed": 0,
        "estimator": CUTS,
        "variant": "all",
        "metric": "curve",
    }
    scores = [0.1, 0.5, 0.4, 0.4, 0.4, 0.7, 0.6]
    frame = pd.DataFrame(
        [
            {**about, "round": 2 * k + 2, "value": score}
            for k, score in enumerate(scores)
        ]
    )
    found = finished_page.patience(frame).set_index(["most", "patience"])
    assert found.loc[200, "lost"].to_dict() == pytest.approx({3: 0.2, 5: 0.0, 10: 0.0})
    assert found.loc[200, "rounds"].to_dict() == {3: 10, 5: 14, 10: 14}


def test_fewer_rounds_cut_the_stored_curves_off():
    about = {
        "run": "chile@0.001",
        "seed": 0,
        "estimator": CUTS,
        "variant": "all",
        "metric": "curve",
    }
    frame = pd.DataFrame(
        [
            {**about, "round": done, "value": score}
            for done, score in ((50, 0.5), (60, 0.6), (160, 0.8))
        ]
    )
    found = finished_page.patience(frame).set_index(["most", "patience"])
    assert found.xs(10, level="patience")["lost"].to_dict() == pytest.approx(
        {50: 0.3, 100: 0.2, 200: 0.0}
    )
    assert found.xs(10, level="patience")["rounds"].to_dict() == {
        50: 50,
        100: 60,
        200: 160,
    }


def test_the_distance_from_the_best_pair_is_exact():
    table = finished_page.below_best(finished_ways.parts_of(simulated(plain)))
    assert list(table.index) == list(NAMES)
    assert table.loc[MAIN_CUT].tolist() == pytest.approx([0.1, 0.1, 0.0, 0.1])
    assert table.loc["all"].tolist() == pytest.approx([0.5, 0.5, 0.4, 0.5])


def test_expectations_follow_from_the_intervals():
    found = {
        each.expected: each.held
        for each in finished_page.findings(finished_ways.parts_of(simulated(plain)))
    }
    assert (
        found[
            "All but the last layer, with a tuned rate, loses at most 1 point against the best cut"
        ]
        is True
    )
    assert (
        found["A race of four cuts gains at least half a point on all but the last"]
        is False
    )
    assert found["Four rates against four cuts: the first is better"] is True


def test_the_loss_of_a_family_is_foreseen_from_the_others():
    def helpful(
        name, seed, cut, rate
    ):  # validation misleads in half of the federations, where it shows a large gap
        return plain(name, seed, cut, rate) + (
            0.6 if cut == "nothing" and STUDY_NAMES.index(name) % 2 else 0
        )

    parts = finished_ways.parts_of(simulated(plain, STUDY_NAMES, validation=helpful))
    found = finished_page.calibration(parts)
    assert found["one"] == pytest.approx(
        ((1 - 3 / 7) ** 2 + (3 / 7 - 1) ** 2) / 2, abs=0.02
    )
    assert found["thirds"] < found["one"]
