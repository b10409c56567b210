"""The scorecard: each paper's claims with verdict and number, made from claims and stored pages, and its changes.

:mod:`figures.claims` has the claims. The verdict and the number are read off the page of the figure that decides it.

``first_verdicts.csv`` has the lines when the record began. ``changed_verdicts.csv`` has every line since that entered
or left the scorecard, or whose verdict or title changed, with a date and a reason. Together they give the verdicts at
any date.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from figures import items
from figures.claims import (
    WORDS as WORDS,
    Claim as Claim,
    claims as claims,
    read as read,
)
from figures.page import markdown, read_expectations, shown
from fl_core.errors import UsageError

FIRST, CHANGES = items.HERE / "first_verdicts.csv", items.HERE / "changed_verdicts.csv"
README, RECORD = items.HERE / "README.md", items.HERE / "changed_verdicts.md"
BEGIN, END = "<!-- scorecard -->", "<!-- end of the scorecard -->"
NEW, LEFT = "new", "left"
"""Stand for the verdict before a line's entry, and after its exit."""
TITLE = "title"
"""The cause of an entry whose line asks less or more than before, under the same verdict."""
IN_TABLES = (
    "player_fl.best_fairness",
    "player_fl.best_incentive",
    "player_fl.even_gains",
    "player_fl.fewer_losers",
)
"""Lines that the picture of their page does not show. Its table of expectations does."""
TITLES = {
    "player_fl": "PLayer-FL",
    "scheduling": "Layer scheduling",
    "fedpft": "FedPFT",
    "pfedla": "pFedLA",
    "fedra": "FedRA",
}


def judged(claim: Claim, pictures: Path = items.PICTURES) -> tuple[str, str]:
    """Return the verdict on a claim in the scorecard's words, and our number, as its page has them.

    Raises:
        UsageError: its page has not exactly one such expectation, or nothing of the measurement is shown.
    """
    page = pictures / f"{claim.figure}.md"
    return claim.judged(read_expectations(page.read_text(encoding="utf-8")))


def verdicts() -> dict[str, str]:
    """Return today's verdict of every line, as plain words."""
    return {claim.line: judged(claim)[0].strip("*") for claim in claims()}


def recorded(first_path: Path = FIRST, changes: Path = CHANGES) -> dict[str, str]:
    """Return the verdict of every line, replayed from the record.

    Raises:
        UsageError: A change does not fit what was before it, or has no reason.
    """
    verdict_by_line = {change["line"]: change["verdict"] for change in read(first_path)}
    for change in read(changes):
        verdict_before, verdict_after = (
            verdict_by_line.pop(change["line"], NEW),
            change["after"],
        )
        is_unchanged = verdict_before == verdict_after
        is_consistent = change["before"] == verdict_before and is_unchanged == (
            change["cause"] == TITLE
        )
        if not is_consistent or not change["reason"]:
            raise UsageError(
                f"{changes.name}: a change must fit the verdict before it and have a reason; got {change['line']}, "
                f"{change['before']} to {verdict_after} after {verdict_before}. Correct the entry."
            )
        if verdict_after != LEFT:
            verdict_by_line[change["line"]] = verdict_after
    return verdict_by_line


_SIGNED = re.compile(r"[+-]\d+\.\d+")


def distance(published_text: str, measured_text: str) -> str:
    """Return ours minus theirs, number by number; a dash unless both have as many differences with a sign.

    >>> distance("+3.7, -1.0 (Table 1)", "A +6.7 ± 5.4; B +0.0 ± 4.7")
    '+3.0, +1.0'
    """
    our_numbers, their_numbers = (
        [float(number) for number in _SIGNED.findall(text.replace("± -", "± "))]
        for text in (measured_text, published_text)
    )
    if not our_numbers or len(our_numbers) != len(their_numbers):
        return "–"
    return ", ".join(
        f"{a - b:+.1f}" for a, b in zip(our_numbers, their_numbers, strict=True)
    )


HEAD = ("the paper claims", "paper", "here", "distance", "setting", "verdict")


def table() -> str:
    """Return the scorecard in Markdown: for each paper its counts, a table, and the words that are judged.

    Behind a verdict stands what its page shows of the claim: a picture, or a table where no picture shows it.
    """
    sections = []
    for paper, title in TITLES.items():
        paper_claims = [claim for claim in claims() if claim.paper == paper]
        table_rows, verdict_counts = [], Counter[str]()
        for claim in paper_claims:
            verdict, our_number = judged(claim)
            verdict_counts[verdict.strip("*")] += 1
            form_name = "table"
            if claim.figure in shown() and claim.line not in IN_TABLES:
                form_name = "picture"
            page_link = f"[{verdict}](pictures/{claim.figure}.md), {form_name}"
            distance_text = distance(claim.theirs, our_number)
            table_rows.append(
                (
                    claim.claim,
                    claim.theirs,
                    our_number,
                    distance_text,
                    claim.setting,
                    page_link,
                )
            )
        columns = dict(zip(HEAD, zip(*table_rows, strict=True), strict=True))
        verdicts = [word.strip("*") for word in WORDS.values()]
        counts_text = ", ".join(
            f"{verdict_counts[verdict]} {verdict}" for verdict in verdicts
        )
        quotes = [
            f"- `{claim.line}`: “{claim.words}” ({claim.place}). Criterion of {claim.written}, "
            f"{_KNOWN[claim.rows_known]}."
            for claim in paper_claims
        ]
        sections += [
            f"**{title}**: {counts_text}.",
            markdown(columns),
            "<details><summary>The paper's words, and when each criterion was written</summary>",
            "\n".join(quotes),
            "</details>",
        ]
    return "\n\n".join(sections)


_KNOWN = {
    "yes": "rows known",
    "no": "before the rows",
    "in part": "later seeds registered",
}


def renewed(text: str) -> str:
    """Return a page's text with its scorecard made again.

    Raises:
        UsageError: the text has no place for it.
    """
    if BEGIN not in text or END not in text:
        raise UsageError(
            f"the page must have {BEGIN} and {END}; got neither or one. Add both lines."
        )
    text_before, text_after = text.partition(BEGIN)[0], text.partition(END)[2]
    return f"{text_before}{BEGIN}\n\n{table()}\n\n{END}{text_after}"


def record() -> str:
    """Return the list of changes as a page."""
    changes = read(CHANGES)
    columns = {column: [change[column] for change in changes] for column in changes[0]}
    columns["line"] = [f"`{claim_line}`" for claim_line in columns["line"]]
    return "\n\n".join([
        "# Changed verdicts",
        "Every change of the [scorecard](README.md), with its date and reason. A line of the scorecard is removed "
        "only with an entry here. `python -m figures scorecard` makes this page from `changed_verdicts.csv`.",
        markdown(columns),
    ]) + "\n"  # fmt: skip


def write(folder: Path = items.HERE) -> Path:
    """Write the README with its scorecard made again, and the list of changed verdicts. Return the README's path."""
    text = renewed(README.read_text(encoding="utf-8"))
    (folder / README.name).write_text(text, encoding="utf-8")
    (folder / RECORD.name).write_text(record(), encoding="utf-8")
    return folder / README.name
