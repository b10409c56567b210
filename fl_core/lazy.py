"""Lazy imports of a package's public names on first use, and a check of its neighbours."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
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


def check_neighbour(package: str, file: str) -> None:
    """Refuse a file of the user that hides a package of this installation.

    Args:
        package: name of a top-level package in the same folder as the asking one.
        file: the asking package's ``__file__``.

    Raises:
        ImportError: names the file, and what to do.
    """
    spec = (
        sys.modules[package].__spec__ if package in sys.modules else find_spec(package)
    )
    found = spec.origin if spec is not None else None
    expected = Path(file).parents[1] / package / "__init__.py"
    if found is None or Path(found).resolve() != expected.resolve():
        raise ImportError(
            f"the module {package!r} must be {expected}; got {found}. Rename that file."
        )
