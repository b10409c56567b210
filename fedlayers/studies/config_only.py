"""Clear errors for data or models in memory: studies take only what a configuration can name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from inspect import signature
from typing import ParamSpec, TypeVar

from fl_core.config import RunConfig
from fl_core.errors import UsageError, check_known

P = ParamSpec("P")
R = TypeVar("R")
_IN_MEMORY = {
    "data": (
        "samples in memory: put them into a file, numpy.savez('wards.npz', x=x, y=y, client=names), or into a "
        "function that returns them",
        "dataset='wards.npz' or 'package.module:function'",
    ),
    "model": ("model in memory: name the class or function that makes it", "model='package.module:name'"),
}


def config_only(study: Callable[P, R]) -> Callable[P, R]:
    """Wrap a study whose first parameter is ``config``, so that unfitting arguments get a clear error.

    Raises:
        UsageError: ``data`` or ``model`` in memory, a key of the configuration, no configuration, an unknown name.
    """
    known = list(signature(study).parameters)
    name = f"fl.{study.__name__}"

    @wraps(study)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for key, value in kwargs.items():
            if key in known:
                continue
            if key == "data" or (key in _IN_MEMORY and not isinstance(value, str)):
                what, instead = _IN_MEMORY[key]
                raise UsageError(f"{name} takes no {what}. Write {name}(fl.RunConfig({instead}), ...).")
            if key in {field.name for field in fields(RunConfig)}:
                raise UsageError(f"{key} is a key of the configuration. Write {name}(fl.RunConfig({key}=...), ...).")
            check_known(f"argument of {name}", key, known)
        config = args[0] if args else kwargs.get("config")
        if not isinstance(config, RunConfig):
            given = type(config).__name__ if args or "config" in kwargs else "nothing"
            raise UsageError(f"the first argument of {name} must be fl.RunConfig(dataset=...); got {given}.")
        return study(*args, **kwargs)

    return checked
