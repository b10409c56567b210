"""The rules that choose layers. Each says how many, counted from the input, are federated.

A function in this module with ``@rule`` above it is registered by its name.

A rule of one curve takes the layers' values from input to output, all above 0. It looks for the place at which they
rise. The layers before it serve everyone. The layers after it serve each client's own task. Only ratios of values
matter to it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

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

    >>> from diagnostics.decide.rules import RULES
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

    >>> from diagnostics.decide.rules import RULES, rule
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


def ratios(values: Sequence[float]) -> list[float]:
    """Return S_{l+1} / S_l for l = 1 .. L-1, from values that are all above 0."""
    return [after / before for before, after in pairwise(values)]


def _no_ratio(values: Sequence[float], threshold: float) -> str:
    return "" if max(ratios(values)) > threshold else f"no ratio exceeds {threshold:g}"


@rule(
    summary="share the layers before the first jump S_{l+1}/S_l above the threshold (PLayer-FL)",
    lacks=_no_ratio,
)
def sensitivity_ratio(values: Sequence[float], threshold: float = THRESHOLD) -> int:
    """Return l* = min {l : S_{l+1} / S_l > t}, the number of layers shared (PLayer-FL, Eq. 3).

    The result is L - 1 if no ratio exceeds t. A higher threshold never shares fewer layers. The paper gives no number
    for t. By the ratios in its Fig. 4, 1.2 makes the splits of its Table A.2 on six of its seven datasets. The seventh
    (Heart) takes about 1.9.
    """
    return next(
        (count for count, ratio in enumerate(ratios(values), 1) if ratio > threshold),
        len(values) - 1,
    )


@rule(summary="share the layers before the largest jump S_{l+1}/S_l")
def largest_jump(values: Sequence[float]) -> int:
    """Return l* = argmax S_{l+1} / S_l, the number of layers shared; the first of equals."""
    steps = ratios(values)
    return steps.index(max(steps)) + 1


def change_gains(values: Sequence[float]) -> NDArray[np.float64]:
    """Return how much a second level after layer l = 1 .. L-1 lowers the squared error of the log values.

    Let y = log S. Let m_1 and m_2 be the means of the first l and of the other L - l values. Two levels lower the error
    by l (L - l) / L (m_2 - m_1)^2. The result has the sign of m_2 - m_1. Below 0, the level falls.
    """
    y = np.log(np.asarray(values, dtype=np.float64))
    n = np.arange(1, len(y))
    sums = np.cumsum(y)[:-1]
    height = (y.sum() - sums) / (len(y) - n) - sums / n
    height[np.abs(height) <= 1e-12 * np.abs(y).max()] = 0.0  # level, but for rounding
    return np.sign(height) * height**2 * n * (len(y) - n) / len(y)


def _penalty(threshold: float) -> float:
    return math.log(max(threshold, 1.0)) ** 2 / 2


def _no_change(values: Sequence[float], threshold: float) -> str:
    pays = change_gains(values).max() > _penalty(threshold)
    return "" if pays else f"no rise of level is worth a step by {threshold:g}"


@rule(
    summary="share the layers before the one rise of level that best fits log S, if it pays by the threshold",
    lacks=_no_change,
)
def change_point(values: Sequence[float], threshold: float = THRESHOLD) -> int:
    """Return the number of layers before the change of level that best fits the log values.

    Least squares fits two levels. A change costs the penalty (log t)^2 / 2. One step by the factor t between two layers
    gains the same. A change counts if the level rises and the gain of :func:`change_gains` exceeds the penalty. Of
    equal gains the first counts. If no change counts, the result is L - 1.

    Unlike a ratio of neighbours, the rule sees a rise that several layers share. It does not follow one layer that
    stands out. Higher thresholds share no fewer layers: the change stays, or goes to L - 1.
    """
    gains = change_gains(values)
    best = int(np.argmax(gains))
    return best + 1 if gains[best] > _penalty(threshold) else len(values) - 1


@rule(summary="share exactly the layers that are named", reads="names")
def manual(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the layers to share, as they are given."""
    return tuple(names)
