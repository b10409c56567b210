"""Planted groups of clients: how the federations are dealt, and what their rows say."""

import numpy as np
import pytest

from figures.decision import groups
from fl_core import rows
from fl_core.data import open_named


def test_every_image_has_one_client_and_only_planted_ones_are_turned():
    turned, plain = groups.dealt(True, 3), groups.dealt(False, 3)
    assert sum(len(y) for _, y in plain.values()) == len(open_named("digits").y)
    for client, (name, (x, y)) in enumerate(plain.items()):
        assert np.array_equal(turned[name][0], np.rot90(x, client % 4, axes=(-2, -1)))
        assert np.array_equal(turned[name][1], y)
    assert not np.array_equal(plain["client 0"][1][:80], groups.dealt(False, 4)["client 0"][1][:80])


@pytest.mark.parametrize(("right", "none"), [(10, 10), (9, 9), (8, 10)])
def test_the_outcome_counts_seeds(right, none):
    lines = []
    for seed in range(10):
        for run, held in ((groups.PLANTED, seed < right), (groups.IID, seed < none)):
            claimed = (4 if held else 1) if run == groups.PLANTED else (1 if held else 2)
            agreement = float(held) if run == groups.PLANTED else 1.0
            values = {groups.SILHOUETTE: 0.5, groups.COUNT: claimed, groups.AGREEMENT: agreement}
            lines += [rows.row(name, float(value), run=run, seed=seed) for name, value in values.items()]
            lines += [rows.row(groups.NULL, value, run=run, seed=seed) for value in (0.1, 0.2)]
    frame = rows.frame(lines)
    table = groups.table(frame)
    assert (table[groups.NULL].unique().tolist(), table["drawn"].unique().tolist()) == ([0.2], [2])
    drawing = groups.ITEM.draw({"missing": [], "failed": [], "seeds": list(range(10)), "scale": "quick"}, frame)
    assert [finding.held for finding in drawing.findings] == [right >= 9, none == 10]
    assert f"{right} of 10" in drawing.lead
