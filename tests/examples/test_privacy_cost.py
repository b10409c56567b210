"""The example that measures what noise costs prints its table."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from examples.privacy_cost import main
from fedlayers.remote.privacy import spent

pytestmark = pytest.mark.skipif(find_spec("opacus") is None, reason="the account is opacus', of the extra federation")


def test_a_short_table(capsys: pytest.CaptureFixture[str]) -> None:
    numbers = {"clip": 0.003, "clip-numbers": 0.003, "noise": 6, "seeds": 1, "rounds": 1}
    main([f"--{name}={value}" for name, value in numbers.items()] + ["--algorithms", "fedavg"])
    cells = [cell.strip() for cell in capsys.readouterr().out.splitlines()[-1].strip("|").split("|")]
    assert cells[0] == "fedavg"
    assert all(0 <= float(cell) <= 100 for cell in cells[1:3])
    assert float(cells[4]) == round(spent({3.0: 1}, 1e-5), 2)
