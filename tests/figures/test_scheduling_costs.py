"""Layer scheduling before training: the paper's counts come out exactly, and beside them what they leave out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from figures import items
from figures.scheduling import costs as scheduling_costs
from fl_core import rows

VIEWS = ("fig1", "fig7", "table3", "table4")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of the paper's network on images of MNIST's shape: the costs do not hang on what is in them."""
    folder = tmp_path_factory.mktemp("costs")
    draw = np.random.default_rng(0)
    x = draw.integers(0, 256, (200, 28, 28, 1), dtype=np.uint8)
    np.savez(folder / "shape.npz", x=x, y=np.arange(200) % 10, classes=np.array([str(k) for k in range(10)]))
    names = [f"mnist.{name}" for name in scheduling_costs.ALGORITHMS]
    small: dict[str, Any] = {"dataset": str(folder / "shape.npz"), "clients": 4, "samples": 200}
    runs = {name: replace(scheduling_costs.STUDY.runs[name], **small) for name in names}
    path = folder / f"{scheduling_costs.NAME}.jsonl"
    items.train(replace(scheduling_costs.STUDY, runs=runs), path, command="typed", progress=False)
    return path


def test_counts_are_the_papers_and_flops_reverse_their_order(made: Path) -> None:
    header, frame = rows.read(made)
    sums = scheduling_costs.costs(header, frame, "mnist").groupby("run")[["naive", "flops", "moved"]].sum()
    thirds = {"fedbabu": (576_896,) * 3, "vanilla": (832, 52_096, 576_896), "anti": (524_800, 576_064, 576_896)}
    for name, sizes in {"fedavg": (582_026,) * 3, **thirds}.items():
        assert sums.loc[name, "naive"] == 100 * 100 * 50 * sum(sizes)
        assert sums.loc[name, "moved"] == 100 * 100 * 2 * 4 * sum(sizes)
    share = sums["flops"] / sums.loc["fedavg", "flops"]
    assert share["vanilla"] == pytest.approx(0.883, abs=0.002)
    assert share["anti"] == pytest.approx(0.695, abs=0.002)


def test_values_hold_until_the_next_row() -> None:
    made = [rows.row("round_cost", value, round=done, variant="naive") for done, value in ((1, 5.0), (3, 7.0))]
    found = scheduling_costs.by_round(rows.frame(made), 4)
    assert found["naive"].tolist() == [5, 5, 7, 7]
    assert found.index.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("name", VIEWS)
def test_views_draw_what_is_stored(name: str, made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduling_costs, "DATASETS", ("mnist",))
    drawing = items.redraw(items.find(f"scheduling.{name}"), made, made.parent)
    with Image.open(made.parent / f"scheduling.{name}.png") as picture:
        assert min(picture.size) > 400
    verdicts = [finding.held for finding in drawing.findings]
    wanted = {"fig1": [True, True], "fig7": [True, False, True], "table3": [True], "table4": [True, True, False, True]}
    assert verdicts == wanted[name]
    assert len(pd.read_csv(made.parent / f"scheduling.{name}.csv")) == len(drawing.table)


def test_stored_rows_have_the_papers_numbers() -> None:
    """Those that are committed, of real data's networks."""
    header, frame = scheduling_costs.STUDY.read(scheduling_costs.STUDY.path())
    assert list(header["runs"]) == list(scheduling_costs.STUDY.runs)
    totals = {name: scheduling_costs.total_parameters(frame, name) for name in scheduling_costs.DATASETS}
    assert totals == {"mnist": 582_026, "cifar10": 878_538, "tiny_imagenet32": 924_708}
    table = scheduling_costs._totals(header, frame)
    published = table[table["published"].notna()]
    assert published["naive"].round(2).tolist() == published["published"].tolist()
