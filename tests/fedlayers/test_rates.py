"""Rates tuned before a race: what is tried, which is used, and what is kept."""

import math
import re
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from fedlayers.studies import race
from fedlayers.studies.choose import choose
from fedlayers.studies.jobs import TrainingJob
from fedlayers.studies.report import write_page
from fl_core.config import RunConfig
from fl_core.errors import UsageError

CONFIG = RunConfig(dataset="heart", rounds=4, eval_every=1, epochs=1)
ARMS = ("nothing", "all_but_last")


def test_rates_are_tried_without_the_probe_among_the_arms(tmp_path):
    choice = choose(
        CONFIG.with_keys(rounds=1), tmp_path, arms=("nothing", "all"), tune_rates=2
    )
    assert choice.cost.runs == choice.measured.runs == 4
    assert set(choice.table["arm"]) == {"nothing", "all"}
    page = write_page(choice, tmp_path).read_text()
    assert re.search(r"amsgrad\), lr ([0-9.]+)", page)[1] == f"{choice.rates.lr:g}"


def test_a_trial_of_a_rate_by_one_seed_keeps_no_arm_that_several_seeds_refuse(
    tmp_path, monkeypatch
):
    def bad_with_two_seeds(*asked):
        runs, models = race.ranked(*asked)
        seeds = runs.groupby(["arm", "lr"])["seed"].transform("nunique")
        return runs.assign(above=np.where(seeds == 2, 9.0, -1.0)), models

    monkeypatch.setattr("fedlayers.studies.choose.ranked", bad_with_two_seeds)
    how = {"tune_rates": 2, "seeds": (0, 1), "baselines": False}
    choice = choose(CONFIG.with_keys(rounds=1), tmp_path, arms=ARMS, **how)
    assert choice.inference.refused == ARMS


def test_rates_are_tuned_for_own_data_by_default(tmp_path):
    draw, few = np.random.default_rng(0), RunConfig(rounds=1)
    wards = {
        ward: (draw.normal(size=(40, 5)), np.arange(40) % 2)
        for ward in ("north", "south")
    }
    own = {"data": wards, "model": "mlp"}
    for name, config, asked, rates in (
        ("own", few, own, [0.001, 0.003, 0.01, 0.03]),
        ("given", few.with_keys(lr=0.1), own, None),
        ("named", CONFIG.with_keys(rounds=1), {}, None),
    ):
        found = choose(config, tmp_path / name, arms=ARMS, **asked).rates
        assert (None if found is None else list(found.tried)) == rates


@pytest.mark.parametrize(
    ("values", "failed", "best"),
    [
        ([0.1, 0.3, 0.2], [], 3.0),
        ([0.1, 0.3, 0.2], [1], 9.0),
        ([0.1, None, 0.2], [], 1.0),
        ([0.1, math.nan, 0.2], [], 1.0),
        ([None, None, None], [0], 9.0),
    ],
)
def test_a_rate_is_chosen_among_those_that_finished(
    values,
    failed,
    best,
    tmp_path,
    monkeypatch,
):
    """By the runs' values, or by the ranks of their scores if one has none; the first has the best rank."""
    jobs = [
        TrainingJob(tmp_path / f"r{k}", CONFIG.with_keys(lr=3.0**k)) for k in range(3)
    ]
    lines = [
        {"run": job.name, "arm": "a", "score": [0, -2, -1][k], "lr": 3.0**k, "seed": 0}
        for k, job in enumerate(jobs)
    ]

    class Values:
        def of_run(self, path, name):
            found = values[int(path.name[1:])]
            if found is None:
                raise UsageError("its clients hold parts of the model")
            return found

        def line(self, one):
            return {
                "score": one,
                "loss": -one,
                "above": -1.0,
                "low": -1.0,
                "high": -1.0,
            }

    reasons = {jobs[k].name: "diverged" for k in failed}
    monkeypatch.setattr(race, "train", lambda *_: reasons)

    def standings(jobs, *_):
        table = pd.DataFrame(lines).assign(macro_f1=0.5).set_index("run", drop=False)
        judged = table.loc[[job.name for job in jobs]]
        return SimpleNamespace(judged=judged, main="macro_f1")

    monkeypatch.setattr(race, "standings", standings)
    found = race.best_rate(jobs, None, lambda _: None, {0: Values()})
    assert found.lr == best
