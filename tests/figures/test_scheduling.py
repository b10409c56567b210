"""Layer scheduling's runs, tables and pictures: tiny runs are measured right, and made-up rows give known verdicts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from PIL import Image

from figures import items, recipe
from figures.scheduling import runs as scheduling
from figures.scheduling.runs import (
    EARLY,
    HEADS_COLUMN,
    MEAN,
    PAPER,
    POOLED,
    QUICK,
    SCHEDULES,
    SMALL,
    STUDY,
    TUNED,
    Column,
)
from fl_core import rows, runner
from fl_core.recorder import Recorder

pytestmark = pytest.mark.filterwarnings("ignore:client")
LITTLE = {name: Column("large_digits", 120, (1, 2, 3), (0, 1, 2), 1) for name in PAPER}


@pytest.mark.parametrize(
    "table", [PAPER, QUICK, {"cifar10": HEADS_COLUMN}], ids=["paper", "quick", "heads"]
)
def test_what_is_reported_is_evaluated(table: dict[str, Column]) -> None:
    for name, column in table.items():
        assert all(done % column.every == 0 for done in column.at)
        assert max(column.unfreeze) < column.at[0] or name in ("mnist", "cifar10")
        times = [done / PAPER[name].at[k] for k, done in enumerate(column.at)]
        thaws = [
            t / p
            for t, p in zip(column.unfreeze[1:], PAPER[name].unfreeze[1:], strict=True)
        ]
        assert (
            len({round(each, 9) for each in (*times, *thaws)}) == 1
        )  # all scaled by one factor


@pytest.fixture(scope="module")
def little(tmp_path_factory: pytest.TempPathFactory) -> tuple[recipe.Recipe, Path]:
    base = SMALL.with_keys(clients=3, participation=0.7, batch_size=16)
    made = scheduling.recipes(LITTLE, base, 1) | scheduling.over_heads(
        LITTLE["cifar10"], base
    )
    made |= scheduling.over_thawing("cifar100", LITTLE["cifar100"], base, 1)
    item = replace(STUDY, runs=made, paper={}, seeds=1, more_seeds={})
    folder = tmp_path_factory.mktemp("scheduling") / scheduling.NAME
    only = [
        "mnist.fedavg",
        "mnist.vanilla",
        "cifar10.anti_fedrep",
        "cifar10.vanilla_fedrod",
        "cifar100.anti_early",
    ]
    recipe.train(item, folder, only=only, progress=False)
    return item, folder


def test_a_run_is_measured_when_it_is_reported(
    little: tuple[recipe.Recipe, Path],
) -> None:
    item, folder = little
    header, frame = item.read(folder)
    assert set(frame["run"]) == {
        "mnist.fedavg", "mnist.vanilla", "cifar10.anti_fedrep", "cifar10.vanilla_fedrod", "cifar100.anti_early"
    }  # fmt: skip
    own = frame[(frame["run"] == "mnist.vanilla") & (frame["metric"] == "accuracy")]
    tuned = own[(own["model"] == "personal") & (own["client"] == "")]
    assert set(tuned["round"]) == {1, 2, 3}
    engine = runner.run(
        item.runs["mnist.vanilla"],
        instruments=recipe.measure.instruments(),
        progress=False,
    )
    whole = engine.listener(Recorder).frame()
    tested = whole[
        (whole["metric"] == "accuracy")
        & (whole["split"] == "test")
        & (whole["model"] == "personal")
    ]
    for done, part in tested.groupby("round"):
        right = (part["value"] * part["n_samples"].astype(float)).sum()
        at = tuned[tuned["round"] == done].set_index("variant")["value"]
        assert at[POOLED] == pytest.approx(right / part["n_samples"].sum(), abs=1e-12)
        assert at[MEAN] == pytest.approx(part["value"].mean(), abs=1e-12)
    clients = own[own["client"] != ""]
    assert clients["value"].tolist() == tested[tested["round"] == 3]["value"].tolist()
    sums = frame[(frame["run"] == "mnist.vanilla") & (frame["metric"] == "bytes_up")]
    assert sums["value"].item() == whole[whole["metric"] == "bytes_up"]["value"].sum()
    found = scheduling.scores(frame)
    assert (
        found.loc[("mnist.vanilla", 3), 0]
        == tuned[(tuned["round"] == 3) & (tuned["variant"] == POOLED)]["value"].item()
    )
    shown = scheduling.curves(frame, "mnist", ["fedavg", "vanilla"])
    assert set(shown["model"]) == {"global"}
    assert "mnist.anti 0" in header["missing"]


@pytest.mark.slow
def test_a_tiny_study_is_drawn_and_says_what_is_missing(
    little: tuple[recipe.Recipe, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    item, folder = little
    monkeypatch.setitem(items.REGISTRY, item.name, item)
    monkeypatch.setitem(scheduling.COLUMNS, scheduling.NAME, (LITTLE, PAPER))
    drawing = items.redraw(items.find("scheduling.table2"), folder, folder.parent)
    assert "34 runs" in drawing.caption
    assert "mnist.anti 0" in drawing.text
    assert {finding.held for finding in drawing.findings} == {None}
    assert (
        drawing.table["seeds"].sum() == 3 + 3
    )  # FedAvg and Vanilla on one dataset, at three times
    with Image.open(folder.parent / "scheduling.table2.png") as picture:
        assert min(picture.size) > 240


LEVELS = {
    "fedavg": 0.3,
    "local_adaptation": 0.5,
    "fedper": 0.4,
    "lg_fedavg": 0.4,
    "fedrep": 0.42,
    "fedrod": 0.5,
}
LEVELS |= {"fedbabu": 0.55, "vanilla": 0.6, "anti": 0.6}


def made_up(
    changes: dict[str, float] | None = None,
    seeds: int = 3,
    before: float = 0.1,
    behind: float = 0.05,
    noise: float = 1e-3,
    item: recipe.Recipe = STUDY,
) -> tuple[dict[str, Any], pd.DataFrame]:
    """Rows as if every run had come to the level of its method, ``changes`` aside.

    ``before`` is the schedules' accuracy without fine-tuning, by which they lie ``behind`` FedBABU.
    """
    off = np.random.default_rng(0).normal(
        0, noise, seeds
    )  # every run's, so that differences are exact
    made: list[rows.Row] = []
    for run in item.runs:
        dataset, _, method = run.partition(".")
        column = scheduling.COLUMNS[item.name][False][dataset]
        schedule, _, below = method.partition("_")
        wrap = schedule in SCHEDULES and below in LEVELS
        level = (changes or {}).get(
            run, LEVELS[below if wrap else method.removesuffix(EARLY)]
        )
        tuned = method.removesuffix(EARLY) in TUNED
        for seed in range(seeds):
            own = level + off[seed]
            named: dict[str, Any] = {
                "seed": seed,
                "algorithm": item.runs[run].federation.algorithm,
                "run": run,
                "split": "test",
            }
            for done in sorted({*column.unfreeze[1:], *column.at}):
                plain = (
                    before + behind * (method == "fedbabu") + off[seed]
                    if tuned
                    else own
                )
                models = {
                    "global" if tuned or method == "fedavg" else "personal": plain
                }
                models |= {"personal": own} if tuned and done in column.at else {}
                for model, value in models.items():
                    for variant in (POOLED, MEAN):
                        made.append(
                            rows.row(
                                "accuracy",
                                value,
                                round=done,
                                model=model,
                                variant=variant,
                                **named,
                            )
                        )
            for k in range(4):
                made.append(
                    rows.row(
                        "accuracy",
                        own + 0.01 * k,
                        client=f"c{k}",
                        n_train=20 + k,
                        **named,
                    )
                )
    runs = {run: {"config": config.to_json()} for run, config in item.runs.items()}
    header = {
        "item": item.name, "runs": runs, "seeds": 3, "missing": [], "failed": {}, "command": "typed",
        "seconds": 1.0,
    }  # fmt: skip
    return header, rows.frame(made)


def held(name: str, **given: Any) -> list[bool | None]:
    header, frame = made_up(**given)
    view = items.find(f"scheduling.{name}")
    assert view.draw is not None
    drawing = view.draw(header, frame)
    plt.close(drawing.figure)
    assert len(drawing.table)
    return [finding.held for finding in drawing.findings]
