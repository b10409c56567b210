"""The type of a rule, and its decorator. A rule says how many layers, counted from the input, are federated.

A rule of one curve takes the layers' values from input to output, all above 0. It looks for the place at which they
rise. The layers before it serve everyone. The layers after it serve each client's own task. Only ratios of values
matter to it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from fl_core.errors import RunError, UsageError, check_known
from fl_core.registry import Registry

THRESHOLD = 1.2
READS = ("curve", "names")

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Rule:
    """A rule: the function that decides, and what it reads.

    Attributes:
        name: the function's name.
        choose: the function. For one curve: (values [L]) or (values [L], threshold) -> number of layers shared, from 1
            to L. For names: (names) -> the same names.
        summary: one line.
        reads: ``curve`` (of one metric) or ``names`` (the user's).
        lacks: (values, threshold) -> why the rule finds no cut and so shares all but the last layer.

    >>> from diagnostics.decide.rules.base import RULES
    >>> RULES["sensitivity_ratio"].cut([1.0, 1.1, 2.0, 2.1], 1.2)
    2
    """

    name: str
    choose: Callable[..., Any]
    summary: str
    reads: str = "curve"
    lacks: Callable[[Sequence[float], float], str] | None = None

    @property
    def decides(self) -> bool:
        """True if the rule decides on its own from one curve."""
        return self.reads == "curve"

    @property
    def takes_threshold(self) -> bool:
        """True if the rule takes a threshold."""
        return self.decides and len(inspect.signature(self.choose).parameters) > 1

    def cut(self, values: Sequence[float], threshold: float = THRESHOLD) -> int:
        """Return the number of shared layers, for a rule that decides from one curve.

        Raises:
            RunError: the rule does not return a number from 1 to the number of layers.
        """
        count = (
            self.choose(values, threshold)
            if self.takes_threshold
            else self.choose(values)
        )
        if count not in range(1, len(values) + 1):
            raise RunError(
                f"rule {self.name!r} must share 1 to {len(values)} layers; got {count!r}."
            )
        return int(count)


def _from_function(function: Any, path: str) -> Rule:
    """Make a rule of a user's function without the decorator.

    It is assumed to read one curve.
    """
    if isinstance(function, Rule):
        return function
    if not inspect.isfunction(function):
        raise UsageError(
            f"rule {path!r} must be a function; got {type(function).__name__}."
        )
    return _make(
        function, (inspect.getdoc(function) or function.__name__).partition("\n")[0]
    )


RULES: Registry[Rule] = Registry("rule", "diagnostics.decide.rules", _from_function)


def rule(
    *,
    summary: str,
    reads: str = "curve",
    lacks: Callable[[Sequence[float], float], str] | None = None,
) -> Callable[[Function], Function]:
    """Register a function as a rule under its own name.

    Use it as a decorator. Its keywords are the attributes of :class:`Rule`.

    Raises:
        UsageError: another rule has the name, ``reads`` is unknown, or the function takes too few or too many
            arguments.

    >>> from diagnostics.decide.rules.base import RULES, rule
    >>> @rule(summary="share all but the last layer")
    ... def all_but_last(values):
    ...     return len(values) - 1
    >>> RULES["all_but_last"].cut([1.0, 2.0, 3.0])
    2
    """
    check_known("what a rule reads", reads, READS)

    def add(function: Function) -> Function:
        RULES.add(
            function.__name__,
            _make(function, summary, reads=reads, lacks=lacks),
            function,
        )
        return function

    return add


def _make(function: Callable[..., Any], summary: str, **facts: Any) -> Rule:
    """Make a rule of a function, and check the number of its arguments."""
    takes = len(inspect.signature(function).parameters)
    if takes not in (1, 2):
        raise UsageError(
            f"rule {function.__name__!r} must take the values and a threshold; got {takes} arguments."
        )
    return Rule(function.__name__, function, summary, **facts)


def curve_rule(name: str) -> Rule:
    """Return the rule of this name. It must decide on its own from one curve.

    Raises:
        UsageError: the rule is unknown, or it reads something else.
    """
    chosen = RULES[name]
    if not chosen.decides:
        known = [name for name, each in RULES.members().items() if each.decides]
        check_known("rule that decides by itself", name, known)
    return chosen
