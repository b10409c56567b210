"""Updates of sites in bfloat16: half the bytes. What is rounded is the change against what the site received."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fedlayers.remote.codec import PacketError
from fl_core.algorithms.base import Message, find
from fl_core.errors import UsageError, check_known
from fl_core.tree import Tree

BF16 = "bf16"
KINDS = (BF16,)


def check_compressed(kind: str, algorithm: str) -> None:
    """Refuse a compression that the algorithm or this version does not have.

    Raises:
        UsageError: an unknown compression, or an algorithm whose clients keep what they send.
    """
    check_known("compression", kind, KINDS)
    if find(algorithm).keeps_server_pair:
        raise UsageError(
            f"the algorithm must allow rounded messages; got {algorithm!r}, whose clients keep what they send. "
            "Leave --compress out."
        )


def start_of(kind: str, name: str, received: Message, initial: Tree) -> Tensor | None:
    """Return the tensor that an update starts from: as received, or of the initial model. None if it is missing."""
    found = received.trees.get(kind, {}).get(name)
    return initial.get(name) if found is None and kind == "model" else found


def compress_message(message: Message, received: Message, initial: Tree) -> Message:
    """Return a site's message with float32 tensors as their change in bfloat16. All else stays.

    Bfloat16 has 8 significant bits: a change keeps its value within 2^-8 of itself. A tensor without a start is
    rounded whole.

    >>> start, end = {"w": torch.ones(2)}, {"w": torch.tensor([1.001, 0.998])}
    >>> sent = compress_message(Message({"model": end}), Message({"model": start}), start)
    >>> sent.trees["model"]["w"].dtype, sent.bytes
    (torch.bfloat16, 4)
    >>> expand_message(sent, Message({"model": start}), start).trees["model"]["w"]
    tensor([1.0010, 0.9980])
    """

    def rounded(kind: str, name: str, tensor: Tensor) -> Tensor:
        if tensor.dtype != torch.float32:
            return tensor
        start = start_of(kind, name, received, initial)
        return (tensor if start is None else tensor - start).to(torch.bfloat16)

    return map_tensors(message, rounded)


def expand_message(message: Message, received: Message, initial: Tree) -> Message:
    """Return the message that :func:`compress_message` rounded, with its tensors in the types of the model.

    Raises:
        PacketError: a float32 tensor of the model did not arrive as bfloat16.
    """

    def whole(kind: str, name: str, tensor: Tensor) -> Tensor:
        if name not in initial or initial[name].dtype != torch.float32 or tensor.dtype == torch.bool:
            return tensor  # checked later, as every message
        if tensor.dtype != torch.bfloat16 or tensor.shape != initial[name].shape:
            wanted = f"bfloat16 of shape {list(initial[name].shape)}"
            raise PacketError(f"{name!r} of {kind!r} must be {wanted}; got {tensor.dtype} of {list(tensor.shape)}.")
        start = start_of(kind, name, received, initial)
        return tensor.float() if start is None else start + tensor.float()

    return map_tensors(message, whole)


def map_tensors(message: Message, change: Callable[[str, str, Tensor], Tensor]) -> Message:
    """Return a message whose tensors are what ``change`` makes of their tree's name, their own name and themselves."""
    trees = {
        kind: {name: change(kind, name, tensor) for name, tensor in each.items()}
        for kind, each in message.trees.items()
    }
    return Message(trees, message.meta)
