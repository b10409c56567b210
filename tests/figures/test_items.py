"""Studies and their views, and files whose bytes the rows determine."""

from dataclasses import replace

import pandas as pd
import pytest
from PIL import Image

from figures import items, names, training
from figures.__main__ import main
from figures.items import Item
from figures.page import read_expectations
from fl_core.algorithms import registry
from tests.conftest import refuses
from tests.figures.conftest import NAME, plotted

FIGURE, TABLE = "toy.fig1", "toy.tableA2"
pytestmark = pytest.mark.filterwarnings("ignore:client")


@pytest.fixture
def study(check, monkeypatch):
    """A study of two runs without a drawing of its own, and two views of it."""
    runs = {name: check.runs[name] for name in ("local", "fedavg")}
    item = replace(check, runs=runs, draw=None)
    views = [
        Item(name, f"Title of {name}", source=NAME, draw=plotted)
        for name in (FIGURE, TABLE)
    ]
    registered = {figure.name: figure for figure in (*views, item)}
    monkeypatch.setattr(items, "REGISTRY", registered)
    return item


def test_a_study_is_drawn_by_its_views_from_its_rows(study, tmp_path, monkeypatch):
    monkeypatch.setattr("figures.page.shown", lambda: {FIGURE})
    figure = items.find(FIGURE)
    assert figure.study is study
    main([FIGURE, "--train", "--out", str(tmp_path)])
    header, frame = figure.read(study.path(tmp_path))
    assert (header["item"], header["seeds"], len(frame)) == (NAME, 2, 8)
    for kind in ("png", "csv", "md"):
        assert [path.stem for path in tmp_path.glob(f"*.{kind}")] == [FIGURE]
    assert len(pd.read_csv(tmp_path / f"{FIGURE}.csv")) == 8
    page = (tmp_path / f"{FIGURE}.md").read_text()
    title, lead, picture, finding, *_, settings = page.split("\n\n")
    assert title == f"# Title of {FIGURE}"
    assert lead.startswith("**Held: ")
    assert FIGURE in picture
    assert read_expectations(f"{finding}\n\n") == [("a line", "held", "so it is")]
    assert "| learning rate | 0.05 |" in settings
    assert f"`{header['command']}`" in settings
    main([NAME, "--train", "--out", str(tmp_path)])
    assert {path.stem for path in tmp_path.glob("*.png")} == {FIGURE, TABLE}
    with refuses(f"{NAME} .*{FIGURE}, {TABLE}"):
        items.redraw(study, study.path(tmp_path), tmp_path)


def test_a_view_waits_for_its_runs(study, tmp_path, monkeypatch):
    monkeypatch.setattr(items, "ROWS", tmp_path)
    some = replace(items.find(TABLE), shown=["fedavg"])
    assert items.find(TABLE).state == study.state == "no rows"
    training.train(study, study.path(), only=["local"])
    assert items.find(TABLE).state == study.state == "2 of 4 runs"
    assert some.state == "no rows"
    training.train(study, study.path())
    assert items.find(TABLE).state == study.state == some.state == "ready"
    items.packed_file(study.path()).write_bytes(b"PAR1")
    assert study.state == "damaged"


def test_equal_rows_give_equal_bytes(study, tmp_path):
    main([FIGURE, "--train", "--out", str(tmp_path)])
    first = {path.name: path.read_bytes() for path in tmp_path.glob(f"{FIGURE}.*")}
    assert len(first) == 3
    other = tmp_path / f"{FIGURE}.png"
    with Image.open(other) as picture:
        picture.load()
    picture.save(other, compress_level=1)  # the same pixels, by another library
    stored = other.read_bytes()
    items.redraw(items.find(FIGURE), study.path(tmp_path), tmp_path)
    assert other.read_bytes() == stored != first[other.name]
    picture.transpose(Image.Transpose.FLIP_TOP_BOTTOM).save(other)
    for damaged in (b"", stored[:100]):
        if damaged:
            other.write_bytes(damaged)
        items.redraw(items.find(FIGURE), study.path(tmp_path), tmp_path)
        again = {path.name: path.read_bytes() for path in tmp_path.glob(f"{FIGURE}.*")}
        assert again == first


def test_names_are_those_of_the_papers():
    assert set(names.ALGORITHMS) <= set(registry()), (
        "a name of an algorithm that there is not"
    )
