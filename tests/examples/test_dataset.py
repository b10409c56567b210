"""The dataset from outside: named by its place, opened, trained on, and found again by who resumes."""

import json

from examples.datasets.two_moons_silos import ANGLES
from fl_core import rows
from fl_core.config import RunConfig
from fl_core.run import runner

NAME = "examples.datasets.two_moons_silos:two_moons_silos"


def test_a_run_names_it_by_its_place_and_takes_its_recipe(tmp_path):
    runner.run(RunConfig(dataset=NAME, rounds=1), tmp_path / "run")
    stored = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (stored["dataset"], stored["model"], stored["batch_size"]) == (
        NAME,
        "mlp",
        16,
    )
    _, frame = rows.read(tmp_path / "run" / "rows.jsonl")
    scores = frame.query("metric == 'accuracy' and split == 'test'")
    assert set(scores["client"]) >= set(ANGLES)
    assert scores["value"].between(0, 1).all()
