"""Base of wrappers: an algorithm around another one that changes a part of it, such as a schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import wraps
from inspect import isfunction
from typing import Any

from fl_core.algorithms.base import Algorithm, TaskInfo, find


class AlgorithmWrapper(Algorithm):
    """A wrapper of the algorithm named by ``base``, whose hooks call the inner ones unless a subclass overrides them.

    The inner algorithm's own keys are given by ``--option`` too. It calls its own hooks and never the wrapper's. To
    change its view of the task, override :meth:`inner_task_info`.
    """

    @dataclass(frozen=True)
    class Config:
        base: str = "fedavg"

    def setup(self) -> None:
        own_keys = {field.name for field in fields(self.Config)}
        options = {
            key: value for key, value in self.options.items() if key not in own_keys
        }
        self.inner = self.base_algorithm(self.options)(
            self.inner_task_info(), self.plan, options
        )
        self.evaluates, self.static_traffic = (
            self.inner.evaluates,
            self.inner.static_traffic,
        )
        self.uses_plan = self.uses_plan or self.inner.uses_plan

    def inner_task_info(self) -> TaskInfo:
        """Return the task for the inner algorithm. Default: the same."""
        return self.task_info

    @classmethod
    def base_algorithm(cls, config: Mapping[str, Any]) -> type[Algorithm]:
        return find(
            str(
                config.get(
                    "base",
                    next(f.default for f in fields(cls.Config) if f.name == "base"),
                )
            )
        )


def _pass_on(name: str) -> Callable[..., Any]:
    @wraps(getattr(Algorithm, name))
    def hook(self: AlgorithmWrapper, *args: Any, **options: Any) -> Any:
        return getattr(self.inner, name)(*args, **options)

    return hook


for _name, _hook in vars(Algorithm).items():
    if (
        isfunction(_hook) and _name[0] != "_" and _name not in ("setup", "with_plan")
    ):  # they make it
        setattr(AlgorithmWrapper, _name, _pass_on(_name))
