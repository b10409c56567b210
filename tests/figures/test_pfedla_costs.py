"""pFedLA's bytes: the formula gives the published numbers, and real messages are eight times as many bytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from figures import training
from figures.pfedla import costs as pfedla_costs

TOTALS = {"mnist": 85_822, "cifar10": 121_278}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of the networks for images of the datasets' shapes: the costs do not hang on what is in them."""
    folder = tmp_path_factory.mktemp("costs")
    files = {}
    for name, shape in {"mnist": (28, 28, 1), "cifar10": (32, 32, 3)}.items():
        x = np.random.default_rng(0).integers(0, 256, (1500, *shape), dtype=np.uint8)
        np.savez(
            folder / f"{name}.npz",
            x=x,
            y=np.arange(1500) % 10,
            classes=np.array([*"abcdefghij"]),
        )
        files[name] = str(folder / f"{name}.npz")
    runs = {
        run: config.with_keys(
            dataset=files[run.partition(".")[0]], samples_per_client=40
        )
        for run, config in pfedla_costs.STUDY.runs.items()
    }
    path = folder / pfedla_costs.NAME
    study = replace(pfedla_costs.STUDY, runs=runs)
    training.train(study, path, command="typed", progress=False)
    training.pack(study, path)
    return path


def test_counts_and_messages(made: Path) -> None:
    _, frame = pfedla_costs.STUDY.read(made)
    sizes = frame[frame["metric"] == "parameters"].set_index(["run", "layer"])["value"]
    sums = frame[frame["metric"] != "parameters"].pivot(
        index="run", columns="metric", values="value"
    )
    for dataset, units in pfedla_costs.RETAINED.items():
        for k in range(len(units) + 1):
            run = f"{dataset}.{k}"
            total, kept = sizes[run].sum(), sum(sizes[run, unit] for unit in units[:k])
            assert total == TOTALS[dataset]
            assert sums.loc[run, "bytes_up"] == 4 * 600 * 10 * total
            assert sums.loc[run, "bytes_down"] == 4 * 600 * 10 * (total - kept)
            assert sums.loc[run, "ledger"] * 2**20 == pytest.approx(
                3000 * (2 * total - kept)
            )


def test_stored_rows_are_those_of_now(made: Path) -> None:
    stored = pfedla_costs.STUDY.read(pfedla_costs.STUDY.path())[1]
    same = ["run", "layer", "metric", "variant", "value"]
    assert stored[same].equals(pfedla_costs.STUDY.read(made)[1][same])


@pytest.mark.parametrize(
    ("dataset", "published"),
    [
        ("mnist", [491.08, 488.65, 312.52]),
        ("cifar10", [693.96, 418.96, 382.24, 379.81]),
    ],
)
def test_the_ledger_gives_the_published_numbers(
    dataset: str, published: list[float]
) -> None:
    frame = pfedla_costs.STUDY.read(pfedla_costs.STUDY.path())[1]
    found = frame[frame["metric"] == pfedla_costs.LEDGER].set_index("run")["value"]
    assert [
        round(found[f"{dataset}.{k}"], 2) for k in range(len(published))
    ] == published
