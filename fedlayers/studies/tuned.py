"""The result of tuning as a file for a comparison: each algorithm's settings, and how they were judged."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fl_core.config import RunConfig
from fl_core.defaults import resolved
from fl_core.errors import UsageError, check_known, listing
from fl_core.former import current_keys
from fl_core.storage.files import check_version, write_json

FORMAT = "fedlayers.tuned/1"
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
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise UsageError(f"tuned must be a file; got {path}, which is not there. Check the path.") from error
        except (OSError, ValueError, RecursionError) as error:
            raise UsageError(f"tuned must be a file of fedlayers tune; got {path}: {error}.") from error
        names = cls.__dataclass_fields__.keys()
        known = isinstance(found, dict) and check_version(path, found.pop("format", None), FORMAT)
        if (
            not known
            or found.keys() != names
            or not all(isinstance(found[key], dict) for key in ("settings", "options"))
        ):
            raise UsageError(f"tuned must be a file of fedlayers tune; got {path}. Run fedlayers tune first.")
        settings = {name: current_keys(each) for name, each in found["settings"].items()}
        return cls(**{**found, "settings": settings, "seeds": tuple(found["seeds"])})

    def applied(
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
            raise UsageError(f"Seed {seen[0]} was tuned on. Compare on others, such as --seed {max(self.seeds) + 1}.")
        if resolved(config).dataset != self.dataset:
            warnings.warn(f"tuned on {self.dataset}, compared on {config.dataset}", stacklevel=3)
        rest = [name for name in algorithms if name not in tuned]
        if rest:
            warnings.warn(f"{listing(rest)} not tuned as the others were: default settings", stacklevel=3)
        given = {name: dict((options or {}).get(name, {})) for name in algorithms}
        for name in tuned:
            known = RunConfig.__dataclass_fields__
            of_config = [
                key for key in self.settings[name] if getattr(config, check_known("key", key, known)) is not None
            ]
            twice = [*of_config, *(key for key in self.options[name] if key in given[name])]
            if twice:
                raise UsageError(f"{twice[0]} of {name} was tuned, and is set as well. Leave one out.")
        return (
            {name: self.settings[name] for name in tuned},
            {name: {**given[name], **self.options.get(name, {})} for name in algorithms},
        )
