"""Search spaces of hyper-parameters: values or a range for each key, and the points to try."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from fl_core.algorithms.base import find
from fl_core.errors import UsageError, as_list, check_known, listing
from fl_core.seeds import numpy_generator

TRAINING = ("lr", "momentum", "weight_decay", "max_grad_norm")
"""Keys of local training that can be tuned. They do not change a run's number of steps."""
ATTEMPTS = 1000
"""Maximum draws for one point until it is a new one."""
_RANGE = re.compile(r"(?P<low>[^:]+?)\.\.(?P<high>[^:]+)(:(?P<scale>.*))?")

Point = dict[str, Any]


@dataclass(frozen=True)
class Values:
    """Values to choose from, such as ``0.01,0.1,1``."""

    values: tuple[Any, ...]

    def __len__(self) -> int:
        return len(self.values)

    def at(self, share: float) -> Any:
        """Return the value at a share of the way, 0 to below 1."""
        return self.values[int(share * len(self.values))]


@dataclass(frozen=True)
class Range:
    """All numbers from ``low`` to ``high``, such as ``1e-4..1e-1:log``, rounded to four digits.

    Attributes:
        log: whether the logarithm is uniform.
    """

    low: float
    high: float
    log: bool = False

    def at(self, share: float) -> float:
        """Return the number at a share of the way, 0 to 1."""
        ends = (
            (math.log(self.low), math.log(self.high))
            if self.log
            else (self.low, self.high)
        )
        number = ends[0] + share * (ends[1] - ends[0])
        return min(
            max(float(f"{math.exp(number) if self.log else number:.4g}"), self.low),
            self.high,
        )


Search = Values | Range


def parse_search(key: str, text: Any) -> Search:
    """Parse what is searched for a key: ``LOW..HIGH``, ``LOW..HIGH:log``, values between commas, or a list.

    Raises:
        UsageError: no numbers, a reversed range, or a repeated value.

    >>> parse_search("lr", "1e-4..1e-1:log").at(1 / 3)
    0.001
    >>> parse_search("mu", "0.01,0.1,1").values
    (0.01, 0.1, 1)
    """
    found = _RANGE.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        values = (
            tuple(map(_value, text.split(",")))
            if isinstance(text, str)
            else as_list(key, text)
        )
        if not values or "" in values:
            raise UsageError(
                f"{key} must have values as in {key}=0.1,1, or a range as in {key}=1e-4..1e-1:log; got none."
            )
        twice = [value for place, value in enumerate(values) if value in values[:place]]
        if twice:
            raise UsageError(
                f"values of {key} must differ; got {twice[0]} twice. Leave one out."
            )
        return Values(values)
    try:
        low, high = float(found["low"]), float(found["high"])
    except ValueError as error:
        raise UsageError(
            f"ends of the range of {key} must be numbers; got {text!r}."
        ) from error
    log = (
        found["scale"] is not None
        and check_known(f"scale of {key}", found["scale"], ("log",)) == "log"
    )
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise UsageError(
            f"range of {key} must go from a number to a larger one; got {text!r}."
        )
    if log and low <= 0:
        raise UsageError(f"logarithmic range of {key} must be above 0; got {text!r}.")
    return Range(low, high, log)


def spaces(
    over: Mapping[str, Any],
    algorithms: Sequence[str],
    options: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, dict[str, Search]]:
    """Return what is searched for each algorithm.

    Args:
        over: by key, see :func:`parse_search`. A key is one of :data:`TRAINING`, for all algorithms, or an algorithm's
            own, for all that have it, or ``ALGORITHM.KEY``.
        options: fixed keys of the algorithms, by algorithm.

    Raises:
        UsageError: nothing to search, a key that no algorithm has, or one that is also fixed.
    """
    if not over:
        raise UsageError(
            "There is nothing to search. Name keys, such as lr=1e-4..1e-1:log."
        )
    own = {name: _own_keys(name, (options or {}).get(name, {})) for name in algorithms}
    found: dict[str, dict[str, Search]] = {name: {} for name in algorithms}
    for said, text in over.items():
        chosen = [name for name in algorithms if said.startswith(f"{name}.")]
        key = said.removeprefix(f"{chosen[0]}.") if chosen else said
        having = [
            name for name in chosen or algorithms if key in TRAINING or key in own[name]
        ]
        if not having:
            known = [
                *TRAINING,
                *(each for name in chosen or algorithms for each in own[name]),
            ]
            check_known(
                f"key to tune of {listing(chosen or algorithms)}",
                key,
                dict.fromkeys(known),
            )
        for name in having:
            if key in (options or {}).get(name, {}):
                raise UsageError(
                    f"{key} of {name} must be searched or set, not both. Leave one out."
                )
            if key in found[name]:
                raise UsageError(
                    f"{key} of {name} must be searched once; got it twice. Leave one out."
                )
            found[name][key] = parse_search(said, text)
    return found


def points(space: Mapping[str, Search], trials: int, seed: int) -> list[Point]:
    """Return the points to try: different ones up to the number of trials, or all of them (a grid).

    A point's values depend on the key's name and the point's number, not on the algorithm's name. All algorithms
    therefore try the same learning rates. A search with more trials begins with the same trials.

    >>> space = {"lr": parse_search("lr", "0.01..1:log"), "mu": parse_search("mu", "0.1,1")}
    >>> points(space, 2, seed=0) == points(space, 5, seed=0)[:2]
    True
    >>> len(points({"mu": parse_search("mu", "0.1,1")}, 5, seed=0))
    2
    """
    whole = math.prod(
        len(each) if isinstance(each, Values) else trials for each in space.values()
    )
    found: list[Point] = []
    for attempt in range(ATTEMPTS * trials):
        if len(found) == min(trials, whole):
            break
        point = {
            key: each.at(numpy_generator(seed, "tune", key, attempt).random())
            for key, each in space.items()
        }
        if point not in found:
            found.append(point)
    return found


def _own_keys(name: str, options: Mapping[str, Any]) -> list[str]:
    algorithm = find(name)
    return list(
        dict.fromkeys(
            f.name
            for each in (algorithm, algorithm.base_algorithm(options))
            for f in fields(each.Config)
        )
    )


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text.strip()
