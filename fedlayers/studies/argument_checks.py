"""Clear errors for a study that is called with unfitting arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import ParamSpec, TypeVar

from fl_core.config import KEYS, RunConfig
from fl_core.defaults import resolve
from fl_core.errors import UsageError, check_known
from fl_core.storage.files import check_no_links
from fl_core.training.losses import LOSSES

P = ParamSpec("P")
R = TypeVar("R")


def task_kind(config: RunConfig) -> str:
    """Return the kind of task of a configuration's loss, of :data:`fl_core.scores.TASKS`."""
    return LOSSES[str(resolve(config).training.loss)].task


def seeds_of(
    config: RunConfig, seeds: Sequence[int] | None, count: int, apart: int = 0
) -> tuple[int, ...]:
    """Return the seeds that are given, or ``count`` of them from the configuration's seed plus ``apart``.

    >>> seeds_of(RunConfig(seed=5), None, 3), seeds_of(RunConfig(seed=5), (0, 1), 3)
    ((5, 6, 7), (0, 1))
    """
    first = config.execution.seed + apart
    return tuple(range(first, first + count)) if seeds is None else tuple(seeds)


def checked_call(study: Callable[P, R]) -> Callable[P, R]:
    """Wrap a study whose first parameter is ``config``, so that unfitting arguments get a clear error.

    Raises:
        UsageError: a key of the configuration, no configuration, an unknown name, or an output folder that is a run or
            a file.
        CorruptError: a link below ``out``.
    """
    call = signature(study)
    known = list(call.parameters)
    name = f"fl.{study.__name__}"

    @wraps(study)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for key in kwargs:
            if key in known:
                continue
            if key in KEYS:
                raise UsageError(
                    f"{key} is a key of the configuration. Write {name}(fl.RunConfig({key}=...), ...)."
                )
            check_known(f"argument of {name}", key, known)
        config = args[0] if args else kwargs.get("config")
        if not isinstance(config, RunConfig):
            given = type(config).__name__ if args or "config" in kwargs else "nothing"
            raise UsageError(
                f"the first argument of {name} must be fl.RunConfig(...); got {given}."
            )
        bound = call.bind_partial(*args, **kwargs)
        bound.apply_defaults()
        out = Path(bound.arguments["out"])
        if (out / "config.json").exists() or (out.exists() and not out.is_dir()):
            what = "a run" if out.is_dir() else "a file"
            raise UsageError(
                f"out must be a folder of runs; {out} is {what}. Choose another folder."
            )
        check_no_links(out)
        return study(*args, **kwargs)

    return checked
