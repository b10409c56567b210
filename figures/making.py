"""One run and seed of an item, as the work of a place: here, in processes, or on the nodes of a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedlayers.places.away import away
from fl_core.records import carrying

if TYPE_CHECKING:
    from figures.items import Item

ROWS = ".jsonl"


@dataclass(frozen=True)
class Making:
    """What makes the rows of one run and seed; their file is written where they are asked for.

    Attributes:
        path: the item's folder, where runs find what they start from and leave it for others.
        away: whether it is on another machine than the one that asked for it.
    """

    item: Item
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
        """What :meth:`figures.items.Item.make` returns."""
        with away(self.away):
            return self.item.make(self.run, self.seed, self.path, self.data_root)

    def sent_to(self, path: Path | None) -> Making:
        return replace(self, away=True, path=path or self.path)

    def held(self) -> AbstractContextManager[None]:
        return nullcontext()  # runs of an item share their folder

    def outgoing(self, sent: carrying.Sent) -> Iterator[carrying.Parcel]:
        return carrying.of_folder(self.path, sent, ROWS)

    def incoming(self, sent: carrying.Sent, over: bool) -> Iterator[carrying.Parcel]:
        return carrying.of_folder(self.path, sent, ROWS) if over else iter(())

    def accept(self, parcel: carrying.Parcel) -> None:
        carrying.put(self.path, parcel, run=False)
