"""What each hook of an algorithm must return, and the check of it, which every overridden hook has."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Set
from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from fl_core.algorithms.exchange import Message, Observation, State
from fl_core.errors import UsageError, check_known, listing
from fl_core.plan import LayerPlan
from fl_core.training.local import Phase

if TYPE_CHECKING:
    from fl_core.algorithms.base import Algorithm


class HookSpec(NamedTuple):
    """What a hook must return, in words, and the test of it."""

    words: str
    fits: Callable[[Any], bool]


def _all_are(kind: type, values: Any, *holders: type) -> bool:
    """Whether these are in one of the holders, and each of a kind."""
    held = isinstance(values, holders)
    return held and all(isinstance(value, kind) for value in values)


def _trees(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(tree, Mapping) for tree in value.values())


def _numbers(value: Any) -> bool:
    """Whether these may be observations; of a generator that is not known before."""
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


def checked(hook: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The hook, followed by :func:`check_returned`."""

    @wraps(hook)
    def answer(self: Algorithm, *args: Any, **options: Any) -> Any:
        value = hook(self, *args, **options)
        check_returned(self, name, value)
        return value

    return answer


def check_returned(algorithm: Algorithm, name: str, value: Any) -> None:
    """Refuse what a hook returned if it is something else than :data:`HOOK_SPECS` says.

    Raises:
        UsageError: names the algorithm, the hook, what it returned and what is expected; of names of tensors that the
            model does not have, the nearest.
    """
    form = HOOK_SPECS[name]
    if not form.fits(value):
        raise UsageError(f"{algorithm.name}: {name} returned {_shown(value)}; it must return {form.words}")
    if form is NAMES and not value <= (known := algorithm.task_info.tensors):
        check_known(f"tensor that {name} of {algorithm.name} returned,", min(value - known), sorted(known))
    if name == "models" and algorithm.evaluates not in value:
        made = listing(value) or "no models"
        raise UsageError(f"{algorithm.name}: models returned {made}; it must return one named {algorithm.evaluates!r}")


def _shown(value: Any) -> str:
    """What a value is, for an error message: its kind, and that of what it holds."""
    if value is None or isinstance(value, str):
        return repr(value)
    if isinstance(value, Mapping):
        held: Collection[Any] = value.values()
    else:
        held = value if isinstance(value, (list, tuple, Set)) else ()
    kinds = sorted({type(each).__name__ for each in held})
    return f"a {type(value).__name__}" + (f" of {', '.join(kinds)}" if kinds else "")
