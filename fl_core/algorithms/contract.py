"""Checks of an algorithm: names and arguments of its hooks, what its phases name, and no state on the object.

An algorithm object is copied to worker processes and built again when a run resumes. Its own attributes would differ
between processes and be lost. So the engine freezes it before the first round.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable
from dataclasses import is_dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from fl_core.errors import UsageError, check_known

if TYPE_CHECKING:
    from fl_core.algorithms.base import Algorithm
    from fl_core.training.phases import Phase


def check_hooks(algorithm: type[Algorithm], base: type[Algorithm]) -> None:
    """Refuse a misspelt hook, one with other arguments, and a ``Config`` of another kind.

    A method that is not inherited counts as a misspelt hook if it has a hook's arguments and nearly its name. Losses
    are left alone: phases call them by whatever name.

    Raises:
        UsageError: names the hook, and what it should be.
    """
    where = f"{algorithm.__module__}.{algorithm.__qualname__}"
    hooks = {
        name: hook
        for name, hook in vars(base).items()
        if name[0] != "_" and not isinstance(hook, type)
    }
    functions = {name: hook for name, hook in hooks.items() if inspect.isfunction(hook)}
    for name, member in vars(algorithm).items():
        own, hook = getattr(member, "__func__", member), hooks.get(name)
        if name == "Config" and not is_dataclass(member):
            raise UsageError(
                f"{where}.Config must be a frozen dataclass. Write @dataclass(frozen=True) above it."
            )
        if name.startswith("_") or not callable(own) or isinstance(own, type):
            continue
        if isinstance(hook, classmethod):
            if not (isinstance(member, classmethod) or inspect.ismethod(member)):
                raise UsageError(
                    f"{where}.{name} must be a class method. Write @classmethod above it."
                )
            hook = hook.__func__
        if inspect.isfunction(hook):
            expected, actual = _arguments(hook), _arguments(own)
            if len(expected) != len(actual) and not any(
                argument.startswith("*") for argument in actual
            ):
                raise UsageError(
                    f"{where}.{name} must take ({', '.join(expected)}); got ({', '.join(actual)})."
                )
        elif inspect.isfunction(member) and not any(
            hasattr(parent, name) for parent in algorithm.__mro__[1:]
        ):
            near = get_close_matches(name, functions.keys() - {"loss"}, 1, 0.7)
            if near and _arguments(member) == _arguments(functions[near[0]]):
                raise UsageError(
                    f"{where}: a method with the arguments of a hook must be one; got {name!r}. "
                    f"Name it {near[0]!r}, or begin its name with an underscore."
                )


def _arguments(function: Any) -> list[str]:
    """Return the names of parameters without a default, with the stars of ``*args`` and ``**kwargs``."""
    parameters = inspect.signature(function).parameters.values()
    stars: dict[Any, str] = {
        inspect.Parameter.VAR_POSITIONAL: "*",
        inspect.Parameter.VAR_KEYWORD: "**",
    }
    return [
        stars.get(p.kind, "") + p.name
        for p in parameters
        if p.default is inspect.Parameter.empty
    ]


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
