"""Outputs of forward passes, kept in bounded memory for the next metric that needs the same pass."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

MOST = 2**30
"""Bytes kept in memory: 1 GiB."""

See = Callable[[str, Any, Tensor], None]
"""Called with a module's path, what else tells its calls apart, and what the module put out."""
End = TypeVar("End")


@dataclass
class _Pass:
    """One pass: the modules that it watched, their outputs in order, and its result."""

    paths: frozenset[str]
    alive: tuple[Any, ...]
    calls: list[tuple[str, Any, Tensor]] = field(default_factory=list)
    end: Any = None
    fits: bool = True


class ActivationCache:
    """Forward passes by key. A repeated pass is replayed from memory with the same bits.

    A pass that does not fit is computed again each time. So is one whose outputs are not plain numbers.

    >>> kept, made = ActivationCache(), []
    >>> def forward(see):
    ...     made.append("a pass")
    ...     see("fc1", 0, torch.ones(2))
    ...     return "done"
    >>> seen = []
    >>> [kept.replay("the same", ["fc1"], forward, lambda path, call, z: seen.append(z.tolist())) for _ in range(2)]
    ['done', 'done']
    >>> seen, len(made)
    ([[1.0, 1.0], [1.0, 1.0]], 1)

    Args:
        most: bytes in memory.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._passes: dict[Hashable, list[_Pass]] = {}
        self.size = 0  # bytes kept

    def replay(
        self,
        key: Hashable,
        paths: Collection[str],
        make: Callable[[See], End],
        see: See,
        alive: tuple[Any, ...] = (),
    ) -> End:
        """Pass to ``see`` everything that ``make(see)`` would pass, and return its result.

        The pass is computed only if it is new.

        Args:
            key: identifies the pass, together with the watched modules.
            paths: the watched modules. A stored pass that watched more of them serves too.
            alive: objects that the key names by identity. They must live as long as the key.
        """
        for known in self._passes.get(key, ()):
            if known.paths.issuperset(paths):
                for path, call, output in known.calls:
                    if path in paths:
                        see(path, call, output)
                return known.end
        new, size = _Pass(frozenset(paths), alive), self.size

        def both(path: str, call: Any, output: Tensor) -> None:
            nonlocal size
            size += output.nbytes
            new.fits = new.fits and _is_plain(output) and size <= self._most
            if new.fits:
                new.calls.append((path, call, output.detach().clone()))
            else:
                new.calls.clear()
            see(path, call, output)

        new.end = make(both)
        if new.fits:
            self.size = size
            self._passes.setdefault(key, []).append(new)
        return new.end


def _is_plain(output: Tensor) -> bool:
    """Return True if a tensor's entries are floating-point numbers that fill a block of memory, each once.

    A copy then has the same layout.
    """
    if output.layout != torch.strided or not output.is_floating_point():
        return False
    expected = 1
    for stride, size in sorted(zip(output.stride(), output.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
