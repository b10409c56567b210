"""Lazy imports of a package's public names on first use."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
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
