"""Local training in bfloat16 beside float32: what is said of known differences, and the item from end to end."""

from __future__ import annotations

from pathlib import Path

import pytest

from figures import precision
from figures.__main__ import main
from figures.precision import HALF, METHODS, PLAIN
from fl_core import rows
from tests.figures.conftest import TINY, page, small


def test_differences_are_bfloat16_minus_float32_paired_by_seed() -> None:
    lines = [
        rows.row(
            "accuracy",
            0.5 + 0.1 * seed + gain * (name == HALF),
            run=f"fedavg.{name}",
            seed=seed,
            client=client,
        )
        for name in (PLAIN, HALF)
        for seed, gain in enumerate((0.01, 0.012, 0.008))
        for client in ("a", "b")
    ]
    found = precision.gaps(rows.frame(lines))
    assert list(found) == ["fedavg"]
    assert found["fedavg"].pairs == 3
    assert found["fedavg"].interval.value == pytest.approx(0.01)
    assert found["fedavg"].level(precision.MARGIN) is True


@pytest.mark.slow
def test_runs_and_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = {
        name: TINY.with_keys(
            algorithm=config.federation.algorithm,
            precision=config.training.precision,
            rounds=2,
        )
        for name, config in precision.RUNS.items()
    }
    small(monkeypatch, precision.ITEM, runs)
    main([precision.NAME, "--train", "--seeds", "3", "--out", str(tmp_path)])
    text = page(precision.NAME, tmp_path)
    assert text.count(" | 3 | ") == len(METHODS)
    assert "within 2 points" in text
