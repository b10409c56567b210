"""What noise for privacy does to a choice: what is measured, and what the choices lose."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from fedlayers.studies.arms import DEFAULT
from figures.decision import privacy
from figures.decision.privacy import CHOSEN, EPSILON, RULE, SHARED, TEST
from fl_core import rows, runner


def frame_of(
    scores: dict[str, dict[str, float]], chosen: dict[str, list[str]], shared: dict[str, list[float | None]]
) -> pd.DataFrame:
    lines = []
    for run, of_arms in scores.items():
        for seed, (winner, count) in enumerate(zip(chosen[run], shared[run], strict=True)):
            lines += [rows.row(TEST, value, variant=arm, seed=seed, run=run) for arm, value in of_arms.items()]
            lines.append(rows.row(CHOSEN, 1.0, variant=winner, seed=seed, run=run))
            status = "ok" if count is not None else "a value below 0"
            lines.append(rows.row(SHARED, count, status=status, variant=RULE, seed=seed, run=run))
    return rows.frame(lines)


def test_what_choices_lose_is_told_with_the_noise_and_without() -> None:
    table = privacy.regrets(
        frame_of(
            {"off": {"nothing": 0.4, "half": 0.6}, "noise_1": {"nothing": 0.4, "half": 0.2}},
            {"off": ["half", "half"], "noise_1": ["nothing", "half"]},
            {"off": [2.0, 3.0], "noise_1": [2.0, None]},
        )
    ).set_index("run")
    assert list(table.index) == ["off", "noise_1"]
    assert table.loc["off", ["best", "random", "regret"]].tolist() == pytest.approx([0.6, 0.1, 0.0])
    assert table.loc["noise_1", ["best", "random", "regret"]].tolist() == pytest.approx([0.4, 0.1, 0.1])
    assert table.loc["noise_1", "regret_without"] == pytest.approx(0.1)
    assert table["same"].tolist() == [2, 1]
    assert table["rule_same"].tolist() == [2, 1]


@pytest.mark.slow
def test_what_shares_nothing_is_not_changed_by_noise(tmp_path: Path) -> None:
    pytest.importorskip("opacus", reason="the account is opacus', of the extra federation")
    found: dict[str, pd.DataFrame] = {}
    for run in ("off", "noise_1"):
        config = replace(privacy.configurations()[run], rounds=2)
        found[run] = privacy._measure(runner.assemble(config), run, tmp_path)
    scores = {run: frame[frame["metric"] == TEST].set_index("variant")["value"] for run, frame in found.items()}
    assert set(scores["off"].index) == set(scores["noise_1"].index) == set(DEFAULT)
    assert scores["off"]["nothing"] == scores["noise_1"]["nothing"]
    assert (scores["off"] != scores["noise_1"]).any()
    for run, frame in found.items():
        assert frame[frame["metric"] == CHOSEN]["variant"].item() in DEFAULT
        assert (frame[frame["metric"] == EPSILON]["value"] > 0).all() == (run != "off")
