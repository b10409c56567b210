"""FedPFT's pictures: what is dealt and sent is counted right, and a small study is measured, kept and drawn."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torch import nn

from diagnostics.representation.embedding import Pool, embed
from figures import items, planes, recipe
from figures.fedpft import (
    class_shares as fedpft_dealt,
    counts as fedpft_counts,
    insides as fedpft,
)
from fl_core import data, rows
from fl_core.algorithms.fedpft import ATTENTION
from fl_core.data.partitions.papers import label_shares
from fl_core.models.extended import PROMPTS, Prompted, Transform
from fl_core.seeds import torch_seeded

pytestmark = pytest.mark.filterwarnings("ignore:client")
CLASSES = ("automobile", "cat", "dog", "truck")


def images(path: Path, n: int, side: int, classes: tuple[str, ...]) -> str:
    """Coloured noise, a little brighter in another place for each class."""
    generator = np.random.default_rng(0)
    y = np.arange(n) % len(classes)
    x = generator.integers(0, 200, (n, side, side, 3))
    x[np.arange(n), y % side] += 50
    np.savez(path, x=x.astype(np.uint8), y=y, classes=np.array(classes))
    return str(path)


def drawn(name: str, stored: Path, out: Path) -> items.Drawing:
    drawing = items.redraw(items.find(name), stored, out)
    with Image.open(out / f"{name}.png") as picture:
        assert min(picture.size) > 240
        assert len(picture.convert("RGB").getcolors(1 << 24) or []) > 30
    assert len(pd.read_csv(out / f"{name}.csv")) == len(drawing.table)
    return drawing


def test_labels_alone_are_dealt_as_the_partition_deals_samples(tmp_path: Path) -> None:
    y = np.arange(3000) % 10
    np.savez(
        tmp_path / "own.npz",
        x=np.zeros((3000, 1), np.float32),
        y=y,
        classes=np.array([*"abcdefghij"]),
    )
    chosen: dict[str, Any] = {
        "partition": "fedpft_dirichlet",
        "clients": 6,
        "alpha": 0.5,
        "samples_per_client": 70,
    }
    held = data.load(str(tmp_path / "own.npz"), seed=3, **chosen).class_counts("train")
    assert (fedpft_dealt.dealt(10, 6, 70, 0.5, 3).to_numpy() == held.to_numpy()).all()


@pytest.mark.parametrize(("classes", "alpha"), [(2, 1.0), (10, 0.1), (50, 0.5)])
def test_entropy_expected_is_the_mean_over_many_draws(
    classes: int, alpha: float
) -> None:
    shares = label_shares(classes, 20_000, alpha, 0)
    entropy = -(shares * np.log(np.where(shares > 0, shares, 1.0))).sum(axis=1)
    assert fedpft_dealt.entropy_expected(classes, alpha) == pytest.approx(
        entropy.mean(), rel=0.01
    )


def test_stored_rows_of_figure_4_deal_as_now(tmp_path: Path) -> None:
    item = fedpft_dealt.FIG4
    _, frame = item.read(item.path())
    for run, config in item.runs.items():
        classes, alpha = int(run.partition(" ")[0]), config.data.alpha or 0.0
        kept = fedpft_dealt.counted(
            frame[frame["run"] == run], fedpft_dealt.CLIENTS, classes
        )
        assert (
            (
                kept
                == fedpft_dealt.dealt(
                    classes, fedpft_dealt.CLIENTS, fedpft_dealt.SAMPLES, alpha, 0
                )
            )
            .all()
            .all()
        )
        assert (kept.sum(axis=1) == fedpft_dealt.SAMPLES).all()
    drawing = drawn(item.name, item.path(), tmp_path)
    assert [finding.held for finding in drawing.findings] == [True, True]
    assert drawing.table["draws"].eq(3 * fedpft_dealt.CLIENTS).all()


def test_modules_have_the_published_numbers_and_the_message_is_their_sum(
    tmp_path: Path,
) -> None:
    file = images(tmp_path / "hundred.npz", 600, 32, tuple(str(k) for k in range(100)))
    item = fedpft_counts.TABLE10
    path = tmp_path / "rows.parquet"
    runs = {name: config.with_keys(dataset=file) for name, config in item.runs.items()}
    items.train(replace(item, runs=runs), path, command="typed", progress=False)
    frame = item.read(path)[1]
    counted = frame.pivot(index=["run", "layer"], columns="metric", values="value")
    states = {
        "extractor": 1_235_401,
        "transform": 263_168,
        "classifier": 25_700,
        "projection": 32_896,
    }
    for part, size in states.items():
        assert counted.loc[("resnet8.fedpft", part), "numbers"] == size
    assert counted.loc[("resnet8.fedpft", "extractor"), "parameters"] == 1_232_704
    assert counted.loc[("resnet8.fedpft", ""), "numbers_sent"] == sum(states.values())
    assert counted.loc[("resnet10.fedavg", ""), "numbers_sent"] == 4_911_564 + 51_300
    assert counted.loc[("resnet10.fedavg", ""), "bytes_down"] > 4 * 4_900_000
    stored = fedpft_counts.TABLE10.read(fedpft_counts.TABLE10.path())[1]
    same = ["run", "layer", "metric", "value"]
    pd.testing.assert_frame_equal(
        stored[same], frame[same]
    )  # CIFAR-100's sizes, with whatever images
    drawing = drawn(item.name, path, tmp_path)
    assert [finding.held for finding in drawing.findings] == [True, False]
    off = drawing.table[drawing.table["printed"] != drawing.table["counted_as_printed"]]
    assert off[["model", "printed", "counted_as_printed"]].to_numpy().tolist() == [
        ["resnet8", "1.27M", "1.26M"],
        ["resnet8", "23.14", "23.48"],
    ]


def prompted() -> Prompted:
    with torch_seeded(0):
        tokens = {
            name: torch.randn(k, 8) for name, k in zip(PROMPTS, (2, 5), strict=True)
        }
        return Prompted(nn.Linear(3, 8), nn.Linear(8, 4), Transform(8), tokens, True)


def test_the_classifier_takes_in_what_passed_the_prompts_asked_for() -> None:
    model, x = prompted(), torch.randn(6, 3)
    for name in PROMPTS:
        wanted = model.head(model.transform(model.body(x), getattr(model, name)))
        torch.testing.assert_close(fedpft.behind(model, name)(x), wanted)
    assert model.contrast_prompts is not None  # the model itself stays as it was
    kinds = dict(fedpft._kinds({"a": model}, fedpft.FEDPFT))
    assert list(kinds) == list(PROMPTS)
    assert list(dict(fedpft._kinds({"a": model}, "personal_head"))) == [PROMPTS[0]]
    assert list(dict(fedpft._kinds({"a": nn.Linear(3, 4)}, "fedavg"))) == [""]


def pooled(n: int = 40) -> Pool:
    generator = np.random.default_rng(0)
    classes = np.array([CLASSES[k % 4] for k in range(n)], dtype=object)
    clients = np.array([f"client_{k // 20}" for k in range(n)], dtype=object)
    x = generator.normal(size=(n, 5)) + 4 * (np.arange(n) % 4)[:, None]
    return Pool(x.astype(np.float32), classes, clients, np.arange(n) % 20)


def test_planes_come_back_from_rows_as_they_were() -> None:
    given = pooled()
    named = {"layer": PROMPTS[0], "seed": 0, "run": "some"}
    frame = rows.frame(fedpft._features(given, True, 0, named))
    found, wanted = planes.plane(frame, "some"), embed(given, seed=0)
    columns = ["client", "class", "sample", "x", "y"]
    order = ["client", "sample"]
    pd.testing.assert_frame_equal(
        found[columns].sort_values(order, ignore_index=True),
        wanted[columns].sort_values(order, ignore_index=True),
        check_dtype=False,
    )
    assert found.attrs == wanted.attrs
    assert not set(rows.frame(fedpft._features(given, False, 0, named))["metric"]) & {
        planes.X,
        planes.Y,
    }


def test_class_distance_by_hand() -> None:
    x = np.array([[0.0, 0.0], [0.0, 2.0], [3.0, 1.0], [3.0, 1.0], [0.0, 5.0]])
    given = Pool(
        x,
        np.array(["cat", "cat", "dog", "dog", "ship"], object),
        np.array(["a"] * 5, object),
        np.arange(5),
    )
    # means (0, 1), (3, 1), (0, 5): distances 3, 4 and 5
    assert fedpft.class_distance(given, ("cat", "dog")) == pytest.approx(3 / 4)
    assert fedpft.class_distance(given, ("cat", "truck")) is None
    alike = replace(given, x=np.zeros_like(x))
    assert fedpft.class_distance(alike, ("cat", "dog")) is None
    found = rows.frame(fedpft._features(given, False, 0, {})).set_index(
        ["metric", "variant"]
    )
    assert math.isnan(found.loc[(fedpft.SIMILAR, "automobile and truck"), "value"])
    assert "no samples" in found.loc[(fedpft.SIMILAR, "automobile and truck"), "status"]
    assert "one class or client" in found.loc[("silhouette_client", ""), "status"]


def attention(table: list[list[float]]) -> pd.DataFrame:
    return rows.frame(
        rows.row(
            ATTENTION,
            value,
            client="a",
            layer=PROMPTS[0],
            variant=f"sample {k + 1}>{key}",
        )
        for k, row in enumerate(table)
        for key, value in zip(
            ("feature", "prompt 1", "prompt 2", "prompt 3"), row, strict=True
        )
    )


def test_attention_is_summed_up_by_hand() -> None:
    def summed(table: list[list[float]]) -> list[float]:
        return [each["value"] for each in fedpft._attended(attention(table), {})]

    assert summed([[0.25] * 4] * 3) == pytest.approx([0.25, 0.0, 1.0])
    found = summed([[1.0, 0.0, 0.0, 0.0], [0.4, 0.6, 0.0, 0.0]])
    row = -(0.4 * math.log(0.4) + 0.6 * math.log(0.6)) / math.log(4)
    assert found == pytest.approx([0.7, (0.3 + 0.0 + 0.0) / 3, row / 2])
    assert fedpft.weights(attention([[0.1, 0.2, 0.3, 0.4]])).to_numpy().tolist() == [
        [0.1, 0.2, 0.3, 0.4]
    ]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A round of some of the runs, on noise."""
    folder = tmp_path_factory.mktemp("study")
    tiny: dict[str, Any] = {
        "dataset": images(folder / "noise.npz", 600, 12, CLASSES), "clients": 3, "samples_per_client": 40,
        "rounds": 1, "epochs": 2, "batch_size": 20, "eval_every": 1, "checkpoint_every": 1,
    }  # fmt: skip
    wanted = ("fedavg", "no_contrast", fedpft.FEDPFT, fedpft.MILD)
    runs = {}
    for name, config in fedpft.RUNS.items():
        options = {**config.federation.options} | (
            {"feature_epochs": 1}
            if "feature_epochs" in config.federation.options
            else {}
        )
        runs[name] = config.with_keys(options=options, **tiny)
    path = folder / fedpft.NAME
    recipe.train(
        replace(fedpft.STUDY, runs=runs, more_seeds={}),
        path,
        only=wanted,
        command="typed",
        progress=False,
    )
    return path


@pytest.mark.slow
def test_the_study_measures_every_run(made: Path) -> None:
    header, frame = fedpft.STUDY.read(made)
    assert [each for each in header["missing"] if each.endswith(" 0")] == [
        f"{name} 0" for name in ("fedper", "fedcac", "no_alternating", "personal_head")
    ]
    many = frame.groupby(["run", "metric"]).size().unstack(fill_value=0)
    assert (many["accuracy"] == 3).all()
    assert (many[fedpft.COUNT] == 12).all()
    assert many.loc[:, planes.X].to_dict() == {
        "fedavg": 24,
        "fedpft": 48,
        fedpft.MILD: 0,
        "no_contrast": 24,
    }
    samples = 8  # a client's test images, fewer than the 20 that are looked at
    for run in (fedpft.FEDPFT, fedpft.MILD):
        assert many.loc[run, ATTENTION] == samples * (11 + 21)
        assert many.loc[run, fedpft.SPREAD] == 2 * 3
    assert frame.loc[frame["metric"] == ATTENTION, "client"].unique().tolist() == [
        "client_0"
    ]
    places = [planes.plane(frame, fedpft.FEDPFT, kind) for kind in PROMPTS]
    assert not np.allclose(places[0][["x", "y"]], places[1][["x", "y"]])
    pd.testing.assert_series_equal(places[0]["class"], places[1]["class"])
    gone = frame[frame["status"] != "ok"]
    assert set(gone["metric"]) <= {fedpft.SIMILAR}  # three clients may lack a class


@pytest.mark.parametrize(("name", "open_"), [("fig2", 2), ("fig3", 3), ("fig6", 2)])
@pytest.mark.slow
def test_pictures_of_one_seed_claim_nothing_and_say_what_is_missing(
    name: str, open_: int, made: Path, tmp_path: Path
) -> None:
    drawing = drawn(f"fedpft.{name}", made, tmp_path)
    assert [finding.held for finding in drawing.findings] == [None] * open_
    assert "No order" in drawing.caption
    assert "fedper 0" in drawing.caption
    assert "40 training images" in drawing.caption
