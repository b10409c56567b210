"""What PLayer-FL's layer-wise figures suggest for each network, and whether measured curves confirm it."""

from __future__ import annotations

import pandas as pd

from figures.differences import FEWEST, LEAST
from figures.items import Finding
from figures.layerwise import listed, ranges, within
from figures.player_fl.layers import Network

FLAT = 1.1
"""S below this is flat, and a layer at which it grows by more than this factor is no longer alike."""
TEN, HUNDRED = 10, 100
OFFSET = 0.5
"""Added to the angles of fully connected layers after convolutions in the code behind the published figure."""


def decided(network: Network, expected: str, measured: str, held: bool, values: pd.DataFrame) -> Finding:
    """A finding on one network's curves (layers x (seed, client)), open with fewer than three seeds."""
    seeds = values.columns.get_level_values(0).nunique()
    enough = seeds >= LEAST
    return Finding(
        f"{network.title}: {expected}", measured if enough else f"{measured} ({FEWEST})", held if enough else None
    )


def medians_within(network: Network, what: str, values: pd.DataFrame, printed: pd.DataFrame) -> list[Finding]:
    """Whether the medians are within the published ranges."""
    if printed["low"].isna().any():
        return []
    where = printed.attrs["where"].partition(",")[0]
    middle = values.median(axis=1)
    expected = f"medians of {what} within the ranges of the paper's {where}, {ranges(printed)}"
    return [decided(network, expected, listed(middle), within(middle, printed), values)]


def rises(network: Network, what: str, values: pd.DataFrame, printed: pd.DataFrame) -> list[Finding]:
    """Gradient variance and curvature: smallest at the last convolution, and far larger in the last layers."""
    middle = values.median(axis=1)
    least = middle / middle.min()
    findings = medians_within(network, what, values, printed)
    if not network.last_conv:
        last = middle.index[-1]
        return [
            *findings,
            decided(network, f"{what} is largest at {last}", listed(middle), middle.idxmax() == last, values),
        ]
    at = f"{what} is smallest at the last convolution"
    far = f"{what} is at least {TEN} times its smallest at fc1 and {HUNDRED} times at fc2"
    sizes = f"{least['fc1']:.3g} times and {least['fc2']:.3g} times"
    return [
        *findings,
        decided(network, at, listed(middle), middle.idxmin() == network.last_conv, values),
        decided(network, far, sizes, bool(least["fc1"] >= TEN and least["fc2"] >= HUNDRED), values),
    ]


def no_cliff(network: Network, what: str, values: pd.DataFrame, printed: pd.DataFrame) -> list[Finding]:
    """1 - CKA grows with depth, in no single step."""
    middle = values.median(axis=1)
    steps = middle.diff().iloc[1:]
    rise = middle.max() - middle.min()
    largest = f"the largest is {steps.max():.3g} of {rise:.3g}, at {steps.idxmax()}"
    return [
        decided(network, f"{what} grows from each layer to the next", listed(middle), bool((steps > 0).all()), values),
        decided(
            network,
            f"{what} makes no more than half of its rise in a single step",
            largest,
            bool(steps.max() <= rise / 2),
            values,
        ),
    ]


def offset(network: Network, what: str, values: pd.DataFrame, printed: pd.DataFrame) -> list[Finding]:
    """Procrustes angles: those of fully connected layers after convolutions are published with an added constant."""
    if not network.last_conv or printed["low"].isna().any():
        return medians_within(network, what, values, printed)
    middle = values.median(axis=1)
    full = [layer for layer in middle.index if layer.startswith("fc")]
    published = (printed["low"] + printed["high"])[full] / 2
    apart, less = (float((middle[full] - centre).abs().mean()) for centre in (published, published - OFFSET))
    expected = f"from fc1 on {what} lies nearer to the published one less {OFFSET} than to the published one"
    measured = f"{less:.3g} from the one and {apart:.3g} from the other on average; {listed(middle)}"
    return [decided(network, expected, measured, less < apart, values)]


def kink(network: Network, what: str, values: pd.DataFrame, printed: pd.DataFrame) -> list[Finding]:
    """Federation sensitivity is flat up to the last convolution, or up to the classifier."""
    middle = values.median(axis=1)
    findings = medians_within(network, what, values, printed)
    if network.last_conv:
        before, at = middle[network.last_conv], middle["fc1"] / middle[network.last_conv]
        expected = f"{what} stays below {FLAT} up to {network.last_conv} and grows by more than {FLAT} times at fc1"
        return [*findings, decided(network, expected, listed(middle), bool(before < FLAT < at), values)]
    if middle.index[0] == "embedding":
        expected = f"{what} stays below 1.5 before the classifier and is above 50 at it"
        return [
            *findings,
            decided(network, expected, listed(middle), bool(middle.iloc[-2] < 1.5 and middle.iloc[-1] > 50), values),
        ]
    return findings
