"""The catalogue of the papers' figures and tables, its list, and everything drawn at once."""

import re
from collections import Counter
from dataclasses import replace

import matplotlib.pyplot as plt
import pytest

from figures import catalogue, gallery, items
from figures.__main__ import main
from figures.papers import PAPERS
from tests.figures.conftest import plotted

PUBLISHED = catalogue.published()
NUMBERED = rf"({'|'.join(PAPERS)})\.(fig|table|sec)(A?\d+|K)"


def test_each_name_stands_once_and_papers_stand_in_order():
    assert max(Counter(entry.name for entry in PUBLISHED).values()) == 1
    assert all(
        re.fullmatch(NUMBERED, entry.name) and entry.title for entry in PUBLISHED
    )
    assert tuple(dict.fromkeys(entry.paper for entry in PUBLISHED)) == PAPERS
    papers = [entry.paper for entry in PUBLISHED]
    assert papers == sorted(papers, key=PAPERS.index)


def test_registered_figures_of_a_paper_are_in_the_catalogue():
    entries = {entry.name: entry for entry in PUBLISHED}
    begins = re.compile(rf"({'|'.join(PAPERS)})\.(fig|table|sec)")
    for name, item in items.REGISTRY.items():
        if begins.match(name):
            assert name in entries, f"{name} is not in the catalogue"
            assert not entries[name].note, f"{name} is registered and has a reason"
        assert item.study.name in items.REGISTRY  # of a view, its source


def test_a_figure_that_another_shows_is_drawn_by_that():
    entries = {entry.name: entry for entry in PUBLISHED}
    also = [(item, name) for item in items.REGISTRY.values() for name in item.also]
    assert max(Counter(name for _, name in also).values()) == 1
    for item, name in also:
        assert name not in items.REGISTRY
        assert catalogue.drawn(name) is item
        _, state, title = entries[name].told()
        assert (state, item.name in title) == (item.state, True)


def listed(capsys, *arguments):
    main(["list", *arguments])
    return [re.split(r" {2,}", line) for line in capsys.readouterr().out.splitlines()]


def test_list_has_a_line_each_with_state_title_and_reason(
    capsys,
):
    lines = listed(capsys)
    entries = catalogue.entries()
    assert lines == [list(entry.told()) for entry in entries]
    assert entries[: len(PUBLISHED)] == PUBLISHED
    assert {line[0] for line in lines} == {
        *items.REGISTRY,
        *(entry.name for entry in PUBLISHED),
    }
    for line, entry in zip(lines, entries, strict=True):
        assert (line[1] == "absent") == bool(entry.note)
        reason = entry.note or (entry.lacks and f"without {entry.lacks}")
        assert not reason or line[2].endswith(f" ({reason})")


def test_all_goes_on_after_a_failure_names_it_and_exits_with_1(
    tmp_path, monkeypatch, capsys
):
    heart = replace(items.find("player_fl.heart_sensitivity"), draw=plotted)

    def broken(header, frame):
        plt.figure()
        raise KeyError("a layer")

    monkeypatch.setattr(items, "REGISTRY", {})
    monkeypatch.setattr(gallery, "redraw", lambda at, out: out)
    items.register(heart)
    items.register(items.Item("player_fl.broken", "", source=heart.name, draw=broken))
    with pytest.raises(SystemExit) as stopped:
        main(["all", "--out", str(tmp_path / "out")])
    assert stopped.value.code == 1
    printed = capsys.readouterr()
    assert printed.out.split() == [heart.name, "gallery"]
    assert "player_fl.broken: KeyError" in printed.err
    assert re.search(r"1 of 3 .*: player_fl\.broken$", printed.err.splitlines()[-1])


def test_a_figure_that_has_ended_names_its_commit(capsys):
    entries = {entry.name: entry for entry in PUBLISHED}
    assert len(catalogue.ended()) == 30
    pages = {page.stem for page in items.PICTURES.glob("*.md")}
    assert pages <= set(items.REGISTRY), "a page has code, or is a line of the history"
    for name, commit in catalogue.ended().items():
        assert name not in items.REGISTRY
        assert name not in entries or entries[name].told()[1] == "ended"
        with pytest.raises(SystemExit) as stopped:
            main([name])
        assert stopped.value.code == 2
        assert re.search(rf"{name} .*{commit}.*history", capsys.readouterr().err)
