"""What tests of pictures share."""

from __future__ import annotations

from collections.abc import Iterator

import matplotlib as mpl
import matplotlib.pyplot as plt
import pytest


@pytest.fixture
def closed() -> Iterator[None]:
    """Pictures are drawn without a screen, and closed after the test."""
    mpl.use("Agg")
    yield
    plt.close("all")
