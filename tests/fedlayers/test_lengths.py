"""The result of a command on a built-in dataset fits on a screen."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.fedlayers import command

LINES = 25
WIDTH = 110
BASELINES = 8
"""Rows of a race's table that are no arm at its rate: baselines, and trials of rates."""
COMMANDS = {
    "run": "run --rounds 1",
    "run by a rule": "run --algorithm playerfl --rounds 1",
    "choose": "choose --rounds 1 --seeds 2 --tune-rates 2",
    "compare": "compare --rounds 1 --seeds 2 --baselines",
    "tune": "tune --rounds 1 --algorithms fedavg fedprox --search lr=0.01,0.1 mu=0.1,1",
    "diagnose": "diagnose --null labels clients fresh",
    "study": "study --rounds 2 --seeds 2",
}


def result(printed: str) -> list[str]:
    """Return the printed lines after those on progress."""
    lines = printed.rstrip("\n").splitlines()
    progress = [
        k
        for k, line in enumerate(lines)
        if ("runs: " in line and " of " in line) or "continuing to" in line
    ]
    begins = [
        k for k, line in enumerate(lines) if line.startswith("test split")
    ]  # what a run prints after a race
    return lines[max([-1, *progress, *(k - 1 for k in begins)]) + 1 :]


SLOW = ("run", "choose", "tune", "study")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else [])
        for name in COMMANDS
    ],
)
def test_the_result_fits_on_a_screen(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    command(f"{COMMANDS[name]} --dataset heart")
    printed = capsys.readouterr()
    lines = result(printed.out)
    room = LINES + (BASELINES if name == "choose" else 0)
    assert 4 < len(lines) <= room, "\n".join(lines)
    assert sum(math.ceil(max(1, len(line)) / WIDTH) for line in lines) <= room + 5, (
        "\n".join(lines)
    )
    assert "\r" not in printed.err
