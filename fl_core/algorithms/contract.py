"""Checks of an algorithm: names of its hooks, what its phases name, and no state on the object.

An algorithm object is copied to worker processes and built again when a run resumes. Its own attributes would differ
between processes and be lost. So the engine freezes it before the first round.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from difflib import get_close_matches
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from fl_core.bounds import ABOVE_0, Bound, at_least, check_value
from fl_core.errors import UsageError, check_known

if TYPE_CHECKING:
    from fl_core.algorithms.base import Algorithm
    from fl_core.training.phases import Phase


def check_hooks(algorithm: type[Algorithm], base: type[Algorithm]) -> None:
    """Refuse a misspelt hook: a new method with a hook's parameters and nearly its name.

    Losses are left alone: phases call them by whatever name.

    Raises:
        UsageError: names the method, and the hook; or options are no dataclass.
    """
    options = vars(algorithm).get("Config")
    if options is not None and not is_dataclass(options):
        raise UsageError(
            f"{algorithm.__module__}.{algorithm.__qualname__}: Config must be a dataclass; got a plain class. "
            "Write @dataclass(frozen=True) above it."
        )
    hooks = {
        name: hook
        for name, hook in vars(base).items()
        if name[0] != "_" and name != "loss" and inspect.isfunction(hook)
    }
    for name, method in vars(algorithm).items():
        inherited = any(hasattr(parent, name) for parent in algorithm.__mro__[1:])
        if name[0] == "_" or inherited or not inspect.isfunction(method):
            continue
        near = get_close_matches(name, hooks, 1, 0.7)
        if near and _parameters(method) == _parameters(hooks[near[0]]):
            raise UsageError(
                f"{algorithm.__module__}.{algorithm.__qualname__}: a method with the arguments of a hook must be one; "
                f"got {name!r}. Name it {near[0]!r}, or begin its name with an underscore."
            )


def _parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def freeze(algorithm: Algorithm) -> None:
    """Forbid setting attributes of an algorithm from now on, and of the algorithms inside it."""
    for value in list(vars(algorithm).values()):
        if hasattr(value, "aggregate") and hasattr(value, "with_plan"):
            freeze(value)
    vars(algorithm)["_frozen"] = True


def refuse_assignment(algorithm: Algorithm, name: str) -> None:
    """Refuse to set an attribute of a frozen algorithm.

    Raises:
        UsageError: names the place of what changes during a run.
    """
    if vars(algorithm).get("_frozen"):
        raise UsageError(
            f"{algorithm.name} must not set self.{name} during a run. An algorithm is copied to workers and built anew "
            "on resume; what changes in a run belongs to the State of the server or of a client: State.trees for "
            "tensors, State.meta for plain data"
        )


def check_phases(
    algorithm: Algorithm,
    phases: Iterable[Phase],
    observers: Collection[str],
    trees: Collection[str] | None = None,
) -> None:
    """Refuse phases that name a loss, a step, an observer or a tree that does not exist.

    Args:
        observers: what the run can measure with. trees: what the client has to train, if that is known.

    Raises:
        UsageError: names the phase, what it asks for, and the nearest that exists.
    """
    for phase in phases:
        where = f"of phase {phase.name!r} of {algorithm.name}"
        algorithm.method(phase.loss, f"loss {where}")
        if phase.step:
            algorithm.method(phase.step, f"step {where}")
        if trees is not None:
            check_known(f"tree {where}", phase.state_key, trees)
        for name in phase.observe:
            check_known(f"observer {where}", name, observers)


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
