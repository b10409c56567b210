"""The claim that FedPFT's features set the classes further apart, from rows with known values."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from figures import recipe
from figures.fedpft import separation
from figures.planes import CLUSTERED
from fl_core import rows
from tests.figures.conftest import TINY, drawn, header_of


def frame_of(
    accuracy: dict[str, float], silhouettes: dict[str, float], seeds: int
) -> pd.DataFrame:
    """Rows of both runs, whose values differ a little between seeds."""
    lines = []
    for run, model in (("fedavg", "global"), ("no_contrast", "personal")):
        for seed in range(seeds):
            named = {
                "run": run,
                "seed": seed,
                "round": separation.ROUNDS,
                "split": "test",
            }
            lines.append(
                rows.row(
                    "accuracy",
                    accuracy[run] + 0.01 * seed,
                    client="a",
                    model=model,
                    **named,
                )
            )
            lines += [
                rows.row(metric, silhouettes[run] + 0.01 * seed**2, **named)
                for metric in CLUSTERED
            ]
    return rows.frame(lines)


def finding(seeds: int = 5, apart: float = 0.1, level: float = 0.45):
    header = header_of(separation.STUDY, seeds)
    header["had"] = {run: list(range(seeds)) for run in separation.RUNS}
    frame = frame_of(
        {"fedavg": level, "no_contrast": 0.7},
        {"fedavg": 0.0, "no_contrast": apart},
        seeds,
    )
    frame.loc[
        (frame["run"] == "fedavg") & (frame["metric"] == "silhouette_class"), "value"
    ] *= 0.5
    return drawn(separation.NAME, header, frame).findings[0]


def test_the_verdict_follows_the_silhouettes() -> None:
    assert finding().held is True
    assert finding(apart=-0.4).held is False
    assert finding(seeds=2).held is None


def test_a_fedavg_that_has_learned_little_is_not_comparable() -> None:
    assert finding(level=0.2).incomparable
    assert not finding().incomparable


@pytest.mark.slow
def test_the_study_measures_both_runs(tmp_path: Path) -> None:
    tiny = {
        run: TINY.with_keys(
            algorithm=config.federation.algorithm,
            options=config.federation.options,
            model="resnet8",
            epochs=4,
        )
        for run, config in separation.RUNS.items()
    }
    item = replace(separation.STUDY, runs=tiny, seeds=1)
    recipe.train(item, tmp_path / separation.NAME, command="typed", progress=False)
    _, frame = item.read(tmp_path / separation.NAME)
    assert set(frame.loc[frame["metric"] == "silhouette_class", "run"]) == set(
        separation.RUNS
    )
