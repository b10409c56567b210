"""pFedLA's Fig. 1: what a small study stores, and what its curves and weights decide."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from figures import recipe
from figures.pfedla import similar
from fl_core import rows
from fl_core.errors import UsageError
from tests.figures.conftest import TINY, drawn, header_of

pytestmark = pytest.mark.filterwarnings("ignore:client")
HEADER = header_of(similar.STUDY)
UNITS = {
    "conv1.conv": 0.18,
    "conv1.norm": 0.17,
    "conv2.conv": 0.2,
    "fc1": 0.3,
    "fc2": 0.28,
    "fc3": 0.22,
}


def frame_of(gain: float, units: dict[str, float], seeds: int = 3) -> pd.DataFrame:
    """Rows in which mixing by layer is better by ``gain`` and the first client weights itself as given."""
    made: list[Any] = []
    for k, run in enumerate(similar.RUNS):
        layered = run.startswith(similar.LAYERS)
        for seed in range(seeds):
            named = {"run": run, "seed": seed}
            for done in (0, 40):
                score = (
                    0.1
                    if not done
                    else 0.5 + gain * layered + 0.002 * ((seed * (k + 1)) % 3)
                )
                what = {"model": "personal", "round": done, "split": "test", **named}
                made.append(rows.row("accuracy", score, **what))
                made.append(rows.row("accuracy", score, client="client_0", **what))
            for layer, value in (units if layered else {"": 0.17}).items():
                for other in ("client_0", "client_1"):
                    made.append(rows.row(
                        similar.WEIGHT, value + 0.001 * seed if other == "client_0" else 0.1,
                        client="client_0", client_b=other, layer=layer, round=40, **named,
                    ))  # fmt: skip
    return rows.frame(made)


def test_what_the_paper_shows_would_be_reproduced_and_its_opposite_not() -> None:
    found = drawn(similar.NAME, HEADER, frame_of(0.1, UNITS)).findings
    assert [finding.held for finding in found] == [True] * 3
    turned = drawn(
        similar.NAME,
        HEADER,
        frame_of(-0.1, {name: 0.5 - value for name, value in UNITS.items()}),
    ).findings
    assert [finding.held for finding in turned] == [False] * 3
    few = drawn(similar.NAME, HEADER, frame_of(0.1, UNITS, seeds=2)).findings
    assert [finding.held for finding in few] == [None] * 3
    mixed = drawn(
        similar.NAME, HEADER, frame_of(0.1, UNITS | {"conv2.conv": 0.29})
    ).findings
    assert mixed[2].held is False


def test_without_a_run_that_mixes_by_layer_nothing_is_drawn() -> None:
    frame = frame_of(0.1, UNITS)
    with pytest.raises(UsageError, match="mixes"):
        drawn(similar.NAME, HEADER, frame[frame["run"] == similar.MODELS])


def test_a_small_study_keeps_the_first_clients_scores_and_weights(
    tmp_path: Path,
) -> None:
    tiny = TINY.with_keys(
        clients=3,
        partition="non_iid_1",
        classes_per_client=4,
        samples_per_client=40,
        max_samples=None,
        rounds=2,
    )
    runs = {
        run: tiny.with_keys(
            algorithm=config.federation.algorithm,
            options=config.federation.options,
            eval_every=1,
        )
        for run, config in similar.RUNS.items()
    }
    item = replace(similar.STUDY, runs=runs, seeds=1, more_seeds={})
    recipe.train(item, tmp_path / similar.NAME, command="typed", progress=False)
    frame = item.read(tmp_path / similar.NAME)[1]
    scores = similar.accuracies(frame)
    assert set(scores.index) == {
        (run, who, n)
        for run in runs
        for who in (similar.FIRST, similar.EVERYONE)
        for n in range(3)
    }
    weights = frame[frame["metric"] == similar.WEIGHT]
    sums = weights.groupby(["run", weights["layer"].fillna("")])["value"].sum()
    assert sums.to_numpy() == pytest.approx(1.0)
    assert weights["client"].unique().tolist() == ["client_0"]
    selves = similar.selves(frame)
    assert set(selves.loc[similar.MODELS].index) == {""}
    assert len(selves.loc[similar.LAYERS]) > 2
    sharper = selves.loc[f"{similar.LAYERS}_sharp", 0] - selves.loc[similar.LAYERS, 0]
    assert (sharper >= 0).all()
