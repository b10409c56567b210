"""Where clients live: their states, the models that they keep, and what runs their work.

An engine asks; what comes back is messages, numbers and names. A client's own tensors do not leave its home.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from fl_core.algorithms.base import Algorithm, Message, Observation, Round, State
from fl_core.algorithms.model_template import ModelTemplate, StateSchema, models_of
from fl_core.data import FederatedData
from fl_core.errors import check_known
from fl_core.execution.client_runner import FinetuneJob, Job, JobResult, ScoreJob, TrainJob
from fl_core.execution.executors import Executor
from fl_core.execution.offloading import ClientStates, OffloadedTrees
from fl_core.records.store import Checkpoint
from fl_core.records.writing import Writer
from fl_core.tree import Tree

TUNED = "personal"  # what a fine-tuned model is called
SCORED = ("validation", "test")


@dataclass(frozen=True)
class TrainRequest:
    """Take part in one exchange.

    Attributes:
        score: splits on which to score the model that local training gives.
        keep: keep that model, under ``local``.
        lost: the reply will not arrive: what the training changes at the client is undone.
    """

    client: int
    rnd: Round
    message: Message
    score: tuple[str, ...] = ()
    keep: bool = False
    lost: bool = False


@dataclass(frozen=True)
class FinetuneRequest:
    """Fine-tune a copy of one of the client's models after so many rounds, and keep it under ``personal``."""

    client: int
    done: int
    template: ModelTemplate
    model: str


@dataclass(frozen=True)
class ScoreRequest:
    """Score the client's models after so many rounds on validation and test samples, and note what is observed."""

    client: int
    done: int
    template: ModelTemplate


ClientRequest = TrainRequest | FinetuneRequest | ScoreRequest


@dataclass
class ClientReply:
    """What comes back: messages and numbers; fields that do not apply stay empty."""

    client: int
    message: Message = field(default_factory=Message)
    scores: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)  # model -> split -> metric -> value
    work: dict[str, float] = field(default_factory=dict)
    observations: list[Observation] = field(default_factory=list)
    missing: bool = False  # no reply came in time
    epsilon: tuple[float, float] | None = None  # spent so far, at which delta, where the client hides what it sends


class ClientBackend(Protocol):
    """Where the clients of one engine live."""

    @property
    def moved(self) -> float:
        """Seconds that this process has spent on carrying work between processes."""

    def use(self, algorithm: Algorithm) -> None:
        """Work under this algorithm, or under its new plan; clients that have not replied yet begin under it."""

    def begin(self, algorithm: Algorithm) -> None:
        """Let every client be as before its first round of this algorithm."""

    def run(self, requests: Iterable[ClientRequest]) -> Iterator[ClientReply]:
        """Yield the replies in the requests' order; an error is raised where the reply would have come."""

    def visible_state(self, client: int) -> State:
        """A client's state as the server may see it: names for tensors."""

    def forget(self) -> None:
        """Let go of the models kept so far."""

    def save(self, writer: Writer, done: int, server: State) -> None:
        """Write a checkpoint after so many rounds, with what of the clients belongs into it."""

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint."""

    def fork(self) -> ClientBackend:
        """A home of the same clients as before their first round, from which nothing comes back to this one."""


class LocalClients:
    """Clients that live in this process, in bounded memory; an executor does their work, here or in workers.

    Args:
        executor: does the work. data: whose clients they are. initial: the model before the first round.
        folder: of the scratch files, see :class:`OffloadedTrees`.
    """

    def __init__(self, executor: Executor, data: FederatedData, initial: Tree, folder: Path | None = None) -> None:
        self.executor, self.data, self.initial, self.folder = executor, data, initial, folder
        self.names = [client.name for client in data.clients]
        self.index = {name: client for client, name in enumerate(self.names)}
        self.kept: dict[str, OffloadedTrees] = {}  # local and fine-tuned models of the current round
        self._outlines: dict[int, StateSchema] = {}
        self._begun: dict[int, dict[str, Any]] = {}

    @property
    def moved(self) -> float:
        return self.executor.moved

    def begin(self, algorithm: Algorithm) -> None:
        self._work_under(algorithm)
        self.states = ClientStates(self.names, self.start, self.folder)

    def use(self, algorithm: Algorithm) -> None:
        self._work_under(algorithm)
        self.executor.use(algorithm)

    def _work_under(self, algorithm: Algorithm) -> None:
        self.algorithm = algorithm
        self._outlines.clear()
        self._begun.clear()

    def start(self, name: str) -> State:
        """The state of a client before its first round, under the present plan."""
        return self.algorithm.client_state(self.initial, self.index[name]).clone()

    def run(self, requests: Iterable[ClientRequest]) -> Iterator[ClientReply]:
        waiting: deque[tuple[ClientRequest, deque[str], ClientReply]] = deque()

        def jobs() -> Iterator[Job]:
            for request in requests:
                named = self._jobs(request)
                waiting.append((request, deque(named), ClientReply(request.client)))
                yield from named.values()

        for result in self.executor.run(jobs()):
            request, models, reply = waiting[0]
            self._take(request, models.popleft(), result, reply)
            if not models:
                yield waiting.popleft()[2]

    def visible_state(self, client: int) -> State:
        if client not in self._begun:
            self._begun[client] = self.algorithm.client_state(self.initial, client).meta
        if client not in self._outlines:
            self._outlines[client] = StateSchema.of(self.states[self.names[client]], self._begun[client])
        return self._outlines[client].state(self._begun[client])

    def forget(self) -> None:
        self.kept = {}

    def save(self, writer: Writer, done: int, server: State) -> None:
        writer.checkpoint(Checkpoint(done, server, self.states, self.kept), self.states.changed)
        self.states.changed.clear()

    def restore(self, checkpoint: Checkpoint) -> None:
        self.states = ClientStates(self.names, checkpoint.clients.__getitem__, self.folder)
        self.states.changed.clear()
        self._outlines.clear()
        for kind, models in checkpoint.models.items():
            for name in models:
                self.keep(kind, name, models[name])

    def fork(self) -> LocalClients:
        return LocalClients(self.executor, self.data, self.initial, self.folder)

    def models(self, client: int, offer: ModelTemplate, done: int) -> Mapping[str, Tree]:
        """A client's models after so many rounds, the fine-tuned one among them."""
        name = self.names[client]
        models = models_of(self.algorithm, offer, self.states[name], Round(done))
        tuned = self.kept[TUNED].get(name) if TUNED in self.kept else None
        return models if tuned is None else {**models, TUNED: tuned}

    def _jobs(self, request: ClientRequest) -> dict[str, Job]:
        """The jobs of a request, by the model that each is about."""
        client = request.client
        name = self.names[client]
        if isinstance(request, TrainRequest):
            state, rnd, message = self.states[name], request.rnd, request.message
            if request.lost:  # what hooks write into the state is lost with the reply
                return {"local": TrainJob(client, rnd, message, state.clone())}
            return {"local": TrainJob(client, rnd, message, state, request.score, request.keep)}
        if isinstance(request, FinetuneRequest):
            models = models_of(self.algorithm, request.template, self.states[name], Round(request.done))
            return {TUNED: FinetuneJob(client, request.done, models[check_known("model", request.model, models)])}
        models = dict(sorted(self.models(client, request.template, request.done).items()))
        return {each: ScoreJob(client, model, SCORED, each, request.done) for each, model in models.items()}

    def _take(self, request: ClientRequest, model: str, result: JobResult, reply: ClientReply) -> None:
        """Keep what stays here of a job's result, and put the rest into the reply."""
        reply.message, reply.work = result.message, result.work
        reply.observations += result.observations
        if result.scores:
            reply.scores[model] = result.scores
        if isinstance(request, TrainRequest) and not request.lost:
            self.states[self.names[request.client]] = result.state
            self._outlines.pop(request.client, None)
        if result.tree is not None:
            self.keep(model, self.names[request.client], result.tree)

    def keep(self, kind: str, name: str, model: Tree) -> None:
        """Keep a client's model beside its state until the next round."""
        self.kept.setdefault(kind, OffloadedTrees(self.folder))[name] = model


__all__ = [
    "ClientBackend",
    "ClientReply",
    "ClientRequest",
    "FinetuneRequest",
    "LocalClients",
    "ScoreRequest",
    "TrainRequest",
]
