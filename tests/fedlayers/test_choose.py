"""Choosing by a race: its arms, its judgement, how sure it is, and that it goes on after a stop."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from diagnostics.measure import instruments
from fedlayers.studies import hint, jobs
from fedlayers.studies.arms import ENDS, FIRST, arms_of, ends_of
from fedlayers.studies.choose import choose
from fedlayers.studies.harmless import Bench
from fl_core.config import RunConfig
from fl_core.errors import RunError
from fl_core.layers import Layer
from fl_core.plan import LayerPlan
from fl_core.records.store import Run
from fl_core.rounds.clients import ClientRunner
from fl_core.run import runner
from tests.conftest import refuses

LAYERS = tuple(Layer(name, (f"{name}.weight",)) for name in ("a", "b", "c", "d", "e"))
CONFIG = RunConfig(dataset="heart", rounds=5, eval_every=1)
SHORT = {"arms": ("nothing", "half", "head_local")}


def test_a_plan_file_and_an_algorithm_are_arms(tmp_path):
    LayerPlan(LAYERS, ("b", "d")).save(tmp_path / "mine.json")
    mine, ditto = arms_of([str(tmp_path / "mine.json"), "ditto"], LAYERS)
    assert mine.plan is not None
    assert mine.plan.shared == ("b", "d")
    assert (ditto.algorithm, ditto.plan) == ("ditto", None)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["half"], "two arms"),
        (["al"], "'al'.*'all'"),
        (["half", "halve"], "'halve'.*'half'"),
        (["half", "first_2"], "'half' .*'first_2'"),
        (["half", "first_9"], "5 layers"),
        (["half", "fedavg:half"], "fedavg .*plan"),
        (["half", "fedpr:half"], "algorithm 'fedpr'"),
        (["lora_A", "nothing"], "adapt="),
    ],
)
def test_arms_that_cannot_race_are_refused(names, message):
    with refuses(message):
        arms_of(names, LAYERS)


def test_arms_with_one_folder_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("p").mkdir()
    LayerPlan(LAYERS, ()).save(Path("p/x.json"))
    LayerPlan(LAYERS, ("a", "b", "c", "d", "e")).save(Path("p_x.json"))
    with refuses(r"'p/x\.json' and 'p_x\.json'.*Rename"):
        jobs.jobs_of(arms_of(["p/x.json", "p_x.json"], LAYERS), CONFIG, (0,), tmp_path)


@pytest.fixture(scope="module")
def raced(tmp_path_factory):
    out, told = tmp_path_factory.mktemp("race") / "out", list[str]()
    return out, choose(CONFIG, out, seeds=(0, 1), progress=told.append, **SHORT), told


def test_the_base_rate_is_that_of_the_recommended_runs_seed(raced):
    _, choice, _ = raced
    seed = next(
        s for s, one in choice.recommended.items() if one.job.path == choice.run
    )
    bench = Bench(runner.assemble(CONFIG.with_keys(seed=seed)))
    found = bench.scores(bench.base_rate, "validation")
    line = choice.evidence.set_index("name").loc["base_rate"]
    assert (line["macro_f1"], line["loss"]) == (found["macro_f1"], found["loss"])


def test_the_judgement_is_that_of_the_formula(raced):
    """The weighted mean over clients, of the last round, where no own epochs are better."""
    out, choice, _ = raced
    for _, line in choice.standing.judged.iterrows():
        path = out / "arms" / f"{line['arm']}-{line['seed']}"
        frame = Run(path).rows()[1]
        frame = frame[(frame["split"] == "validation") & (frame["model"] == "personal")]
        part = frame[(frame["round"] == 5) & (frame["metric"] == "macro_f1")]
        value = np.average(part["value"], weights=part["n_train"])
        bench = Bench(runner.assemble(CONFIG.with_keys(seed=int(line["seed"]))))
        loss = bench.scores(
            bench.of_models("run", bench.load(path).models), "validation"
        )["loss"]
        assert line["loss"] == -line["score"]
        if line["epochs"]:
            assert line["loss"] < loss
        else:
            assert line["macro_f1"] == pytest.approx(value)
            assert line["loss"] == pytest.approx(loss)
    assert choice.inference.leader == choice.table["arm"].iloc[0]
    assert choice.winner.name == choice.inference.leader


def test_its_decision_and_its_cost_are_kept(raced):
    """All clients take part and every plan is known, so what is foreseen is sent."""
    out, choice, told = raced
    assert told[0].startswith("6 runs, 30 rounds ")
    kept = json.loads((out / "choice.json").read_text())
    assert kept["winner"] == choice.winner.name
    assert kept["answers"] == [choice.answers.head, *choice.answers.lines]
    assert kept["verdict"] == choice.inference.verdict
    assert kept["left"] == list(choice.inference.remaining)
    plan = LayerPlan.load(out / "plan.json")
    assert (plan.why.rule, plan.digest) == ("race", choice.winner.plan.digest)
    assert list(plan.why.race[2:]) == kept["answers"]
    assert plan.why.race[1] in str(plan)
    assert all(f" {arm.name} " in plan.why.race[1] for arm in choice.arms)
    frames = [Run(path).rows()[1] for path in (out / "arms").iterdir()]
    sent = sum(
        frame.loc[frame["metric"].isin(["bytes_down", "bytes_up"]), "value"].sum()
        for frame in frames
    )
    assert choice.measured.n_bytes == sent == choice.cost.n_bytes
    assert choice.measured.rounds == choice.cost.rounds


@pytest.mark.parametrize(
    "algorithm", ["fedavg", "ditto", "fedrep", "pfedme", "playerfl", "fedcac"]
)
def test_steps_that_are_foreseen_are_those_that_are_made(algorithm, monkeypatch):
    run, made = ClientRunner.run, []

    def counted(self, job):
        result = run(self, job)
        made.append(
            sum(value for name, value in result.work.items() if name.endswith("/steps"))
        )
        return result

    monkeypatch.setattr(ClientRunner, "run", counted)
    config = CONFIG.with_keys(algorithm=algorithm, rounds=1, epochs=3, stack="off")
    foreseen = hint.round_steps(runner.assemble(config))
    runner.run(config, instruments=instruments, progress=False)
    assert foreseen == sum(made)


def test_the_same_call_goes_on_and_another_is_refused(raced, monkeypatch):
    out, choice, _ = raced
    monkeypatch.setattr(runner, "run", None)  # everything is there
    again = choose(CONFIG, out, seeds=(0, 1), **SHORT)
    pd.testing.assert_frame_equal(again.standing.judged, choice.standing.judged)
    with refuses(r"lr=0"):
        choose(
            RunConfig(dataset="heart", rounds=5, eval_every=1, lr=0.3),
            out,
            seeds=(0, 1),
        )


@pytest.mark.parametrize(
    ("names", "local"),
    [
        ("a", []),
        ("a b", ["b", "a"]),
        ("a b c", ["c", "a"]),
        ("a b c d e", ["e", "a b"]),
        ("stem l.0.x l.0.y l.1.x head", ["head", "stem l.0.x l.0.y"]),
        ("m.0.lora_A m.0.lora_B m.1.lora_A m.1.lora_B head",
         ["m.0.lora_B m.1.lora_B head", "m.0.lora_A m.0.lora_B"]),
    ],
)  # fmt: skip
def test_the_two_ends_are_the_head_and_the_first_half_of_the_blocks(names, local):
    layers = tuple(Layer(name, (name,)) for name in names.split())
    arms = arms_of((*FIRST, *ends_of(layers)), layers, distinct=False)
    kept = [
        [name for name in arm.plan.names if name not in arm.plan.shared] for arm in arms
    ]
    assert kept == [[], names.split(), *(each.split() for each in local)]
    cuts = ends_of(layers, thorough=True)
    assert len(cuts) == 2 * (len(layers) - 1)
    assert set(cuts).isdisjoint(ENDS)


def test_an_arm_that_diverges_has_lost(tmp_path):
    config = RunConfig(
        dataset="heart", rounds=3, eval_every=1, lr=1e30, optimizer="sgd"
    )
    with refuses("every arm", RunError):
        choose(config, tmp_path / "out")


@pytest.mark.parametrize(
    "score", ["balanced_accuracy", pytest.param("loss", marks=pytest.mark.slow)]
)
def test_a_named_score_alone_selects_rates_rounds_runs_and_arms(tmp_path, score):
    config = RunConfig(dataset="heart", rounds=4, eval_every=1, patience=2)
    how = {"tune_rates": 2, "baselines": False}
    arms = ("nothing", "all")
    choice = choose(config, tmp_path, arms=arms, score=score, **how)
    runs = sorted((tmp_path / "arms").iterdir())
    assert {Run(path).stopping_rule().metrics for path in runs} == {(score,)}
    bench = Bench(runner.assemble(config))

    def worth(path):
        return bench.worth(bench.of_models("run", bench.load(path).models))

    tried = choice.rates.tried
    names = [tmp_path / "arms" / f"all-lr{lr:g}-0" for lr in tried]
    assert choice.rates.lr == tried[int(np.argmax([worth(path) for path in names]))]
    judged = choice.standing.judged.set_index("arm")
    assert choice.winner.name == judged["score"].idxmax()
    assert judged["epochs"].isin([0, 1, 2, 4]).all()
    for path in runs:
        if path.name.startswith("nothing"):
            assert judged.loc["nothing", "score"] >= worth(path) - 1e-9
    assert (choice.main, choice.plan.why.metric) == (score, score)


def test_files_of_an_earlier_decision_do_not_stay(tmp_path):
    config = RunConfig(dataset="heart", rounds=1)
    how = {"baselines": False}
    choose(config, tmp_path, arms=("nothing", "half"), **how)
    assert (tmp_path / "plan.json").exists()
    choose(config, tmp_path, arms=("local", "fedavg"), **how)
    assert json.loads((tmp_path / "choice.json").read_text())["shared"] is None
    assert not (tmp_path / "plan.json").exists()
