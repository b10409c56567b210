"""The dataset from outside: named by its place, opened, trained on, and found again by who resumes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from examples.datasets.two_moons_silos import ANGLES
from fl_core import data, rows, runner
from fl_core.config import RunConfig

NAME = "examples.datasets.two_moons_silos:two_moons_silos"


def test_silos_are_clients_and_see_the_same_moons_turned() -> None:
    moons = data.load(NAME)
    assert [client.name for client in moons.clients] == list(ANGLES)
    assert moons.weights == (128, 128, 128)
    assert (moons.shape, moons.classes) == ((2,), ("0", "1"))
    centres = []
    for client, angle in zip(moons.clients, ANGLES.values(), strict=True):
        turn = torch.tensor(angle).deg2rad()
        back = torch.tensor([[turn.cos(), -turn.sin()], [turn.sin(), turn.cos()]])
        x, y = client.train.x @ back, client.train.y
        centres.append(torch.stack([x[y == k].mean(0) for k in (0, 1)]))
    for other in centres[1:]:
        torch.testing.assert_close(other, centres[0], atol=0.15, rtol=0)


def test_a_run_names_it_by_its_place_and_takes_its_recipe(tmp_path: Path) -> None:
    runner.run(RunConfig(dataset=NAME, rounds=1), tmp_path / "run", progress=False)
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


@pytest.mark.parametrize("partition", ["iid", "natural_dirichlet"])
def test_its_silos_can_be_partitioned_otherwise(partition: str) -> None:
    clients = {"iid": 4, "natural_dirichlet": 6}[partition]
    assert len(data.load(NAME, partition=partition, clients=clients).clients) == clients
