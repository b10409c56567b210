"""Transport of requests and replies between processes: their trees in shared memory, the rest through a pipe."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from fl_core.algorithms.base import Message, State
from fl_core.execution.requests import (
    ClientReply,
    ClientRequest,
    FinetuneRequest,
    ScoreRequest,
)
from fl_core.execution.shared_memory import SharedBlock
from fl_core.tree import Tree

_Entry = tuple[
    str, torch.dtype, torch.Size, int
]  # a tensor's name, type, shape and first byte
ALIGNED = 64  # bytes: any type of number may begin there
ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TOP_PAD_": str(1 << 28),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 32),
}
"""Settings of glibc's allocator that keep the memory of one training step for the next.

Otherwise it returns the memory and every page faults again. They are read when a process starts."""


@contextmanager
def allocator_settings() -> Iterator[None]:
    """Start processes in the block with :data:`ALLOCATOR`. Variables that the environment already sets stay."""
    added = ALLOCATOR.keys() - os.environ.keys()
    os.environ.update({name: ALLOCATOR[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


class Slot:
    """Shared memory for the trees of one request or reply at a time. A tree that does not fit is sent as bytes.

    Args:
        repeats: whether a tensor that is still in its place is not copied again, such as one that all clients of a
            round receive. It must be False for tensors that fused optimiser steps change, since these do not update the
            version.

    Attributes:
        copied: bytes of tensors copied in so far.
    """

    def __init__(self, shared: SharedBlock, repeats: bool = False) -> None:
        self.shared, self.memory, self.repeats = shared, shared.tensor, repeats
        self.copied = 0
        self._there: dict[int, _There] = {}

    @classmethod
    def allocate(cls, n_bytes: int, repeats: bool = False) -> Slot:
        """Return a new slot of at least this many bytes."""
        return cls(SharedBlock(-(-n_bytes // ALIGNED) * ALIGNED), repeats)

    def store(self, value: Any) -> Any:
        """Store a request's or reply's trees over earlier ones, and return it with their places instead of trees.

        A tree without room is there as bytes.
        """
        end = 0

        def place(source: Tree) -> list[_Entry] | bytes:
            nonlocal end
            entries: list[_Entry] = []
            at = end
            for name, tensor in source.items():
                entries.append((name, tensor.dtype, tensor.shape, at))
                at += -(-tensor.nbytes // ALIGNED) * ALIGNED
            if at > len(self.memory):
                return save(
                    {name: tensor.contiguous() for name, tensor in source.items()}
                )
            self._copy(source, entries, end, at)
            end = at
            return entries

        return _map_trees(value, place)

    def _copy(
        self, source: Tree, entries: Sequence[_Entry], start: int, end: int
    ) -> None:
        """Copy a tree's tensors to these bytes, except unchanged ones that are there already."""
        before, coming = self._there, {}
        self._there = {
            at: each for at, each in before.items() if each.end <= start or at >= end
        }
        for (name, view), (*_, at) in zip(
            self._views(entries).items(), entries, strict=True
        ):
            tensor = source[name]
            there = before.get(at)
            if there is None or not there.is_still(tensor):
                view.copy_(tensor)
                self.copied += view.nbytes
            if self.repeats and view.nbytes:
                coming[at] = _There(tensor, at + view.nbytes)
        self._there |= coming

    def take(self, value: Any, copy: bool) -> Any:
        """Return the original of a value from :meth:`store`.

        Without ``copy`` its tensors are the slot's memory until reuse.
        """

        def find(placed: list[_Entry] | bytes) -> Tree:
            if isinstance(placed, bytes):
                return load(placed)
            views = self._views(placed)
            return (
                {name: view.clone() for name, view in views.items()} if copy else views
            )

        return _map_trees(value, find)

    def _views(self, entries: Iterable[_Entry]) -> Tree:
        return {
            name: self.memory[at : at + shape.numel() * dtype.itemsize]
            .view(dtype)
            .view(shape)
            for name, dtype, shape, at in entries
        }


class _There:
    """A tensor that was copied to a slot, with its version. The reference prevents reuse of its identity."""

    def __init__(self, tensor: Tensor, end: int) -> None:
        self.tensor, self.end = tensor, end
        self.version = None if tensor.is_inference() else tensor._version

    def is_still(self, tensor: Tensor) -> bool:
        """Return whether it is this tensor with unchanged contents. For inference tensors this is unknown, so False."""
        return (
            tensor is self.tensor
            and self.version is not None
            and tensor._version == self.version
        )


class Channel:
    """One end of the link between a process and its worker. An end that keeps its messages copies them."""

    def __init__(
        self, link: Connection, sends: Slot, receives: Slot, keeps: bool
    ) -> None:
        self.link, self.sends, self.receives, self.keeps = link, sends, receives, keeps

    def send(self, message: tuple[str, Any]) -> None:
        """Send a message of some kind: a request, a reply, or anything without trees."""
        kind, value = message
        self.link.send_bytes(
            pickle.dumps((kind, self.sends.store(value)))
        )  # a plain pickle: no tensors

    def recv(self) -> tuple[str, Any]:
        """Receive the kind and contents of the next message."""
        kind, value = pickle.loads(self.link.recv_bytes())
        return kind, self.receives.take(value, copy=self.keeps)

    def fileno(self) -> int:
        """Return the file descriptor, to wait on several channels at once."""
        return self.link.fileno()

    def close(self) -> None:
        """Close this end; the other end reads an end of file."""
        self.link.close()


def _map_trees(value: Any, change: Callable[[Any], Any]) -> Any:
    """Apply a function to every tree in a request or reply; anything else stays as it is."""
    if isinstance(value, (State, Message)):
        return replace(
            value, trees={name: change(t) for name, t in value.trees.items()}
        )
    if isinstance(value, (FinetuneRequest, ScoreRequest, ClientReply)):
        value = replace(
            value, models={name: change(t) for name, t in value.models.items()}
        )
    if not isinstance(value, (ClientRequest, ClientReply)):
        return value
    parts = (State, Message)
    return replace(
        value,
        **{
            name: _map_trees(p, change)
            for name, p in vars(value).items()
            if isinstance(p, parts)
        },
    )
