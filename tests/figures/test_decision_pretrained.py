"""The summary of pretrained starts against gains and intervals that are computed by hand."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from figures.decision import pretrained
from figures.decision.finished_ways import ARMS
from fl_core import rows

CLIENTS = {"a": (1.0, 30), "b": (0.5, 10)}
"""Of each client the factor of its score, and its training samples."""


def value(start: str, seed: int, arm: str) -> float:
    """Return a score whose gain over sharing nothing is twice as large from a pretrained start."""
    other = start == pretrained.PRETRAINED
    return 0.3 + 0.1 * other + 0.05 * ARMS.index(arm) * (seed + 1) * (1 + other)


def lines(
    starts: Any = (pretrained.FRESH, pretrained.PRETRAINED), seeds: Any = (0, 1), data: str = "pacs"
) -> Iterator[rows.Row]:
    for start in starts:
        for seed in seeds:
            for arm in ARMS:
                for client, (factor, n) in CLIENTS.items():
                    yield rows.row(
                        "macro_f1", factor * value(start, seed, arm), run=f"{data}-{start}", seed=seed, variant=arm,
                        split=pretrained.HELD_OUT, client=client, n_train=n,
                    )  # fmt: skip


def test_scores_weight_clients_by_training_samples() -> None:
    table = pretrained.scores(rows.frame(lines()))
    assert len(table) == 2 * 2 * len(ARMS)
    for line in table.itertuples():
        expected = value(line.start, line.seed, line.arm) * (1.0 * 30 + 0.5 * 10) / 40
        assert line.value == pytest.approx(expected)


def test_gains_and_their_change_are_paired_by_seed() -> None:
    table = pretrained.summary(pretrained.scores(rows.frame(lines()))).set_index("arm")
    factor = 35 / 40
    for k, arm in enumerate(ARMS):
        gains = np.array([factor * 0.05 * k * (seed + 1) for seed in (0, 1)])
        half = stats.t.ppf(0.975, 1) * gains.std(ddof=1) / math.sqrt(2)
        expected = (gains.mean(), gains.mean() - half, gains.mean() + half)
        assert table.loc[arm, "gain fresh"] == pytest.approx(expected)
        assert table.loc[arm, "change"] == pytest.approx(expected)
    assert table["seeds"].eq(2).all()


def test_a_seed_without_both_starts_does_not_count() -> None:
    frame = rows.frame([*lines(seeds=(0, 1)), *lines((pretrained.FRESH,), (2,))])
    table = pretrained.summary(pretrained.scores(frame))
    assert table["seeds"].eq(2).all()
    one = pretrained.summary(pretrained.scores(rows.frame(lines(seeds=(0,)))))
    assert one["change"].map(lambda found: math.isnan(found.low)).all()


def test_expectations_follow_the_numbers() -> None:
    frame = rows.frame([line for name in pretrained.DATA for line in lines(data=name)])
    higher, gain, cut = pretrained.findings(pretrained.summary(pretrained.scores(frame)))
    assert higher.held is True
    assert gain.held is False
    assert cut.held is True
    partial = pretrained.findings(pretrained.summary(pretrained.scores(rows.frame(lines()))))
    assert all(each.held is None for each in partial)


def test_both_starts_have_the_same_settings() -> None:
    configs = pretrained.ITEM.runs
    for name, (_, init, _) in pretrained.DATA.items():
        fresh, other = (configs[f"{name}-{start}"].to_json() for start in (pretrained.FRESH, pretrained.PRETRAINED))
        assert other.pop("init") == init
        assert fresh.pop("init") is None
        assert fresh == other
    assert isinstance(pretrained._draw({"missing": []}, rows.frame(lines())).table, pd.DataFrame)
