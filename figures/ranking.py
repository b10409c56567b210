"""Ranks algorithms over several datasets: mean ranks, Friedman's and Nemenyi's tests, and their diagram."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd
import scikit_posthocs
import scipy.stats
from matplotlib.axes import Axes

from diagnostics.plots.drawing import COLOURS, MEAN
from fl_core import statistics

ALPHA = 0.05


@dataclass(frozen=True)
class FriedmanTest:
    """The result of Friedman's test, with a chi-square ``statistic`` of ``n_algorithms`` - 1 degrees of freedom.

    Statistic and p-value are NaN unless ``status`` is ok.
    """

    statistic: float
    p_value: float
    n_algorithms: int
    n_blocks: int
    status: str = "ok"


def friedman(table: pd.DataFrame) -> FriedmanTest:
    """Test with Friedman's test whether the algorithms differ, with scipy's correction for ties.

    The algorithms (rows) are the treatments and the datasets or seeds (columns) the blocks. The transposed table would
    test whether the datasets differ, which they always do. The p-value is the chi-square approximation.
    """
    n_algorithms, n_blocks = table.shape
    status = statistics.incomplete(table)
    if not status and n_algorithms < 3:
        status = f"Friedman's test needs at least 3 algorithms, not {n_algorithms}"
    if not status and n_blocks < 2:
        status = f"Friedman's test needs at least 2 datasets or seeds, not {n_blocks}"
    score_matrix = None if status else table.to_numpy(float)
    if score_matrix is not None and (score_matrix == score_matrix[:1]).all():
        status = "all algorithms are tied in every dataset or seed"
    if score_matrix is None or status:
        return FriedmanTest(math.nan, math.nan, n_algorithms, n_blocks, status)
    test_result = scipy.stats.friedmanchisquare(*score_matrix)
    return FriedmanTest(
        float(test_result.statistic), float(test_result.pvalue), n_algorithms, n_blocks
    )


@dataclass(frozen=True)
class Ranking:
    """Algorithms ranked over datasets, with the tests of whether they differ.

    Attributes:
        values: algorithms (rows) by datasets (columns); a dataset that lacks any algorithm takes no part.
        higher_is_better: whether the highest value has rank 1.
    """

    values: pd.DataFrame
    higher_is_better: bool

    @cached_property
    def blocks(self) -> pd.DataFrame:
        """Return the values that take part."""
        return self.values.dropna(axis=1)

    @cached_property
    def ranks(self) -> pd.Series:
        """Return the mean rank of each algorithm, 1 is best; NaN where no dataset is complete."""
        if self.blocks.empty:
            return pd.Series(math.nan, index=self.values.index)
        return statistics.ranks(self.blocks, self.higher_is_better)

    @cached_property
    def friedman(self) -> FriedmanTest:
        """Return whether the algorithms differ, algorithms being treatments and datasets blocks."""
        return friedman(self.blocks)

    @cached_property
    def transposed(self) -> FriedmanTest:
        """Return the same test of the transposed table: whether the datasets differ."""
        return friedman(self.blocks.T)

    @cached_property
    def status(self) -> str:
        """Return ``ok``, or why no pair is tested after Friedman's test."""
        shape = self.blocks.shape
        reason = f"at least 2 algorithms and 2 datasets or seeds are needed, not {shape[0]} and {shape[1]}"
        return statistics.incomplete(self.blocks) or (
            reason if min(shape) < 2 else "ok"
        )

    @cached_property
    def nemenyi(self) -> pd.DataFrame:
        """Return the p-value of every pair on mean ranks, after Friedman's test (Demsar, 2006).

        For k algorithms and N datasets it is the tail of the studentized range at

            |R_i - R_j| / sqrt(k (k + 1) / (6 N)) sqrt(2)

        It is NaN unless the status is ok.
        """
        algorithms = self.values.index
        if self.status != "ok":
            return pd.DataFrame(math.nan, index=algorithms, columns=algorithms)
        p_values = scikit_posthocs.posthoc_nemenyi_friedman(
            self.blocks.to_numpy(float).T
        )
        return pd.DataFrame(p_values.to_numpy(), index=algorithms, columns=algorithms)

    @property
    def says(self) -> str:
        """Return the result of Friedman's test in words."""
        test = self.friedman
        if test.status == "ok":
            return f"p = {test.p_value:.2g} over {test.n_blocks} datasets"
        return test.status

    @property
    def critical(self) -> float:
        """Return Nemenyi's critical difference of mean ranks (Demsar, 2006); NaN where that test has no result.

        It is q sqrt(k (k + 1) / (6 N)) for k algorithms and N datasets. Here q is the upper 5 % point of the
        studentized range with infinite degrees of freedom, over sqrt(2).
        """
        if self.status != "ok":
            return math.nan
        k, n = self.blocks.shape
        q = scipy.stats.studentized_range.ppf(1 - ALPHA, k, math.inf) / math.sqrt(2)
        return float(q * math.sqrt(k * (k + 1) / (6 * n)))


def first_shares(
    scores: pd.DataFrame, ranking: Ranking, resamples: int = 2000
) -> pd.Series:
    """Return each algorithm's share of resamples with the best mean rank. Ties are divided.

    The seeds of every dataset are drawn with replacement, the same for all algorithms, and their medians ranked.

    Args:
        scores: dataset, method, seed, value.
    """
    generator, algorithms = np.random.default_rng(0), list(ranking.blocks.index)
    sign = -1 if ranking.higher_is_better else 1
    total_ranks = np.zeros((resamples, len(algorithms)))
    for dataset in ranking.blocks.columns:
        dataset_scores = scores[scores["dataset"] == dataset].pivot(
            index="seed", columns="method", values="value"
        )
        seed_scores = (
            dataset_scores.reindex(columns=algorithms)
            .dropna()
            .to_numpy(dtype=np.float64)
        )
        resampled_seeds = generator.integers(
            len(seed_scores), size=(resamples, len(seed_scores))
        )
        total_ranks += scipy.stats.rankdata(
            sign * np.median(seed_scores[resampled_seeds], axis=1), axis=1
        )
    is_first = np.isclose(total_ranks, total_ranks.min(axis=1, keepdims=True))
    return pd.Series(
        (is_first / is_first.sum(axis=1, keepdims=True)).mean(axis=0), index=algorithms
    )


def diagram(ax: Axes, ranking: Ranking, names: Mapping[str, str]) -> None:
    """Draw the critical-difference diagram (Demsar, 2006): algorithms by mean rank.

    Bars join algorithms without a significant difference by Nemenyi's test. Without a test the reason is written.

    Args:
        names: how each algorithm is shown, by its name.
    """
    if ranking.status != "ok":
        ax.set_axis_off()
        ax.text(
            0.5,
            0.5,
            ranking.status,
            ha="center",
            va="center",
            transform=ax.transAxes,
            wrap=True,
            color="0.4",
        )
        return
    ranks = ranking.ranks.rename(index=names)
    pair_p_values = ranking.nemenyi.rename(index=names, columns=names)
    artists = scikit_posthocs.critical_difference_diagram(
        ranks, pair_p_values, alpha=ALPHA, ax=ax, text_h_margin=0.15, label_fmt_left="{label} ({rank:.1f})",
        label_fmt_right="({rank:.1f}) {label}", label_props={"fontsize": 7.5},
        elbow_props={"color": "0.3", "linewidth": 0.9, "marker": ""},
        marker_props={"color": MEAN, "s": 14}, crossbar_props={"color": COLOURS[0], "linewidth": 3, "marker": ""},
    )  # fmt: skip
    for bar in artists[
        "crossbars"
    ]:  # which are sets: in another order in every process
        bar[0].set_xdata(sorted(bar[0].get_xdata()))
    low, high = 1.0, float(len(ranks))
    ax.set_xlim(low - 0.2, high + 0.2)
    ax.set_xticks(range(1, len(ranks) + 1))
    bottom, _ = ax.get_ylim()
    ax.set_ylim(bottom, 4.0)
    ax.grid(False)
    ax.plot(
        [low, low + ranking.critical],
        [2.5, 2.5],
        color="0.3",
        linewidth=1.4,
        marker="|",
        markersize=5,
    )
    note = f"Nemenyi's critical difference at {ALPHA:g}: {ranking.critical:.1f}"
    ax.text(low, 2.9, note, va="bottom", fontsize=7, color="0.3")
