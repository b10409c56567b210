"""A race that a judge stops early: its forecasts, what it keeps, and that all its runs can be continued."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from fedlayers.studies import race
from fedlayers.studies.arms import DEFAULT, arms_of
from fedlayers.studies.choose import choose
from fedlayers.studies.jobs import TrainingJob
from fedlayers.studies.race import (
    judged_at,
    judged_round,
    validation_scores,
)
from fl_core.config import RunConfig
from fl_core.plan import LayerPlan
from fl_core.records.stopping import moving_mean
from fl_core.records.store import Run
from fl_core.run import runner

CONFIG = RunConfig(
    dataset="digits",
    clients=3,
    max_samples=500,
    model_options={"sizes": (16, 12, 8)},
    lr=0.02,
    rounds=48,
    eval_every=2,
    epochs=1,
    patience=2,
)
AT = 6
TIMED = ("seconds", "foreseen", "measured")


@pytest.fixture(scope="module")
def raced(tmp_path_factory):
    out, told = tmp_path_factory.mktemp("race") / "out", list[str]()
    return out, choose(CONFIG, out, progress=told.append), told


def decided(out):
    """The decision without times."""
    found = json.loads((out / "choice.json").read_text())
    return {key: value for key, value in found.items() if key not in TIMED}


def forecast(shallow, deep):
    """The registered formula: what the deeper cut gains."""
    tops = [
        max(moving_mean(dict(enumerate(curve))).values()) for curve in (shallow, deep)
    ]
    slopes = [
        np.polynomial.Polynomial.fit(range(len(c)), c, 1).convert().coef[1]
        for c in (shallow, deep)
    ]
    noises = [np.std(np.diff(curve)) for curve in (shallow, deep)]
    gap, slope = tops[1] - tops[0], slopes[1] - slopes[0]
    return float(
        -0.01224
        + 0.554 * gap
        + 0.0391 * slope
        + 0.03405 * np.mean(tops)
        - 0.1745 * np.mean(noises)
    )


def test_the_judge_keeps_the_arm_of_the_registered_formula(raced):
    out, choice, told = raced
    curves = {}
    for arm in DEFAULT:
        frame = Run(out / "arms" / f"{arm}-0").rows()[1]
        curve = validation_scores(frame, ["macro_f1"], AT)
        assert list(curve["round"]) == [2, 4, 6]
        curves[arm] = curve["macro_f1"].to_list()
    gains = pd.DataFrame(0.0, index=DEFAULT, columns=DEFAULT)
    for k, shallow in enumerate(DEFAULT):
        for deep in DEFAULT[k + 1 :]:
            gains.loc[deep, shallow] = forecast(curves[shallow], curves[deep])
            gains.loc[shallow, deep] = -gains.loc[deep, shallow]
    kept = gains.sum(axis=1).idxmax()
    early = choice.inference.early
    assert early is not None
    assert (
        choice.winner.name,
        early.kept,
        early.round,
        choice.until,
        early.rounds,
    ) == (kept, kept, AT, AT, 48)
    assert early.gains == {
        arm: pytest.approx(gains.loc[kept, arm]) for arm in DEFAULT if arm != kept
    }
    assert kept in told[-3]


def test_only_the_kept_arm_has_a_final_score(raced):
    out, choice, _ = raced
    judged = choice.standing.judged.set_index("arm")
    for arm in DEFAULT:
        run, line = Run(out / "arms" / f"{arm}-0"), judged.loc[arm]
        if arm == choice.winner.name:
            assert run.finished
            trained = run.rounds[-1]
            curve = validation_scores(run.rows()[1], ["macro_f1"], run.best_round(None))
            assert line["macro_f1"] == pytest.approx(curve["macro_f1"].iloc[-1])
            assert line["note"] == ""
        else:
            assert run.rounds[-1] == AT
            assert line[["macro_f1", "loss"]].isna().all()
            assert line["note"] == f"not kept, trained to round {AT}"
    assert choice.measured.rounds == 3 * AT + trained
    likely = 2 * CONFIG.federation.patience * CONFIG.execution.eval_every
    assert (choice.cost.rounds, choice.cost.most) == (3 * AT + likely, 3 * AT + 48)


def test_what_was_stopped_is_named_wherever_the_race_is_shown(raced):
    out, choice, _ = raced
    stopped = [arm for arm in DEFAULT if arm != choice.winner.name]
    notes = choice.trials.set_index("name").loc[stopped, "note"]
    assert notes.str.startswith("not kept").all()
    assert choice.inference.early is not None
    gains = choice.inference.early.gains
    assert decided(out)["early"]["gains"] == gains
    evidence = "\n".join(LayerPlan.load(out / "plan.json").why.race)
    assert choice.inference.early.line(choice.main) in evidence
    assert all(f"on {arm}" in choice.text() for arm in stopped)


@pytest.mark.slow
def test_thorough_continues_what_was_stopped_as_if_it_never_was(raced, tmp_path):
    again = choose(CONFIG, tmp_path / "a")
    assert again.winner.name == raced[1].winner.name
    choose(CONFIG, tmp_path / "a", thorough=True)
    choose(CONFIG, tmp_path / "b", thorough=True)
    assert decided(tmp_path / "a") == decided(tmp_path / "b")
    assert "early" not in decided(tmp_path / "a")
    assert (tmp_path / "a" / "standing.csv").read_bytes() == (
        tmp_path / "b" / "standing.csv"
    ).read_bytes()
    for arm in DEFAULT:
        ours, theirs = (
            Run(tmp_path / name / "arms" / f"{arm}-0") for name in ("a", "b")
        )
        assert ours.rows()[1].equals(theirs.rows()[1])
    later = choose(CONFIG, tmp_path / "a").standing.judged.set_index("arm")
    assert later["note"].str.startswith("not kept").sum() == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "job", [2, 5], ids=["while all train", "while the kept one trains"]
)
def test_a_race_that_was_cut_off_resumes(job, raced, tmp_path, monkeypatch):
    carried_out, count = TrainingJob.carry_out, iter(range(1, 100))

    def killed(self):
        if next(count) == job:
            replace(self, until=max(self.path.is_dir() * AT, 0) + 3).carry_out()
            raise KeyboardInterrupt
        carried_out(self)

    monkeypatch.setattr(TrainingJob, "carry_out", killed)
    with pytest.raises(KeyboardInterrupt):
        choose(CONFIG, tmp_path)
    assert not (tmp_path / "choice.json").exists()
    choose(CONFIG, tmp_path)
    assert decided(tmp_path) == decided(raced[0])
    pd.testing.assert_frame_equal(
        pd.read_csv(tmp_path / "standing.csv"), pd.read_csv(raced[0] / "standing.csv")
    )


@pytest.mark.slow
def test_if_the_kept_arm_diverges_the_next_is_kept(raced, tmp_path, monkeypatch):
    kept, trained = raced[1].winner.name, race.train

    def train(jobs, *others):
        if [(job.arm, job.until) for job in jobs] == [(kept, None)]:
            return {f"{kept}-0": "it diverged"}
        return trained(jobs, *others)

    monkeypatch.setattr(race, "train", train)
    choice = choose(CONFIG, tmp_path)
    assert choice.winner.name != kept
    assert choice.standing.failed == {f"{kept}-0": "it diverged"}


@pytest.mark.parametrize(
    ("changes", "arms", "seeds", "why"),
    [
        ({"patience": 0}, DEFAULT, 1, "--patience"),
        ({"rounds": 40}, DEFAULT, 1, "48 rounds"),
        ({"eval_every": 3}, DEFAULT, 1, "3 evaluations"),
        ({}, DEFAULT, 3, "several seeds"),
        ({"max_samples": 200}, DEFAULT, 1, "10 training samples a class and client"),
        ({}, ("half", "first_3"), 1, "first_3"),
        ({"algorithm": "fedrep"}, DEFAULT, 1, "nothing"),
    ],
)
def test_where_the_judge_was_not_tested_all_are_trained(changes, arms, seeds, why):
    config = CONFIG.with_keys(**{"algorithm": "fedper", **changes})
    task = runner.assemble(config)
    raced = arms_of(arms, task.layers, config.federation.algorithm)
    at, reason = judged_at(task, raced, range(seeds))
    assert at == 0
    assert why in reason


def test_the_judged_round_is_an_evaluated_one():
    for rounds in range(48, 300):
        for every in (1, 2, 3):
            at = judged_round(rounds, every)
            assert at % every == 0
            assert at <= 0.15 * rounds + 1e-9
            assert at == 0 or at + every > 0.15 * rounds - 1e-9
