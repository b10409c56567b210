"""The contents of stored files: the types in JSON, and trees of tensors in a safetensors file."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fl_core import limits
from fl_core.errors import CorruptError, UsageError, check_known, damaged

if TYPE_CHECKING:
    from torch import Tensor

COUNT = "a whole number from 0"
DIGEST = "a digest, or nothing"
NUMBER = "a finite number"


@dataclass(frozen=True)
class MapOf:
    """An object with any names whose values all have this form."""

    form: Any


ROWS = {"bytes": COUNT, "sha256": DIGEST}
MANIFEST = {"files": MapOf({"bytes": COUNT, "sha256": DIGEST}), "rows": ROWS}
STATE = {"blob": DIGEST, "trees": [str], "meta": dict}
CHECKPOINT = {
    "round": COUNT,
    "run": DIGEST,
    "rows": ROWS,
    "states": {"server": STATE},
}
CODE = {
    "run": DIGEST,
    "changes": [{"round": COUNT, "changed": [str], "code": MapOf(DIGEST)}],
}
STATES = {"states": MapOf(STATE)}
ENVIRONMENT = {"versions": MapOf(str), "python": str}
LAYER = {"name": str, "parameters": [str], "buffers": [str]}
HEADER = {"version": str, "data": str, "checkpoint": str, "layers": [LAYER]}
CONFIG = {
    "dataset": str,
    "algorithm": str,
    "options": dict,
    "model_options": dict,
    "batchnorm": str,
    "own": [str],
    "given": (dict, None),
    "in_force?": (dict, None),
    "command": str,
    "code": MapOf(DIGEST),
    "words?": [str],
}


def validate(found: Any, form: Any, name: str = "") -> str:
    """Describe the first place where a value does not have the expected form, or return ``""``.

    Args:
        form: a type; None; :data:`COUNT`, :data:`DIGEST` or :data:`NUMBER`; several forms as a tuple; ``[form]``
            for a list of any length; :class:`MapOf`; or a dictionary of forms by name. There a ``?`` marks optional
            names, and other names may have any value.
        name: of the value.
    """
    at = f"{name}." if name else ""
    if isinstance(form, dict):
        if not isinstance(found, Mapping):
            return _wrong(found, name, "an object")
        for key in form:
            if not key.endswith("?") and key not in found:
                return f"{at}{key} is missing"
        known = {key.removesuffix("?"): inner for key, inner in form.items()}
        return next(
            filter(
                None,
                (
                    validate(found[key], known[key], at + key)
                    for key in known
                    if key in found
                ),
            ),
            "",
        )
    if isinstance(form, MapOf):
        if not isinstance(found, Mapping):
            return _wrong(found, name, "an object")
        return next(
            filter(
                None,
                (
                    validate(value, form.form, f"{at}{key}")
                    for key, value in found.items()
                ),
            ),
            "",
        )
    if isinstance(form, list):
        if not isinstance(found, (list, tuple)):
            return _wrong(found, name, "a list")
        return next(
            filter(
                None,
                (validate(value, form[0], f"{at}{k}") for k, value in enumerate(found)),
            ),
            "",
        )
    if isinstance(form, tuple):
        told = [validate(found, each, name) for each in form]
        inner = next(
            (each for each in told if not each.startswith(f"{name or 'it'} must")), ""
        )
        return "" if "" in told else inner or _wrong(found, name, _named(form))
    return "" if _is(found, form) else _wrong(found, name, _named((form,)))


def parsed(path: Path, data: bytes, form: Any) -> Any:
    """Return the contents of a stored JSON file that has a form.

    Raises:
        CorruptError: names the file, and its first fault.
    """
    with damaged(path):
        found = limits.parsed_json(data)
    check_stored(path, found, form)
    return found


def check_stored(path: Path, found: Any, form: Any) -> None:
    """Refuse the contents of a stored file that do not have a form.

    Raises:
        CorruptError: names the file, and its first fault.
    """
    if wrong := validate(found, form):
        raise CorruptError(f"{path} is damaged: {wrong}")


def check_names(what: str, found: Any, form: Mapping[str, Any]) -> None:
    """Refuse a field that the form does not have.

    Args:
        what: has the fields, as in messages: ``a plan``.

    Raises:
        UsageError: names the field and the nearest known one.
    """
    for name in found if isinstance(found, Mapping) else ():
        check_known(
            f"field of {what}", name, [known.removesuffix("?") for known in form]
        )


def _named(forms: tuple[Any, ...]) -> str:
    words = {list: "a list", dict: "an object", MapOf: "an object"}
    return " or ".join(
        "null"
        if each is None
        else each
        if isinstance(each, str)
        else words.get(type(each)) or each.__name__
        for each in forms
    )


def _is(found: Any, form: Any) -> bool:
    if form == COUNT:
        return isinstance(found, int) and not isinstance(found, bool) and found >= 0
    if form == DIGEST:
        return isinstance(found, str) and bool(re.fullmatch(r"([0-9a-f]{64})?", found))
    if form == NUMBER:  # whole numbers beyond all floats are none
        return (
            isinstance(found, (int, float))
            and not isinstance(found, bool)
            and abs(found) <= sys.float_info.max
        )
    return found is None if form is None else isinstance(found, form)


def _wrong(found: Any, name: str, wanted: str) -> str:
    shown = repr(found)
    return f"{name or 'it'} must be {wanted}; got {shown if len(shown) <= 40 else type(found).__name__}"


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

HEADER_BYTES = 2**24
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
    if header > HEADER_BYTES:
        raise ValueError(
            f"its header must have at most {HEADER_BYTES:,} bytes; got {header:,}"
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
