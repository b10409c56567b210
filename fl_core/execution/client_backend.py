"""Backends where the clients live: their states, their kept models, and the execution of their work.

The engine sends requests and receives messages, numbers and names. A client's own tensors do not leave its backend.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from fl_core.algorithms.base import Algorithm, Round, State
from fl_core.algorithms.model_template import ModelTemplate, StateSchema, models_of
from fl_core.data import FederatedData
from fl_core.errors import check_known
from fl_core.execution.executors import Executor
from fl_core.execution.offloading import ClientStates, OffloadedTrees
from fl_core.execution.requests import (
    TUNED,
    ClientReply,
    ClientRequest,
    FinetuneRequest,
    TrainRequest,
)
from fl_core.records.store import Checkpoint
from fl_core.records.writing import Writer
from fl_core.tree import Tree


class ClientBackend(Protocol):
    """The place where the clients of one engine live."""

    @property
    def transfer_seconds(self) -> float:
        """Return the seconds that this process has spent on moving work between processes."""

    def use(self, algorithm: Algorithm) -> None:
        """Work with this algorithm, or with its new plan. Clients that have not replied yet start under it."""

    def begin(self, algorithm: Algorithm) -> None:
        """Reset every client to its state before the first round of this algorithm."""

    def run(self, requests: Iterable[ClientRequest]) -> Iterator[ClientReply]:
        """Yield the replies in the requests' order. An error is raised in the place of its reply."""

    def visible_state(self, client: int) -> State:
        """Return a client's state as the server may see it: references for tensors."""

    def forget(self) -> None:
        """Drop the models kept so far."""

    def save(self, writer: Writer, done: int, server: State) -> None:
        """Write a checkpoint after ``done`` rounds, with the clients' part of it."""

    def restore(self, checkpoint: Checkpoint) -> None:
        """Resume from a checkpoint."""

    def fork(self) -> ClientBackend:
        """Return a backend of the same clients before their first round that never changes this one."""


class LocalClients:
    """Clients in this process, in bounded memory. An executor does their work, here or in workers.

    Args:
        executor: does the work. data: of the clients. initial: the model before the first round.
        folder: of the scratch files, see :class:`OffloadedTrees`.
    """

    def __init__(
        self,
        executor: Executor,
        data: FederatedData,
        initial: Tree,
        folder: Path | None = None,
    ) -> None:
        self.executor, self.data, self.initial, self.folder = (
            executor,
            data,
            initial,
            folder,
        )
        self.names = [client.name for client in data.clients]
        self.index = {name: client for client, name in enumerate(self.names)}
        self.kept: dict[
            str, OffloadedTrees
        ] = {}  # local and fine-tuned models of the current round
        self._outlines: dict[int, StateSchema] = {}
        self._begun: dict[int, dict[str, Any]] = {}

    @property
    def transfer_seconds(self) -> float:
        return self.executor.transfer_seconds

    def begin(self, algorithm: Algorithm) -> None:
        self._work_under(algorithm)
        me = weakref.proxy(
            self
        )  # the states do not keep the clients and their data in memory
        self.states = ClientStates(self.names, lambda name: me.start(name), self.folder)

    def use(self, algorithm: Algorithm) -> None:
        self._work_under(algorithm)
        self.executor.use(algorithm)

    def _work_under(self, algorithm: Algorithm) -> None:
        self.algorithm = algorithm
        self._outlines.clear()
        self._begun.clear()

    def start(self, name: str) -> State:
        """Return the state of a client before its first round, under the present plan."""
        return self.algorithm.client_state(self.initial, self.index[name]).clone()

    def run(self, requests: Iterable[ClientRequest]) -> Iterator[ClientReply]:
        asked: deque[ClientRequest] = deque()

        def filled() -> Iterator[ClientRequest]:
            for request in requests:
                asked.append(request)
                yield self._fill(request)

        for reply in self.executor.run(filled()):
            self._take(asked.popleft(), reply)
            yield reply

    def visible_state(self, client: int) -> State:
        if client not in self._begun:
            self._begun[client] = self.algorithm.client_state(self.initial, client).meta
        if client not in self._outlines:
            self._outlines[client] = StateSchema.from_state(
                self.states[self.names[client]], self._begun[client]
            )
        return self._outlines[client].state(self._begun[client])

    def forget(self) -> None:
        self.kept = {}

    def save(self, writer: Writer, done: int, server: State) -> None:
        writer.checkpoint(
            Checkpoint(done, server, self.states, self.kept), self.states.changed
        )
        self.states.changed.clear()

    def restore(self, checkpoint: Checkpoint) -> None:
        self.states = ClientStates(
            self.names, checkpoint.clients.__getitem__, self.folder
        )
        self.states.changed.clear()
        self._outlines.clear()
        for kind, models in checkpoint.models.items():
            for name in models:
                self.keep(kind, name, models[name])

    def fork(self) -> LocalClients:
        return LocalClients(self.executor, self.data, self.initial, self.folder)

    def models(
        self, client: int, offer: ModelTemplate, done: int
    ) -> Mapping[str, Tree]:
        """Return a client's models after ``done`` rounds, with the fine-tuned one."""
        name = self.names[client]
        models = models_of(self.algorithm, offer, self.states[name], Round(done))
        tuned = self.kept[TUNED].get(name) if TUNED in self.kept else None
        return models if tuned is None else {**models, TUNED: tuned}

    def _fill(self, request: ClientRequest) -> ClientRequest:
        """Return a request with what a worker needs of the client: its state, or its models."""
        client = request.client
        state = self.states[self.names[client]]
        if isinstance(request, TrainRequest):
            if request.lost:  # the hooks' changes of the state are lost with the reply
                return replace(request, score=(), keep=False, state=state.clone())
            return replace(request, state=state)
        if isinstance(request, FinetuneRequest):
            models = models_of(
                self.algorithm, request.template, state, Round(request.done)
            )
            models = {
                request.model: models[check_known("model", request.model, models)]
            }
        else:
            models = dict(
                sorted(self.models(client, request.template, request.done).items())
            )
        return replace(request, template=ModelTemplate(models))

    def _take(self, request: ClientRequest, reply: ClientReply) -> None:
        """Keep the local part of a reply and remove it there."""
        name = self.names[request.client]
        if isinstance(request, TrainRequest) and not request.lost:
            self.states[name] = reply.state
            self._outlines.pop(request.client, None)
        for kind, model in reply.models.items():
            self.keep(kind, name, model)
        reply.state, reply.models = State(), {}

    def keep(self, kind: str, name: str, model: Tree) -> None:
        """Keep a client's model next to its state until the next round."""
        self.kept.setdefault(kind, OffloadedTrees(self.folder))[name] = model
