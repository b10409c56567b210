"""Several trees of tensors in one file: joining of their names, and checks of such a file without torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from fl_core import limits
from fl_core.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

_SEPARATOR = "|"  # between the name of a tree and the name of a tensor; module paths have no such character
_TYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
}
"""Torch's names of the supported number types, by their names in a safetensors file."""

HEADER = 2**24
"""Bytes of a safetensors file's header at most; a tensor takes about 100."""

V = TypeVar("V")


def merge_trees(trees: Mapping[str, Mapping[str, V]]) -> dict[str, V]:
    """Join several trees into one, with a tree's name before each key.

    Nothing is copied; :func:`split_trees` is the inverse.

    Raises:
        UsageError: a tree's name contains the separator.
    """
    for name in trees:
        if _SEPARATOR in name:
            raise UsageError(
                f"name of a tree must be without {_SEPARATOR!r}; got {name!r}."
            )
    return {
        f"{name}{_SEPARATOR}{key}": value
        for name, tree in trees.items()
        for key, value in tree.items()
    }


def split_trees(tree: Mapping[str, V], names: Iterable[str]) -> dict[str, dict[str, V]]:
    """Split a tree from :func:`merge_trees` into the original trees.

    ``names`` lists them all, since empty ones have no keys.

    Raises:
        ValueError: a key begins with none of the names.
    """
    trees: dict[str, dict[str, V]] = {name: {} for name in names}
    for key, value in tree.items():
        name, _, rest = key.partition(_SEPARATOR)
        if name not in trees:
            raise ValueError(f"its tensor {key!r} belongs to none of its trees")
        trees[name][rest] = value
    return trees


def types(data: bytes) -> dict[str, str]:
    """Return torch's name of the number type of each tensor in a safetensors file, by the tensor's name.

    The checks are the same as in loading, before any tensor is made. The header must be valid. Its tensors must fill
    the file without gap or overlap. Each must have the bytes of its shape and type. Models must support the types.

    Raises:
        ValueError: a check fails.
    """
    from safetensors import deserialize

    with _refusal(data):
        return {name: _TYPES[view["dtype"]] for name, view in deserialize(data)}


def tensors(data: bytes) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, by name. Errors are as in :func:`types`."""
    from safetensors.torch import load

    with _refusal(data):
        loaded: dict[str, Tensor] = load(data)
    for name, tensor in loaded.items():
        if (kind := str(tensor.dtype).removeprefix("torch.")) not in _TYPES.values():
            raise ValueError(
                f"its tensor {name!r} must have numbers that models compute with; got {kind}"
            )
    return loaded


def check_header(data: bytes) -> None:
    """Refuse the beginning of a safetensors file whose header would take far more memory than it has bytes.

    Raises:
        ValueError: the header is too long, or has too many values.
    """
    header = int.from_bytes(data[:8], "little")
    if header > HEADER:
        raise ValueError(
            f"its header must have at most {HEADER:,} bytes; got {header:,}"
        )
    limits.check_values(data[8 : 8 + header].decode(errors="replace"))


@contextmanager
def _refusal(data: bytes) -> Iterator[None]:
    from safetensors import SafetensorError

    check_header(data)
    header = int.from_bytes(data[:8], "little")
    bytearray(len(data) + 64 * header + 4096 * data.count(b"{", 0, 8 + header) + 2**20)
    # The line above raises MemoryError. Without memory, safetensors would end the process, or never return.
    try:
        yield
    except SafetensorError as error:
        raise ValueError(str(error)) from error
    except KeyError as error:
        raise ValueError(
            f"it has numbers of a type that torch does not load, {error}"
        ) from error
