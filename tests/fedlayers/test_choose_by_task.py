"""`choose` and `tune` go to their ends with the main score of every task."""

import json

import numpy as np
import pandas as pd
import pytest
import torch

import fedlayers as fl
from fl_core.records.store import Run
from fl_core.rows import (
    MAIN,
    MULTILABEL,
    REGRESSION,
    SURVIVAL,
    TABLE,
    column_of,
    label_of,
)
from tests.conftest import refuses
from tests.fedlayers import command
from tests.fl_core.made import TASKS, targets


def each_task(quick, tasks=(SURVIVAL, MULTILABEL)):
    """Parametrise by tasks, all but one of which are slow."""
    marked = [pytest.param(t, marks=[pytest.mark.slow] * (t != quick)) for t in tasks]
    return pytest.mark.parametrize("task", marked)


def words(task, folder):
    """Return the flags of a table for a task, in the working folder."""
    targets().to_csv(folder / "t.csv", index=False)
    label, excluded = (TASKS[task][key] for key in ("label_column", "exclude_columns"))
    return (
        f"--dataset {folder / 't.csv'} --task {task} --label-column {label} "
        f"--exclude-columns {' '.join(excluded)} --rounds 2 --model mlp --out {folder / 'out'}"
    )


@each_task(SURVIVAL)
def test_choose_judges_by_the_main_score(task, tmp_path, capsys):
    out = tmp_path / "out"
    command(f"choose {words(task, tmp_path)} --arms nothing all --seeds 2")
    printed = capsys.readouterr().out
    assert column_of(MAIN[task]) in printed
    assert "macro-F1" not in printed
    choice = json.loads((out / "choice.json").read_text())
    assert pd.DataFrame(choice["judged"])[MAIN[task]].between(0, 1).all()
    assert choice["winner"] in ("nothing", "all")
    assert [line["seed"] for line in choice["judged"]] == [0, 0, 1, 1]
    assert (out / "race.png").stat().st_size > 5000
    page = (out / "report.html").read_text()
    assert choice["answers"][0].split(":")[0].replace("'", "&#x27;") in page
    assert "How sure the decision is" in page


@each_task(MULTILABEL)
def test_tune_searches_for_the_main_score(task, tmp_path, capsys):
    out = tmp_path / "out"
    search = "--algorithms fedavg --search lr=0.01,0.1"
    command(f"tune {words(task, tmp_path)} {search}")
    assert MAIN[task] in capsys.readouterr().out
    assert json.loads((out / "tuned.json").read_text())["score"] == MAIN[task]


def test_metrics_of_single_samples_say_that_survival_couples_them():
    model = torch.nn.Linear(4, 1)
    y = torch.stack([torch.rand(30), (torch.arange(30) % 2).float()], 1)
    asked = {"loss": "cox", "progress": False}
    data = {"a": (torch.randn(30, 4), y)}
    report = fl.diagnose(model, data, ["hessian_trace", "grad_norm"], **asked)
    status = report.frame.groupby("metric")["status"].unique()
    assert list(status["grad_norm"]) == ["ok"]
    assert "not applicable" in status["hessian_trace"][0]


def few(task, seed=0):
    """Return samples of a task, of which the last client's validation gives no main score: it is one sample."""
    draw, made = np.random.default_rng(seed), {}
    for name, count in (("north", 60), ("south", 60), ("west", 6)):
        x = draw.normal(size=(count, 4)).astype(np.float32)
        made[name] = (
            x,
            x[:, 0] if task == REGRESSION else (x[:, :2] > 0).astype(np.float32),
        )
    return made


@each_task(MULTILABEL, (REGRESSION, MULTILABEL))
def test_a_client_without_a_main_score_is_left_out_for_all_arms_alike(task, tmp_path):
    config = fl.RunConfig(
        task=task, rounds=3, epochs=30, lr=0.01, eval_every=1, patience=0
    )
    more = {
        "arms": ("nothing", "all"),
        "seeds": (0, 1),
        "tune_rates": 0,
        "baselines": False,
    }
    choice = fl.choose(config, tmp_path / "out", data=few(task), model="mlp", **more)
    main = MAIN[task]
    assert (
        f"{label_of(main)} leaves out west with seeds 0, 1: {TABLE[main].missing}"
        in choice.text()
    )
    seed = Run(choice.run).config["seed"]
    scores = choice.benches[seed].by_client(
        choice.recommended[seed].model, "validation"
    )
    expected = scores.loc[["north", "south"], main].mean()  # of equally many samples
    judged = choice.standing.judged.set_index(["arm", "seed"])[main]
    assert judged[choice.winner.name, seed] == pytest.approx(expected)


@pytest.mark.parametrize("task", [REGRESSION, MULTILABEL])
def test_a_race_without_any_main_score_is_refused_before_training(task, tmp_path):
    data = {
        name: few(task, seed)["west"] for seed, name in enumerate(("north", "south"))
    }
    with refuses(f"{label_of(MAIN[task])} must have a value"):
        fl.choose(
            fl.RunConfig(task=task, rounds=2, patience=0),
            tmp_path / "out",
            data=data,
            model="mlp",
            tune_rates=0,
        )
    assert not (tmp_path / "out").exists()
