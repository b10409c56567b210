"""Lazy imports of a package's public names on first use, and a check of its neighbours."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def attach(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` for a package whose names live in other modules.

    Importing the package is then fast. A name's module is imported when the name is first used. The name stays in the
    package from then on.

    Args:
        package: the package's ``__name__``.
        homes: the module of each public name. A leading dot makes it relative to the package. With a colon at the end
            the name is that module itself.

    >>> homes = {"dumps": "json"}
    >>> look_up, names = attach("fl_core", homes)
    >>> look_up("dumps")([1])
    '[1]'
    """

    def look_up(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = import_module(homes[name].removesuffix(":"), package)
        value = module if homes[name].endswith(":") else getattr(module, name)
        vars(sys.modules[package]).setdefault(name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return look_up, names


def check_neighbour(package: str, file: str) -> None:
    """Refuse a file of the user that hides a package of this installation.

    Args:
        package: name of a top-level package in the same folder as the asking one.
        file: the asking package's ``__file__``.

    Raises:
        ImportError: names the file, and what to do.
    """
    spec = sys.modules[package].__spec__ if package in sys.modules else find_spec(package)
    found = spec.origin if spec is not None else None
    expected = Path(file).parents[1] / package / "__init__.py"
    if found is None or Path(found).resolve() != expected.resolve():
        raise ImportError(f"the module {package!r} must be {expected}; got {found}. Rename that file.")
