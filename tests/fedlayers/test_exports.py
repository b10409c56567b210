"""Trained models and tuned settings by the command line: what is typed, and what each mistake is answered with."""

from pathlib import Path

import pandas as pd
import pytest

import fedlayers as fl
from fedlayers.cli import app as cli
from fl_core.data.named.small import COLUMNS


@pytest.fixture
def terminal(tmp_path, monkeypatch, capsys):
    """Runs a command line in a folder of its own; gives what it said, or the line with which it was refused."""
    monkeypatch.chdir(tmp_path)

    def say(line, code=0):
        capsys.readouterr()
        try:
            cli.main(line.split())
            left = 0
        except SystemExit as end:
            left = end.code or 0
        out, err = capsys.readouterr()
        assert left == code, err
        return err.splitlines()[-1] if code else out

    return say


def test_a_model_leaves_its_run_and_labels_new_rows(terminal):
    terminal("run --algorithm fedper --rounds 1 --out run")
    assert "va.safetensors.json" in terminal(
        "export run --client va --out va.safetensors"
    )
    heads = list(COLUMNS)
    pd.DataFrame([[0.5] * 10, [-0.5] * 10], columns=heads).to_csv(
        "new.csv", index=False
    )
    for scores, columns in (("probability", 7), ("logit", 7), ("none", 2)):
        assert "2 predictions: said.csv" in terminal(
            f"predict va.safetensors --data new.csv --scores {scores} --out said.csv"
        )
        said = pd.read_csv("said.csv", dtype={"predicted": str})
        assert said.shape == (2, columns)
        assert said["predicted"].tolist() == list(
            fl.predict("va.safetensors", "new.csv").labels
        )
        assert said["sample"].tolist() == [0, 1]
    for line, message in (
        ("export run --client va --out va.safetensors", "va.safetensors"),
        ("export run --model persnal --client va --out b", "mean 'personal'"),
        (
            "predict va.safetensors --data new.csv --out new.csv",
            "predictions; got new.csv",
        ),
        ("predict va.safetensors --data new.csv --out run", "new file"),
        (
            "predict va.safetensors --data new.csv --scores logits",
            "mean 'logit'",
        ),
        ("predict run --data new.csv", "run.json"),
    ):
        assert message in terminal(line, code=2), line
    assert Path("new.csv").read_text().startswith("age,sex")
