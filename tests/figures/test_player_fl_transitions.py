"""PLayer-FL's Table A.2: decisions by threshold beside the lists, from made-up sensitivities and from tiny runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from diagnostics.decide import select
from figures import items
from figures.__main__ import main
from figures.layerwise import SENSITIVITY
from figures.player_fl import transitions
from figures.player_fl.runs import ABSENT
from fl_core import rows
from fl_core.defaults import resolve

LAYERS = {
    "fashion_mnist": ("conv1", "conv2", "conv3", "fc1", "fc2"),
    "heart": ("fc1", "fc2", "fc3", "fc4"),
}


def sensitivities(dataset: str, seeds: int, ratios: list[float]) -> pd.DataFrame:
    """Two clients with 10 and 30 training samples, each with S in these ratios from layer to layer."""
    curve = np.cumprod([1.0, *ratios]).tolist()
    made = [
        rows.row(SENSITIVITY, s, run=dataset, seed=seed, client=client, layer=layer, n_train=n, variant="training")
        for seed in range(seeds)
        for client, n in (("a", 10), ("b", 30))
        for layer, s in zip(LAYERS[dataset], curve, strict=True)
    ]  # fmt: skip
    return rows.frame(made)


@pytest.mark.parametrize(
    ("dataset", "ratios"),
    [("fashion_mnist", [1.01, 1.0, 1.22, 5.9]), ("heart", [1.76, 1.98, 2.9])],
)
def test_decisions_are_the_first_ratio_above_each_threshold(
    dataset: str, ratios: list[float]
) -> None:
    found = transitions.decisions(sensitivities(dataset, 3, ratios), dataset)
    layers = LAYERS[dataset]
    for threshold in select.THRESHOLDS:
        above = [k for k, ratio in enumerate(ratios) if ratio > threshold]
        assert found.usual(threshold) == (
            layers[above[0] if above else len(ratios) - 1],
            3,
        )
    assert found.usual(transitions.JUMP) == (layers[int(np.argmax(ratios))], 3)
    wanted = {
        "fashion_mnist": ("conv3", "conv3", "conv3"),
        "heart": ("fc2", "fc2", "fc1"),
    }[dataset]
    assert tuple(found.lists[place] for place in transitions.LISTS) == wanted
    assert found.layers_later(wanted[0]) == 0
    assert found.layers_later(layers[0]) == -layers.index(wanted[0])
    assert found.layers_later("no decision") is None


def test_a_missing_value_decides_nothing() -> None:
    frame = sensitivities("heart", 2, [1.5, 1.5, 1.5])
    frame.loc[(frame["seed"] == 1) & (frame["layer"] == "fc2"), "value"] = np.nan
    found = transitions.decisions(frame, "heart")
    assert found.counts.loc[1.2, "no decision"] == 1
    assert found.usual(1.2) == ("fc1", 1)


def test_drawn_with_published_beside_decided() -> None:
    frame = pd.concat([sensitivities("fashion_mnist", 3, [1.01, 1.0, 1.22, 5.9]),
                       sensitivities("heart", 3, [1.1, 1.98, 2.9])])  # fmt: skip
    config = {
        name: {"config": resolve(transitions.ITEM.runs[name]).to_json()}
        for name in LAYERS
    }
    drawing = items.find(transitions.NAME).draw(
        {"runs": config, "missing": ["cifar10 0"]}, frame
    )  # type: ignore[misc]
    texts = [text.get_text() for text in drawing.figure.axes[0].texts]
    assert "conv3  3/3" in texts
    assert texts.count("fc2") == 2  # heart's in the table and in the first list
    table = drawing.table
    one = table[
        (table["threshold"] == 1.2)
        & (table["dataset"] == "fashion_mnist")
        & (table["layer"] == "conv3")
    ]
    assert (one["measured"].item(), one["published"].item()) == (3, "conv3")
    ratio = table[
        (table["quantity"] == "sensitivity / layer before") & (table["layer"] == "fc1")
    ].iloc[0]
    assert (ratio["measured"], ratio["published"]) == (
        pytest.approx(1.22),
        pytest.approx(1.22),
    )
    assert set(
        table.loc[table["status"].str.contains("not available"), "dataset"]
    ) == set(ABSENT)
    printed, same, every, most, *_ = drawing.findings
    assert same.held is None  # three seeds
    assert "Fashion-MNIST in 0 of 3" in same.measured
    assert printed.held is False  # the paper's own curves; whatever was measured
    assert every.held is None  # not all datasets are there
    assert "at best 2 of 2" in every.measured or "at best 1 of 2" in every.measured
    assert most.expected.startswith("the default threshold 1.2 ")
    assert "1 runs" in drawing.caption
    assert "cifar10 0" in drawing.text
    assert "too small" not in every.incomparable  # neither of these two datasets is
    few = frame[frame["seed"] < 2]
    drawing = items.find(transitions.NAME).draw({"runs": config, "missing": []}, few)  # type: ignore[misc]
    assert {finding.held for finding in drawing.findings[1:]} == {None}


def test_the_papers_own_curves_ask_for_different_thresholds() -> None:
    limits = transitions.thresholds()
    assert len(limits) == 7
    assert tuple(limits.loc["heart"]) == (1.76, 1.98)
    assert tuple(limits.loc["fashion_mnist"]) == (1.01, 1.22)
    assert (limits["low"] < limits["high"]).all(), "each alone has a threshold"


@pytest.mark.slow
def test_trained_on_a_real_dataset_and_drawn(tmp_path: Path) -> None:
    main(
        [
            transitions.NAME,
            "--train",
            "--only",
            "heart",
            "--seeds",
            "1",
            "--out",
            str(tmp_path),
        ]
    )
    with Image.open(tmp_path / f"{transitions.NAME}.png") as picture:
        assert min(picture.size) > 300
    table = pd.read_csv(tmp_path / f"{transitions.NAME}.csv")
    ratios = table[table["quantity"] == "sensitivity / layer before"]
    assert list(ratios["layer"]) == ["fc2", "fc3", "fc4"]
    assert (ratios["measured"] > 1).all()
