"""The rules that every algorithm must keep, and the checks of them: hooks have known names, objects keep no state.

An algorithm object is copied to worker processes and built anew when a run goes on. What it kept on itself would be
another thing in each process and lost on resume, so the engine freezes it before the first round.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Iterator
from dataclasses import is_dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fl_core.algorithms.hook_types import HOOK_SPECS, checked
from fl_core.errors import UsageError, check_known

if TYPE_CHECKING:
    from fl_core.algorithms.base import Algorithm
    from fl_core.training.local import Phase

FROZEN, CONTENTS = "_frozen", "_contents"
RENAMED = {
    "held": "submodel",
    "up": "uploaded",
    "kept": "local_tensors",
    "open": "server_state",
    "start": "client_state",
    "candidates": "client_start, which scores models with ctx.score",
    "insides": "observations",
    "look": "client_observations",
    "finish": "finetuning",
    "tunes": "finetuning",
    "adapts": "finetuning",
    "decides": "default_plan, which gives None",
    "least_layers": "resolve_plan, which raises a UsageError",
    "splits": "uses_plan",
    "cuts": "removes_layers",
    "paired": "keeps_server_pair",
    "foreseeable": "static_traffic",
    "adds": "added_modules",
    "adopt": "resolve_plan",
    "under": "base_algorithm",
    "build": "wrap_model",
    "begin": "client_start",
    "reply": "client_update",
    "send": "server_message",
}
"""What hooks were called in version 0.1, and their names now."""
_PLACE = (
    "An algorithm is copied to workers and built anew on resume; what changes in a run belongs to the State of the "
    "server or of a client: State.trees for tensors, State.meta for plain data"
)


def check_hooks(algorithm: type[Algorithm], base: type[Algorithm]) -> None:
    """Refuse a hook by an old name, a misspelt one or one with other arguments, and a ``Config`` of another kind.

    The class's own hooks are replaced by themselves with a check of what they return (:mod:`.returns`).
    A method that is not inherited counts as a misspelt hook if it has a hook's arguments and nearly its name. Losses
    are left alone: phases call them by whatever name.

    Raises:
        UsageError: names the hook, and what it should be.
    """
    where = f"{algorithm.__module__}.{algorithm.__qualname__}"
    for name, member in list(vars(algorithm).items()):
        if name in RENAMED:
            raise UsageError(f"{where} defines {name!r}: that hook is now {RENAMED[name]}")
        if name == "Config" and not is_dataclass(member):
            raise UsageError(f"{where}.Config must be a frozen dataclass: write @dataclass(frozen=True) above it")
        hook, own = vars(base).get(name), getattr(member, "__func__", member)
        if name.startswith("_") or not callable(own):
            continue
        if isinstance(hook, classmethod):
            if not (isinstance(member, classmethod) or inspect.ismethod(member)):
                raise UsageError(f"{where}.{name} is asked of the class: write @classmethod above it")
            hook = hook.__func__
        if not inspect.isfunction(hook):
            _check_helper(algorithm, base, name, where)
            continue
        expected, actual = _arguments(hook), _arguments(own)
        if len(expected) != len(actual) and not any(argument.startswith("*") for argument in actual):
            raise UsageError(f"{where}.{name} takes ({', '.join(actual)}); it is called with ({', '.join(expected)})")
        if name in HOOK_SPECS and not inspect.ismethod(member):  # a method bound to another algorithm is checked there
            looked_at = checked(own, name)
            setattr(algorithm, name, classmethod(looked_at) if isinstance(member, classmethod) else looked_at)


def _check_helper(algorithm: type[Algorithm], base: type[Algorithm], name: str, where: str) -> None:
    """Refuse a method that is a misspelt hook."""
    member = vars(algorithm)[name]
    inherited = any(hasattr(parent, name) for parent in algorithm.__mro__[1:])
    hooks = {each: hook for each, hook in vars(base).items() if inspect.isfunction(hook) and each[0] != "_"}
    hooks.pop("loss")
    near = [] if inherited or not inspect.isfunction(member) else get_close_matches(name, hooks, 1, 0.7)
    if near and _arguments(member) == _arguments(hooks[near[0]]):
        raise UsageError(
            f"{where} defines {name!r}, which no round calls: is it the hook {near[0]!r}? A helper with these "
            "arguments may be called so after an underscore"
        )


def _arguments(function: Any) -> list[str]:
    """Names of a function's parameters without a default, with the stars of ``*args`` and ``**kwargs``."""
    parameters = inspect.signature(function).parameters.values()
    stars: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    required = [p for p in parameters if p.default is inspect.Parameter.empty]
    return [stars.get(p.kind, "") + p.name for p in required]


# --- nothing is kept on the object -------------------------------------------------------------------------------


def refuse_assignment(algorithm: Algorithm, name: str) -> None:
    """Refuse to set an attribute of a frozen algorithm.

    Raises:
        UsageError: says where what changes belongs.
    """
    if vars(algorithm).get(FROZEN):
        raise UsageError(f"{algorithm.name} sets self.{name} during a run. {_PLACE}")


def freeze(algorithm: Algorithm) -> None:
    """Forbid setting attributes from now on, and note the values for :func:`check_unchanged` to find changes in place.

    Both hold for the algorithms inside it too.
    """
    for part in _with_inner(algorithm):
        vars(part).update({FROZEN: True, CONTENTS: _contents_of(part)})


def portable(algorithm: Algorithm) -> dict[str, Any]:
    """The attributes of an algorithm that are sent to a worker process, where it is frozen anew."""
    return {name: value for name, value in vars(algorithm).items() if name != CONTENTS}


def check_unchanged(algorithm: Algorithm) -> None:
    """Refuse an algorithm that has changed a list, dictionary, set or tensor of its own since it was frozen.

    Raises:
        UsageError: names the attribute, and where what changes belongs.
    """
    for part in _with_inner(algorithm):
        before = vars(part).get(CONTENTS, {})
        now = _contents_of(part) if CONTENTS in vars(part) else {}
        changed = [name for name in {**before, **now} if before.get(name) != now.get(name)]
        if changed:
            raise UsageError(f"{part.name} changed self.{changed[0]} in place during a run. {_PLACE}")


def _with_inner(algorithm: Algorithm) -> Iterator[Algorithm]:
    """The algorithm and, if it wraps another one as a schedule does, also the wrapped algorithms."""
    yield algorithm
    for value in vars(algorithm).values():
        if hasattr(value, "aggregate") and hasattr(value, "with_plan"):
            yield from _with_inner(value)


def _contents_of(algorithm: Algorithm) -> dict[str, Any]:
    snapshots = {name: _contents(value) for name, value in vars(algorithm).items() if name not in (FROZEN, CONTENTS)}
    return {name: contents for name, contents in snapshots.items() if contents is not None}


def _contents(value: Any) -> Any:
    """A snapshot of a mutable value, to be compared with later; None for what cannot change in place or be compared."""
    if isinstance(value, dict):
        return {key: (_contents(item), _identity(item)) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [(_contents(item), _identity(item)) for item in value]
        return items if isinstance(value, list) or any(contents is not None for contents, _ in items) else None
    if isinstance(value, (set, bytearray)):
        return type(value)(value)
    if isinstance(value, Tensor):
        return value._version
    return None


def _identity(item: Any) -> Any:
    return item if isinstance(item, (str, int, float, bool, type(None))) else id(item)


# --- phases name what there is -----------------------------------------------------------------------------------


def check_phases(
    algorithm: Algorithm,
    phases: Iterable[Phase],
    observers: Collection[str],
    trees: Collection[str] | None = None,
) -> None:
    """Refuse phases that name a loss, a step, an observer or a tree that is not there.

    Args:
        observers: what the run can measure with. trees: what the client has to train, if that is known.

    Raises:
        UsageError: names the phase, what it asks for, and the nearest that there is.
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


def methods(algorithm: Algorithm) -> list[str]:
    """Names of an algorithm's public methods, for the error message about one that does not exist."""
    return [
        name for name in dir(type(algorithm)) if not name.startswith("_") and callable(getattr(type(algorithm), name))
    ]
