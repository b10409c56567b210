"""Base of wrappers: an algorithm around another one that changes a part of it, such as a schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor, nn

from fl_core.algorithms.base import Algorithm, Message, Observation, Round, State, TaskInfo, Update, find
from fl_core.layers import Layer
from fl_core.plan import LayerPlan
from fl_core.training.context import Context
from fl_core.training.phases import Phase
from fl_core.tree import Tree


class AlgorithmWrapper(Algorithm):
    """A wrapper of the algorithm named by ``base``, whose hooks call the inner ones unless a subclass overrides them.

    The inner algorithm's own keys are given by ``--option`` too. It calls its own hooks and never the wrapper's. To
    change its view of the task, override :meth:`inner_task_info`.
    """

    @dataclass(frozen=True)
    class Config:
        base: str = "fedavg"

    def __init__(
        self, task_info: TaskInfo, plan: LayerPlan | None = None, config: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(task_info, plan, config)
        own_keys = {field.name for field in fields(self.Config)}
        options = {key: value for key, value in self.options.items() if key not in own_keys}
        self.inner = self.base_algorithm(self.options)(self.inner_task_info(), plan, options)
        self.evaluates, self.static_traffic = self.inner.evaluates, self.inner.static_traffic
        self.uses_plan = self.uses_plan or self.inner.uses_plan

    def inner_task_info(self) -> TaskInfo:
        """Return the task for the inner algorithm. Default: the same."""
        return self.task_info

    @classmethod
    def base_algorithm(cls, config: Mapping[str, Any]) -> type[Algorithm]:
        return find(str(config.get("base", next(f.default for f in fields(cls.Config) if f.name == "base"))))

    def method(self, name: str, what: str = "method") -> Callable[..., Any]:
        return self.inner.method(name, what)

    def notes(self) -> list[str]:
        return self.inner.notes()

    def default_plan(self, layers: tuple[Layer, ...]) -> LayerPlan | None:
        return self.inner.default_plan(layers)

    def resolve_plan(self, plan: LayerPlan) -> LayerPlan:
        return self.inner.resolve_plan(plan)

    def server_state(self, initial: Tree) -> State:
        return self.inner.server_state(initial)

    def client_state(self, initial: Tree, client: int) -> State:
        return self.inner.client_state(initial, client)

    def submodel(self, rnd: Round, client: int) -> frozenset[str]:
        return self.inner.submodel(rnd, client)

    def exchanges(self, index: int) -> tuple[str, ...]:
        return self.inner.exchanges(index)

    def shared(self, rnd: Round, client: int) -> frozenset[str]:
        return self.inner.shared(rnd, client)

    def uploaded(self, rnd: Round, client: int) -> frozenset[str]:
        return self.inner.uploaded(rnd, client)

    def local_tensors(self, rnd: Round, client: int) -> frozenset[str]:
        return self.inner.local_tensors(rnd, client)

    def server_message(self, server: State, client: int, rnd: Round) -> Message:
        return self.inner.server_message(server, client, rnd)

    def client_start(self, state: State, message: Message, ctx: Context, rnd: Round, client: int) -> Tree:
        return self.inner.client_start(state, message, ctx, rnd, client)

    def phases(self, rnd: Round, client: int) -> tuple[Phase, ...]:
        return self.inner.phases(rnd, client)

    def loss(self, params: Mapping[str, Tensor], batch: tuple[Tensor, Tensor], ctx: Context) -> Tensor:
        return self.inner.loss(params, batch, ctx)

    def client_update(self, state: State, trained: dict[str, Tree], ctx: Context, rnd: Round, client: int) -> Message:
        return self.inner.client_update(state, trained, ctx, rnd, client)

    def aggregate(self, server: State, updates: Iterable[Update], rnd: Round) -> None:
        self.inner.aggregate(server, updates, rnd)

    def models(self, server: State, client: State, rnd: Round) -> dict[str, Tree]:
        return self.inner.models(server, client, rnd)

    def finetuning(self, done: int, client: int) -> tuple[Phase, ...]:
        return self.inner.finetuning(done, client)

    def observations(self, server: State, rnd: Round) -> Iterable[Observation]:
        return self.inner.observations(server, rnd)

    def client_observations(self, model: nn.Module, x: Tensor, rnd: Round, client: int) -> Iterable[Observation]:
        return self.inner.client_observations(model, x, rnd, client)
