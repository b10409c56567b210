"""The leaderboard's page has the tables of the stored rows, and its picture names the critical difference."""

from benchmarks.leaderboard import analysis, page
from benchmarks.leaderboard.federations import FEDERATIONS
from benchmarks.leaderboard.methods import METHODS
from benchmarks.leaderboard.runs import STORED, complete, read
from docs.lists import BLOCK
from tests.benchmarks.leaderboard import planted

EIGHT = list(FEDERATIONS)[:8]


def score(federation, method, seed, client):
    return 0.4 + 0.01 * list(METHODS).index(method) + 0.001 * EIGHT.index(federation)


RUNS = analysis.scored_runs(planted.rows(EIGHT, score))


def test_the_page_is_up_to_date():
    """``python -m benchmarks.leaderboard --write`` brings it up to date."""
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.updated(text, analysis.scored_runs(read(STORED))) == text
    assert [kind for _, kind, _ in BLOCK.findall(text)] == list(page.LISTS)


def test_stored_federations_are_complete():
    rows = read(STORED)
    assert rows
    assert all(complete(rows, name) for name in {row["federation"] for row in rows})
