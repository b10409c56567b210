"""Outputs of forward passes, stored in bounded memory for the next metric that needs the same pass."""

from __future__ import annotations

import shutil
import tempfile
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TypeVar

import torch
from safetensors.torch import load, save
from torch import Tensor

from fl_core import tree
from fl_core.tree import Tree

OBJECT = 2**10
"""Bytes counted for a tensor in addition to its entries."""
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


class OffloadedTrees(MutableMapping[str, Tree]):
    """A dictionary of trees with at most ``bound`` bytes in memory. The least recently used go to a scratch file.

    The file has no name and ends with the process, however that ends. Resuming a run does not need it. A tree is a
    value: set it again to change it. It returns with the same bits.

    Args:
        folder: of the scratch file. The default is the system's temporary folder.
        bound: bytes in memory.
    """

    def __init__(self, folder: Path | None = None, bound: int = BOUND) -> None:
        self.folder, self.bound = folder, bound
        self.held = 0  # bytes in memory
        self._names: dict[str, None] = {}
        self._memory: OrderedDict[str, Tree] = (
            OrderedDict()
        )  # least recently used first
        self._slots: dict[
            str, tuple[int, int]
        ] = {}  # where in the file: offset and length
        self._free: defaultdict[int, list[int]] = defaultdict(list)  # length -> offsets
        self._file: IO[bytes] | None = None
        self._end = 0

    def __getitem__(self, name: str) -> Tree:
        if name not in self._memory:
            self._hold(name, self._read(*self._slots[name]))
        self._memory.move_to_end(name)
        entries = dict(self._memory[name])
        self._shrink()
        return entries

    def __setitem__(self, name: str, value: Tree) -> None:
        self._drop(name)
        self._names[name] = None
        self._hold(name, {key: _own(tensor) for key, tensor in value.items()})
        self._shrink()

    def __delitem__(self, name: str) -> None:
        del self._names[name]
        self._drop(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def _hold(self, name: str, value: Tree) -> None:
        self._memory[name] = value
        self.held += _size(value)

    def _drop(self, name: str) -> None:
        if name in self._memory:
            self.held -= _size(self._memory.pop(name))
        if name in self._slots:
            offset, length = self._slots.pop(name)
            self._free[length].append(offset)

    def _shrink(self) -> None:
        while self.held > self.bound:
            name, value = self._memory.popitem(last=False)
            self.held -= _size(value)
            if name not in self._slots:
                self._slots[name] = self._write(
                    save(tree.clone(value))
                )  # cloned, since entries may share memory

    def _write(self, data: bytes) -> tuple[int, int]:
        if self._file is None:
            self._file = tempfile.TemporaryFile(dir=self.folder)  # noqa: SIM115  (it is open as long as the trees are)
        free = self._free[len(data)]
        offset = free.pop() if free else self._end
        self._end = max(self._end, offset + len(data))
        self._file.seek(offset)
        self._file.write(data)
        return offset, len(data)

    def _read(self, offset: int, length: int) -> Tree:
        assert self._file is not None
        self._file.seek(offset)
        return load(self._file.read(length))


def _own(tensor: Tensor) -> Tensor:
    """Return the tensor, copied if it is only a part of a larger block of memory."""
    alone = tensor.untyped_storage().nbytes() <= tensor.numel() * tensor.element_size()
    return tensor if alone and tensor.is_contiguous() else tensor.contiguous().clone()


def _size(value: Tree) -> int:
    return sum(t.numel() * t.element_size() + OBJECT for t in value.values())
