"""Curves and their slopes, the sum of a diagnosis's passes, and parts of commands: each from numbers that are known."""

import pandas as pd
import pytest

from benchmarks import scale
from benchmarks.curves import CURVES


def points(seconds, megabytes):
    """As if every curve grew by these exponents, with a little noise from repeat to repeat."""
    return pd.DataFrame(
        {
            "curve": name,
            "size": size,
            "repeat": k,
            "seconds": 0.1 * size**seconds * (1 + 0.02 * k),
            "megabytes": 5 * size**megabytes * (1 + 0.02 * k),
        }
        for name, curve in CURVES.items()
        for size in curve.sizes
        for k in range(3)
    )


def test_a_slope_is_the_exponent_and_its_interval_holds_it():
    sizes = [10, 10, 100, 100, 1000, 1000]
    exact = [3 * size**1.5 for size in sizes]
    assert scale.slope(sizes, exact) == pytest.approx((1.5, 1.5, 1.5))
    slope, low, high = scale.slope(
        sizes, [v * (1.1 if k % 2 else 0.9) for k, v in enumerate(exact)]
    )
    assert low < slope < high
    assert slope == pytest.approx(1.5, abs=0.05)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.3, "grows slower"), (1.0, "as theory"), (1.4, "grows faster")],
)
def test_growth_is_told_beside_theory(seconds, words):
    time, memory = scale.slopes("round-parameters", points(seconds, 1.0))
    assert (time.holds, memory.holds) == (words, "as theory")
    assert time.ratio == pytest.approx(seconds, abs=0.01)


def test_what_is_below_the_grain_or_not_measured_has_no_slope():
    frame = points(1.0, 0.0)
    frame["megabytes"] = 0.01
    assert [row.holds for row in scale.slopes("round-clients", frame)] == [
        "as theory",
        "at most 0.01: no slope",
    ]
    assert {row.holds for row in scale.slopes("round-clients", frame.iloc[:0])} == {
        "not measured"
    }
