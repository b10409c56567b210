"""One run and seed of an item as a job of a backend: in this process, in others or on a cluster."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from fedlayers.backends.base import FileBatch, Sent, batches, write_files
from fedlayers.backends.remote_errors import remote_errors
from fl_core.storage.files import Folder

ROWS = ".jsonl"
FILES = re.compile(r"\w[\w.-]*")
"""The names of files in an item's folder."""


class Makes(Protocol):
    """The part of an item that makes its rows; :class:`figures.items.Item` has it."""

    @property
    def runs(self) -> Mapping[str, Any]: ...
    def make(self, run: str, seed: int, folder: Path, data_root: str | None) -> Any: ...


@dataclass(frozen=True)
class Making:
    """A function that makes the rows of one run and seed. Their file is written when they are requested.

    Attributes:
        path: the item's folder, where runs find what they start from and leave it for others.
        away: whether it is on another machine than the one that asked for it.
    """

    item: Makes
    run: str
    seed: int
    path: Path
    data_root: str | None = None
    away: bool = False

    @property
    def name(self) -> str:
        return f"{self.run}, seed {self.seed}"

    @property
    def gpus(self) -> int:
        return int(self.item.runs[self.run].device != "cpu")

    def carry_out(self) -> Any:
        """The result of :meth:`figures.items.Item.make`."""
        with remote_errors(self.away):
            return self.item.make(self.run, self.seed, self.path, self.data_root)

    def sent_to(self, path: Path | None) -> Making:
        return replace(self, away=True, path=path or self.path)

    def held(self) -> AbstractContextManager[None]:
        return nullcontext()  # runs of an item share their folder

    def outgoing(self, sent: Sent) -> Iterator[FileBatch]:
        folder = Folder(self.path)
        names = [
            name
            for name in folder.names()
            if not name.endswith((ROWS, ".part")) and (self.path / name).is_file()
        ]
        return batches(folder, names, sent)

    def incoming(self, sent: Sent, over: bool) -> Iterator[FileBatch]:
        return self.outgoing(sent) if over else iter(())

    def accept(self, parcel: FileBatch) -> None:
        write_files(self.path, parcel, FILES)
