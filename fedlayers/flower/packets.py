"""Requests and replies as Flower's records: JSON for names and numbers, arrays for tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fl_core.display import printable
from fl_core.errors import (
    NonFiniteError,
    RunError,
    UsageError,
    about,
    check_known,
    check_type,
)
from fl_core.storage import (
    format_bytes,
    merge_trees,
    parsed_json,
    read_toml,
    split_trees,
)
from fl_core.tree import Tree

HEAD, TENSORS, JSON = "head", "tensors", "json"
TOML_BYTES = 2**20
MOST_JSON = 2**26
"""The largest number of characters of a packet's JSON."""
ERRORS: dict[str, type[Exception]] = {
    each.__name__: each for each in (UsageError, NonFiniteError, RunError)
}
"""Errors that keep their kind on the way to the server. Others become a RunError."""


@dataclass
class Packet:
    """What one message holds.

    Attributes:
        head: names and numbers, as JSON has them.
        trees: tensors by name in each tree.
    """

    head: dict[str, Any]
    trees: dict[str, Tree] = field(default_factory=dict)

    def records(self) -> RecordDict:
        """Return the packet as Flower's records."""
        text = json.dumps({**self.head, "trees": list(self.trees)})
        records = {HEAD: ConfigRecord({JSON: text})}
        tensors = merge_trees(self.trees)
        if tensors:
            arrays = {name: Array(each.contiguous()) for name, each in tensors.items()}
            records[TENSORS] = ArrayRecord(arrays)
        return RecordDict(records)


Keys = TypeVar("Keys")


def read_keys(path: Path, kind: type[Keys]) -> Keys:
    """Return the keys in a TOML file as a dataclass.

    Raises:
        UsageError: a key is unknown or missing, or a value has another type.
    """
    found, hints = read_toml(path, TOML_BYTES), get_type_hints(kind)
    with about(str(path)):
        for key, value in found.items():
            check_type(check_known("key", key, hints), value, hints[key])
        for key in hints:
            if key not in found and not hasattr(kind, key):
                raise UsageError(f"{key} must be given; got none. Add {key} = ...")
        return kind(**found)


def error_packet(error: Exception) -> Packet:
    """Return an error as a packet of one line."""
    kind = next((name for name, each in ERRORS.items() if isinstance(error, each)), "")
    text = str(error) if kind else f"{type(error).__name__}: {error}"
    return Packet({"error": kind, "text": text})


def packet_of(records: RecordDict, most_bytes: int) -> Packet:
    """Return the packet in some records.

    Args:
        most_bytes: of the arrays together.

    Raises:
        UsageError: they hold no packet, or one that is too large.
    """
    try:
        text = records.config_records[HEAD][JSON]
        if not isinstance(text, str) or len(text) > MOST_JSON:
            raise ValueError(f"its JSON must be a text of at most {MOST_JSON:,} signs")
        head = parsed_json(text)
        arrays = dict(records.array_records.get(TENSORS, {}))
        size = sum(len(array.data) for array in arrays.values())
        if size > most_bytes:
            most = format_bytes(most_bytes)
            raise ValueError(
                f"arrays must have at most {most}; got {format_bytes(size)}"
            )
        # a clone is aligned as torch aligns its own
        tensors = {
            name: torch.from_numpy(each.numpy()).clone()
            for name, each in arrays.items()
        }
        return Packet(head, split_trees(tensors, head.pop("trees")))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(
            f"the message must be a packet of fedlayers; got {type(error).__name__}: {error}."
        ) from error


def raise_error(site: str, head: Mapping[str, Any]) -> None:
    """Raise the error that a site has sent, if it has sent one."""
    if "error" in head:
        begun = f"site {site!r}: "  # a site may write any name into its text
        text = printable(" ".join(str(head.get("text")).split())[:2000])
        kind = ERRORS.get(str(head["error"]), RunError)
        raise kind(begun + text.removeprefix(begun))
