"""The types in each JSON file of a run directory. Digests show damage but not who wrote a file.

>>> validate({"round": 3, "rows": {"bytes": -1}}, {"round": COUNT, "rows": {"bytes": COUNT}})
'rows.bytes must be a whole number from 0; got -1'
>>> validate({"round": 3}, {"round": COUNT, "words?": [str]})
''
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fl_core import limits
from fl_core.errors import CorruptError, check_known, damaged

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
