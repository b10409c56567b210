"""The result of tuning as a file for a comparison: each algorithm's settings, and how they were judged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedlayers.studies.spaces import TRAINING
from fl_core import limits
from fl_core.config import KEYS, RunConfig, resolve
from fl_core.errors import UsageError, check_known, listing, warn
from fl_core.registry import is_outside
from fl_core.storage.files import check_version, write_json
from fl_core.storage.schema import COUNT, NUMBER, MapOf, validate

FORMAT = "fedlayers.tuned/1"
FORM = {
    "settings": MapOf(MapOf((NUMBER, None))), "options": MapOf(dict), "values": MapOf(NUMBER), "trials": MapOf(COUNT),
    "score": str, "dataset": str, "rounds": COUNT, "seeds": [COUNT], "version": str,
}  # fmt: skip
Settings = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Tuned:
    """The settings of each algorithm that did best in tuning.

    Attributes:
        settings: keys of the run's configuration, by algorithm, such as ``{"fedavg": {"lr": 0.01}}``.
        options: each algorithm's own keys, by algorithm.
        values: their score on validation samples, by algorithm.
        trials: number of settings that were tried, by algorithm.
        score, dataset, rounds, seeds: the conditions of the tuning.
        version: of this package.
    """

    settings: Settings
    options: Settings
    values: dict[str, float]
    trials: dict[str, int]
    score: str
    dataset: str
    rounds: int
    seeds: tuple[int, ...]
    version: str

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        write_json(path, {"format": FORMAT, **asdict(self)})

    @classmethod
    def load(cls, path: Path | str) -> Tuned:
        """Read what :meth:`save` wrote.

        Raises:
            UsageError: no such file, or not one of these.
        """
        if not (path := Path(path)).is_file():
            raise UsageError(
                f"tuned must be a file; got {path}, which does not exist. Check the path."
            )
        try:
            found = limits.parsed_json(limits.read_text(path, limits.JSON_BYTES))
        except UsageError:
            raise
        except ValueError as error:
            raise UsageError(
                f"tuned must be a file of fedlayers tune; got {path}: {error}."
            ) from error
        if not isinstance(found, dict) or not check_version(
            path, found.pop("format", None), FORMAT
        ):
            raise UsageError(
                f"tuned must be a file of fedlayers tune; got {path}. Run fedlayers tune first."
            )
        if wrong := validate(found, FORM) or _unknown(found):
            raise UsageError(
                f"tuned must be a file of fedlayers tune; got {path}: {wrong}. Run fedlayers tune again."
            )
        return cls(**{**found, "seeds": tuple(found["seeds"])})

    def apply(
        self,
        config: RunConfig,
        algorithms: Sequence[str],
        seeds: Sequence[int],
        options: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> tuple[Settings, Settings]:
        """Return the settings and the options of a comparison's algorithms: tuned ones and given ones.

        Warns:
            UserWarning: some algorithms were not tuned, or on another dataset.

        Raises:
            UsageError: a seed that tuning used, a key that is also given, or no algorithm that was tuned.
        """
        tuned = [name for name in algorithms if name in self.settings]
        if not tuned:
            raise UsageError(
                f"algorithms must have one that was tuned: {listing(self.settings)}; got {listing(algorithms)}."
            )
        seen = sorted(set(self.seeds) & set(seeds))
        if seen:
            raise UsageError(
                f"Seed {seen[0]} was used for tuning. Use others to compare, such as --seed {max(self.seeds) + 1}."
            )
        if resolve(config).data.dataset != self.dataset:
            warn(f"tuned on {self.dataset}, compared on {config.data.dataset}")
        rest = [name for name in algorithms if name not in tuned]
        if rest:
            warn(f"{listing(rest)} not tuned as the others were: default settings")
        given = {name: dict((options or {}).get(name, {})) for name in algorithms}
        for name in tuned:
            of_config = [
                key
                for key in self.settings[name]
                if config.value(check_known("key", key, KEYS)) is not None
            ]
            twice = [
                *of_config,
                *(key for key in self.options[name] if key in given[name]),
            ]
            if twice:
                raise UsageError(
                    f"{twice[0]} of {name} must be tuned or set, not both. Leave one out."
                )
        return (
            {name: self.settings[name] for name in tuned},
            {
                name: {**given[name], **self.options.get(name, {})}
                for name in algorithms
            },
        )


def _unknown(found: Mapping[str, Any]) -> str:
    """Describe what tuning never writes: a key that it does not search, or code; empty without a fault."""
    if (
        found.keys() != FORM.keys()
        or found["settings"].keys() != found["options"].keys()
    ):
        return "it must have settings and options of the same algorithms alone"
    keys = {key for each in found["settings"].values() for key in each}
    if other := sorted(keys - set(TRAINING)):
        return f"settings must be among {listing(TRAINING)}; got {other[0]!r}"
    values = [value for each in found["options"].values() for value in each.values()]
    code = [value for value in values if isinstance(value, str) and is_outside(value)]
    return (
        f"options must not be code, which only a command may name; got {code[0]!r}"
        if code
        else ""
    )
