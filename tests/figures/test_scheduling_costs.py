"""Layer scheduling before training: the paper's counts come out exactly, of the committed rows."""

from __future__ import annotations

from figures.scheduling import costs
from fl_core import rows


def test_a_cost_holds_until_the_next_row() -> None:
    made = [
        rows.row("round_cost", value, round=done, variant="naive")
        for done, value in ((1, 5.0), (3, 7.0))
    ]
    frame = rows.frame(made).assign(run="mnist.vanilla")
    found = costs.by_round(frame, "mnist.vanilla", "round_cost")["naive"]
    assert found.loc[:4].tolist() == [5, 5, 7, 7]
    assert found.index[-1] == 300


def test_stored_rows_have_the_papers_numbers() -> None:
    _, frame = costs.STUDY.read(costs.STUDY.path())
    total = costs.sizes(frame).loc["total"]
    assert total.tolist() == [582_026, 878_538, 924_708]
    published = costs.totals(frame).dropna(subset="published")
    assert published["naive"].round(2).tolist() == published["published"].tolist()
