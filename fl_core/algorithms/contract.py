"""The rules for every algorithm and their checks: names of hooks, what hooks return, and no state on the object.

An algorithm object is copied to worker processes and built again when a run resumes. Its own attributes would differ
between processes and be lost. So the engine freezes it before the first round.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from dataclasses import is_dataclass
from difflib import get_close_matches
from functools import wraps
from typing import Any, ClassVar, NamedTuple, Protocol

from torch import Tensor, nn

from fl_core.algorithms.exchange import Message, Observation, State, TaskInfo
from fl_core.errors import UsageError, check_known, listing
from fl_core.plan import LayerPlan
from fl_core.training.phases import Phase

FROZEN, CONTENTS = "_frozen", "_contents"
_PLACE = (
    "An algorithm is copied to workers and built anew on resume; what changes in a run belongs to the State of the "
    "server or of a client: State.trees for tensors, State.meta for plain data"
)


class AlgorithmLike(Protocol):
    """The parts of an algorithm that its checks read."""

    name: ClassVar[str]
    evaluates: str
    task_info: TaskInfo

    def method(self, name: str, what: str = "method") -> Callable[..., Any]:
        """Return the method of that name, or refuse it."""


def check_hooks(algorithm: type, base: type) -> None:
    """Refuse a misspelt hook, one with other arguments, and a ``Config`` of another kind.

    The class's own hooks are replaced by themselves with a check of what they return.
    A method that is not inherited counts as a misspelt hook if it has a hook's arguments and nearly its name. Losses
    are left alone: phases call them by whatever name.

    Raises:
        UsageError: names the hook, and what it should be.
    """
    where = f"{algorithm.__module__}.{algorithm.__qualname__}"
    for name, member in list(vars(algorithm).items()):
        if name == "Config" and not is_dataclass(member):
            raise UsageError(f"{where}.Config must be a frozen dataclass. Write @dataclass(frozen=True) above it.")
        hook, own = vars(base).get(name), getattr(member, "__func__", member)
        if name.startswith("_") or not callable(own):
            continue
        if isinstance(hook, classmethod):
            if not (isinstance(member, classmethod) or inspect.ismethod(member)):
                raise UsageError(f"{where}.{name} must be a class method. Write @classmethod above it.")
            hook = hook.__func__
        if not inspect.isfunction(hook):
            _check_helper(algorithm, base, name, where)
            continue
        expected, actual = _arguments(hook), _arguments(own)
        if len(expected) != len(actual) and not any(argument.startswith("*") for argument in actual):
            raise UsageError(f"{where}.{name} must take ({', '.join(expected)}); got ({', '.join(actual)}).")
        if name in HOOK_SPECS and not inspect.ismethod(member):  # a method bound to another algorithm is checked there
            looked_at = with_checks(own, name)
            setattr(algorithm, name, classmethod(looked_at) if isinstance(member, classmethod) else looked_at)


def _check_helper(algorithm: type, base: type, name: str, where: str) -> None:
    """Refuse a method that is a misspelt hook."""
    member = vars(algorithm)[name]
    inherited = any(hasattr(parent, name) for parent in algorithm.__mro__[1:])
    hooks = {each: hook for each, hook in vars(base).items() if inspect.isfunction(hook) and each[0] != "_"}
    hooks.pop("loss")
    near = [] if inherited or not inspect.isfunction(member) else get_close_matches(name, hooks, 1, 0.7)
    if near and _arguments(member) == _arguments(hooks[near[0]]):
        raise UsageError(
            f"{where}: a method with the arguments of a hook must be one; got {name!r}. "
            f"Name it {near[0]!r}, or begin its name with an underscore."
        )


def _arguments(function: Any) -> list[str]:
    """Names of a function's parameters without a default, with the stars of ``*args`` and ``**kwargs``."""
    parameters = inspect.signature(function).parameters.values()
    stars: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    required = [p for p in parameters if p.default is inspect.Parameter.empty]
    return [stars.get(p.kind, "") + p.name for p in required]


# --- nothing is kept on the object -------------------------------------------------------------------------------


def refuse_assignment(algorithm: AlgorithmLike, name: str) -> None:
    """Refuse to set an attribute of a frozen algorithm.

    Raises:
        UsageError: says where what changes belongs.
    """
    if vars(algorithm).get(FROZEN):
        raise UsageError(f"{algorithm.name} must not set self.{name} during a run. {_PLACE}")


def freeze(algorithm: AlgorithmLike) -> None:
    """Forbid setting attributes from now on, and note the values for :func:`check_unchanged` to find changes in place.

    Both hold for the algorithms inside it too.
    """
    for part in _with_inner(algorithm):
        vars(part).update({FROZEN: True, CONTENTS: _contents_of(part)})


def picklable_attributes(algorithm: AlgorithmLike) -> dict[str, Any]:
    """The attributes of an algorithm that are sent to a worker process. It is frozen again there."""
    return {name: value for name, value in vars(algorithm).items() if name != CONTENTS}


def check_unchanged(algorithm: AlgorithmLike) -> None:
    """Refuse an algorithm that has changed a list, dictionary, set or tensor of its own since it was frozen.

    Raises:
        UsageError: names the attribute, and where what changes belongs.
    """
    for part in _with_inner(algorithm):
        before = vars(part).get(CONTENTS, {})
        now = _contents_of(part) if CONTENTS in vars(part) else {}
        changed = [name for name in {**before, **now} if before.get(name) != now.get(name)]
        if changed:
            raise UsageError(f"{part.name} must not change self.{changed[0]} in place during a run. {_PLACE}")


def _with_inner(algorithm: AlgorithmLike) -> Iterator[AlgorithmLike]:
    """The algorithm and, if it wraps another one as a schedule does, also the wrapped algorithms."""
    yield algorithm
    for value in vars(algorithm).values():
        if hasattr(value, "aggregate") and hasattr(value, "with_plan"):
            yield from _with_inner(value)


def _contents_of(algorithm: AlgorithmLike) -> dict[str, Any]:
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
    algorithm: AlgorithmLike,
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


def methods(algorithm: AlgorithmLike) -> list[str]:
    """Names of an algorithm's public methods, for the error message about one that does not exist."""
    return [
        name for name in dir(type(algorithm)) if not name.startswith("_") and callable(getattr(type(algorithm), name))
    ]


# --- what hooks return ---------------------------------------------------------------------------------------------


class HookSpec(NamedTuple):
    """The kind of value that a hook must return, in words, and its test."""

    words: str
    fits: Callable[[Any], bool]


def _all_are(kind: type, values: Any, *holders: type) -> bool:
    """Return whether these values are in one of the holders, each of one kind."""
    held = isinstance(values, holders)
    return held and all(isinstance(value, kind) for value in values)


def _trees(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(tree, Mapping) for tree in value.values())


def _numbers(value: Any) -> bool:
    """Return whether these may be observations. A generator's values are not known before."""
    if isinstance(value, (list, tuple)):
        return _all_are(Observation, value, list, tuple)
    return isinstance(value, Iterable) and not isinstance(value, (str, Mapping))


NAMES = HookSpec("a set of names of tensors", lambda value: _all_are(str, value, Set))
_MESSAGE = HookSpec("a Message, whose trees are {name: {tensor's name: tensor}}",
                lambda value: isinstance(value, Message) and _trees(value.trees))  # fmt: skip
_STATE = HookSpec("a State, whose trees are {name: {tensor's name: tensor}}",
              lambda value: isinstance(value, State) and _trees(value.trees))  # fmt: skip
_PHASES = HookSpec("a tuple of Phases", lambda value: _all_are(Phase, value, tuple))
_OBSERVATIONS = HookSpec("Observations", _numbers)
HOOK_SPECS = {
    "base_algorithm": HookSpec(
        "a class made of Algorithm", lambda value: isinstance(value, type) and hasattr(value, "Config")
    ),
    "wrap_model": HookSpec("a torch.nn.Module", lambda value: isinstance(value, nn.Module)),
    "setup": HookSpec("nothing", lambda value: value is None),
    "notes": HookSpec("a list of lines of text", lambda value: _all_are(str, value, list, tuple)),
    "default_plan": HookSpec("a LayerPlan or None", lambda value: value is None or isinstance(value, LayerPlan)),
    "resolve_plan": HookSpec("a LayerPlan", lambda value: isinstance(value, LayerPlan)),
    "server_state": _STATE,
    "client_state": _STATE,
    **dict.fromkeys(("submodel", "shared", "uploaded", "local_tensors"), NAMES),
    "exchanges": HookSpec("a tuple of names", lambda value: bool(value) and _all_are(str, value, tuple)),
    "server_message": _MESSAGE,
    "client_start": HookSpec("the weights, {tensor's name: tensor}", lambda value: isinstance(value, Mapping)),
    "phases": _PHASES,
    "client_update": _MESSAGE,
    "aggregate": HookSpec("nothing, and change the server's State in place", lambda value: value is None),
    "models": HookSpec("the models, {name: {tensor's name: tensor}}", _trees),
    "finetuning": _PHASES,
    "observations": _OBSERVATIONS,
    "client_observations": _OBSERVATIONS,
}
"""What each hook must return; a loss is looked at where it is trained with."""


def with_checks(hook: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The hook, followed by :func:`check_returned`."""

    @wraps(hook)
    def answer(self: AlgorithmLike, *args: Any, **options: Any) -> Any:
        value = hook(self, *args, **options)
        check_returned(self, name, value)
        return value

    return answer


def check_returned(algorithm: AlgorithmLike, name: str, value: Any) -> None:
    """Refuse what a hook returned if it is something else than :data:`HOOK_SPECS` says.

    Raises:
        UsageError: names the algorithm, the hook, what it returned and what is expected; of names of tensors that the
            model does not have, the nearest.
    """
    form = HOOK_SPECS[name]
    if not form.fits(value):
        raise UsageError(f"{algorithm.name}: {name} must return {form.words}; got {_kind_of_value(value)}.")
    if form is NAMES and not value <= (known := algorithm.task_info.tensors):
        check_known(f"tensor that {name} of {algorithm.name} returned,", min(value - known), sorted(known))
    if name == "models" and algorithm.evaluates not in value:
        made = listing(value) or "no models"
        raise UsageError(f"{algorithm.name}: models must return one named {algorithm.evaluates!r}; got {made}.")


def _kind_of_value(value: Any) -> str:
    """Return a value's kind, and the kinds of its contents, for an error message."""
    if value is None or isinstance(value, str):
        return repr(value)
    if isinstance(value, Mapping):
        held: Collection[Any] = value.values()
    else:
        held = value if isinstance(value, (list, tuple, Set)) else ()
    kinds = sorted({type(each).__name__ for each in held})
    return f"a {type(value).__name__}" + (f" of {', '.join(kinds)}" if kinds else "")
