"""Bounds on values: stated in the types of a dataclass's fields or a function's options, and checked in one place.

>>> from dataclasses import dataclass
>>> from typing import Annotated
>>> @dataclass(frozen=True)
... class Folds:
...     count: Annotated[int, Bound("at least 2", lambda count: count >= 2)] = 5
>>> check_fields(Folds(count=1))
Traceback (most recent call last):
    ...
fl_core.errors.UsageError: count must be at least 2; got 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from functools import cache
from numbers import Real
from typing import Annotated, Any, NamedTuple, get_args, get_type_hints

from fl_core.errors import UsageError, check_known


class Bound(NamedTuple):
    """A bound on a finite number: its words in an error, and whether a number keeps it."""

    words: str
    holds: Callable[[Any], bool]


class OneOf(NamedTuple):
    """A choice of names: what they are, and which there are."""

    kind: str
    names: Collection[str]


def at_least(least: int) -> Bound:
    """Return the bound of numbers from ``least``."""
    return Bound(f"at least {least}", lambda value: value >= least)


ABOVE_0 = Bound("above 0", lambda value: value > 0)
SHARE = Bound("above 0 and at most 1", lambda value: 0 < value <= 1)
BELOW_1 = Bound("at least 0 and below 1", lambda value: 0 <= value < 1)
INSIDE = Bound("between 0 and 1", lambda value: 0 < value < 1)
Size = Annotated[int, Bound("an integer above 0", lambda value: isinstance(value, int) and value > 0)]
"""The type of a width, a depth or another size of a model."""


def check_value(name: str, value: Any, bound: Bound, way: str = "") -> None:
    """Check that a value is a finite number within a bound.

    Args:
        way: what to do, for the message.

    Raises:
        UsageError: the value is not.
    """
    number = isinstance(value, Real) and not isinstance(value, bool)
    finite = " and finite" if number and not math.isfinite(value) else ""
    if finite or not (number and bound.holds(value)):
        raise UsageError(f"{name} must be {bound.words}{finite}; got {value!r}.{way and f' {way}'}")


def check_values(values: Mapping[str, Any], stated: Any, where: str = "", way: str = "") -> None:
    """Check values by name against the bounds in the annotations of a class or a function. None is not checked.

    Args:
        where: the beginning of a message.
        way: what to do, for the message.

    Raises:
        UsageError: names the first value out of bounds.
    """
    for name, bound in _bounds(stated):
        value = values.get(name)
        if value is None:
            continue
        if isinstance(bound, OneOf):
            check_known(bound.kind, value, bound.names)
        else:
            check_value(f"{where}{name}", value, bound, way)


def check_fields(found: Any, where: str = "", way: str = "") -> None:
    """Check the fields of a dataclass as :func:`check_values`."""
    check_values(vars(found), type(found), where, way)


@cache
def _bounds(stated: Any) -> list[tuple[str, Bound | OneOf]]:
    hints = get_type_hints(stated, include_extras=True)
    return [
        (name, bound)
        for name, hint in hints.items()
        for part in (hint, *get_args(hint))
        for bound in getattr(part, "__metadata__", ())
        if isinstance(bound, Bound | OneOf)
    ]
