"""Somebody's own algorithm, in one file of their working folder, from the command line."""

import sys
from pathlib import Path

import pytest

from tests.fedlayers import command

ALGORITHM = '''
from fl_core.algorithms.base import Algorithm

class Quarter(Algorithm):
    """FedAvg of a quarter of the training."""

    name = "quarter"
    paper = "a test"
'''


@pytest.fixture
def own_file(tmp_path, monkeypatch):
    """A folder with a module of its own, which is forgotten after the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("own_of_a_test.py").write_text(ALGORITHM)
    yield "own_of_a_test:Quarter"
    sys.modules.pop("own_of_a_test", None)


def test_a_run_directory_does_not_choose_what_is_imported(own_file, capsys):
    command(f"run --algorithm {own_file} --rounds 1 --out run")
    allowed = "--allow-code own_of_a_test:Half"
    for line in ("resume run", "diagnose run", f"resume run {allowed}"):
        with pytest.raises(SystemExit, match="2"):
            command(line)
        message = capsys.readouterr().err.splitlines()[-1]
        assert f"--allow-code {own_file}" in message
    command(f"resume run --allow-code {own_file}")
    assert "1 round of quarter: run" in capsys.readouterr().out


OTHERS = '''
import numpy as np
from fl_core.rows import row

def tensors(measurement):
    """Number of a layer's tensors."""
    return [
        row("tensors", len(layer.tensors), client=subject.client, layer=layer.name)
        for subject in measurement.subjects
        for layer in measurement.layers
    ]

def first(values):
    """Share the first layer alone."""
    return 1

def coins():
    """Coins by their weight, of two mints."""
    random = np.random.default_rng(0)
    return {mint: (random.normal(size=(60, 3)), np.arange(60) % 2) for mint in ("north", "south")}
'''


def test_a_dataset_a_metric_and_a_rule_are_named_by_their_places(own_file, capsys):
    Path("own_of_a_test.py").write_text(ALGORITHM + OTHERS)
    data = "--dataset own_of_a_test:coins"
    command(f"diagnose {data} --metrics own_of_a_test:tensors federation_sensitivity")
    assert "tensors" in capsys.readouterr().out.partition("\n")[2]
    command("select diagnosis --rule own_of_a_test:first --out plan.json")
    assert "1 of " in capsys.readouterr().out
    rule = "--algorithm playerfl --rule own_of_a_test:first --rounds 1"
    command(f"run {data} {rule} --out run")
    assert "north" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        command("resume run")
    assert (
        "--allow-code own_of_a_test:coins own_of_a_test:first"
        in capsys.readouterr().err
    )
    command("resume run --allow-code own_of_a_test:coins own_of_a_test:first")
