"""Lazy imports of a package's public names on first use."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def attach(
    package: str, file: str
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` for a package whose names live in other modules.

    Importing the package is then fast. A name's module is imported when the name is first used. The name stays in the
    package from then on. The names are the package's imports for type checkers.

    Args:
        package: the package's ``__name__``.
        file: its ``__file__``. The imports below its ``if TYPE_CHECKING:`` are read.

    >>> import fl_core.models
    >>> look_up, names, public = attach("fl_core.models", fl_core.models.__file__)
    >>> look_up("MODELS").kind, "build" in names(), public == fl_core.models.__all__
    ('model', True, True)
    """
    blocks = [
        node
        for node in ast.parse(Path(file).read_text(encoding="utf-8")).body
        if isinstance(node, ast.If)
    ]
    imports = [
        node
        for block in blocks
        for node in block.body
        if isinstance(node, ast.ImportFrom)
    ]
    homes = {alias.name: str(node.module) for node in imports for alias in node.names}

    def look_up(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = import_module(homes[name])
        value = (
            getattr(module, name)
            if hasattr(module, name)
            else import_module(f"{homes[name]}.{name}")
        )
        vars(sys.modules[package]).setdefault(name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return look_up, names, sorted(homes)
