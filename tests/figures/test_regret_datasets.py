"""The regret study over datasets: rows there and back, the means over datasets, findings, and a real dataset."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from fedlayers.studies.regret import RANDOM, regret
from figures import items, recipe, regret as study
from figures.__main__ import main
from fl_core import rows, runner
from fl_core.defaults import resolve

LAYERS = {"heart": 4, "mnist": 5, "cifar10": 7}
pytestmark = pytest.mark.filterwarnings("ignore:client")
TINY = study.ITEM.runs["heart"].with_keys(rounds=1, eval_every=1, checkpoint_every=1)


def made_up(
    best: dict[str, int], chosen: dict[str, int], seeds: int = 3
) -> pd.DataFrame:
    """Scores that fall by 0.05 a layer from the best cut, and one choice for all rules."""
    made = []
    for dataset, top in best.items():
        names = [f"l{k}" for k in range(1, LAYERS[dataset] + 1)]
        for seed in range(seeds):
            for cut in range(LAYERS[dataset] + 1):
                value = 0.8 - 0.05 * abs(cut - top) + 0.001 * seed
                last = names[cut - 1] if cut else ""
                made += [
                    rows.row(
                        study.CUT,
                        value,
                        run=dataset,
                        seed=seed,
                        layer=last,
                        variant=str(cut),
                        split=split,
                    )
                    for split in ("validation", "test")
                ]
            for rule in study.RULES:
                cut = chosen[dataset]
                known: dict[str, Any] = {"run": dataset, "seed": seed, "variant": rule}
                undecided = rule == "cka=largest_jump" and seed == 0
                made.append(
                    rows.row(study.DECISION, None, status="a value is 0", **known)
                    if undecided
                    else rows.row(study.DECISION, cut, layer=names[cut - 1], **known)
                )
            made.append(rows.row("samples", 10, run=dataset, seed=seed, client="a"))
    return rows.frame(made)


def test_what_a_part_gains_is_not_the_gain_of_a_maximum() -> None:
    """Each of two inner cuts is best where it is not chosen: the better one over the other seed loses here."""
    frame = made_up({"heart": 2}, {"heart": 2}, seeds=2)
    lucky = {("1", 0): 0.9, ("3", 1): 0.9}
    scored = frame["metric"] == study.CUT
    frame.loc[scored, "value"] = [
        lucky.get((v, s), 0.5)
        for v, s in zip(frame[scored]["variant"], frame[scored]["seed"], strict=True)
    ]
    assert study.part_against_whole(study.of_dataset(frame, "heart")) == 0
    assert np.isnan(
        study.part_against_whole(study.of_dataset(frame[frame["seed"] == 0], "heart"))
    )


def header(
    datasets: dict[str, int], missing: tuple[str, ...] = ()
) -> dict[str, object]:
    runs = {
        name: {"config": resolve(study.ITEM.runs[name]).to_json()} for name in datasets
    }
    return {"runs": runs, "missing": list(missing), "failed": {}}


def test_means_over_datasets() -> None:
    best, chosen = (
        {"heart": 2, "mnist": 2, "cifar10": 3},
        {"heart": 2, "mnist": 1, "cifar10": 5},
    )
    frame = made_up(best, chosen)
    found = {name: study.of_dataset(frame, name) for name in best}
    assert {name: len(each.layers) for name, each in found.items()} == LAYERS
    mean = study.summary(found)
    for name in best:
        assert mean.loc[study.RULE, name] == pytest.approx(
            0.05 * abs(best[name] - chosen[name])
        )
        inner = [0.05 * abs(cut - best[name]) for cut in range(1, LAYERS[name])]
        assert mean.loc[RANDOM, name] == pytest.approx(np.mean(inner))
        assert mean.loc["share nothing", name] == pytest.approx(0.05 * best[name])
        ends = max(0.8 - 0.05 * best[name], 0.8 - 0.05 * (LAYERS[name] - best[name]))
        assert study.part_against_whole(found[name]) == pytest.approx(0.8 - ends)
    decided = found["heart"].table.set_index("rule")["seeds"]
    assert (decided["cka=largest_jump"], decided[study.RULE]) == (2, 3)


@pytest.mark.parametrize(
    ("chosen", "seeds", "held"),
    [
        ({"heart": 2, "mnist": 2, "cifar10": 3}, 3, (True, True, True)),
        ({"heart": 4, "mnist": 5, "cifar10": 7}, 3, (False, False, True)),
        ({"heart": 2, "mnist": 2, "cifar10": 3}, 2, (None, None, None)),
    ],
)
def test_drawn_with_findings(
    chosen: dict[str, int], seeds: int, held: tuple[bool | None, ...]
) -> None:
    best = {"heart": 2, "mnist": 2, "cifar10": 3}
    drawing = study.ITEM.draw(
        header(best, ("airline_tweets 0",)), made_up(best, chosen, seeds)
    )  # type: ignore[misc]
    assert tuple(each.held for each in drawing.findings) == held
    assert "1 runs" in drawing.caption
    assert "Fed-Heart with seed 0: a value is 0" in drawing.text
    assert "airline_tweets 0" in drawing.text
    over = drawing.table[drawing.table["dataset"] == "mean over datasets"].set_index(
        "rule"
    )["regret"]
    wanted = np.mean([0.05 * abs(best[name] - chosen[name]) for name in best])
    assert over[study.RULE] == pytest.approx(wanted)
    axes = [ax for sub in drawing.figure.subfigs for ax in sub.axes]
    assert [ax.get_title() for ax in axes if ax.get_title()] == [
        "CIFAR-10",
        "Fed-Heart",
        "MNIST",
    ]
    upper, lower = ({str(line.get_marker()) for line in ax.lines if line.get_label() in labels} for ax, labels in (
        (axes[0], study.RULES), (axes[-1], study.TITLES.values())
    ))  # fmt: skip
    assert (len(upper), len(lower)) == (len(study.RULES), len(best))
    assert not upper & lower  # no mark means a rule above and a dataset below


@pytest.mark.slow
def test_a_real_dataset_is_trained_once_and_its_rows_hold_the_regret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    item = replace(study.ITEM, runs={"heart": TINY}, seeds=1, more_seeds={})
    monkeypatch.setitem(items.REGISTRY, study.NAME, item)
    main([study.NAME, "--train", "--out", str(tmp_path)])
    _, frame = item.read(tmp_path / study.NAME)
    found = study.of_dataset(frame, "heart")
    config = runner.assemble(TINY).config.with_keys(seed=0)
    fresh = regret(config, study.RULES, (0,), tmp_path / "again", progress=False)
    assert found.layers == fresh.layers
    assert found.scores["validation"].tolist() == fresh.scores["validation"].tolist()
    assert found.scores["test"].tolist() == fresh.scores["test"].tolist()
    assert found.scores["held_out"].tolist() == fresh.scores["held_out"].tolist()
    assert found.decisions["cut"].tolist() == fresh.decisions["cut"].tolist()
    assert found.table["regret"].tolist() == pytest.approx(
        fresh.table["regret"].tolist(), nan_ok=True
    )
    with Image.open(tmp_path / f"{study.NAME}.png") as picture:
        assert min(picture.size) > 800
    assert set(pd.read_csv(tmp_path / f"{study.NAME}.csv")["dataset"]) == {
        "heart",
        "mean over datasets",
    }
    assert {path.name for path in (tmp_path / study.NAME).iterdir()} == {
        recipe.rows_file(Path(), "heart", 0).name
    }
