"""FedPFT's ablation and its settings: what a small study measures, and what its pictures decide."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from figures import recipe
from figures.fedpft import fitted, parts
from fl_core import rows
from fl_core.errors import UsageError
from tests.figures.conftest import drawn, header_of
from tests.figures.test_fedpft import CLASSES, images

pytestmark = pytest.mark.filterwarnings("ignore:client")
HEADER = header_of(parts.STUDY)
RISE = {0: 0.2, 1: 0.5, 2: 0.6, 3: 0.65, 4: 0.66, 5: 0.4}
"""Accuracy by epochs for the features, as the paper describes it."""


def frame_of(values: dict[str, float], seeds: int = 3) -> pd.DataFrame:
    """Rows of one client a run, of which the seeds differ a little."""
    made = [
        rows.row(
            parts.ORIGIN,
            value + 0.001 * seed + 0.0005 * ((seed * k) % 3),
            run=run,
            seed=seed,
            client="a",
        )
        for k, (run, value) in enumerate(values.items())
        for seed in range(seeds)
    ]
    return rows.frame(made).assign(round=12)


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames here hold the other study's runs already."""
    monkeypatch.setattr(parts, "joined", lambda header, frame: frame)


def test_the_published_ablation_would_be_reproduced_and_its_opposite_not(
    beside: None,
) -> None:
    published = {run: value for (run, _), value in parts.TABLE.published().items()}
    drawing = drawn("fedpft.table3", HEADER, frame_of(published))
    assert [finding.held for finding in drawing.findings] == [True] * 6
    assert {finding.verdict for finding in drawing.findings} == {"not comparable"}
    assert "V: all" in " ".join(drawing.table["line"])
    turned = {run: 1 - value for run, value in published.items()}
    assert [
        finding.held
        for finding in drawn("fedpft.table3", HEADER, frame_of(turned)).findings
    ] == [False] * 6


@pytest.mark.parametrize("name", parts.SWEEPS)
def test_a_sweep_decides_what_the_paper_says(name: str, beside: None) -> None:
    sweep = parts.SWEEPS[name]
    flat = dict.fromkeys(sweep.values, 0.66)
    rising, steep = (
        (RISE, flat)
        if name == "fedpft.fig9"
        else (flat, {n: 0.3 + n / 100 for n in sweep.values})
    )

    def held(values: dict[int, float], **how: Any) -> bool | None:
        frame = frame_of(
            {sweep.run(value): score for value, score in values.items()}, **how
        )
        return drawn(name, HEADER, frame).findings[0].held

    assert held(rising) is True
    assert held(rising, seeds=2) is None
    assert held(steep) is not True
    with pytest.raises(UsageError, match=sweep.option):
        drawn(name, HEADER, frame_of({fitted.OURS: 0.5}))


def test_a_small_study_scores_every_client_of_settings_at_the_ends(
    tmp_path: Path,
) -> None:
    tiny: dict[str, Any] = {
        "dataset": images(tmp_path / "noise.npz", 600, 12, CLASSES), "clients": 2, "samples_per_client": 40,
        "rounds": 1, "batch_size": 20, "eval_every": 1, "checkpoint_every": 1,
    }  # fmt: skip
    wanted = ("setting_I", "feature_epochs_0", "feature_epochs_5", "contrast_prompts_1")
    runs = {name: config.with_keys(**tiny) for name, config in parts.RUNS.items()}
    item = replace(parts.STUDY, runs=runs, seeds=1)
    recipe.train(
        item, tmp_path / parts.NAME, only=wanted, command="typed", progress=False
    )
    _, frame = item.read(tmp_path / parts.NAME)
    assert (frame["status"] == "ok").all()
    assert frame["value"].between(0, 1).all()
    assert frame.groupby("run")["client"].nunique().to_dict() == dict.fromkeys(
        wanted, 2
    )
