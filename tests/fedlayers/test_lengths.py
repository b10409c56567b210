"""The result of a command on a built-in dataset fits on a screen."""

import math

import pytest

from tests.conftest import with_slow
from tests.fedlayers import command

LINES = 25
WIDTH = 110
COMMANDS = {
    "run by a rule": "run --algorithm playerfl --rounds 1",
    "compare": "compare --rounds 1 --seeds 2 --baselines",
    "diagnose": "diagnose --null labels clients fresh",
    "study": "study --rounds 1 --seeds 2",
    "choose": "choose --rounds 1 --seeds 1",
}


def result(printed):
    """Return the printed lines after those on progress."""
    lines = printed.rstrip("\n").splitlines()
    ends = "runs: ", "fitting the baselines"
    progress = [k for k, line in enumerate(lines) if line.startswith(ends)]
    return lines[max([-1, *progress]) + 1 :]


SLOW = ("study", "compare")


@pytest.mark.parametrize("name", with_slow(COMMANDS, SLOW))
def test_the_result_fits_on_a_screen(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command(f"{COMMANDS[name]} --dataset heart")
    printed = capsys.readouterr()
    lines = result(printed.out)
    assert 4 < len(lines) <= LINES, "\n".join(lines)
    rows = sum(math.ceil(max(1, len(line)) / WIDTH) for line in lines)
    assert rows <= LINES + 10, "\n".join(lines)
    assert "\r" not in printed.err
