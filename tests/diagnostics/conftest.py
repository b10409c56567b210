"""What tests of pictures share."""

import matplotlib as mpl
import matplotlib.pyplot as plt
import pytest


@pytest.fixture
def closed():
    """Pictures are drawn without a screen, and closed after the test."""
    mpl.use("Agg")
    yield
    plt.close("all")
