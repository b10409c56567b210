"""Figures: listed, redrawn from stored rows without training, in agreement with them, and made anew."""

import json
import re

import numpy as np
import pytest
import torch
from PIL import Image
from pyarrow import parquet

from figures import items, packing
from figures.__main__ import main
from figures.drawing import DPI
from figures.page import read_expectations, shown
from tests.conftest import every_other
from tests.figures.conftest import check_picture

ITEMS = sorted(items.REGISTRY)
READY = [
    name
    for name in ITEMS
    if items.REGISTRY[name].draw and items.REGISTRY[name].state != "no rows"
]


HEART, LONGER = "player_fl.heart_sensitivity", "fedpft.longer"


@pytest.mark.parametrize("name", every_other(READY, of=6))
@pytest.mark.usefixtures("no_training", "read_once")
def test_redraw_from_stored_rows_gives_what_is_committed(name, tmp_path, capsys):
    main([name, "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    page = (tmp_path / f"{name}.md").read_text()
    assert page == (items.PICTURES / f"{name}.md").read_text()
    if "## The picture" in page:
        check_picture(tmp_path / f"{name}.png")
        with Image.open(tmp_path / f"{name}.png") as picture:
            assert picture.info["dpi"] == pytest.approx((DPI, DPI), abs=0.1)
    assert (items.PICTURES / f"{name}.png").is_file() or name not in shown()
    findings = read_expectations(page)
    for expected, verdict, measured in findings:
        assert re.search(
            rf"\n{verdict}\b.*{re.escape(f': {expected}. Measured: {measured}.')}\n",
            printed,
        )
    header, _ = items.find(name).read(items.find(name).path())
    assert findings or header.get("missing")
    assert f"`{header['command']}`" in printed
    named = re.search(
        r"^\| seeds \| (?:\d+-)?(\d+) \|$", page, re.MULTILINE
    )  # a view may show fewer runs
    assert header["seeds"] == 1 or (named and 1 <= int(named[1]) <= header["seeds"])


@pytest.mark.slow
def test_train_makes_rows_of_every_run_and_seed(tmp_path):
    item = items.find(HEART)
    before = items.packed_file(item.path()).read_bytes()
    main([HEART, "--train", "--seeds", "2", "--out", str(tmp_path)])
    header, frame = item.read(item.path(tmp_path))
    assert items.packed_file(item.path()).read_bytes() == before
    sizes = frame.groupby(["run", "seed"]).size()
    assert len(sizes) == 4
    assert sizes.eq(16).all()
    assert header["runs"]["figure"]["config"]["lr"] == 7.5e-3
    assert "data_root" not in header["runs"]["figure"]["config"]
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
        (["player_fl.heart_sensitivty"], "mean player_fl.heart_sensitivity"),
        (["player_f"], "mean player_fl"),
        (["FEDRA.tabel1"], "mean fedra.table1, "),
        (["unknown_name"], "got 'unknown_name'. See python -m figures list."),
        ([HEART, "--budget", "3"], "--budget"),
        ([LONGER, "--train", "--device", "gpu"], "device must be"),
        pytest.param(
            [LONGER, "--train", "--device", "cuda"],
            "device must be one that works here: cpu; got 'cuda'",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU"),
        ),
        ([LONGER, "--train", "--data-root", "nowhere"], "/nowhere"),
        (["decision.tuned"], "Commit 44010171 has it"),
        (["gpu", "--budget", "-1"], "--budget must be at least 0 minutes; got -1"),
        (["gpu", "--budget", "nan"], "--budget must be at least 0 minutes; got nan"),
        (["list", "fedr"], "mean 'fedra'"),
        (["gallery", "fedra"], "one name"),
        (["fedra.fig1"], "schematic"),
        (["fedra.fig11"], "mean fedra.fig1"),
    ],
)
def test_a_request_that_cannot_be_met_exits_with_2_and_writes_nothing(
    arguments, said, tmp_path, capsys
):
    with pytest.raises(SystemExit) as stopped:
        main([*arguments, "--out", str(tmp_path)])
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


def test_stored_rows_name_no_machine():
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
