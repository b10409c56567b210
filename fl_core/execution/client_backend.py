"""Where the clients live: their states, their kept models, and the execution of their work.

The engine sends requests and receives messages and numbers. What else a client has stays here.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from fl_core import seeds, tree
from fl_core.algorithms.base import Algorithm, Round, State
from fl_core.execution.client_runner import ClientRunner
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
from fl_core.tree import Tree


class LocalClients:
    """Clients in this process, in bounded memory. An executor does their work, here or in workers.

    Args:
        client_runner: has the model and the data. executor: does the work. initial: the model before the first round.
        folder: of the scratch files, see :class:`OffloadedTrees`.
        dropout: the probability that a client's reply is lost in a round (:func:`is_lost`).

    Attributes:
        work_seconds: that :meth:`run` has waited for replies.
    """

    def __init__(
        self,
        client_runner: ClientRunner,
        executor: Executor,
        initial: Tree,
        folder: Path | None = None,
        dropout: float = 0.0,
    ) -> None:
        self.client_runner, self.executor = client_runner, executor
        self.initial = initial
        self.folder, self.dropout = folder, dropout
        self.names = [client.name for client in client_runner.data.clients]
        self.index = {name: client for client, name in enumerate(self.names)}
        self.kept: dict[str, OffloadedTrees] = {}  # models of the current round
        self.work_seconds = 0.0

    @property
    def transfer_seconds(self) -> float:
        """Return the seconds that this process has spent on moving work between processes."""
        return self.executor.transfer_seconds

    def begin(self, algorithm: Algorithm) -> None:
        """Reset every client to its state before the first round of this algorithm."""
        self.algorithm = algorithm
        me = weakref.proxy(self)  # the states do not keep clients and data in memory
        self.states = ClientStates(self.names, lambda name: me.start(name), self.folder)

    def use(self, algorithm: Algorithm) -> None:
        """Work with this algorithm, or with its new plan. Clients that have not replied yet start under it."""
        self.algorithm = algorithm
        self.executor.use(algorithm)

    def start(self, name: str) -> State:
        """Return the state of a client before its first round, under the present plan."""
        return self.algorithm.client_state(self.initial, self.index[name]).clone()

    def run(self, requests: Iterable[ClientRequest]) -> Iterator[ClientReply]:
        """Yield the replies in the requests' order. An error is raised in the place of its reply."""
        asked: deque[ClientRequest] = deque()
        waiting = iter(requests)

        def filled() -> Iterator[ClientRequest]:
            while True:
                began = time.perf_counter()
                request = next(waiting, None)
                self.work_seconds -= time.perf_counter() - began
                if request is None:
                    return
                asked.append(self._fill(request))
                yield asked[-1]

        replies = self.executor.run(filled())
        while True:
            began = time.perf_counter()
            reply = next(replies, None)
            self.work_seconds += time.perf_counter() - began
            if reply is None:
                return
            self._take(asked.popleft(), reply)
            yield reply

    def forget(self) -> None:
        """Drop the models kept so far."""
        self.kept = {}

    def restore(self, checkpoint: Checkpoint) -> None:
        """Resume from a checkpoint."""
        self.states = ClientStates(
            self.names, checkpoint.clients.__getitem__, self.folder
        )
        self.states.changed.clear()
        for kind, models in checkpoint.models.items():
            for name in models:
                self.keep(kind, name, models[name])

    def fork(self) -> LocalClients:
        """Return the same clients before their first round, which never change these ones."""
        return LocalClients(
            self.client_runner, self.executor, self.initial, self.folder
        )

    def models(self, client: int, server: State, done: int) -> Mapping[str, Tree]:
        """Return a client's models after ``done`` rounds, with the fine-tuned one."""
        state = self.states[self.names[client]]
        return self.algorithm.models(server, state, Round(done)) | self._tuned(client)

    def _tuned(self, client: int) -> dict[str, Tree]:
        tuned = self.kept.get(TUNED, {}).get(self.names[client])
        return {} if tuned is None else {TUNED: tuned}

    def is_lost(self, request: TrainRequest) -> bool:
        """Return whether the reply to this request is lost."""
        seed, index = self.algorithm.task_info.seed, request.rnd.index
        return is_lost(seed, index, request.client, self.dropout)

    def _fill(self, request: ClientRequest) -> ClientRequest:
        """Return a request with what a worker needs of the client: its state, or its models."""
        client = request.client
        state = self.states[self.names[client]]
        if isinstance(request, TrainRequest):
            if self.is_lost(request):  # the hooks' changes are lost with the reply
                return replace(request, score=(), keep=False, state=state.clone())
            return replace(request, state=state)
        found = self.algorithm.models(request.server, state, Round(request.done))
        if isinstance(request, FinetuneRequest):
            found = {self.algorithm.evaluates: found[self.algorithm.evaluates]}
        received = _received(found, state)
        if not isinstance(request, FinetuneRequest):
            found = dict(sorted((found | self._tuned(client)).items()))
        return replace(request, server=State(), models=found, received=received)

    def _take(self, request: ClientRequest, reply: ClientReply) -> None:
        """Keep the local part of a reply and remove it there."""
        name = self.names[request.client]
        if not isinstance(request, TrainRequest):
            reply.received = request.received
        elif self.is_lost(request):
            reply.message = None
        else:
            self.states[name] = reply.state
        for kind, model in reply.models.items():
            self.keep(kind, name, model)
        reply.state, reply.models = State(), {}

    def keep(self, kind: str, name: str, model: Tree) -> None:
        """Keep a client's model next to its state until the next round."""
        self.kept.setdefault(kind, OffloadedTrees(self.folder))[name] = model


def is_lost(seed: int, index: int, client: int, rate: float) -> bool:
    """Return whether a client's reply is lost by chance in a round.

    The client was sampled, received the server's message and trained. Its reply does not arrive because the client
    was off, disconnected or too late. The server continues with the other replies. The client returns to its whole
    state before the round: server and client store halves of the same thing, such as SCAFFOLD's variates, which may
    only change together.

    The result depends on these numbers alone. A higher rate loses the replies of a lower one and more.

    >>> is_lost(seed=0, index=0, client=3, rate=0.0)
    False

    Args:
        seed: the run's. index: of the round, from 0 on.
        rate: the probability, from 0 to below 1, independent for each client and round.
    """
    if not rate:
        return False
    draw = seeds.numpy_generator(seed, "dropout", index, client)
    return bool(draw.random() < rate)


def _received(models: Mapping[str, Tree], state: State) -> int:
    """Return the bytes of models that are not a client's own, each name counted once."""
    own = {id(t) for held in state.trees.values() for t in held.values()}
    parts = {
        name: part
        for model in models.values()
        for name, part in model.items()
        if id(part) not in own
    }
    return tree.n_bytes(parts)
