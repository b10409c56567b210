"""Packets between server and sites as bytes: JSON and safetensors. Sizes are checked before memory is allocated.

    8 bytes  b"fedlyrs1"
    8 bytes  n, the length of the head, little-endian
    n bytes  the head: a JSON object whose ``kind`` names the packet's kind, perhaps with spaces after it
    the rest tensors as safetensors, named ``tree|tensor``; empty without tensors

A packet contains no pickle, and decoding it imports no code.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fl_core import limits, tree
from fl_core.errors import RunError
from fl_core.storage import blobs
from fl_core.storage.schema import validate
from fl_core.tree import Tree

MAGIC = b"fedlyrs1"
HEAD_BYTES = 2**26
"""Maximum bytes of a head. It has names, numbers and a plan; all that is large is a tensor."""
LARGEST = 2**63
"""Exclusive upper limit of whole numbers in a head."""
LARGE, PAD = 2**20, 4096
"""A packet with more bytes of tensors has a head of whole blocks. Equal tensors for several sites then lie at equal
places, and Flower takes equal chunks from the server once."""
TREES = 4096
"""Maximum number of trees in a packet."""
_NAME = re.compile(r"[\w./ :#+-]{1,200}", re.ASCII)
_TYPES = ("float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
_FRAME = len(MAGIC) + 8


class PacketError(RunError):
    """Invalid data from the network. The message names what is wrong."""


@dataclass
class Packet:
    """A head of plain data, and trees of tensors.

    >>> import torch
    >>> packet = decode(encode(Packet({"kind": "hello"}, {"model": {"fc.bias": torch.ones(2)}})))
    >>> packet.head, packet.trees["model"]["fc.bias"].tolist()
    ({'kind': 'hello'}, [1.0, 1.0])
    >>> decode(b"anything else")
    Traceback (most recent call last):
        ...
    fedlayers.remote.codec.PacketError: a packet must begin with the mark of fedlayers; got other bytes.
    """

    head: dict[str, Any]
    trees: dict[str, Tree] = field(default_factory=dict)


def encode(packet: Packet) -> bytes:
    """Return the packet as bytes. Errors are as in :func:`encode_parts`."""
    return b"".join(encode_parts(packet))


def encode_parts(packet: Packet) -> list[bytes | memoryview]:
    """Return the packet's bytes in parts. Tensors are not copied.

    Raises:
        PacketError: the head has a value that JSON cannot express, such as NaN or infinity.
    """
    try:
        head = json.dumps({**packet.head, "trees": list(packet.trees)}, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise PacketError(f"a packet must hold plain data and tensors only: {error}") from error
    flat = blobs.merge_trees(packet.trees)
    body = blobs.parts(flat) if flat else []
    if sum(map(len, body)) > LARGE:
        head += b" " * (-len(head) % PAD)
    return [MAGIC, len(head).to_bytes(8, "little"), head, *body]


def decode(data: bytes, most: int | None = None) -> Packet:
    """Return the packet in some bytes, after checks of its names, types and numbers.

    Args:
        most: maximum size in bytes; by default the machine's memory.

    Raises:
        PacketError: says what is wrong.
    """
    limits.check_size("a packet", len(data), most, PacketError)
    if data[: len(MAGIC)] != MAGIC or len(data) < _FRAME:
        raise PacketError("a packet must begin with the mark of fedlayers; got other bytes.")
    size = int.from_bytes(data[len(MAGIC) : _FRAME], "little")
    if size > (most_fits := min(HEAD_BYTES, len(data) - _FRAME)):
        raise PacketError(f"a packet's head must have at most {most_fits:,} bytes; got {size:,}.")
    head = _head(data[_FRAME : _FRAME + size])
    names = head.pop("trees")
    body = data[_FRAME + size :]
    try:
        found = blobs.tensors(body) if body else {}
        del body  # a copy of all tensors
        for name, tensor in found.items():
            _check_tensor(name, str(tensor.dtype).removeprefix("torch."))
        trees = blobs.split_trees(found, names)
    except ValueError as error:
        raise PacketError(f"a packet's tensors cannot be read: {error}") from error
    for name, each in trees.items():
        bad = tree.first_nonfinite(each, {})
        if bad is not None:
            raise PacketError(f"tensor {bad!r} of {name!r} must be finite; got NaN or infinity.")
    return Packet(head, trees)


def _head(data: bytes) -> dict[str, Any]:
    try:
        head = limits.parsed_json(data)
    except ValueError as error:
        raise PacketError(f"a packet's head cannot be read: {error}") from error
    if not isinstance(head, dict) or not isinstance(head.get("kind"), str):
        raise PacketError("a packet's head must be an object with a kind; got another value.")
    names = head.get("trees")
    if not isinstance(names, list) or len(names) > TREES or len({*map(str, names)}) < len(names):
        raise PacketError(f"a packet's trees must be at most {TREES} distinct names; got {str(names)[:80]}.")
    for name in names:
        _check_name(name)
    _check_numbers(head)
    return head


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise PacketError(f"the name of a tree or tensor must match {_NAME.pattern}; got {str(name)[:80]!r}.")


def _check_tensor(name: str, kind: str) -> None:
    for part in name.split("|"):
        _check_name(part)
    if kind not in _TYPES:
        raise PacketError(f"the type of {name!r} must be one of {', '.join(_TYPES)}; got {kind}.")


def _check_numbers(value: Any) -> None:
    level = [value]
    while level:
        each = level.pop()
        if isinstance(each, float) and not math.isfinite(each):
            raise PacketError(f"a number in a packet's head must be finite; got {each}.")
        if isinstance(each, int) and abs(each) >= LARGEST:
            raise PacketError("a number in a packet's head must have at most 63 bits; got more.")
        level += each.values() if isinstance(each, dict) else each if isinstance(each, list) else ()


# --- what a packet must hold -----------------------------------------------------------------------------------


def check_trees(trees: Mapping[str, Tree], model: Mapping[str, torch.Tensor], who: str) -> None:
    """Check names, shapes and types of tensors against the model. Boolean masks may stand for numbers, but of no model.

    Raises:
        PacketError: names the sender ``who`` and the first wrong tensor.
    """
    for kind, each in trees.items():
        for name, tensor in each.items():
            if name not in model:
                raise PacketError(f"{kind!r} of {who} must have tensors of the model; got {name!r}.")
            wanted = model[name]
            if tensor.shape != wanted.shape:
                shapes = f"shape {list(wanted.shape)}; got {list(tensor.shape)}"
                raise PacketError(f"{name!r} of {kind!r} of {who} must have the {shapes}.")
            if tensor.dtype != wanted.dtype and (tensor.dtype != torch.bool or kind.rpartition("/")[2] == "model"):
                raise PacketError(f"{name!r} of {kind!r} of {who} must be {wanted.dtype}; got {tensor.dtype}.")


def check_whole(what: str, wanted: Collection[str], found: Collection[str]) -> None:
    """Check that no tensor is missing.

    Raises:
        PacketError: names ``what`` and the first missing tensor.
    """
    if missing := sorted(set(wanted) - set(found)):
        raise PacketError(f"{what} must have the tensor {missing[0]!r}; got none.")


def most_bytes(model: Mapping[str, torch.Tensor], trees: int) -> int:
    """Return the maximum bytes of a packet with a head and this number of trees of the model."""
    each = sum(tensor.numel() * tensor.element_size() + 1024 for tensor in model.values())
    return HEAD_BYTES + trees * each


def fields(head: Mapping[str, Any], form: Mapping[str, Any], optional: Collection[str] = ()) -> dict[str, Any]:
    """Return a head's values except its kind, checked against a form of :func:`fl_core.storage.schema.validate`.

    Raises:
        PacketError: a value is missing, of another type, or unknown.
    """
    wrong = validate(head, {f"{key}?" if key in optional else key: value for key, value in form.items()})
    unknown = sorted(head.keys() - form.keys() - {"kind"})
    if wrong or unknown:
        raise PacketError(f"a packet {head['kind']!r} is malformed: {wrong or f'unknown key {unknown[0]!r}'}")
    return {key: head[key] for key in form if key in head}
