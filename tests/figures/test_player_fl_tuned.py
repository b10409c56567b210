"""PLayer-FL's Table 1 with every method tuned alike: equal grids, the chosen rate, and the table from its rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from figures import items
from figures.__main__ import main
from figures.player_fl import tuned
from fl_core import rows
from fl_core.config import RunConfig
from fl_core.errors import UsageError
from tests.figures.conftest import page

FEW = ("local", "fedavg", "playerfl")
pytestmark = pytest.mark.filterwarnings("ignore:client")


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> dict[str, RunConfig]:
    """Three methods on Fed-Heart, two learning rates, one round and two seeds."""
    monkeypatch.setitem(tuned.GRIDS, "heart", (0.01, 0.1))
    runs = {
        run: tuned.RUNS[run].with_keys(rounds=1, eval_every=1)
        for run in (f"heart.{name}" for name in FEW)
    }
    for item in (tuned.SEARCH, tuned.STUDY):
        monkeypatch.setitem(
            items.REGISTRY,
            item.name,
            replace(item, runs=runs, seeds=min(2, item.seeds), more_seeds={}),
        )
    return runs


def test_every_method_tries_as_many_rates() -> None:
    for dataset, rates in tuned.GRIDS.items():
        for run in (run for run in tuned.RUNS if run.startswith(f"{dataset}.")):
            tried = tuned.grid(*run.split("."))
            assert len(set(tried)) == len(rates)
            assert tuned.RUNS[run].training.lr is None


def test_a_run_has_the_rate_that_did_best_on_validation(
    tmp_path: Path, tiny: dict[str, RunConfig]
) -> None:
    main([tuned.TUNING, "--train", "--out", str(tmp_path)])
    assert "no chosen rate" in page(tuned.TUNING, tmp_path)
    main([tuned.NAME, "--train", "--out", str(tmp_path)])
    header = items.REGISTRY[tuned.NAME].read(tmp_path / tuned.NAME)[0]
    for run in tiny:
        frame = rows.read(tmp_path / tuned.TUNING / f"{run}-0.jsonl")[1]
        tried = frame[frame["metric"] == tuned.SCORE].set_index("variant")["value"]
        assert len(tried) == len(tuned.GRIDS["heart"])
        assert (
            frame.loc[frame["metric"] == tuned.SCORE, "split"] == "validation"
        ).all()
        assert tried.idxmax() == f"lr={header['runs'][run]['config']['lr']:g}"
    text = page(tuned.NAME, tmp_path)
    assert "for every method" in text
    assert "rate by method" not in text


def test_a_run_that_was_not_tuned_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"heart\.local .*player_fl\.tuning"):
        tuned.STUDY.make("heart.local", 0, tmp_path / tuned.NAME, None)
