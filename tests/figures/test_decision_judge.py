"""The judge of validation curves: the product has the numbers of its fit."""

import pytest

from fedlayers.studies.race import FROZEN
from figures import items
from figures.decision import finished_page, judge


@pytest.mark.slow
def test_the_judge_of_the_product_is_the_fit_of_the_stored_runs():
    item = items.find("decision.judge")
    parts, ours = finished_page.whole(*item.read(item.path()))
    found = judge.fit(
        [part for part in parts if judge.known(part)], judge.curves_of(ours)
    )
    assert (FROZEN.constant, *FROZEN.weights) == tuple(
        float(f"{value:.4g}") for value in (found.constant, *found.weights)
    )
