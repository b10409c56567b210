"""The software environment of a run, and its changes since."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from collections.abc import Mapping
from typing import Any

PACKAGES = (
    "fedlayers",
    "torch",
    "torchvision",
    "timm",
    "peft",
    "numpy",
    "scikit-learn",
)


def current_environment() -> dict[str, Any]:
    """Return versions, the platform, and the working directory's commit."""
    return {**versions(), "platform": platform.platform(), "commit": _commit()}


def versions() -> dict[str, Any]:
    """Return the versions of Python and the packages. A run's numbers depend on them."""
    return {
        "versions": {name: _version(name) for name in PACKAGES},
        "python": platform.python_version(),
    }


def changes(began: Mapping[str, Any]) -> list[str]:
    """Return versions that differ from an earlier environment, such as ``torch 2.14.0 (now 2.14.1)``."""
    now = versions()
    pairs = {
        name: (old, now["versions"].get(name, ""))
        for name, old in began["versions"].items()
    }
    pairs["python"] = (began["python"], now["python"])
    return [
        f"{name} {old or 'missing'} (now {new or 'missing'})"
        for name, (old, new) in pairs.items()
        if old != new
    ]


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _commit() -> str:
    """Return the commit of the working directory's git repository, with a mark if it has changes.

    Without one it is empty.
    """
    try:
        answer = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout.strip() if answer.returncode == 0 else ""
