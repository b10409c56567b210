"""Trees by name in bounded memory with a scratch file for the rest, and the clients' states stored in them."""

from __future__ import annotations

import tempfile
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import IO, Any

from safetensors.torch import load, save
from torch import Tensor

from fl_core import tree
from fl_core.algorithms.base import State
from fl_core.storage.blobs import merge_trees, split_trees
from fl_core.tree import Tree

BOUND = 2**28
"""Bytes of trees in memory: 256 MiB."""
OBJECT = 2**10
"""Bytes counted for a tensor in addition to its entries."""


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


class ClientStates(Mapping[str, State]):
    """A mapping of every client's state by name, in the clients' order. A state that was never set is the initial one.

    Args:
        names: of the clients.
        beginning: returns a client's state before it was set. It is called each time.
        folder, bound: for the trees of the other states, see :class:`OffloadedTrees`.
    """

    def __init__(
        self,
        names: Sequence[str],
        beginning: Callable[[str], State],
        folder: Path | None = None,
        bound: int = BOUND,
    ) -> None:
        self.beginning = beginning
        self.changed = set(names)  # since the last checkpoint
        self._names = dict.fromkeys(names)
        self._trees = OffloadedTrees(folder, bound)
        self._rest: dict[
            str, tuple[tuple[str, ...], dict[str, Any]]
        ] = {}  # names of trees, and plain data

    def __getitem__(self, name: str) -> State:
        if name not in self._rest:
            if name not in self._names:
                raise KeyError(name)
            return self.beginning(name)
        names, meta = self._rest[name]
        return State(split_trees(self._trees.get(name, {}), names), meta)

    def __setitem__(self, name: str, state: State) -> None:
        if name not in self._names:
            raise KeyError(name)
        flat = merge_trees(state.trees)
        if flat:
            self._trees[name] = flat
        elif name in self._trees:
            del self._trees[name]
        self._rest[name] = tuple(state.trees), state.meta
        self.changed.add(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _own(tensor: Tensor) -> Tensor:
    """Return the tensor, copied if it is only a part of a larger block of memory."""
    alone = tensor.untyped_storage().nbytes() <= tensor.numel() * tensor.element_size()
    return tensor if alone and tensor.is_contiguous() else tensor.contiguous().clone()


def _size(value: Tree) -> int:
    return sum(t.numel() * t.element_size() + OBJECT for t in value.values())
