"""Figures: listed, redrawn from stored rows without training, in agreement with them, and made anew."""

from __future__ import annotations

import json
import re
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from pyarrow import parquet

from figures import items, layerwise, packing
from figures.__main__ import main
from figures.drawing import DPI
from figures.page import read_expectations, shown
from tests.figures.conftest import check_picture

ITEMS = sorted(items.REGISTRY)
READY = [
    name
    for name in ITEMS
    if items.REGISTRY[name].draw and items.REGISTRY[name].state != "no rows"
]
LONG = ("decision.tuned",)
"""What takes over ten seconds to draw."""


def drawings() -> list[Any]:
    """What has rows; of several that one function draws, and of a paper's beyond the first, the others are slow."""
    parameters, functions, papers = [], set(), Counter[str]()
    for name in READY:
        draw = items.REGISTRY[name].draw
        function, paper = (
            draw.func if isinstance(draw, partial) else draw,
            name.partition(".")[0],
        )
        quick = function not in functions and not papers[paper] and name not in LONG
        papers[paper] += quick
        functions.add(function)
        parameters.append(pytest.param(name, marks=[] if quick else [pytest.mark.slow]))
    return parameters


HEART, LONGER = "player_fl.heart_sensitivity", "fedpft.longer"


@pytest.mark.parametrize("name", drawings())
@pytest.mark.usefixtures("no_training", "read_once")
def test_redraw_from_stored_rows_gives_what_is_committed(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([name, "--out", str(tmp_path)])
    said = capsys.readouterr().out
    page = (tmp_path / f"{name}.md").read_text()
    assert page == (items.PICTURES / f"{name}.md").read_text()
    if "## The picture" in page:
        check_picture(tmp_path / f"{name}.png", least=300)
        with Image.open(tmp_path / f"{name}.png") as picture:
            assert picture.info["dpi"] == pytest.approx((DPI, DPI), abs=0.1)
    assert (items.PICTURES / f"{name}.png").is_file() or name not in shown()
    findings = read_expectations(page)
    for expected, verdict, measured in findings:
        assert re.search(
            rf"\n{verdict}\b.*{re.escape(f': {expected}. Measured: {measured}.')}\n",
            said,
        )
    header, _ = items.find(name).read(items.find(name).path())
    assert findings or header.get("missing")
    assert f"`{header['command']}`" in said
    named = re.search(
        r"^\| seeds \| (?:\d+-)?(\d+) \|$", page, re.MULTILINE
    )  # a view may show fewer runs
    assert header["seeds"] == 1 or (named and 1 <= int(named[1]) <= header["seeds"])


@pytest.mark.parametrize(
    ("curve", "threshold", "expected"),
    [
        ([1, 1.1, 2], 1.2, "b"),
        ([1, 1.3, 2], 1.2, "a"),
        ([1, 1.0, 1.0], 1.2, "b"),
        ([1, np.nan, 2], 1.2, "no decision"),
    ],
)
def test_cuts(curve: list[float], threshold: float, expected: str) -> None:
    counts = layerwise.cuts(
        pd.DataFrame([curve, curve], columns=["a", "b", "c"]), [threshold]
    )
    assert counts.loc[threshold].to_dict() == {
        name: 2 * (name == expected) for name in counts.columns
    }
    assert expected in counts.columns


@pytest.mark.slow
def test_train_makes_rows_of_every_run_and_seed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    item = items.find(HEART)
    before = items.packed_file(item.path()).read_bytes()
    main([HEART, "--train", "--seeds", "2", "--out", str(tmp_path)])
    said = capsys.readouterr().out
    assert f"python -m figures {HEART} --train --seeds 2" in said
    assert re.search(r"took \d+\.\d s", said)
    header, frame = item.read(item.path(tmp_path))
    assert items.packed_file(item.path()).read_bytes() == before
    assert frame.groupby(["run", "seed"]).size().eq(16).all()
    assert set(zip(frame["run"], frame["seed"], strict=True)) == {
        (r, s) for r in ("figure", "default") for s in (0, 1)
    }
    assert header["runs"]["figure"]["config"]["lr"] == 7.5e-3
    assert "data_root" not in header["runs"]["figure"]["config"]
    assert (tmp_path / f"{HEART}.png").is_file()
    stored = item.read(item.path())[1]
    same = frame.merge(stored, on=["run", "seed", "client", "layer"])
    assert len(same) == len(frame)
    # the last bits of a sum are the processor's
    np.testing.assert_allclose(
        same["value_x"].astype(float), same["value_y"].astype(float), rtol=1e-3
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["player_fl.heart_sensitivty"], "mean 'player_fl.heart_sensitivity'"),
        ([HEART, "--seeds", "2"], "--seeds"),
        ([HEART, "--train", "--seeds", "0"], "at least 1"),
        ([HEART, "--budget", "3"], "--budget"),
        ([LONGER, "--only", "fedper"], "--only"),
        ([LONGER, "--device", "cuda"], "--device"),
        ([LONGER, "--train", "--device", "gpu"], "device must be"),
        ([LONGER, "--train", "--data-root", "nowhere"], "/nowhere"),
        (["list", "fedr"], "mean 'fedra'"),
        (["all", "--seeds", "2"], "--seeds"),
        (["gallery", "fedra"], "one name"),
        (["gallery", "--pack"], "--pack"),
        (["all", "--train"], "--train"),
        (["gallery", "--budget", "3"], "--budget"),
        (["all", "--device", "cuda"], "--device"),
        (["fedra.fig1"], "schematic"),
        (["fedpft.table2"], "not run"),
        (["fedra.fig11"], "mean 'fedra.fig1'"),
        (["gallery", "--train", "--seeds", "3"], "--seeds"),
    ],
)
def test_a_request_that_cannot_be_met_exits_with_2_and_writes_nothing(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([*arguments, "--out", str(tmp_path)])
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


@pytest.mark.parametrize("name", ["scorecard", "gallery", "all", HEART])
def test_a_folder_that_cannot_be_written_to_is_one_line(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as stopped:
        main([name, "--out", str(tmp_path / "file" / "below")])
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--out" in line


def test_stored_rows_name_no_machine() -> None:
    files = [
        path
        for path in sorted(items.ROWS.rglob("*.parquet"))
        if packing.KEY in (parquet.read_metadata(path).metadata or {})
    ]
    assert len(files) > 20
    for path in files:
        for header in packing.headers(path):
            text = json.dumps(header)
            assert "/home/" not in text, path
            assert "data-root" not in text, path
            about = header.get("about", header.get("runs", {}))
            assert "/" not in json.dumps(about), path
