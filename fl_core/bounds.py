"""Checks of values by annotations of a dataclass's fields or a function's options, and of stored JSON by its form.

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

import inspect
import math
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache, wraps
from numbers import Integral, Real
from pathlib import Path
from types import MappingProxyType, NoneType, SimpleNamespace, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from fl_core.errors import CorruptError, UsageError, as_list, check_known

Function = TypeVar("Function", bound=Callable[..., Any])


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
SIZE = Bound("an integer above 0", lambda value: isinstance(value, int) and value > 0)
Size = Annotated[int, SIZE]
"""The type of a width, a depth or another size of a model."""
Positive = Annotated[float, ABOVE_0]
Count = Annotated[int, at_least(1)]
Share = Annotated[float, Bound("at most 1", lambda value: value <= 1)]
"""Types of an algorithm's options."""
_PLAIN = {bool, int, float, str, list, dict, tuple, NoneType}
_ACCEPTED = {float: (float, int), tuple: (tuple, list), Path: os.PathLike}
_NUMPY = _ACCEPTED | {int: Integral, float: Real}
"""What stands for a type, and what does if a number may be NumPy's."""
_LISTS = (list, tuple, Sequence, Collection)


def check_type(
    name: str, value: Any, hint: Any, way: str = "", *, numpy: bool = False
) -> None:
    """Check that a value has an annotated type. A whole number is also a ``float``, and a truth value is no number.

    A list may stand for a tuple. Only Python's plain types are checked, not ``Literal`` or a class.

    >>> check_type("lr", "fast", float | None)
    Traceback (most recent call last):
        ...
    fl_core.errors.UsageError: lr must be float or none; got 'fast'.

    Args:
        way: what to do, for the message.
        numpy: whether a number may be NumPy's.

    Raises:
        UsageError: it has another type.
    """
    plain = {get_origin(part) or part for part in _alternatives(hint)} <= _PLAIN
    if plain and not _is_kind(value, hint, _NUMPY if numpy else _ACCEPTED):
        raise _not_of(hint, name, value, way)


def checked(function: Function) -> Function:
    """Return a function that first checks the kinds of its arguments by its annotations.

    One value may stand for a list. Annotations that name a type for type checkers alone are not checked.

    >>> @checked
    ... def train(rounds: int, out: Path | str = "run", layers: Sequence[str] = ()) -> None: ...
    >>> train(2, layers=["fc1", 3])
    Traceback (most recent call last):
        ...
    fl_core.errors.UsageError: layers must be a list of str; got 3.

    Raises:
        UsageError: names the argument, its kinds and its value.
    """
    signature = inspect.signature(function)

    @wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        try:
            given = signature.bind_partial(*args, **options).arguments
        except TypeError:
            return function(*args, **options)  # Python's error names the function
        for name, value in given.items():
            if signature.parameters[name].kind is not inspect.Parameter.VAR_KEYWORD:
                _check_argument(name, value, argument_hint(function, name))
        return function(*args, **options)

    return cast(Function, call)


@cache
def argument_hint(function: Callable[..., Any], name: str) -> Any:
    """Return the type of a function's argument; Any if its module does not import it."""
    annotated = SimpleNamespace(__annotations__={name: function.__annotations__[name]})
    try:
        return get_type_hints(annotated, function.__globals__)[name]
    except (AttributeError, NameError):
        return Any


def _check_argument(name: str, value: Any, hint: Any) -> None:
    if _is_kind(value, hint):
        return
    several = as_list(name, value, empty=True)
    wrong = [each for each in several if not _is_kind(each, hint)]
    way = "Name a dataset by dataset=." if name == "config" else ""
    raise _not_of(hint, name, wrong[0] if wrong else value, way)


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if isinstance(hint, UnionType) else (hint,)


def _is_kind(
    value: Any, hint: Any, accepted: Mapping[Any, Any] = MappingProxyType(_NUMPY)
) -> bool:
    parts, kind = get_args(hint), get_origin(hint) or hint
    if kind is UnionType:
        return any(_is_kind(value, part, accepted) for part in parts)
    if kind in (Sequence, Collection) and isinstance(value, Iterator):
        return True  # it can be read only once
    if kind in _LISTS and parts:
        fits = kind in (Sequence, Collection) or _is_kind(value, kind, accepted)
        values = as_list("", value, empty=True)
        return fits and all(_is_kind(each, parts[0], accepted) for each in values)
    if kind in (int, float) and isinstance(value, bool):
        return False
    kinds = accepted.get(kind, kind)
    return kind is Any or not isinstance(kind, type) or isinstance(value, kinds)


def _not_of(hint: Any, name: str, value: Any, way: str) -> UsageError:
    wanted = " or ".join(map(_kind_words, _alternatives(hint)))
    return UsageError(
        f"{name} must be {wanted}; got {short_value(value)}.{way and f' {way}'}"
    )


def _kind_words(hint: Any) -> str:
    kind = get_origin(hint) or hint
    if kind in _LISTS and get_args(hint):
        return f"a list of {_kind_words(get_args(hint)[0])}"
    words = {NoneType: "none", Path: "a path", Mapping: "dict"}
    return words.get(kind) or str(getattr(kind, "__name__", kind))


def short_value(value: object) -> str:
    """Return a value for an error message. Of a long or complex value only the type is shown, to hide clients' data."""
    text = repr(value) if isinstance(value, str | int | float | Path | None) else ""
    return text if 0 < len(text) <= 80 else type(value).__name__


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
        raise UsageError(
            f"{name} must be {bound.words}{finite}; got {value!r}.{way and f' {way}'}"
        )


def check_values(
    values: Mapping[str, Any], stated: Any, where: str = "", way: str = ""
) -> None:
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


# --- options of an algorithm ---

MOST = {
    int: Bound("a number from 0 to 1e9", lambda value: 0 <= value <= 1e9),
    float: Bound("a number from 0 to 1e30", lambda value: 0 <= value <= 1e30),
}
"""What an option may be: a count, and a strength or rate, which float32 must hold."""


def read_options(name: str, config: type, values: Mapping[str, Any]) -> Any:
    """Return a dataclass of options with the given values. Numbers and lists may be texts.

    Args:
        name: of what has the options, for messages.

    Raises:
        UsageError: a value of the wrong type or out of bounds, or none for an option without a default.
    """
    hints, keys = get_type_hints(config, include_extras=True), fields(config)
    filled = {
        f.name: _read_option(name, f.name, values[f.name], hints[f.name])
        for f in keys
        if f.name in values
    }
    needed = [f.name for f in keys if _is_needed(f) and f.name not in filled]
    if needed:
        raise UsageError(f"{name} must have a value for {needed[0]!r}; got none.")
    return config(**filled)


def _read_option(name: str, key: str, value: Any, kind: Any) -> Any:
    what = f"{name}: {key}"
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    target, *bounds = _parts(next(k for k in kinds if k is not NoneType))
    if NoneType in kinds and value in (None, "none"):
        return None
    if get_origin(target) is tuple:
        parts = value.split(",") if isinstance(value, str) else value
        check_type(what, parts, tuple)
        inner = get_args(target)[0]
        return tuple(_read_option(name, key, part, inner) for part in parts)
    if get_origin(target) is Literal:
        return check_known(f"{key} of {name}", value, get_args(target))
    if target not in MOST:
        check_type(what, value, target)
        return value
    if isinstance(value, str):
        with suppress(ValueError):
            value = float(value)
    for bound in (MOST[target], *bounds):
        check_value(what, value, bound)
    if target(value) != value:
        raise UsageError(f"{what} must be a whole number; got {value!r}.")
    return target(value)


def _parts(kind: Any) -> tuple[Any, ...]:
    """Return a type and the bounds that annotate it."""
    return get_args(kind) if get_origin(kind) is Annotated else (kind,)


# --- the allowed values of keys ---

BN = ("global", "local", "drop")
"""Running statistics of batch normalisation: averaged, each client's own, or none."""
WAYS = ("block", "module")
"""Definitions of a layer: a weighted module with its normalisation, or every module by itself."""
OPTIMIZERS = ("sgd", "adam", "adamw")
STOPPING_INTERVAL = 2
"""Rounds between evaluations, at most, of a run that may stop when validation no longer improves."""
LOSSES = (
    "cross_entropy",
    "focal",
    "player_focal",
    "bce",
    "mse",
    "mae",
    "huber",
    "cox",
    "multilabel_bce",
)
CLASS_WEIGHTS = ("none", "balanced")
"""Weights of classes in the loss, next to W,W,...: none, or such that every class has the same total weight."""
WEIGHTS = ("samples", "uniform")
"""Weights of clients in averages: their training samples, or equal weights."""
STACKS = ("auto", "on", "off")
"""Whether clients are trained together in one process."""
SCALES = ("none", "standard", "minmax", "robust", "imagenet")
"""Scaling of columns of numbers: none, to mean 0 and deviation 1, to 0..1, or by median and quartiles. The last is of
colour images: by ImageNet's mean and deviation."""
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""The mean and the standard deviation of ImageNet's channels in 0..1."""
IMPUTES = ("none", "mean", "median", "most_frequent")
"""Values for missing numbers: none (they are errors), or a statistic of the column's training samples."""


COUNT = "a whole number from 0"
DIGEST = "a digest, or nothing"
NUMBER = "a finite number"


@dataclass(frozen=True)
class MapOf:
    """An object with any names whose values all have this form."""

    form: Any


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


def read_as(kind: Any, found: Any, what: str, name: str = "") -> Any:
    """Return what :func:`dataclasses.asdict` gave of a type as that type again. Lists become tuples where it has these.

    Args:
        kind: a dataclass, a tuple, a dictionary, a plain type, or one of these or None.
        what: has the value, as in messages: ``a plan``.
        name: of the value within it.

    Raises:
        UsageError: names the first field that is unknown (and the nearest known one), missing, or of another type.
    """
    parts, at = get_args(kind), f"{name}." if name else ""
    found = list(found) if isinstance(found, tuple) else found
    if NoneType in parts:
        (kind,) = (part for part in parts if part is not NoneType)
        return None if found is None else read_as(kind, found, what, name)
    origin = get_origin(kind) or kind
    form = {float: NUMBER, tuple: list}.get(origin, origin)
    form = dict if is_dataclass(kind) else form
    fault = "" if kind is Any or _is(found, form) else _wrong(found, name, (form,))
    hints = get_type_hints(kind) if is_dataclass(kind) else {}
    if hints and not fault:
        for key in found:
            check_known(f"field of {what}{name and f', {name}'}", key, hints)
        lacking = [each.name for each in fields(kind) if _is_needed(each)]
        lacking = [key for key in lacking if key not in found]
        fault = f"{at}{lacking[0]} is missing" if lacking else ""
    if fault:
        raise UsageError(
            f"{what} must be as fedlayers writes it; {fault}. Make it again."
        )
    if hints:
        return kind(
            **{k: read_as(hints[k], v, what, f"{at}{k}") for k, v in found.items()}
        )
    if origin in (tuple, list):
        places = enumerate(found)
        return origin(read_as(parts[0], v, what, f"{at}{k}") for k, v in places)
    if origin is dict:
        return {k: read_as(parts[1], v, what, f"{at}{k}") for k, v in found.items()}
    return found


def _is_needed(each: Field[Any]) -> bool:
    return each.default is MISSING and each.default_factory is MISSING


def check_stored(path: Path, found: Any, form: Any) -> None:
    """Refuse the contents of a stored file that do not have a form.

    Raises:
        CorruptError: names the file, and its first fault.
    """
    if wrong := validate(found, form):
        raise CorruptError(f"{path} is damaged: {wrong}")


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
    words: dict[Any, str] = {list: "a list", dict: "an object", MapOf: "an object"}
    wanted = [
        words.get(form if isinstance(form, type) else type(form))
        or getattr(form, "__name__", form)
        for form in forms
    ]
    known = " or ".join("null" if each is None else each for each in wanted)
    shown = repr(found)
    short = shown if len(shown) <= 40 else type(found).__name__
    return f"{name or 'it'} must be {known}; got {short}"
