"""Layer scheduling's runs, tables and pictures: tiny runs are measured right, and made-up rows give known verdicts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from figures import items, recipe, training
from figures.scheduling import runs as scheduling
from figures.scheduling.runs import (
    HEADS_COLUMN,
    MEAN,
    POOLED,
    SIZES,
    SMALL,
    STUDY,
    UNFREEZE,
    Column,
)
from fl_core import runner
from fl_core.recorder import Recorder

pytestmark = pytest.mark.filterwarnings("ignore:client")
LITTLE = {
    name: Column("large_digits", 120, (1, 2, 3), (0, 1, 2), 1, each.papers)
    for name, each in SIZES.items()
}


@pytest.mark.parametrize("table", [SIZES, {"cifar10": HEADS_COLUMN}])
def test_what_is_reported_is_evaluated(table: dict[str, Column]) -> None:
    for name, column in table.items():
        assert all(done % column.every == 0 for done in column.at)
        assert max(column.unfreeze) < column.at[0] or name in ("mnist", "cifar10")
        times = [a / b for a, b in zip(column.at, column.papers, strict=True)]
        thaws = [a / b for a, b in zip(column.unfreeze[1:], UNFREEZE[1:], strict=True)]
        assert len({round(each, 9) for each in (*times, *thaws)}) == 1, "one factor"


@pytest.fixture(scope="module")
def little(tmp_path_factory: pytest.TempPathFactory) -> tuple[items.Item, Path]:
    base = SMALL.with_keys(clients=3, participation=0.7, batch_size=16)
    made = scheduling.recipes(LITTLE, base) | scheduling.over_heads(
        LITTLE["cifar10"], base
    )
    made |= scheduling.over_thawing("cifar100", LITTLE["cifar100"], base)
    item = replace(STUDY, runs=made, seeds=1, more_seeds={})
    folder = tmp_path_factory.mktemp("scheduling") / scheduling.NAME
    only = [
        "mnist.fedavg",
        "mnist.vanilla",
        "cifar10.anti_fedrep",
        "cifar10.vanilla_fedrod",
        "cifar100.anti_early",
    ]
    training.train(item, folder, only=only, progress=False)
    return item, folder


def test_a_run_is_measured_when_it_is_reported(
    little: tuple[items.Item, Path],
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
    assert "mnist.anti 0" in header["missing"]


@pytest.mark.slow
def test_a_tiny_study_is_drawn_and_says_what_is_missing(
    little: tuple[items.Item, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    item, folder = little
    monkeypatch.setitem(items.REGISTRY, item.name, item)
    monkeypatch.setitem(scheduling.COLUMNS, scheduling.NAME, LITTLE)
    drawing = items.redraw(items.find("scheduling.table2"), folder, folder.parent)
    assert "34 runs" in drawing.caption
    assert "mnist.anti 0" in drawing.text
    assert {finding.held for finding in drawing.findings} == {None}
    assert (
        drawing.table["seeds"].sum() == 3 + 3
    )  # FedAvg and Vanilla on one dataset, at three times
    with Image.open(folder.parent / "scheduling.table2.png") as picture:
        assert min(picture.size) > 240
