"""Where the clients live: their states, their kept models, and the execution of their work.

The engine sends requests and receives messages and numbers. What else a client has stays here.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from torch import Tensor

from fl_core import seeds, tree
from fl_core.algorithms.base import Algorithm, Round, State
from fl_core.batched import BatchedClients
from fl_core.client_runner import (
    TUNED,
    ClientReply,
    ClientRequest,
    ClientRunner,
    FinetuneRequest,
    TrainRequest,
)
from fl_core.errors import check_known
from fl_core.records.store import Checkpoint
from fl_core.tree import Tree
from fl_core.workers import Workers


class Executor(Protocol):
    """An executor of requests that yields their replies in the requests' order."""

    def use(self, algorithm: Algorithm) -> None:
        """Load an algorithm for later requests. Call this again after its plan has changed."""

    def run(self, requests: Iterable[ClientRequest]) -> Iterator[ClientReply]:
        """Yield replies in the requests' order. An error in a request is raised in the place of its reply."""

    def close(self) -> None:
        """End any worker processes."""


class Serial:
    """An executor that does every request in this process."""

    def __init__(self, client_runner: ClientRunner) -> None:
        self.client_runner = client_runner

    def use(self, algorithm: Algorithm) -> None:
        """Load an algorithm."""
        self.client_runner.use(algorithm)

    def run(self, requests: Iterable[ClientRequest]) -> Iterator[ClientReply]:
        """Yield replies in order."""
        for request in requests:
            yield self.client_runner.run(request)

    def close(self) -> None:
        """Do nothing: there are no processes."""


MakesExecutor = Callable[[ClientRunner], Executor]


def executor(
    client_runner: ClientRunner, workers: int, stack: bool = False
) -> Executor:
    """Choose the executor: stacked clients if asked for, else this process (0 or 1 workers) or worker processes."""
    if stack:
        return BatchedClients(client_runner)
    return Serial(client_runner) if workers < 2 else Workers(client_runner, workers)


class ClientStates(Mapping[str, State]):
    """A mapping of every client's state by name, in the clients' order. A state that was never set is the initial one.

    Args:
        names: of the clients.
        beginning: returns a client's state before it was set. It is called each time.

    Attributes:
        changed: names of the clients that were set since the last checkpoint.
    """

    def __init__(self, names: Sequence[str], beginning: Callable[[str], State]) -> None:
        self.beginning = beginning
        self.changed = set(names)
        self._states: dict[str, State | None] = dict.fromkeys(names)

    def __getitem__(self, name: str) -> State:
        held = self._states[name]
        return self.beginning(name) if held is None else held

    def __setitem__(self, name: str, state: State) -> None:
        trees = {
            kind: {key: _own(tensor) for key, tensor in held.items()}
            for kind, held in state.trees.items()
        }
        self._states[name] = State(trees, state.meta)
        self.changed.add(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._states)

    def __len__(self) -> int:
        return len(self._states)


class LocalClients:
    """Clients in this process. An executor does their work, here or in workers.

    Args:
        client_runner: has the model and the data. executor: does the work. initial: the model before the first round.
        dropout: the probability that a client's reply is lost in a round (:func:`is_lost`).
    """

    def __init__(
        self,
        client_runner: ClientRunner,
        executor: Executor,
        initial: Tree,
        dropout: float = 0.0,
    ) -> None:
        self.client_runner, self.executor = client_runner, executor
        self.initial = initial
        self.dropout = dropout
        self.names = [client.name for client in client_runner.data.clients]
        self.index = {name: client for client, name in enumerate(self.names)}
        self.kept: dict[str, dict[str, Tree]] = {}  # models of the current round

    def begin(self, algorithm: Algorithm) -> None:
        """Reset every client to its state before the first round of this algorithm."""
        self.algorithm = algorithm
        me = weakref.proxy(self)  # the states do not keep clients and data in memory
        self.states = ClientStates(self.names, lambda name: me.start(name))

    def use(self, algorithm: Algorithm) -> None:
        """Work with this algorithm, or with its new plan. Clients that have not replied yet start under it."""
        self.algorithm = algorithm
        self.executor.use(algorithm)

    def start(self, name: str) -> State:
        """Return the state of a client before its first round, under the present plan."""
        state: State = self.algorithm.call(
            "client_state", self.initial, self.index[name]
        )
        return state.clone()

    def run(self, requests: Iterable[ClientRequest]) -> Iterator[ClientReply]:
        """Yield the replies in the requests' order. An error is raised in the place of its reply."""
        asked: deque[ClientRequest] = deque()

        def filled() -> Iterator[ClientRequest]:
            for request in requests:
                asked.append(self._fill(request))
                yield asked[-1]

        for reply in self.executor.run(filled()):
            self._take(asked.popleft(), reply)
            yield reply

    def forget(self) -> None:
        """Drop the models kept so far."""
        self.kept = {}

    def restore(self, checkpoint: Checkpoint) -> None:
        """Resume from a checkpoint."""
        self.states = ClientStates(self.names, checkpoint.clients.__getitem__)
        self.states.changed.clear()
        for kind, models in checkpoint.models.items():
            for name in models:
                self.keep(kind, name, models[name])

    def fork(self) -> LocalClients:
        """Return the same clients before their first round, which never change these ones."""
        return LocalClients(self.client_runner, self.executor, self.initial)

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
        found = self.algorithm.call(
            "models", request.server, state, Round(request.done)
        )
        check_known(f"model of {self.algorithm.name}", self.algorithm.evaluates, found)
        if isinstance(request, FinetuneRequest):
            found = {self.algorithm.evaluates: found[self.algorithm.evaluates]}
        received = received_bytes(found, state)
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
        self.kept.setdefault(kind, {})[name] = model


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


def received_bytes(models: Mapping[str, Tree], state: State) -> int:
    """Return the bytes of models that are not a client's own, each name counted once."""
    own = {id(t) for held in state.trees.values() for t in held.values()}
    parts = {
        name: part
        for model in models.values()
        for name, part in model.items()
        if id(part) not in own
    }
    return tree.n_bytes(parts)


def _own(tensor: Tensor) -> Tensor:
    """Return the tensor, copied if it is only a part of a larger block of memory."""
    alone = tensor.untyped_storage().nbytes() <= tensor.numel() * tensor.element_size()
    return tensor if alone and tensor.is_contiguous() else tensor.contiguous().clone()
