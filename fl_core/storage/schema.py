"""The contents of stored files: the types in JSON, and trees of tensors in a safetensors file."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Any,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

from fl_core import limits
from fl_core.errors import CorruptError, UsageError, check_known

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
    return next(_faults(found, form, name), "")


def _faults(found: Any, form: Any, name: str) -> Iterator[str]:
    at = f"{name}." if name else ""
    kind: Any = (list, tuple) if isinstance(form, list) else Mapping
    if isinstance(form, tuple):
        faults = [validate(found, each, name) for each in form]
        inner = [each for each in faults if not each.startswith(f"{name or 'it'} must")]
        if "" not in faults:
            yield inner[0] if inner else _wrong(found, name, form)
    elif not isinstance(form, (dict, list, MapOf)):
        if not _is(found, form):
            yield _wrong(found, name, (form,))
    elif not isinstance(found, kind):
        yield _wrong(found, name, (form,))
    elif isinstance(form, list):
        for place, value in enumerate(found):
            yield from _faults(value, form[0], f"{at}{place}")
    elif isinstance(form, MapOf):
        for key, value in found.items():
            yield from _faults(value, form.form, f"{at}{key}")
    else:
        for key, inner_form in form.items():
            plain = key.removesuffix("?")
            if plain in found:
                yield from _faults(found[plain], inner_form, at + plain)
            elif plain == key:
                yield f"{at}{key} is missing"


def form_of(kind: Any) -> Any:
    """Return the form of what :func:`dataclasses.asdict` gives of a type. Fields with a default are optional."""
    parts = get_args(kind)
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        return {
            f"{each.name}{'' if _is_needed(each) else '?'}": form_of(hints[each.name])
            for each in fields(kind)
        }
    if get_origin(kind) is UnionType:
        return tuple(form_of(part) for part in parts)
    if get_origin(kind) is tuple:
        return [form_of(parts[0])]
    if get_origin(kind) is dict:
        return dict if parts[1] is Any else MapOf(form_of(parts[1]))
    return {float: NUMBER, NoneType: None}.get(kind, kind)


def _is_needed(each: Field[Any]) -> bool:
    return each.default is MISSING and each.default_factory is MISSING


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


def _wrong(found: Any, name: str, forms: tuple[Any, ...]) -> str:
    words = {list: "a list", dict: "an object", MapOf: "an object"}
    wanted = [
        words.get(type(form)) or getattr(form, "__name__", form) for form in forms
    ]
    known = " or ".join("null" if each is None else each for each in wanted)
    shown = repr(found)
    short = shown if len(shown) <= 40 else type(found).__name__
    return f"{name or 'it'} must be {known}; got {short}"


_SEPARATOR = "|"  # between the name of a tree and the name of a tensor; module paths have no such character
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


def tensors(data: bytes) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, by name.

    The header must be valid. Its tensors must fill the file without gap or overlap. Each must have the bytes of its
    shape and type.

    Raises:
        ValueError: a check fails.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    check_header(data)
    try:
        loaded: dict[str, Tensor] = load(data)
        return loaded
    except SafetensorError as error:
        raise ValueError(str(error)) from error
    except KeyError as error:
        raise ValueError(
            f"it has numbers of a type that torch does not load, {error}"
        ) from error


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
