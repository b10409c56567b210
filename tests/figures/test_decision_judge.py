"""The judge of validation curves: its numbers, its fit, and the costs of races that stop arms early."""

from itertools import product

import numpy as np
import pytest

from fedlayers.studies.race import FROZEN, features
from figures import items
from figures.decision import finished_page, judge
from figures.decision.finished_ways import parts_of
from tests.figures.test_decision_finished import NAMES, plain, simulated


def curves_of(federations, late):
    """Curves that rise to their run's score by round 40; `late` names a cut that is flat until round 32."""
    found = {}
    for name, seed, cut, rate in product(federations, range(3), NAMES, range(4)):
        rise = [
            float(done > 32) if cut == late else min(1.0, done / 20)
            for done in range(2, 42, 2)
        ]
        end = plain(name, seed, cut, rate)
        found[name, seed, cut, rate] = {
            2 * k + 2: end * share for k, share in enumerate(rise)
        }
    return found


def test_without_a_penalty_the_fit_is_least_squares(monkeypatch):
    monkeypatch.setattr(judge, "PENALTY", 0.0)
    names = ("heart", "tweets_table")
    parts, curves = parts_of(simulated(plain, names)), curves_of(names, late="")
    lines, gaps = [], []
    for part, seed, rate in product(parts, range(3), range(4)):
        for a, b in ((0, 2), (0, 3), (0, 4), (2, 3), (2, 4), (3, 4)):
            pair = [
                np.array(list(curves[part.name, seed, NAMES[k], rate].values()))[:15]
                for k in (a, b)
            ]
            lines.append(features(*pair))
            gaps.append(
                part.cuts.held_out[seed, b, rate] - part.cuts.held_out[seed, a, rate]
            )
    found = judge.fit(parts, curves)
    errors = np.array(gaps) - found.constant - np.array(lines) @ found.weights
    assert errors @ np.column_stack([np.ones(len(lines)), lines]) == pytest.approx(
        0, abs=1e-8
    )


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
