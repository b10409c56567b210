"""An algorithm's own configuration, read from what a user gave: known keys, right types, nothing below 0.

A field's type can narrow its values: ``Literal["own", "cloud"]``, :data:`Positive`, :data:`Count` or :data:`Share`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, fields
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from fl_core.bounds import ABOVE_0, Bound, at_least, check_value
from fl_core.errors import UsageError, check_known

MOST = {int: 1e9, float: 1e30}
"""The largest number that an option may be: of a count, and of a strength or rate, which float32 must hold."""


Positive = Annotated[float, ABOVE_0]
Count = Annotated[int, at_least(1)]
Share = Annotated[float, Bound("at most 1", lambda value: value <= 1)]


def make_config(algorithm: type[Any], values: Mapping[str, Any]) -> Any:
    """Return the algorithm's own ``Config`` with the given values; strings are read as the field's type.

    Raises:
        UsageError: an unknown key, or a value of the wrong type, also among the keys of what it is laid over.
    """
    return configurations(algorithm, values)[0]


def configurations(algorithm: type[Any], values: Mapping[str, Any]) -> tuple[Any, ...]:
    """The algorithm's ``Config`` and, if it wraps another algorithm, that one's ``Config`` after it.

    Raises:
        UsageError: as :func:`make_config`.
    """
    algorithms = list(dict.fromkeys((algorithm, algorithm.base_algorithm(values))))
    known = {
        field.name
        for each_algorithm in algorithms
        for field in fields(each_algorithm.Config)
    }
    for key in values:
        if not known:
            raise UsageError(
                f"{algorithm.name} must have no options; got {key!r}. Leave it out."
            )
        check_known(f"option of {algorithm.name}", key, known)
    return tuple(
        _fill(algorithm.name, each_algorithm.Config, values)
        for each_algorithm in algorithms
    )


def _fill(name: str, config: type, values: Mapping[str, Any]) -> Any:
    hints, keys = get_type_hints(config, include_extras=True), fields(config)
    filled = {
        f.name: _check_type(name, f.name, values[f.name], hints[f.name])
        for f in keys
        if f.name in values
    }
    needed = [
        f.name
        for f in keys
        if f.default is MISSING
        and f.default_factory is MISSING
        and f.name not in filled
    ]
    if needed:
        raise UsageError(f"{name} must have a value for {needed[0]!r}; got none.")
    return config(**filled)


def _check_type(name: str, key: str, value: Any, kind: Any) -> Any:
    what = f"{name}: {key}"
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    target, *bounds = _parts(next(k for k in kinds if k is not NoneType))
    if value is None or (isinstance(value, str) and value.lower() == "none"):
        if NoneType in kinds:
            return None
        raise UsageError(f"{what} must be {target.__name__}; got none.")
    if get_origin(target) is tuple:
        parts = value.split(",") if isinstance(value, str) else value
        if not isinstance(parts, (list, tuple)):
            raise UsageError(
                f"{what} must be a list of {get_args(target)[0].__name__}; got {value!r}."
            )
        return tuple(
            _check_type(name, key, part, get_args(target)[0]) for part in parts
        )
    if get_origin(target) is Literal:
        return check_known(f"{key} of {name}", value, get_args(target))
    try:
        if target is bool:
            return {"true": True, "false": False, "1": True, "0": False}[
                str(value).lower()
            ]
        if isinstance(value, bool):
            raise TypeError(value)
        number = target(value)
        if target is int and float(value) != number:
            raise ValueError(value)
    except (TypeError, ValueError, KeyError, OverflowError) as error:
        raise UsageError(f"{what} must be {target.__name__}; got {value!r}.") from error
    if target in (int, float) and not (
        number >= 0 and math.isfinite(number)
    ):  # strengths and counts, all of them
        raise UsageError(f"{what} must be at least 0 and finite; got {value}.")
    if target in MOST and number > MOST[target]:
        raise UsageError(
            f"{what} must be at most {MOST[target]:.0e}; got {number:.3g}. Choose a smaller number."
        )
    for bound in bounds:
        check_value(what, number, bound)
    return number


def _parts(kind: Any) -> tuple[Any, ...]:
    """Return a type and the bounds that annotate it."""
    return get_args(kind) if get_origin(kind) is Annotated else (kind,)
