"""What tests of this package share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fl_core.registry import Registry


@pytest.fixture
def own_members(monkeypatch: pytest.MonkeyPatch) -> Callable[[Registry[Any]], None]:
    """Members that a test adds to a registry are gone after it."""

    def keep(registry: Registry[Any]) -> None:
        for name in ("_members", "_made_from"):
            monkeypatch.setattr(registry, name, dict(getattr(registry, name)))

    return keep
