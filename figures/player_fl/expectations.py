"""Check measured curves against the claims of PLayer-FL's layer-wise figures, for each network."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pandas as pd

from figures.differences import FEWEST, LEAST_SEEDS, Difference, joint
from figures.items import Finding
from figures.layerwise import SENSITIVITY, curves, dissimilarity
from figures.papers import published
from figures.player_fl.layers import Network
from figures.recipe import where
from figures.verdicts import (
    LEAD,
    Odds,
    by_seed,
    of_parts,
    of_ranges,
    of_seeds,
    of_share,
    plain,
)

FLAT = 1.1
"""S below this is flat, and a layer at which it grows by more than this factor is no longer alike."""
TEN, HUNDRED = 10, 100
OFFSET = 0.5
"""Added to the angles of fully connected layers after convolutions in the code behind the published figure."""


def decided(
    network: Network,
    expected: str,
    measured_text: str,
    holds: bool | None,
    values: pd.DataFrame,
) -> Finding:
    """Return a finding on one network's curves (layers x (seed, client)), open with fewer than three seeds."""
    expected, reason = f"{network.title}: {expected}", network.incomparable
    if values.columns.get_level_values(0).nunique() < LEAST_SEEDS:
        return Finding(expected, f"{measured_text} ({FEWEST})", None, reason)
    return Finding(expected, measured_text, holds, reason)


def seed_by_seed(
    network: Network,
    expected: str,
    holds: Callable[[pd.Series], bool],
    values: pd.DataFrame,
    addition: str = "",
) -> Finding:
    """Return a finding on the seeds of a network. ``addition`` is added to what was measured."""
    text, verdict = of_seeds(values, holds)
    measured_text = "; ".join(filter(None, [text, addition]))
    return decided(network, expected, measured_text, verdict, values)


def whole(
    expected: str, parts_by_title: Mapping[str, tuple[str, Odds, str]]
) -> Finding:
    """Return a finding on several networks. One that is not comparable may leave it open, not contradict it.

    Args:
        parts_by_title: by dataset what was measured, its p-values, and why it is not comparable; empty where it is.
    """
    verdicts = of_parts([odds for _, odds, _ in parts_by_title.values()])
    fair_verdicts = [
        None if reason and verdict is False else verdict
        for verdict, (_, _, reason) in zip(
            verdicts, parts_by_title.values(), strict=True
        )
    ]
    texts = [
        part_of(title, text, reason)
        for title, (text, _, reason) in parts_by_title.items()
    ]
    return Finding(expected, listed(texts), joint(fair_verdicts))


def part_of(title: str, measured_text: str, reason: str) -> str:
    """Return what was measured of a network, with its title, and whether it is not comparable."""
    words_of_part = [f"{title} {measured_text}"]
    if reason:
        words_of_part.append("not comparable")
    return ", ".join(words_of_part)


def listed(texts: Sequence[str]) -> str:
    """Return the parts of a measurement as a text, with their number."""
    parts_text = "; ".join(texts)
    return f"{parts_text} ({len(texts)} parts)"


def later_layers(frame: pd.DataFrame, networks: Mapping[str, Network]) -> Finding:
    """Return whether representations differ far more in the later layers (Sec. 5.2), over all networks.

    Every dense layer lies above every convolution, and the rise from the last convolution on exceeds that before it.
    """
    parts_by_title = {}
    for run, network in networks.items():
        if not network.last_conv:
            continue
        seed_curves = by_seed(dissimilarity(frame[frame["run"] == run]))
        late_count = sum(
            rises_late(seed_curves[seed], network.last_conv) for seed in seed_curves
        )
        odds = of_share(late_count, seed_curves.shape[1])
        parts_by_title[network.title] = (
            f"in {late_count} of {seed_curves.shape[1]} seeds",
            odds,
            network.incomparable,
        )
    return whole(
        "1 - CKA rises most in the dense layers, above all convolutions", parts_by_title
    )


def rises_late(curve: pd.Series, last_conv: str) -> bool:
    """Return whether a curve rises more after the last convolution than before, to dense layers above all others."""
    conv_values, dense_values = curve.loc[:last_conv], curve.loc[last_conv:].iloc[1:]
    late_rise, early_rise = (
        dense_values.iloc[-1] - conv_values.iloc[-1],
        conv_values.iloc[-1] - conv_values.iloc[0],
    )
    return bool(dense_values.min() > conv_values.max() and late_rise > early_rise)


def correlates(frame: pd.DataFrame, networks: Mapping[str, Network]) -> Finding:
    """Return whether S correlates with the gradient variance over layers, in every network.

    The paper names no coefficient. S is a cumulative sum, so that Spearman's is the rank correlation of the variance
    with depth. A verdict needs both to agree. The coefficients of the paper's own figures stand in brackets. They reach
    down to +0.22, so that no higher bound than 0 can be asked.
    """
    findings = {}
    for method, coefficient_name in (
        ("pearson", "Pearson's r"),
        ("spearman", "Spearman's rho"),
    ):
        parts_by_title = {}
        for run, network in networks.items():
            rows = frame[frame["run"] == run]
            variance = by_seed(curves(rows, "grad_variance", "epoch"))
            sensitivity = by_seed(curves(rows, SENSITIVITY, "training"))
            correlation = Difference(sensitivity.corrwith(variance, method=method))
            odds = LEAD.odds(correlation)
            published_text = of_the_paper(run.partition("-")[0], method)
            text = plain(correlation.interval) + published_text
            parts_by_title[network.title] = (text, odds, network.incomparable)
        findings[coefficient_name] = whole("", parts_by_title)
    verdicts = {finding.held for finding in findings.values()}
    return Finding(
        "S correlates with the gradient variance over layers, by Pearson's and Spearman's coefficient",
        "; ".join(
            f"{coefficient}: {network_finding.measured}"
            for coefficient, network_finding in findings.items()
        ),
        verdicts.pop() if len(verdicts) == 1 else None,
    )


def spikes(frame: pd.DataFrame, networks: Mapping[str, Network]) -> Finding:
    """Return whether S spikes in later layers, in every network (Sec. 5.3).

    Its largest step, as a ratio to the layer before, ends in the later half of the layers. A network that is not
    comparable may leave the finding open, not contradict it.
    """
    texts, verdicts = [], []
    for run, network in networks.items():
        rows = frame[frame["run"] == run]
        text, verdict = of_seeds(curves(rows, SENSITIVITY, "training"), late_spike)
        if network.incomparable:
            verdict = verdict or None
        verdicts.append(verdict)
        texts.append(part_of(network.title, text, network.incomparable))
    return Finding(
        "S takes its largest step from layer to layer in the later half of the layers, in every network",
        listed(texts),
        joint(verdicts),
    )


def late_spike(curve: pd.Series) -> bool:
    """Return whether the largest ratio of a layer to the one before it lies in the later half of the layers."""
    ratios = (curve / curve.shift()).to_numpy()
    return bool(np.nanargmax(ratios) >= len(curve) / 2)


def of_the_paper(dataset: str, method: str) -> str:
    """Return the coefficient of the midpoints of the paper's Figs. 1 and 4, in brackets; empty without both."""
    published_values = where(published("player_fl"), dataset=dataset)
    variance, sensitivity = (
        published_values[published_values["quantity"] == quantity]
        .set_index("layer")[["low", "high"]]
        .mean(axis=1)
        for quantity in ("grad_variance / min", SENSITIVITY)
    )
    if variance.empty or sensitivity.empty:
        return ""
    coefficient = sensitivity.corr(variance, method=method)
    return f" (paper's figures {coefficient:+.2f})"


def medians_within(
    network: Network,
    quantity: str,
    values: pd.DataFrame,
    published_ranges: pd.DataFrame,
) -> list[Finding]:
    """Return whether the medians are within the published ranges."""
    if published_ranges["low"].isna().any():
        return []
    place_name = published_ranges.attrs["where"].partition(",")[0]
    text, verdict = of_ranges(
        values,
        published_ranges["low"].astype(float),
        published_ranges["high"].astype(float),
    )
    return [
        decided(
            network,
            f"medians of {quantity} lie within the ranges of the paper's {place_name}",
            text,
            verdict,
            values,
        )
    ]


def rises(
    network: Network,
    quantity: str,
    values: pd.DataFrame,
    published_ranges: pd.DataFrame,
) -> list[Finding]:
    """Return whether gradient variance or curvature is smallest at the last convolution and far larger at the end."""
    findings = medians_within(network, quantity, values, published_ranges)
    if not network.last_conv:
        last_layer = values.index[-1]
        return [
            *findings,
            seed_by_seed(
                network,
                f"{quantity} is largest at {last_layer}",
                largest_last,
                values,
            ),
        ]
    relative_medians = values.median(axis=1) / values.median(axis=1).min()
    claim = f"{quantity} is at least {TEN} times its smallest at fc1 and {HUNDRED} times at fc2"
    sizes_text = f"by the medians {relative_medians['fc1']:.3g} times and {relative_medians['fc2']:.3g} times"
    return [
        *findings,
        seed_by_seed(
            network,
            f"{quantity} is smallest at the last convolution",
            lambda curve: curve.idxmin() == network.last_conv,
            values,
        ),
        seed_by_seed(
            network,
            claim,
            far_larger,
            values,
            sizes_text,
        ),
    ]


def far_larger(curve: pd.Series) -> bool:
    """Return whether a curve is far above its smallest value in both dense layers."""
    smallest = curve.min()
    return bool(curve["fc1"] >= TEN * smallest and curve["fc2"] >= HUNDRED * smallest)


def largest_last(curve: pd.Series) -> bool:
    """Return whether a curve is largest at its last layer."""
    return bool(curve.idxmax() == curve.index[-1])


def grows(curve: pd.Series) -> bool:
    """Return whether a curve grows from each layer to the next."""
    return bool((curve.diff().iloc[1:] > 0).all())


def gradual(curve: pd.Series) -> bool:
    """Return whether no single step of a curve makes more than half of its rise."""
    return bool(curve.diff().iloc[1:].max() <= (curve.max() - curve.min()) / 2)


def largest_step(values: pd.DataFrame) -> str:
    """Return the largest step of the curves' medians, as text."""
    medians = values.median(axis=1)
    steps = medians.diff().iloc[1:]
    rise = medians.max() - medians.min()
    return f"the largest step of the medians is {steps.max():.3g} of {rise:.3g} at {steps.idxmax()}"


def no_cliff(
    network: Network,
    quantity: str,
    values: pd.DataFrame,
    published_ranges: pd.DataFrame,
) -> list[Finding]:
    """Return whether 1 - CKA grows with depth, in no single step."""
    claim = f"{quantity} makes no more than half of its rise in a single step"
    return [
        seed_by_seed(
            network, f"{quantity} grows from each layer to the next", grows, values
        ),
        seed_by_seed(network, claim, gradual, values, largest_step(values)),
    ]


def offset(
    network: Network,
    quantity: str,
    values: pd.DataFrame,
    published_ranges: pd.DataFrame,
) -> list[Finding]:
    """Return whether Procrustes angles lie in the published ranges.

    Fully connected layers after convolutions are published with an added constant, :data:`OFFSET`.
    """
    if not network.last_conv or published_ranges["low"].isna().any():
        return medians_within(network, quantity, values, published_ranges)
    dense_layers = [layer for layer in values.index if layer.startswith("fc")]
    dense_values, medians = values.loc[dense_layers], values.median(axis=1)
    low, high = (
        published_ranges[end].astype(float)[dense_layers] for end in ("low", "high")
    )
    published_centres = (low + high) / 2
    mean_offset, mean_distance = (
        float((medians[dense_layers] - centre).abs().mean())
        for centre in (published_centres, published_centres - OFFSET)
    )
    text, verdict = of_ranges(dense_values, low - OFFSET, high - OFFSET)
    expected = f"from fc1 on medians of {quantity} lie within the published ranges less {OFFSET}"
    measured_text = (
        f"{mean_distance:.3g} from the middle of these ranges and {mean_offset:.3g} "
        "from that of the published ones on average"
    )
    return [decided(network, expected, f"{measured_text}; {text}", verdict, values)]


def kink(
    network: Network,
    quantity: str,
    values: pd.DataFrame,
    published_ranges: pd.DataFrame,
) -> list[Finding]:
    """Return whether federation sensitivity is flat up to the last convolution, or up to the classifier."""
    findings = medians_within(network, quantity, values, published_ranges)
    if network.last_conv:
        expected = f"{quantity} stays below {FLAT} up to {network.last_conv} and grows by more than {FLAT} times at fc1"
        return [
            *findings,
            seed_by_seed(
                network,
                expected,
                lambda curve: breaks(curve, network.last_conv),
                values,
            ),
        ]
    if values.index[0] == "embedding":
        expected = (
            f"{quantity} stays below 1.5 before the classifier and is above 50 at it"
        )
        return [
            *findings,
            seed_by_seed(
                network,
                expected,
                lambda curve: bool(curve.iloc[-2] < 1.5 and curve.iloc[-1] > 50),
                values,
            ),
        ]
    return findings


def breaks(curve: pd.Series, last_conv: str) -> bool:
    """Return whether a curve of S is flat up to the last convolution and grows at fc1."""
    return bool(curve[last_conv] < FLAT < curve["fc1"] / curve[last_conv])
