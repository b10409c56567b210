"""Layer scheduling before training: the paper's counts come out exactly, and beside them what they leave out."""

from __future__ import annotations

from figures.scheduling import costs as scheduling_costs
from fl_core import rows


def test_values_hold_until_the_next_row() -> None:
    made = [
        rows.row("round_cost", value, round=done, variant="naive")
        for done, value in ((1, 5.0), (3, 7.0))
    ]
    found = scheduling_costs.by_round(rows.frame(made), 4)
    assert found["naive"].tolist() == [5, 5, 7, 7]
    assert found.index.tolist() == [1, 2, 3, 4]


def test_stored_rows_have_the_papers_numbers() -> None:
    """Those that are committed, of real data's networks."""
    header, frame = scheduling_costs.STUDY.read(scheduling_costs.STUDY.path())
    assert set(header["runs"]) == set(scheduling_costs.STUDY.runs)
    totals = {
        name: scheduling_costs.total_parameters(frame, name)
        for name in scheduling_costs.DATASETS
    }
    assert totals == {"mnist": 582_026, "cifar10": 878_538, "tiny_imagenet32": 924_708}
    table = scheduling_costs._totals(header, frame)
    published = table[table["published"].notna()]
    assert published["naive"].round(2).tolist() == published["published"].tolist()
