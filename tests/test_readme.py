"""A stranger types the README from above: each command works in a fresh folder, and so does what it proposes."""

import re
import shlex
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import fedlayers as fl
from docs.outputs import replaced
from fedlayers.cli.app import main
from fl_core.algorithms.base import ALGORITHMS
from tests.docs.test_outputs import words

TEXT = (Path(__file__).parents[1] / "README.md").read_text("utf-8")
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", TEXT, re.DOTALL)
PYTHON = [text for kind, text in BLOCKS if kind == "python"]


def lines_of_shell():
    """The commands of the README in their order, without their output."""
    for kind, text in BLOCKS:
        joined = text.replace("\\\n", " ")
        if kind == "console":
            yield from re.findall(r"(?m)^\$ (.+)", joined)
        elif kind == "":
            yield from re.findall(r"(?m)^fedlayers .+", joined)


def proposed(text):
    """The command that an answer ends with."""
    return re.findall(r"(?m)^Next: (fedlayers .+)", text)


def typed(line, capsys):
    main(shlex.split(line)[1:])
    return capsys.readouterr().out


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")


def test_the_commands_are_a_decision_a_run_by_its_plan_and_a_table():
    assert [line.split()[1] for line in lines_of_shell()] == ["choose", "run", "choose"]


@pytest.mark.slow
def test_the_quickstart_prints_what_it_shows_and_its_plan_trains(fresh, capsys):
    first, run, _ = lines_of_shell()
    shown = next(text for kind, text in BLOCKS if kind == "console")
    printed = typed(first, capsys)
    assert len(words(printed) & words(shown)) >= 0.8 * len(
        words(shown.partition("\n")[2])
    )
    assert "fedrep" in typed(run, capsys)


@pytest.mark.slow
def test_a_table_is_checked_decided_exported_and_predicted(fresh, capsys):
    """With fewer rounds and one seed. Each command is the one that the last answer proposes."""
    *_, table = lines_of_shell()
    short = ["--rounds", "1", "--seeds", "1", "--lr", "0.01"]
    printed = typed(shlex.join(replaced(shlex.split(table), short)), capsys)
    (export,) = proposed(printed)
    (predict,) = proposed(typed(export, capsys))
    file = "fl_core/data/named/heart.csv"
    typed(predict.replace("TABLE", f"{file} --out new.csv"), capsys)
    hospitals = pd.read_csv("new.csv")["client"]
    assert set(hospitals) == {"cleveland", "hungarian", "switzerland", "va"}
    assert len(hospitals) == 920
    columns = "--client-column hospital --label-column num --impute median"
    printed = typed(f"fedlayers check {file} {columns}", capsys)
    assert "This works: fedlayers choose" in printed


def own_table(rows=160):
    """A table with other names of columns, words, and a missing value."""
    draw = np.random.default_rng(5)
    frame = pd.DataFrame(
        {
            "zentrum": draw.choice(["Bern", "K\u00f6ln", "Graz"], rows),
            "alter": draw.integers(18, 90, rows),
            "blutdruck": draw.normal(130, 15, rows).round(0),
            "raucher": draw.choice(["ja", "nein", "fr\u00fcher"], rows),
        }
    )
    risk = (frame["alter"] - 50) / 15 + (frame["raucher"] == "ja")
    frame["ausgang"] = np.where(risk > 0.3, "verstorben", "entlassen")
    frame.loc[3, "blutdruck"] = np.nan
    return frame


def printed(line, capsys, code=0):
    """What a line prints. A table with faults ends the program with 1."""
    if not code:
        return typed(line, capsys)
    with pytest.raises(SystemExit) as end:
        main(shlex.split(line)[1:])
    assert end.value.code == code
    return capsys.readouterr().out


@pytest.mark.slow
def test_a_table_of_one_s_own_goes_the_way_that_each_answer_proposes(fresh, capsys):
    """From check to predictions. A stranger adds what only they know: the client, the label and the new file."""
    own_table().to_csv("patienten.csv", index=False)
    own_table().drop(columns="ausgang").head(20).to_csv("neu.csv", index=False)
    own_table().to_csv("offen.csv", sep=";", index=False)
    for file in ("patienten.csv", "offen.csv"):  # one has a line of pandas to write
        said = printed(f"fedlayers check {file}", capsys, code=1)
        assert "--label-column COLUMN" in said.partition("Then try")[2]
    roles = "--client-column zentrum --label-column ausgang"
    said = printed(f"fedlayers check patienten.csv {roles}", capsys, code=1)
    (choose,) = re.findall(r"(?m)^Then try: (fedlayers .+)", said)
    assert {*roles.split(), "--impute"} <= {*choose.split()}
    short = "--rounds 1 --seeds 1 --lr 0.01 --no-baselines"
    (export,) = proposed(typed(f"{choose} {short}", capsys))
    (predict,) = proposed(typed(export, capsys))
    typed(predict.replace("TABLE", "neu.csv"), capsys)
    made = pd.read_csv("predictions.csv")
    assert list(made["client"]) == list(pd.read_csv("neu.csv")["zentrum"])
    assert {*made["predicted"]} <= {"verstorben", "entlassen"}
    second = f"{choose} {short} --out out/second"
    (export,) = proposed(typed(second, capsys))
    assert "3 models" in typed(export, capsys)


def trained(sign, seed):
    """A module that is trained on samples of one client, and the samples."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(80, 4, generator=draw)
    y = (sign * x[:, 0] > 0).long()
    module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    steps = torch.optim.Adam(module.parameters(), 0.03)
    for _ in range(20):
        steps.zero_grad()
        nn.functional.cross_entropy(module(x), y).backward()
        steps.step()
    return module, x, y


@pytest.mark.slow
def test_the_notebook_s_block_runs_on_models_of_one_s_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model_a, x_a, y_a = trained(1, 0)
    model_b, x_b, y_b = trained(-1, 1)
    pairs = torch.utils.data.TensorDataset(x_b, y_b)
    names = {
        "model_a": model_a,
        "model_b": model_b,
        "x_a": x_a,
        "y_a": y_a,
        "loader_b": torch.utils.data.DataLoader(pairs, batch_size=16),
        "module": nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)),
    }
    exec(PYTHON[0], names)
    assert names["answer"].action
    crossed = fl.cross_scores(names["models"], names["data"])
    assert "north" in str(crossed)


@pytest.mark.slow
def test_the_algorithm_of_five_lines_trains(own_members):
    own_members(ALGORITHMS)
    exec(PYTHON[1], {"fl": fl})
    mine = fl.run(dataset="heart", algorithm="my_fedper", rounds=1, progress=False)
    theirs = fl.run(dataset="heart", algorithm="fedper", rounds=1, progress=False)
    scores = [run.to_frame()["value"].tolist() for run in (mine, theirs)]
    assert scores[0] == scores[1]
