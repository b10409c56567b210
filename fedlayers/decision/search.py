"""The settings that ``tune`` tries, at most the same number for each algorithm, and the result of tuning."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import chain
from pathlib import Path
from typing import Any

import pandas as pd

from fl_core import storage
from fl_core.algorithms.base import find
from fl_core.config import RunConfig, resolve
from fl_core.display import Displayed, Summary
from fl_core.errors import (
    COUNT,
    NUMBER,
    MapOf,
    UsageError,
    as_list,
    check_known,
    listing,
    python_values,
    validate,
    warn,
)
from fl_core.registry import is_outside
from fl_core.seeds import numpy_generator
from fl_core.storage import check_version, write_json

TRAINING = ("lr", "momentum", "weight_decay", "max_grad_norm")
"""Keys of local training that can be tuned. They do not change a run's number of steps."""
ATTEMPTS = 1000
"""Draws at most per trial, in search of points that differ."""
_RANGE = re.compile(r"(?P<low>[^:]+?)\.\.(?P<high>[^:]+)(:(?P<scale>.*))?")

Point = dict[str, Any]


@dataclass(frozen=True)
class Range:
    """All numbers from ``low`` to ``high``, such as ``1e-4..1e-1:log``, rounded to four digits.

    Attributes:
        low, high: the ends of the range.
        log: whether numbers are drawn uniformly in the logarithm.
    """

    low: float
    high: float
    log: bool = False

    def at(self, share: float) -> float:
        """Return the number at a share, 0 to 1, of the way from ``low`` to ``high``.

        With ``log`` the share is that of the logarithms.
        """
        if self.log:
            number = self.low * (self.high / self.low) ** share
        else:
            number = self.low + share * (self.high - self.low)
        return min(max(float(f"{number:.4g}"), self.low), self.high)


Search = tuple[Any, ...] | Range
"""What is searched for a key: some values, or a range."""


def parse_search(key: str, text: Any) -> Search:
    """Parse the search of a key: ``LOW..HIGH``, ``LOW..HIGH:log``, values between commas, or a list.

    The result is a :class:`Range`, or a tuple of values.

    Args:
        key: name of the key, for messages.
        text: the search.

    Raises:
        UsageError: a range has no numbers at its ends or is reversed, or there is no
            value, or a repeated one.

    >>> parse_search("lr", "1e-4..1e-1:log").at(1 / 3)
    0.001
    >>> parse_search("mu", "0.01,0.1,1")
    (0.01, 0.1, 1)
    """
    match = None
    if isinstance(text, str):
        match = _RANGE.fullmatch(text)
    if match is None:
        values = python_values(text)
        if isinstance(text, str):
            values = map(_value, text.split(","))
        return as_list(f"values of {key}", values, distinct=True)
    try:
        low, high = float(match["low"]), float(match["high"])
    except ValueError as error:
        raise UsageError(
            f"ends of the range of {key} must be numbers; got {text!r}."
        ) from error
    log = (
        match["scale"] is not None
        and check_known(f"scale of {key}", match["scale"], ("log",)) == "log"
    )
    if not (-math.inf < low < high < math.inf) or (log and low <= 0):
        raise UsageError(
            f"range of {key} must go from a number to a larger one, with :log above 0; got {text!r}."
        )
    return Range(low, high, log)


def spaces(
    over: Mapping[str, Any] | None,
    algorithms: Sequence[str],
    options: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, dict[str, Search]]:
    """Return the ranges and lists to search, for each algorithm by key.

    Args:
        over: {key: search}, each as :func:`parse_search` takes it. A key is one of :data:`TRAINING`, which all
            algorithms have; an option, for all algorithms that have it; or ``ALGORITHM.KEY``.
        options: fixed keys of the algorithms, by algorithm.

    Raises:
        UsageError: nothing to search, a key that no algorithm has, or one that is also fixed.
    """
    if not over:
        raise UsageError(
            "There is nothing to search. Name keys, such as lr=1e-4..1e-1:log."
        )
    keys_of = {}
    for name in algorithms:
        kind = find(name, (options or {}).get(name, {}))
        keys_of[name] = [*TRAINING, *(field.name for field in fields(kind.Config))]
    spaces_of: dict[str, dict[str, Search]] = {name: {} for name in algorithms}
    for name_and_key, text in over.items():
        prefixed_algorithms = [
            name for name in algorithms if name_and_key.startswith(f"{name}.")
        ]
        key = name_and_key
        if prefixed_algorithms:
            key = name_and_key.removeprefix(f"{prefixed_algorithms[0]}.")
        names = prefixed_algorithms or algorithms
        algorithms_with_key = [name for name in names if key in keys_of[name]]
        if not algorithms_with_key:
            key_names = dict.fromkeys(
                chain.from_iterable(keys_of[name] for name in names)
            )
            check_known(f"key to tune of {listing(names)}", key, key_names)
        for name in algorithms_with_key:
            if key in (options or {}).get(name, {}):
                raise UsageError(
                    f"{key} of {name} must be searched or set, not both. Leave one out."
                )
            if key in spaces_of[name]:
                raise UsageError(
                    f"{key} of {name} must be searched once; got it twice. Leave one out."
                )
            spaces_of[name][key] = parse_search(name_and_key, text)
    return spaces_of


def points(space: Mapping[str, Search], trials: int, seed: int) -> list[Point]:
    """Return the points to try: different ones up to the number of trials, or all of them (a grid).

    A draw depends on the seed, the key's name and the draw's number, but not on the
    algorithm. All algorithms therefore try the same numbers from a range of learning rates.
    Draws from lists can repeat a point. They are skipped, so that algorithms can try other
    parts of a list. A search with more trials begins with the same trials.

    Args:
        space: the search of each key.
        trials: largest number of points.
        seed: seed of the random draws.

    >>> space = {"lr": parse_search("lr", "0.01..1:log"), "mu": parse_search("mu", "0.1,1")}
    >>> points(space, 2, seed=0) == points(space, 5, seed=0)[:2]
    True
    >>> len(points({"mu": parse_search("mu", "0.1,1")}, 5, seed=0))
    2

    Lists without more points than trials are a grid:

    >>> space = {"lr": parse_search("lr", "0.1,0.01,0.001"), "mu": parse_search("mu", [1, 2, 3, 4])}
    >>> grid = points(space, 100, seed=0)
    >>> len(grid), len({(point["lr"], point["mu"]) for point in grid})
    (12, 12)
    >>> points(space, 5, seed=0) == grid[:5]
    True
    """
    n_grid_points = math.prod(
        len(range_of_key) if isinstance(range_of_key, tuple) else trials
        for range_of_key in space.values()
    )
    chosen_points: list[Point] = []
    for attempt in range(ATTEMPTS * trials):
        if len(chosen_points) == min(trials, n_grid_points):
            break
        point = {}
        for key, range_of_key in space.items():
            share = numpy_generator(seed, "tune", key, attempt).random()
            if isinstance(range_of_key, tuple):
                point[key] = range_of_key[int(share * len(range_of_key))]
            else:
                point[key] = range_of_key.at(share)
        if point not in chosen_points:
            chosen_points.append(point)
    return chosen_points


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text.strip()


# --- tuning -----------------------------------------------------------------------------------------------------------

FORMAT = "fedlayers.tuned/1"
FORM = {
    "settings": MapOf(dict), "values": MapOf(NUMBER), "trials": MapOf(COUNT), "score": str, "dataset": str,
    "rounds": COUNT, "seeds": [COUNT], "version": str,
}  # fmt: skip
"""What a file of :class:`Tuned` holds."""
Settings = dict[str, dict[str, Any]]


@dataclass(frozen=True, repr=False)
class Tuned(Displayed):
    """The result of tuning: the best settings of each algorithm.

    Attributes:
        settings: keys of local training and of the algorithm, by algorithm: ``{"fedprox": {"lr": 0.01, "mu": 1.0}}``.
        values: their score on validation samples, by algorithm.
        trials: number of settings that were tried, by algorithm.
        score, dataset, rounds, seeds: the conditions of the tuning.
        version: the version of this package.
        table: a line per trial, by algorithm: the values tried, ``value`` (the score,
            mean over seeds; NaN if a run failed), ``best`` (whether it is the
            algorithm's choice), and ``failed`` (why, if it did). It is empty if the
            object was read from a file.
    """

    settings: Settings
    values: dict[str, float]
    trials: dict[str, int]
    score: str
    dataset: str
    rounds: int
    seeds: tuple[int, ...]
    version: str
    table: pd.DataFrame = field(
        default_factory=lambda: pd.DataFrame(columns=["algorithm", "failed"]),
        compare=False,
    )

    def save(self, path: Path) -> None:
        """Write the settings as JSON, without the table."""
        write_json(path, {"format": FORMAT, **{key: vars(self)[key] for key in FORM}})

    @classmethod
    def load(cls, path: Path | str) -> Tuned:
        """Read what :meth:`save` wrote.

        Raises:
            UsageError: there is no such file, or :meth:`save` did not write it.
        """
        path = Path(path)
        fault = "it has no known format"
        try:
            content = storage.parsed_json(storage.read_text(path, storage.JSON_BYTES))
            if isinstance(content, dict) and check_version(
                path, content.pop("format", None), FORMAT
            ):
                fault = validate(content, FORM) or _unknown(content)
        except UsageError:
            raise
        except (OSError, ValueError) as error:
            fault = str(error)
        if fault:
            raise UsageError(
                f"tuned must be a file of fedlayers tune; got {path}: {fault}. Run fedlayers tune again."
            )
        return cls(**{**content, "seeds": tuple(content["seeds"])})

    def apply(
        self,
        config: RunConfig,
        algorithms: Sequence[str],
        seeds: Sequence[int],
        options: Mapping[str, Mapping[str, Any]] | None = None,
        **own: Any,
    ) -> tuple[Settings, Settings]:
        """Return the settings and the options of a comparison's algorithms, tuned and given ones together.

        Both are dicts by algorithm. The first has tuned keys of local training, for
        tuned algorithms alone. The second has options, for all algorithms.

        Args:
            config: the comparison's configuration.
            algorithms: names of the algorithms.
            seeds: the comparison's seeds.
            options: the given options, by algorithm.
            own: data and model from Python, as in :class:`fl_core.config.Own`.

        Warns:
            UserWarning: some algorithms were not tuned, or on another dataset.

        Raises:
            UsageError: a seed that tuning used, a key that is also given, or no algorithm that was tuned.
        """
        tuned_algorithms = [name for name in algorithms if name in self.settings]
        if not tuned_algorithms:
            raise UsageError(
                f"algorithms must have one that was tuned: {listing(self.settings)}; got {listing(algorithms)}."
            )
        if tuned_seeds := sorted(set(self.seeds) & set(seeds)):
            raise UsageError(
                f"Seed {tuned_seeds[0]} was used for tuning. Use others to compare, such as {max(self.seeds) + 1}."
            )
        if resolve(config, **own).data.dataset != self.dataset:
            warn(f"tuned on {self.dataset}, compared on {config.data.dataset}")
        if untuned_algorithms := [
            name for name in algorithms if name not in tuned_algorithms
        ]:
            warn(
                f"{listing(untuned_algorithms)} not tuned as the others were: default settings"
            )
        options_of = {name: dict((options or {}).get(name, {})) for name in algorithms}
        settings: Settings = {name: {} for name in tuned_algorithms}
        for name in tuned_algorithms:
            training, tuned_options = parts_of(self.settings[name])
            repeated_keys = [key for key in training if config.value(key) is not None]
            repeated_keys += options_of[name].keys() & tuned_options
            if repeated_keys:
                raise UsageError(
                    f"{repeated_keys[0]} of {name} must be tuned or set, not both. Leave one out."
                )
            settings[name] = training
            options_of[name] |= tuned_options
        return settings, options_of

    def shown(self) -> pd.DataFrame:
        """Return the chosen settings as a table, a line per algorithm."""
        return pd.DataFrame(
            [
                {"algorithm": name, "tried": self.trials[name], **settings}
                | {self.score: self.values[name]}
                for name, settings in self.settings.items()
            ]
        )

    def summary(self) -> Summary:
        return Summary.of_frame("The best settings on validation samples", self.shown())

    def text(self) -> str:
        """Return the chosen settings, and how they were chosen."""
        settings_text = self.shown().to_string(
            index=False, na_rep="", float_format="%.4g"
        )
        failed_trials = self.table[self.table["failed"] != ""]
        counts = failed_trials.groupby("algorithm", sort=False).size()
        notes = [
            f"{count} of {name}'s trials failed: see trials.csv"
            for name, count in counts.items()
        ]
        seeds_text = listing(map(str, self.seeds))
        legend = (
            f"{self.score} on validation samples of seeds "
            f"{seeds_text}: mean over clients, weighted by training samples. Test samples were "
            "not read."
        )
        return "\n\n".join([settings_text, *notes, legend])


def _unknown(stored: Mapping[str, Any]) -> str:
    """Describe what tuning never writes: a further entry, or code; empty without a fault."""
    if unknown_keys := sorted(stored.keys() - FORM.keys()):
        return f"it must have the entries {listing(FORM)}; got {unknown_keys[0]!r}"
    of_algorithms = stored["settings"].values()
    values = chain.from_iterable(by_key.values() for by_key in of_algorithms)
    if code_names := [
        value for value in values if isinstance(value, str) and is_outside(value)
    ]:
        return f"settings must not be code, which only a command may name; got {code_names[0]!r}"
    return ""


def parts_of(point: Point) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a point into keys of local training and options of the algorithm."""
    settings = {key: value for key, value in point.items() if key in TRAINING}
    return settings, {key: value for key, value in point.items() if key not in TRAINING}
