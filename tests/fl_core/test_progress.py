"""Progress: a bar on a terminal, elsewhere a line after each tenth."""

import io
import sys

import matplotlib.pyplot as plt
import pytest

from fl_core import progress
from fl_core.progress import TENTHS, progress_bar


class Terminal(io.StringIO):
    def isatty(self):
        return True


def through(
    total,
    monkeypatch,
    file,
    seconds=0.0,
    **options,
):
    monkeypatch.setattr(sys, "stderr", file)
    monkeypatch.setattr(progress, "SECONDS", seconds)
    with progress_bar(total, "work", "step", **options) as bar:
        bar.set_postfix_str("somewhere")
        for _ in range(total - int(options.get("initial", 0))):
            bar.update()
    return file.getvalue()


@pytest.mark.parametrize(
    ("total", "count"), [(1, 1), (4, 4), (10, 10), (12, 10), (1000, 10), (0, 0)]
)
def test_elsewhere_there_is_a_line_for_each_tenth(total, count, monkeypatch):
    lines = through(total, monkeypatch, io.StringIO()).splitlines()
    assert len(lines) == count
    assert not any("\r" in line for line in lines)
    if count:
        assert "100 %" in lines[-1]
        assert f"{total:,} of {total:,}" in lines[-1]


def test_what_was_done_before_has_no_line(monkeypatch):
    assert (
        len(through(100, monkeypatch, io.StringIO(), initial=50).splitlines())
        == TENTHS // 2
    )


def test_a_terminal_has_a_bar_on_one_line(monkeypatch):
    drawn = through(100, monkeypatch, Terminal())
    assert "100/100" in drawn
    assert "\r" in drawn
    assert drawn.count("\n") == 1


def test_a_notebook_has_a_bar_and_pictures_that_are_drawn_again(
    monkeypatch,
):
    shown = []

    class Handle:
        def display(self, contents, raw, metadata=None):
            shown.append(contents | {"size": (metadata or {}).get("image/png")})

        update = display

    monkeypatch.setattr("IPython.display.DisplayHandle", Handle)
    monkeypatch.setattr(progress, "in_notebook", lambda: True)
    assert "50/50" in through(50, monkeypatch, io.StringIO(), 60.0)
    cell = progress.Cell()
    assert cell.due
    for _ in range(2):
        cell.show_figure(plt.figure(figsize=(3, 2), dpi=100).subplots())
        assert not cell.due
        assert bytes(shown[-1]["image/png"]).startswith(b"\x89PNG")
    first, again = (picture["size"] for picture in shown[-2:])
    assert first == again
    pixels = plt.imread(io.BytesIO(shown[-1]["image/png"])).shape[:2]
    assert (2 * first["height"], 2 * first["width"]) == pytest.approx(pixels, abs=1)
    assert min(first.values()) > 100
    monkeypatch.setattr(progress, "in_notebook", lambda: False)
    cell, before = progress.Cell(), len(shown)
    with pytest.warns(UserWarning, match="notebook's cell only"):
        cell.show_figure(plt.figure().subplots())
    assert not cell.due
    assert len(shown) == before
