"""Regret over federations: what methods end with, and the arithmetic, against brute force on made-up scores."""

from dataclasses import replace

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

from figures.decision import beyond, federations, methods, prior, regret
from figures.decision.methods import Federated, Method, Run
from figures.decision.runs import DITTO, PERSONALISED, TRAINED
from fl_core import runner, tree
from fl_core.config import RunConfig
from fl_core.plan import LayerPlan
from fl_core.task import assemble

pytestmark = pytest.mark.filterwarnings("ignore:client")
HEART = RunConfig(dataset="heart", algorithm="fedper", rounds=3, eval_every=3)
CUTS = {"nothing": 0, "quarter": 1, "half": 2, "all_but_last": 3, "all": 4}


def a_run(final, at_half=None, federation="heart", seed=0, decided=None) -> Run:
    """A run whose macro-F1 is given by cut, constant over the rounds or another one up to the middle."""
    rounds = int(federations.FEDERATIONS[federation].config.rounds)
    lines = [
        {"variant": cut, "round": done, "macro_f1": f1, "loss": 1 - f1}
        for cut in CUTS
        for done in range(1, rounds + 1)
        for f1 in [(at_half or final)[cut] if done <= 0.6 * rounds else final[cut]]
    ]
    finished = [(TRAINED, cut, final[cut]) for cut in CUTS] + [(TRAINED, DITTO, 0.5)]
    finished += [
        (f"{PERSONALISED} {n}", cut, final["all"] + 0.01 * n * (cut == "half"))
        for n in (1, 2)
        for cut in list(CUTS)[:-1]
    ]
    table = pd.DataFrame(
        [{"estimator": e, "variant": v, "macro_f1": f1, "loss": 1 - f1} for e, v, f1 in finished]
    ).set_index(["estimator", "variant"])
    scores = pd.DataFrame(lines).set_index(["variant", "round"])
    return Run(federation, seed, CUTS, scores, table, table, decided or {})


FINAL = {"nothing": 0.3, "quarter": 0.35, "half": 0.4, "all_but_last": 0.6, "all": 0.5}
EARLY = {**FINAL, "half": 0.7}


def test_a_race_sees_nothing_after_its_end_and_a_later_one_does():
    run = a_run(FINAL, at_half=EARLY)
    assert methods.race()(run) == (TRAINED, "half")
    assert methods.race(share=1.0)(run) == (TRAINED, "all_but_last")
    assert methods.race(("nothing", "all"))(run) == (TRAINED, "all")
    assert methods.race_cost()(run) == pytest.approx(3 * 0.6 + 0.4)


def test_seeds_decide_together_by_their_mean_and_the_last_arm_may_leave_at_a_half():
    plain, misled = a_run(FINAL, seed=0), a_run(FINAL, at_half=EARLY, seed=1)
    alone = replace(misled, others=(plain,))
    assert methods.race()(alone) == (TRAINED, "half")
    assert methods.race(seeds=3)(replace(alone, others=(plain, plain))) == (TRAINED, "all_but_last")
    assert methods.race_cost(seeds=3)(alone) == pytest.approx(3 * (3 * 0.6 + 0.4))
    late = {**FINAL, "nothing": 0.9}  # worst up to a half: gone, whatever it would have become
    halved = methods.race(share=1.0, two_from=0.5)
    assert methods.race(share=1.0)(a_run(late, at_half=FINAL)) == (TRAINED, "nothing")
    assert halved(a_run(late, at_half=FINAL)) == (TRAINED, "all_but_last")
    assert methods.race_cost(share=1.0, two_from=0.5)(plain) == pytest.approx(3 * 0.5 + 2 * 0.5)


def test_the_depth_is_what_validation_prefers_and_the_better_of_two_candidates_is_used():
    run = a_run(FINAL)
    assert methods.personalised(2)(run) == (f"{PERSONALISED} 2", "half")
    assert methods.better_of(methods.race(), methods.personalised(2))(run) == (TRAINED, "all_but_last")


def test_a_rule_takes_the_nearest_cut_and_without_a_decision_all_but_the_last():
    run = a_run(FINAL, decided={"largest_jump": 1, "change_point": None})
    assert methods.rule("largest_jump")(run) == (TRAINED, "quarter")
    assert methods.rule("change_point")(run) == (TRAINED, "all_but_last")


def test_ratios_are_of_summed_regrets_with_t_intervals_over_federations():
    draw = np.random.default_rng(0)
    compared = [Method("random cut", None, lambda run: 1.0), Method("race", methods.race(), lambda run: 2.0)]
    runs = []
    for federation, low in (("heart", 0.2), ("mnist", 0.4), ("pacs", 0.1)):
        for seed in range(4):
            runs.append(a_run({cut: low + draw.uniform(0, 0.4) for cut in CUTS}, federation=federation, seed=seed))
    parts = methods.federated(runs, compared)
    assert [part.name for part in parts] == ["mnist", "heart", "pacs"]
    inner = np.mean([[run.held_out.loc[(TRAINED, cut), "macro_f1"] for cut in list(CUTS)[1:-1]] for run in runs[:4]])
    assert parts[1].methods[0].mean() == pytest.approx(inner)
    table = methods.summary(parts, compared)
    random, race = np.array([part.cuts.mean(axis=1).max() - part.methods.mean(axis=1) for part in parts]).T
    expected = stats.ttest_1samp(race, 0).confidence_interval(0.95)
    assert table.loc[1, ["regret", "regret_low", "regret_high"]].tolist() == pytest.approx([race.mean(), *expected])
    ratio = race.sum() / random.sum()
    expected = np.array(stats.ttest_1samp(race - ratio * random, 0).confidence_interval(0.95)) / random.mean()
    assert table.loc[1, ["ratio", "ratio_low", "ratio_high"]].tolist() == pytest.approx([ratio, *(ratio + expected)])
    assert table.loc[0, ["ratio", "ratio_low", "ratio_high"]].tolist() == pytest.approx([1, 1, 1])


def test_the_cross_fitted_reference_is_the_best_cut_of_the_other_runs():
    cuts = np.array([[0.1, 0.5, 0.2], [0.4, 0.3, 0.3]])
    part = Federated("heart", (0, 1, 2), ("half", "all"), cuts, cuts[:1], np.ones((1, 3)), (("half",) * 3,))
    assert part.best == "all"
    assert part.regrets() == pytest.approx([1.0 / 3 - 0.8 / 3])
    # best over the other runs: half, all, all
    assert part.crossfitted() == pytest.approx([((0.1 - 0.1) + (0.3 - 0.5) + (0.3 - 0.2)) / 3])


def test_at_least_four_federations_are_new_and_every_network_has_at_most_six_cuts():
    assert sum(federation.part != "seen" for federation in federations.FEDERATIONS.values()) >= 4
    for layers in range(2, 60):
        tried = federations.cuts(layers)
        assert 3 <= len(tried) <= 6
        assert {tried["nothing"], tried["all"]} == {0, layers}
        assert layers - 1 in tried.values()


@pytest.mark.parametrize(
    ("other", "options"), [("Forked", {"common": 0.0}), ("Soft", {"weights": "1,1,0,0"})], ids=["forked", "soft"]
)
def test_without_common_rounds_and_with_whole_weights_they_are_fedper(other, options):
    plan = LayerPlan(assemble(HEART).layers, ()).with_first(2)
    plain = runner.run(HEART, plan=plan, progress=False)
    limit = runner.run(
        replace(HEART, algorithm=f"figures.decision.beyond:{other}", options=options), plan=plan, progress=False
    )
    for client in range(4):
        assert tree.digest(limit.models(client)["personal"]) == tree.digest(plain.models(client)["personal"])


def test_forked_runs_are_fedavg_up_to_the_fork_and_parts_of_layers_lie_between():
    plan = LayerPlan(assemble(HEART).layers, ()).with_first(2)
    config = replace(HEART, algorithm="figures.decision.beyond:Forked", options={"common": 1.0})
    whole = runner.run(config, plan=plan, progress=False)
    fedavg = runner.run(replace(HEART, algorithm="fedavg"), progress=False)
    assert tree.digest(whole.models(1)["personal"]) == tree.digest(fedavg.models(1)["global"])
    soft = replace(HEART, algorithm="figures.decision.beyond:Soft", options={"weights": "1,0.5,0.25,0"})
    engine = runner.run(soft, plan=plan, progress=False)
    own, common = engine.clients.states["va"].trees["model"], engine.server.trees["model"]
    mixed = engine.models(engine.clients.index["va"])["personal"]
    for layer, weight in (("fc1", 1), ("fc2", 0.5), ("fc3", 0.25), ("fc4", 0)):
        name = f"{layer}.linear.weight"
        assert torch.allclose(mixed[name], (1 - weight) * own[name] + weight * common[name], atol=1e-6)


def test_a_layers_weight_is_the_share_of_the_arms_that_share_it():
    run = a_run(FINAL)
    weights = beyond.layer_weights(run, 4)
    assert weights == sorted(weights, reverse=True)
    assert weights[3] == 0
    assert weights[0] == weights[1] > weights[2] > 0.5  # all but the last leads


def test_the_prior_learns_from_other_federations_alone():
    names = ["heart", "mnist", "pacs", "digits_iid", "fashion_iid", "cifar10"]
    scores = {"nothing": 0.3, "quarter": 0.35, "half": 0.4, "all_but_last": 0.5, "all": 0.2}
    turned = {**scores, "nothing": 0.6, "all_but_last": 0.1}
    skew = dict(zip(names, (0.1, 0.9, 0.2, 0.8, 0.15, 0.85), strict=True))
    runs = [a_run(turned if skew[name] > 0.5 else scores, federation=name) for name in names]
    parts = methods.federated(runs, (methods.methods()[0],))
    table = pd.DataFrame({"label_skew": skew, "layers": dict.fromkeys(names, 4.0)})
    for name in names:
        best = prior.predicted(table, parts, name).idxmax()
        assert best == ("nothing" if skew[name] > 0.5 else "all_but_last")
    before = prior.predicted(table, parts, "heart")
    changed = [replace(run, held_out=1 - run.held_out) if run.federation == "heart" else run for run in runs]
    after = prior.predicted(table, methods.federated(changed, (methods.methods()[0],)), "heart")
    pd.testing.assert_series_equal(before, after)


def test_a_shift_of_inputs_is_zero_for_clients_alike_and_its_size_otherwise():
    draw = np.random.default_rng(0)
    alike = [draw.normal(size=(400, 50)) for _ in range(5)]
    assert prior._shift(alike) < 0.03
    moved = [part + 0.5 * (-1) ** k for k, part in enumerate(alike[:4])]
    assert prior._shift(moved) == pytest.approx(0.5 / np.sqrt(1.25), abs=0.03)


def test_a_runs_choice_is_judged_in_the_other_runs():
    """Two runs that prefer opposite cuts: each choice loses the whole gap in the other run."""
    cuts = np.array([[0.9, 0.5], [0.5, 0.9]])
    part = Federated(
        "heart", (0, 1), ("half", "all"), cuts, np.full((2, 2), 0.5), np.ones((2, 2)), ((), ("half", "all"))
    )
    assert regret.in_other_runs([part, part], 1) == pytest.approx([0.4 / 0.2] * 3)
    alike = replace(part, ends=((), ("half", "half")), cuts=np.array([[0.9, 0.9], [0.5, 0.5]]))
    assert regret.in_other_runs([alike], 1)[0] == 0


def test_the_picture_shows_eight_of_the_methods_that_are_compared():
    names = [method.name for method in methods.methods()]
    assert len(regret.DRAWN) == len(set(regret.DRAWN) & set(names)) == 8
    lines = [
        {"method": name, "cost": 1.0 + k, "ratio": 0.1 * k, "ratio_low": 0.0, "ratio_high": 0.2 * k}
        for k, name in enumerate(names)
    ]
    figure, ax = plt.subplots()
    regret._ratios(ax, {"all": pd.DataFrame(lines)})
    shown = [label.get_text().rpartition(" (")[0] for label in ax.get_yticklabels()]
    plt.close(figure)
    assert tuple(shown) == regret.DRAWN


def test_the_gain_of_the_last_third_is_the_best_cuts():
    rounds = pd.DataFrame(
        {"macro_f1": [0.1, 0.5, 0.8, 0.0, 0.0, 0.0]},
        index=pd.MultiIndex.from_product([["half", "all"], [1, 2, 3]], names=["variant", "round"]),
    )
    run = Run("heart", 0, {"half": 2, "all": 4}, rounds, pd.DataFrame(), pd.DataFrame(), {})
    scores = np.array([[0.8], [0.1]])
    part = Federated("heart", (0,), ("half", "all"), scores, scores[:1], np.ones((1, 1)), (("half",),))
    assert regret.last_third([run], [part]) == pytest.approx(0.8 - 0.5)
