"""Outputs of forward passes, stored in bounded memory for the next metric that needs the same pass."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Collection, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from fl_core.execution.offloading import OffloadedTrees

BOUND = 2**28
"""Bytes kept in memory: 256 MiB. What is beyond lies in a scratch file, which has no name and ends with the process."""
MOST = 2**32
"""Bytes kept in all: 4 GiB, and never more than half of the free space where scratch files lie."""

See = Callable[[str, Any, Tensor], None]
"""Called with a module's path, what else tells its calls apart, and what the module put out."""
End = TypeVar("End")


@dataclass
class _Pass:
    """One pass: the modules that it watched, their outputs in order, and its result."""

    paths: frozenset[str]
    alive: tuple[Any, ...]
    calls: list[tuple[str, Any, torch.Size, tuple[int, ...], torch.device]] = field(
        default_factory=list
    )
    end: Any = None


class ActivationCache:
    """Forward passes by key. A repeated pass is replayed from memory with the same bits.

    A pass that does not fit (see :data:`MOST`) is computed again each time. So is one whose outputs are not plain
    numbers.

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
        bound: bytes in memory.
        most: bytes in all.
    """

    def __init__(self, bound: int = BOUND, most: int = MOST) -> None:
        self._trees, self._most = OffloadedTrees(bound=bound), most
        self._passes: dict[Hashable, list[_Pass]] = {}
        self._made = 0
        self.size = 0  # bytes kept in all

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
                for path, call, output in self._outputs(known):
                    if path in paths:
                        see(path, call, output)
                return known.end
        with self._record_calls(_Pass(frozenset(paths), alive)) as (record, recorded):

            def both(path: str, call: Any, output: Tensor) -> None:
                record(path, call, output)
                see(path, call, output)

            end = make(both)
        if recorded:
            recorded[0].end = end
            self._passes.setdefault(key, []).append(recorded[0])
        return end

    def _outputs(self, known: _Pass) -> Iterator[tuple[str, Any, Tensor]]:
        for k, (path, call, shape, strides, device) in enumerate(known.calls):
            flat = self._trees[f"{id(known)}.{k}"][""]
            yield path, call, flat.to(device).as_strided(shape, strides)

    @contextmanager
    def _record_calls(self, new: _Pass) -> Iterator[tuple[See, list[_Pass]]]:
        """Yield a function that records calls, and a list that holds the pass while all of it can be stored."""
        held, names, before = [new], list[str](), self.size

        def forget() -> None:
            held.clear()
            self.size = before
            for name in names:
                del self._trees[name]
            names.clear()

        def record(path: str, call: Any, output: Tensor) -> None:
            if not held:
                return
            if not _is_plain(output) or self.size + output.nbytes > self._room():
                forget()
                return
            names.append(f"{id(new)}.{len(names)}")
            self.size += output.nbytes
            flat = output.detach().as_strided(
                (output.numel(),), (1,)
            )  # the memory itself, in whatever layout
            self._trees[names[-1]] = {"": flat.to("cpu", copy=True)}
            new.calls.append((path, call, output.shape, output.stride(), output.device))

        try:
            yield record, held
        except BaseException:
            forget()
            raise

    def _room(self) -> int:
        return min(
            self._most, self.size + shutil.disk_usage(tempfile.gettempdir()).free // 2
        )


def _is_plain(output: Tensor) -> bool:
    """Return True if a tensor's entries are floating-point numbers that fill a block of memory, each once."""
    if output.layout != torch.strided or not output.is_floating_point():
        return False
    expected = 1
    for stride, size in sorted(zip(output.stride(), output.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
