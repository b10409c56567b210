"""The scorecard: every claim is read off one expectation of a page, and the README has what would be made now."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

import figures.__main__
from figures import catalogue, items, scorecard
from figures.items import Finding
from figures.papers import PAPERS
from fl_core.errors import UsageError

CLAIMS = scorecard.claims()


def test_every_paper_has_claims_of_figures_that_there_are() -> None:
    known = {entry.name: entry for entry in catalogue.entries()}
    assert tuple(dict.fromkeys(claim.paper for claim in CLAIMS)) == PAPERS
    for claim in CLAIMS:
        assert all((claim.claim, claim.data, claim.scale))
        assert claim.figure in known
        planned = known[claim.figure].state() == "planned"
        assert not (planned and claim.finding), f"{claim.figure} is planned and cannot have been measured"


def test_the_readme_has_the_scorecard_of_now() -> None:
    text = scorecard.README.read_text(encoding="utf-8")
    assert text.index(scorecard.BEGIN) < 1000, "the page opens with it"
    assert scorecard.renewed(text) == text, "make lists renews it"
    for claim in CLAIMS:
        verdict, number = scorecard.judged(claim)
        assert verdict in scorecard.WORDS.values()
        assert number
    with pytest.raises(UsageError, match="the page has no <!-- scorecard -->"):
        scorecard.renewed("a page")


def test_the_scorecard_is_written_to_a_folder_of_the_user_s_own(tmp_path: Path) -> None:
    before = scorecard.README.read_bytes()
    figures.__main__.main(["scorecard", "--out", str(tmp_path / "out")])
    (page,) = (tmp_path / "out").iterdir()
    assert scorecard.table() in page.read_text(encoding="utf-8")
    assert scorecard.README.read_bytes() == before


def test_what_a_page_says_is_read_back(tmp_path: Path) -> None:
    said = [
        Finding("a: lies (on all) above b", "+1.0 ± 0.5 (undecided). So be it", True),
        Finding("a lies below c", "-2", False, "other data (not its own)"),
    ]
    (tmp_path / "x.fig1.md").write_text("# Title\n\n" + "\n".join(f"- {each}" for each in said) + "\n")
    found = scorecard.findings(tmp_path / "x.fig1.md")
    assert [tuple(each) for each in found] == [(each.verdict, each.expected, each.measured) for each in said]
    claim = replace(CLAIMS[0], figure="x.fig1", finding="a: lies", shown=r"[+-]\S+")
    assert scorecard.judged(claim, tmp_path) == ("**reproduced**", "+1.0")
    assert scorecard.judged(replace(claim, finding="a lies", shown=""), tmp_path) == ("not comparable", "-2")
    for wrong, message in ((replace(claim, finding="a"), "2 expectations"), (replace(claim, shown="z"), "is like 'z'")):
        with pytest.raises(UsageError, match=re.escape(message)):
            scorecard.judged(wrong, tmp_path)
    assert set(scorecard.WORDS) == set(items.VERDICTS)
