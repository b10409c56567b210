"""Names of clients, classes and columns that others chose do nothing in reports, tables and file names."""

import csv
import io
import re
from pathlib import Path

import pandas as pd
import pytest
import torch
from matplotlib.figure import Figure

from diagnostics.plots.page import Page
from figures.page import markdown
from fl_core.display import csv_bytes, in_csv, in_file_name
from fl_core.run.exported_model import Predictions
from tests.diagnostics.made import Tree

ROOT = Path(__file__).parents[2]
NAMES = [
    "<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "=cmd()", "+cmd()", "-cmd()", "@cmd()", "\t=cmd()",
    "../x", "/etc/x", "a\x00b", "a\nb", "a\r\n\r\n## b", "a|b", "\x1b[31mred", "\u202eabc", "\u2028=cmd()", " =cmd()",
]  # fmt: skip
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2028\u2029]")


@pytest.mark.parametrize("name", NAMES)
def test_a_page_shows_names_as_text(name):
    page = Page(name, name)
    figure = Figure()
    page.figure(figure, name, alt=name)
    page.table(pd.DataFrame({name: [name]}, index=pd.Index([name], name=name)), name)
    tree = Tree(page.html())
    assert not CONTROLS.search(page.html())
    assert "script" not in {tag for tag, _ in tree.tags}
    (image,) = tree.all("img")
    assert set(image) == {"src", "width", "style", "alt"}


def csv_of(name):
    """Return a table of predictions of a class of this name."""
    logits = torch.tensor([[2.0, -1.0], [2.0, -1.0]])
    predictions = Predictions((name, "0"), (name, "other"), logits)
    return csv_bytes(predictions.frame()).decode()


@pytest.mark.parametrize("name", NAMES)
def test_a_table_of_predictions_holds_no_formula_and_no_further_lines(
    name,
):
    lines = list(csv.reader(io.StringIO(csv_of(name))))
    assert [len(line) for line in lines] == [4, 4, 4]
    for cell in [cell for line in lines for cell in line]:
        assert not CONTROLS.search(cell)
        assert "\n" not in cell
        assert cell.lstrip()[:1] not in tuple("=+-@")
    assert lines[1][1] == lines[2][1] == in_csv(name)


SPLIT = {
    "c;@SUM(1)": "c;'@SUM(1)",
    'c;"=cmd()&"': 'c;"\'=cmd()&"',
    "c; =cmd()": "c; '=cmd()",
    "c;＝cmd()": "c;'＝cmd()",
    "=a;+b;=c": "'=a;'+b;'=c",
    "c\t=cmd()": "c\\t=cmd()",
    "-1;+2": "-1;+2",
}


@pytest.mark.parametrize("name", SPLIT)
def test_a_table_holds_no_formula_after_another_separator(name):
    text = csv_of(name)
    assert "\t" not in text
    column = [line[1] for line in csv.reader(io.StringIO(text))]
    assert column == ["predicted", *[SPLIT[name]] * 2]
    for line in csv.reader(io.StringIO(text), delimiter=";"):
        assert all(cell.strip(' "')[:1] not in tuple("=@＝＋－＠") for cell in line)


def test_every_table_is_written_by_the_one_that_escapes():
    writers = [
        path.relative_to(ROOT).as_posix()
        for folder in ("fl_core", "diagnostics", "fedlayers", "figures", "notebooks")
        for path in (ROOT / folder).rglob("*.py")
        if ".to_csv(" in path.read_text(encoding="utf-8")
    ]
    # the other one is a line of a script that check writes
    assert sorted(writers) == ["fl_core/data/table/prepare.py", "fl_core/display.py"]


@pytest.mark.parametrize("name", NAMES)
def test_a_markdown_table_keeps_its_cells(name):
    lines = markdown({"client": [name, "b"], name: [1, "[x](y.md)"]}).split("\n")
    assert len(lines) == 4
    for line in lines:
        assert not CONTROLS.search(line)
        assert len(re.findall(r"(?<!\\)\|", line)) == 3
        assert not re.search(r"<[a-z/]", line)
    assert lines[3].endswith("[x](y.md) |")


@pytest.mark.parametrize("name", [*NAMES, "..", ".", "x" * 300, "ä" * 300])
def test_a_file_name_stays_in_its_folder(name, tmp_path):
    path = tmp_path / f"{in_file_name(name)}.png"
    path.write_bytes(b"")
    assert path.resolve().parent == tmp_path
    assert not path.name.startswith("-")


def test_file_names_differ_where_names_do():
    names = [*NAMES, "x", "..x", "_x", "../../x", "x" * 100, "x" * 101]
    assert len({in_file_name(name).lower() for name in names}) == len(names)
