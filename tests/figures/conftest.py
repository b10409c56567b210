"""What tests of figures share: no training while drawing, rows that are read once, and pictures."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from figures import items, recipe
from fl_core import runner


def forbid_training(patch: pytest.MonkeyPatch) -> None:
    """From here on, training is an error."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("drawing must not train")

    for name in ("assemble", "run", "first_epoch"):
        patch.setattr(runner, name, refuse)


@pytest.fixture
def no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training is an error in this test."""
    forbid_training(monkeypatch)


@pytest.fixture(scope="session")
def rows_in_memory() -> dict[Path, Any]:
    return {}


@pytest.fixture
def read_once(monkeypatch: pytest.MonkeyPatch, rows_in_memory: dict[Path, Any]) -> None:
    """The committed rows, which many views are drawn from, are read from their files once a session."""

    def once(read: Callable[..., Any]) -> Callable[..., Any]:
        def reading(item: items.Item, path: Path) -> Any:
            if items.ROWS not in path.parents:
                return read(item, path)
            if path not in rows_in_memory:
                rows_in_memory[path] = read(item, path)
            header, frame = rows_in_memory[path]
            return copy.deepcopy(header), frame.copy()

        return reading

    for kind in (items.Item, recipe.Recipe):
        monkeypatch.setattr(kind, "read", once(kind.read))


def check_picture(path: Path, least: int = 400) -> None:
    """A picture of at least so many pixels either way that is not empty."""
    with Image.open(path) as picture:
        assert min(picture.size) > least
        assert len(picture.convert("RGB").getcolors(1 << 24) or []) > 50
