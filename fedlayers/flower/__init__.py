"""A federation of sites as a Flower app: a ServerApp for the run, and a ClientApp at each site.

Only this folder imports ``flwr``, and only its documented names. Flower starts a process for each message.
"""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version

from fl_core.errors import UsageError, needs_package

FLWR = ("1.41",)
"""The minor versions of Flower that were tried."""
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")  # read when flwr is imported
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")


def check_flower() -> None:
    """Check that Flower is installed in a version that was tried.

    Raises:
        UsageError: it is not. The message has the command that installs it.
    """
    try:
        found = version("flwr")
    except PackageNotFoundError:
        raise needs_package("flwr", "federate sites", "flower") from None
    if ".".join(found.split(".")[:2]) not in FLWR:
        raise UsageError(
            f"flwr must have version {' or '.join(FLWR)}; got {found}. Run pip install 'fedlayers[flower]'."
        )


check_flower()
