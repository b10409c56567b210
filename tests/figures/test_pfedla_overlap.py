"""pFedLA's weights beside the classes that clients share: numbers by hand, and a small study run and drawn."""

from __future__ import annotations

import pandas as pd
import pytest

from figures.pfedla import overlap

pytestmark = pytest.mark.filterwarnings("ignore:client")


def test_overlap_and_correlations() -> None:
    counts = pd.DataFrame(
        [[3, 1, 0], [2, 0, 2], [0, 0, 5]], index=list("abc"), columns=["0", "1", "2"]
    )
    shared = overlap.overlap(counts)
    assert shared.to_numpy().tolist() == [[1, 0.5, 0], [0.5, 1, 0.5], [0, 1, 1]]
    assert overlap.chosen_pairs(shared) == [("c", "b"), ("a", "c")]
    for found in overlap.correlations(0.2 * shared + 0.1, shared):
        assert found == pytest.approx(1)
    assert overlap.correlations(shared * 0 + 1 / 3, shared) == (None, None)
