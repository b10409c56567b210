"""What the product took from the study with tuned rates."""

import pandas as pd
import pytest

from fedlayers.studies.hint import BANDS
from figures.decision import finished


@pytest.mark.slow
def test_the_bands_of_skew_are_those_of_the_stored_runs():
    table = finished.skew_and_gains()
    ends = pd.cut(table["skew"], [-1.0, *(end for end, _, _ in BANDS)], right=False)
    low, middle, high = (own for _, own in table.groupby(ends, observed=True)["gain"])
    counts = [(low < 1.15, low), (middle < 1.35, middle), (high > 1.05, high)]
    for (those, band), (_, _, words) in zip(counts, BANDS, strict=True):
        assert words.startswith(f"{those.sum()} of {len(band)} ")
