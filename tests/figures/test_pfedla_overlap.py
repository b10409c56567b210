"""pFedLA's weights beside the classes that clients share: numbers by hand, and a small study run and drawn."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from figures.__main__ import main
from figures.pfedla import overlap, weights as weights_by_layer
from fl_core import rows
from tests.figures.conftest import TINY, made, page, small

pytestmark = pytest.mark.filterwarnings("ignore:client")


def test_overlap_and_correlations() -> None:
    counts = pd.DataFrame(
        [[3, 1, 0], [2, 0, 2], [0, 0, 5]], index=list("abc"), columns=["0", "1", "2"]
    )
    shared = overlap.overlap(counts)
    assert shared.to_numpy().tolist() == [[1, 0.5, 0], [0.5, 1, 0.5], [0, 1, 1]]
    assert overlap.chosen_pairs(shared) == [("c", "b"), ("a", "c")]
    for found in overlap.correlations(0.2 * shared + 0.1, shared):
        assert found == pytest.approx(1)
    assert overlap.correlations(shared * 0 + 1 / 3, shared) == (None, None)


@pytest.mark.slow
def test_overlap_runs_and_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = TINY.with_keys(
        clients=3, partition="non_iid_1", classes_per_client=4, samples_per_client=40, max_samples=None, rounds=3,
        eval_every=1,
    )  # fmt: skip
    small(
        monkeypatch,
        overlap.ITEM,
        {name: base.with_keys(algorithm=name) for name in overlap.SHOWN},
    )
    main([overlap.NAME, "--train", "--out", str(tmp_path)])
    assert made(tmp_path / overlap.NAME) == {
        *(
            f"{name}-{seed}"
            for name in ("local", "fedavg", "pfedla")
            for seed in (0, 1)
        ),
        "heurpfedla-0",
    }
    header, frame = rows.read(tmp_path / overlap.NAME / "pfedla-0.jsonl")
    weights_ = frame[frame["metric"] == overlap.WEIGHT]
    layers = weights_["layer"].nunique()
    assert len(weights_[weights_["round"] == 3]) == 9 * layers
    assert len(weights_[weights_["round"] == 2]) == 5 * layers
    start = frame[(frame["metric"] == overlap.CORRELATION) & (frame["round"] == 1)]
    assert header["about"]["config"]["algorithm"] == "pfedla"
    assert frame.loc[frame["metric"] == overlap.OVERLAP, "value"].between(0, 1).all()
    assert len(start) == 2 * (layers + 1)
    text = page(overlap.NAME, tmp_path)
    assert "open: pFedLA's mixture" in text
    assert "of pFedLA's" in text
    for name in ("pfedla.fig5", "pfedla.fig6", "pfedla.fig7"):
        assert "open: " in page(name, tmp_path)
        assert "held" not in page(name, tmp_path), (
            f"{name} claims an order from two seeds"
        )
    pairs = pd.read_csv(tmp_path / "pfedla.fig6.csv")
    sums = pairs.groupby(["layer", "receiver"])["value"].sum()
    assert len(sums) == 3 * layers
    assert sums.to_numpy() == pytest.approx(1)


@pytest.mark.parametrize(
    ("rounds", "expected"),
    [
        ([0, 1, 2, 3], [None, *weights_by_layer.PERIODS]),
        ([0, 6, 12], [None, *weights_by_layer.PERIODS[1:]]),
    ],
)
def test_periods(rounds: list[int], expected: list[str | None]) -> None:
    found = weights_by_layer.periods(pd.Series(rounds))
    assert [None if pd.isna(each) else each for each in found] == expected
