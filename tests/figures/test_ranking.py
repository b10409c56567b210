"""Nemenyi's test on Demsar's example."""

from figures.ranking import Ranking
from tests.fl_core.made import DEMSAR


def test_nemenyi_on_demsars_example():
    found = Ranking(DEMSAR, higher_is_better=True).nemenyi
    # the paper: no pair differs at 5 % (critical difference 1.25); at 10 % (1.12) C4.5 differs from m and from both
    assert found.to_numpy().min() > 0.05
    significant = found < 0.1
    assert {
        (a, b) for a in significant for b in significant if significant.loc[a, b]
    } == {
        pair
        for other in ("C4.5+m", "both")
        for pair in (("C4.5", other), (other, "C4.5"))
    }
