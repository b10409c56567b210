"""Studies of runs that stop by themselves: what arms and trials are judged by."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedlayers.studies.compare import compare
from fedlayers.studies.race import validation_scores
from fedlayers.studies.tune import tune
from fl_core.config import RunConfig
from fl_core.records import store

PATIENT = RunConfig(
    dataset="heart", rounds=14, eval_every=1, epochs=1, lr=0.05, patience=2
)


def test_trials_are_worth_their_score_up_to_the_best_round(tmp_path: Path) -> None:
    config = PATIENT.with_keys(lr=None)
    found = tune(config, ["fedavg"], {"lr": "0.01,0.1"}, tmp_path, trials=2)
    for trial, value in enumerate(found.table["value"]):
        run = store.Run(tmp_path / "trials" / f"fedavg-{trial:03}-1000")
        best = run.best_round("global")
        lines = validation_scores(run.rows()[1], best, metrics=("macro_f1",))[-3:]
        assert value == pytest.approx(
            sum(line["macro_f1"] for line in lines) / len(lines)
        )


def test_a_comparison_scores_best_rounds_by_default(tmp_path: Path) -> None:
    found = compare(PATIENT, ["fedavg", "fedbabu"], [0], tmp_path, progress=False)
    assert set(found.table["model"]) == {"global@best_val", "personal@best_val"}
    for name, model in (("fedavg", "global"), ("fedbabu", "personal")):
        run = store.Run(tmp_path / "runs" / f"{name}-0")
        best = run.best_round(model)
        frame = run.rows()[1]
        rows = frame[
            (frame["round"] == best)
            & (frame["model"] == model)
            & (frame["split"] == "test")
        ]
        rows = rows[rows["metric"] == "macro_f1"]
        wanted = (rows["value"] * rows["n_train"]).sum() / rows["n_train"].sum()
        assert found.table.set_index("algorithm").loc[
            name, "macro_f1"
        ] == pytest.approx(wanted)
