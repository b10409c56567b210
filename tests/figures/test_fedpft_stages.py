"""FedPFT's Fig. 5: what a small study stores of losses and accuracy, and what its curves decide."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from figures import recipe
from figures.fedpft import stages
from figures.fedpft.fitted import OURS
from fl_core import rows
from tests.figures.conftest import drawn, header_of
from tests.figures.test_fedpft import CLASSES, images

pytestmark = pytest.mark.filterwarnings("ignore:client")
HEADER = header_of(stages.STUDY)
TURN = stages.STAGE


def frame_of(gain: float, seeds: int = 3) -> pd.DataFrame:
    """Rows in which FedPFT ends more accurate, with a lower contrastive and a higher classification loss."""
    made: list[Any] = []
    for run, last in ((OURS, TURN), (stages.TWO, 2 * TURN)):
        ours = run == OURS
        for seed in range(seeds):
            for done in range(1, last + 1):
                named = {"run": run, "seed": seed, "round": done}
                spread = 0.002 * ((seed * len(run)) % 3)
                made.append(
                    rows.row(
                        "accuracy",
                        0.5 + gain * ours + spread,
                        model="personal",
                        split="test",
                        **named,
                    )
                )
                made.append(
                    rows.row("accuracy", 0.9, model="local", split="test", **named)
                )
                contrast = (
                    3 - gain * ours + spread if done <= TURN else 1 + 4 * (gain < 0)
                )  # only looked at: no claim
                losses = {stages.CONTRAST: contrast}
                if ours or done > TURN:
                    losses[stages.CLASSIFY] = 1 + gain * ours + spread
                for kind, loss in losses.items():
                    made.append(
                        rows.row(
                            "train_loss", loss, variant=kind, split="train", **named
                        )
                    )
    return rows.frame(made)


def test_what_the_paper_shows_would_be_reproduced_and_its_opposite_not() -> None:
    found = drawn(stages.NAME, HEADER, frame_of(0.1)).findings
    assert [finding.held for finding in found] == [True] * 3
    assert {finding.verdict for finding in found} == {"not comparable"}
    assert [
        finding.held for finding in drawn(stages.NAME, HEADER, frame_of(-0.1)).findings
    ] == [False] * 3
    assert [
        finding.held
        for finding in drawn(stages.NAME, HEADER, frame_of(0.1, seeds=2)).findings
    ] == [None] * 3
    one = frame_of(0.1)
    alone = drawn(stages.NAME, HEADER, one[one["run"] == OURS]).findings
    assert [finding.held for finding in alone] == [None] * 3


def test_a_small_study_keeps_both_losses_of_every_round(tmp_path: Path) -> None:
    tiny: dict[str, Any] = {
        "dataset": images(tmp_path / "noise.npz", 600, 12, CLASSES), "clients": 2, "samples_per_client": 40,
        "rounds": 1, "batch_size": 20, "epochs": 2, "eval_every": 1, "checkpoint_every": 1,
    }  # fmt: skip
    two = stages.RUNS[stages.TWO].with_keys(
        **tiny | {"rounds": 2, "options": {"stage_rounds": 1, "watch": True}},
    )
    item = replace(
        stages.STUDY,
        runs={OURS: stages.RUNS[OURS].with_keys(**tiny), stages.TWO: two},
        seeds=1,
    )
    recipe.train(item, tmp_path / stages.NAME, command="typed", progress=False)
    header, frame = item.read(tmp_path / stages.NAME)
    values = stages.curves(frame)[0]
    for quantity, rounds in {
        stages.CLASSIFY: [2],
        stages.CONTRAST: [1, 2],
        stages.ACCURACY: [0, 1, 2],
    }.items():
        assert values[stages.TWO, quantity].index.tolist() == rounds, (
            "the first stage classifies nothing"
        )
    assert values[OURS, stages.CLASSIFY].index.tolist() == [1]
    assert (values > 0).all()
    drawing = stages.STUDY.draw(header, frame)
    assert "stages" in drawing.caption
