"""The transport over Flower: bytes between a server and its sites through a superlink and supernodes.

Only this folder imports ``flwr``. All names that Flower does not document stand in :mod:`.internals`. Both ends attach
to Flower as processes of their own (its process isolation). The bundle of code that Flower can ship is empty. No side
runs code from the other. Flower's telemetry, its check for updates and its installation of packages at run time are
off.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from fl_core.errors import UsageError

FLWR = ("1.41", "1.42")
"""The supported minor versions of Flower."""
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
"""Environment variables with which Flower calls only its superlink. It reads them when it is imported."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def without_proxy(environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables that keep calls within this machine off a proxy. Other calls still use it.

    >>> without_proxy({"NO_PROXY": "example.org"})["no_proxy"]
    'example.org,127.0.0.1,localhost,::1'
    """
    told = environment.get("no_proxy") or environment.get("NO_PROXY") or ""
    hosts = ",".join(dict.fromkeys([*(host.strip() for host in told.split(",") if host.strip()), *LOOPBACK]))
    return {"no_proxy": hosts, "NO_PROXY": hosts}


os.environ.update({**QUIET, **without_proxy(os.environ)})


def require() -> None:
    """Check that the right Flower is installed. Importing this package does it, before its modules are imported.

    Raises:
        UsageError: it is not; gives the command that installs it.
    """
    try:
        found = version("flwr")
    except PackageNotFoundError:
        found = "none"
    if ".".join(found.split(".")[:2]) not in FLWR:
        known = " or ".join(FLWR)
        raise UsageError(f"flwr must have version {known}; got {found}. Install it: pip install 'fedlayers[flower]'.")


def environment(home: Path) -> dict[str, str]:
    """Return the environment of a Flower process, whose own files are below ``home``."""
    return {**os.environ, **QUIET, **without_proxy(os.environ), "FLWR_HOME": str(home)}


require()
