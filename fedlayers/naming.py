"""Two names for one package: ``fedlayers.diagnostics`` and ``diagnostics``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class _SameModules(MetaPathFinder, Loader):
    """An import hook that returns the module ``full.x`` for ``bare.x``, so that each class exists once."""

    def __init__(self, bare: str, full: str) -> None:
        self.bare, self.full = bare, full

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        ours = sys.modules.get(self.bare) is sys.modules[self.full]
        return ModuleSpec(fullname, self) if ours and fullname.startswith(self.bare + ".") else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(self.full + spec.name.removeprefix(self.bare))
        self._own = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._own  # importing sets the alias here, which would break relative imports


def by_bare_name(bare: str) -> None:
    """Make a subpackage and its modules importable under a top-level name.

    >>> import diagnostics.report
    >>> import fedlayers.diagnostics.report
    >>> diagnostics.report is fedlayers.diagnostics.report
    True
    """
    full = f"{__package__}.{bare}"
    sys.modules[bare] = import_module(full)
    sys.meta_path.insert(0, _SameModules(bare, full))
