"""The scorecard: every claim is read off one expectation of a page, and the README has what would be made now."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from figures import catalogue, items, scorecard
from figures.claims import opening_lines
from figures.items import Finding
from figures.page import expectations, read_expectations
from figures.papers import PAPERS
from tests.conftest import refuses
from tests.figures import recompute

CLAIMS = scorecard.claims()
OPEN = ("undecided", "not comparable")


def test_every_paper_has_claims_of_figures_that_there_are():
    entries = {entry.name: entry for entry in catalogue.entries()}
    assert tuple(dict.fromkeys(claim.paper for claim in CLAIMS)) == PAPERS
    assert len({claim.line for claim in CLAIMS}) == len(CLAIMS)
    assert all(claim.line.startswith(f"{claim.paper}.") for claim in CLAIMS)
    for claim in CLAIMS:
        cells = (claim.claim, claim.theirs, claim.setting, scorecard.judged(claim)[1])
        assert all((*cells, claim.place, claim.words))
        assert max(map(len, cells)) <= 120, claim.line
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", claim.written)
        assert claim.place.startswith(("Abstract", "Sec", "Table", "Appendix", "MLSys"))
        assert claim.figure in entries


@pytest.mark.parametrize("paper", PAPERS)
def test_each_claim_of_an_abstract_has_a_line_or_a_reason(paper):
    text = (items.HERE / f"{paper}.md").read_text(encoding="utf-8")
    part = re.search(r"## What its? (?:abstract )?claims\n.*?\n## ", text, re.DOTALL)
    assert part
    lines = {claim.line for claim in CLAIMS if claim.paper == paper}
    assert set(re.findall(rf"`({paper}\.\w+)`", part[0])) == lines
    for row in re.findall(r"^\| .* \| (.*) \|$", part[0], re.MULTILINE)[1:]:
        assert row.startswith((f"`{paper}.", "none: "))
    assert len(CLAIMS) <= 70


def test_the_readme_has_the_scorecard_of_now():
    text = scorecard.README.read_text(encoding="utf-8")
    assert text.index(scorecard.BEGIN) < 1000, "the page opens with it"
    assert scorecard.renewed(text) == text, "make lists renews it"
    for claim in CLAIMS:
        verdict, number = scorecard.judged(claim)
        assert verdict in scorecard.WORDS.values()
        assert number
    with refuses("<!-- scorecard -->"):
        scorecard.renewed("a page")


@pytest.mark.parametrize("figure", sorted({claim.figure for claim in CLAIMS}))
def test_a_page_opens_with_its_lines_of_the_scorecard(figure):
    text = (items.PICTURES / f"{figure}.md").read_text(encoding="utf-8")
    lines = opening_lines(figure, read_expectations(text))
    assert text.split("\n\n")[1 : 1 + len(lines)] == lines
    for claim in CLAIMS:
        if claim.figure == figure:
            verdict, number = scorecard.judged(claim)
            assert f"{claim.claim}: {verdict} ({number})." in lines


@pytest.mark.parametrize("figure", sorted({claim.figure for claim in CLAIMS}))
def test_a_line_has_a_picture_or_says_that_a_table_shows_it(figure):
    text = (items.PICTURES / f"{figure}.md").read_text(encoding="utf-8")
    has_picture = f"]({figure}.png)" in text
    readme = scorecard.README.read_text(encoding="utf-8")
    link = rf"\]\(pictures/{re.escape(figure)}\.md\), (\w+) \|"
    forms = dict(re.findall(rf"^\| (.*?) \|.*{link}$", readme, re.MULTILINE))
    lines = {claim.claim: claim.line for claim in CLAIMS if claim.figure == figure}
    assert forms == {
        title: "picture" if has_picture and line not in scorecard.IN_TABLES else "table"
        for title, line in lines.items()
    }
    if not has_picture:  # a table of its own, next to the expectations and the settings
        tables = [
            part for part in text.split("\n\n") if re.search(r"^\| --- \|", part, re.M)
        ]
        assert len(tables) > 2


def test_each_other_line_says_what_would_decide_it():
    text = scorecard.README.read_text(encoding="utf-8")
    part = text.partition("## What would decide the others\n")[2].partition("\n## ")[0]
    named = re.findall(
        r"`(\w+\.\w+)`", "".join(re.findall(r"^\| `.*?` \|", part, re.M))
    )
    left = {line for line, verdict in scorecard.verdicts().items() if verdict in OPEN}
    assert (set(named), len(named)) == (left, len(left))


def test_what_a_page_says_is_read_back(tmp_path):
    findings = [
        Finding("a: lies (on all) above b", "+1.0 ± 0.5 (undecided). So be it", True),
        Finding("a lies below c", "-2", False, "other data (not its own)"),
        Finding("|D| is <N>", "|D| = 3", None, "few images"),
    ]
    other = "| expectation | verdict | other |\n| --- | --- | --- |\n| x | held | y |"
    (tmp_path / "x.fig1.md").write_text(
        f"# Title\n\n{expectations(findings)}\n\n{other}\n"
    )
    read = read_expectations((tmp_path / "x.fig1.md").read_text())
    assert read == [
        (finding.expected, finding.verdict, finding.measured) for finding in findings
    ]
    claim = replace(CLAIMS[0], figure="x.fig1", finding="a: lies", shown=r"[+-]\S+")
    assert scorecard.judged(claim, tmp_path) == ("**reproduced**", "+1.0")
    whole = replace(claim, finding="a lies", shown="")
    assert scorecard.judged(whole, tmp_path) == ("not comparable", "-2")
    for wrong, message in ({"finding": "a"}, "got 2"), ({"shown": "z"}, "'z'"):
        with refuses(message):
            scorecard.judged(replace(claim, **wrong), tmp_path)


def test_a_line_changes_only_with_an_entry_in_the_record():
    assert scorecard.verdicts() == scorecard.recorded(), (
        "add the change to changed_verdicts.csv"
    )
    assert scorecard.RECORD.read_text(encoding="utf-8") == scorecard.record(), (
        "make lists renews it"
    )
    changes = scorecard.read(scorecard.CHANGES)
    explained = {
        change["line"]
        for change in changes
        if change["cause"] in ("repair", "title") or change["before"] == "new"
    }
    narrower = {claim.line for claim in CLAIMS if "asked" in claim.claim}
    assert narrower <= explained
    for change in changes:
        assert change["line"].partition(".")[0] in PAPERS
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", change["date"])
        assert change["cause"] in ("repair", "runs", scorecard.TITLE)
    changed = {change["line"] for change in scorecard.read(scorecard.CHANGES)}
    assert {claim.line for claim in CLAIMS if "(asked" in claim.claim} <= changed


def test_a_setting_gives_the_loss_after_local_training_that_its_page_has():
    (claim,) = (
        claim for claim in CLAIMS if claim.line == "pfedla.one_layer_costs_little"
    )
    loss = re.search(r"after local training (\d\.\d ± \d\.\d)$", claim.setting)
    text = (items.PICTURES / f"{claim.figure}.md").read_text(encoding="utf-8")
    measured = [
        measured
        for expected, _, measured in read_expectations(text)
        if expected.startswith("after local training retaining one")
    ]
    assert loss
    assert f"k = 1 -{loss[1]} " in measured[0]


@pytest.mark.parametrize(
    "entry",
    [
        "a,2026-01-02,runs,undecided,reproduced,",
        "a,2026-01-02,runs,reproduced,left,because",
        "c,2026-01-02,runs,undecided,left,because",
        "a,2026-01-02,title,undecided,reproduced,because",
        "a,2026-01-02,runs,undecided,undecided,because",
    ],
)
def test_an_entry_must_fit_what_was_before_it(tmp_path, entry):
    first, path = tmp_path / "first.csv", tmp_path / "changes.csv"
    first.write_text("line,verdict\na,undecided\nb,reproduced\n")
    head = "line,date,cause,before,after,reason\n"
    path.write_text(
        head
        + "b,2026-01-01,repair,reproduced,left,because\nc,2026-01-02,runs,new,reproduced,because\n"
        + "a,2026-01-02,title,undecided,undecided,because\n"
    )
    assert scorecard.recorded(first, path) == {
        "a": "undecided",
        "c": "reproduced",
    }
    path.write_text(head + entry + "\n")
    with refuses("must fit"):
        scorecard.recorded(first, path)


@pytest.mark.parametrize("line", recompute.LINES)
def test_a_second_computation_gives_the_same_numbers(line):
    (claim,) = (recomputed for recomputed in CLAIMS if recomputed.line == line)
    _, number = scorecard.judged(claim)
    numbers = recompute.LINES[line]()
    assert numbers
    for recomputed in numbers:
        assert recomputed in number


def test_the_second_computation_shares_nothing_with_the_first():
    text = Path(recompute.__file__).read_text(encoding="utf-8")
    assert not re.search(
        r"^\s*(from|import) (figures|fedlayers|fl_core)\b", text, re.MULTILINE
    )
    decided = {
        line for line, verdict in scorecard.verdicts().items() if verdict not in OPEN
    }
    assert decided <= set(recompute.LINES)
