"""Requests to clients, the runner that answers them, and clients' states and models.

The engine sends requests, and receives messages and numbers. States and models stay
with :class:`LocalClients`. It adds to a request what the runner needs of the client,
and removes the client's state and models from the reply.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from fl_core import seeds
from fl_core.algorithms.base import (
    Algorithm,
    Message,
    Observation,
    Round,
    State,
    freeze,
)
from fl_core.data import FederatedData
from fl_core.errors import NonFiniteError, about, check_known
from fl_core.training import evaluate
from fl_core.training.loop import batch_slices, train
from fl_core.training.losses import Loss
from fl_core.training.phases import Context, Observers, Phase, Training
from fl_core.training.workspace import Workspace
from fl_core.tree import Tree, copy_to_cpu, in_mode, n_bytes, one_thread

if TYPE_CHECKING:
    from fl_core.records.store import Checkpoint


LOCAL = "local"  # the name of the model after local training
TUNED = "personal"  # the name of a fine-tuned model
SCORED = ("validation", "test")


@dataclass(frozen=True)
class TrainRequest:
    """A request to take part in one exchange.

    Attributes:
        client: the client's position.
        rnd: the round, the exchange's name, and the sampled clients.
        message: the server's message to the client.
        score: splits on which to score the locally trained model.
        keep: whether the client's backend stores that model, under the name ``local``.
        state: the client's state, which its backend adds for the runner.
    """

    client: int
    rnd: Round
    message: Message
    score: tuple[str, ...] = ()
    keep: bool = False
    state: State = field(default_factory=State)


@dataclass(frozen=True)
class _ModelsRequest:
    """A request about a client's models after ``done`` rounds.

    Attributes:
        client: the client's position.
        done: the number of completed rounds.
        server: the server's state. The client's backend makes ``models`` of it and of
            the client's state. The runner gets an empty state in its place.
        models: the client's models by name, which its backend adds. To fine-tune, it is
            the evaluated model alone.
        received: bytes of the server's tensors in the models that the algorithm makes.
    """

    client: int
    done: int
    server: State = field(default_factory=State)
    models: dict[str, Tree] = field(default_factory=dict)
    received: int = 0


class FinetuneRequest(_ModelsRequest):
    """A request to fine-tune a copy of the client's evaluated model. Its backend stores it as ``personal``."""


class ScoreRequest(_ModelsRequest):
    """A request to score the client's models on validation and test samples. The reply also carries observations."""


ClientRequest = TrainRequest | FinetuneRequest | ScoreRequest


@dataclass
class ClientReply:
    """A client's reply to a request: a message and numbers. Fields that do not apply stay empty.

    Attributes:
        client: the client's position.
        message: the message to the server; None if it was lost. The client has then returned to its state before the
            request. It is empty where no training was asked for.
        scores: {model: {split: {metric: value}}}.
        work: steps, samples and mean losses of training, by "phase/quantity".
        observations: the algorithm's numbers about the client's evaluated model.
        missing: whether no reply came in time from the client's site.
        received: bytes of the server's tensors in the models that were scored or tuned.
        state: the client's new state. The backend stores it and removes it from the reply.
        models: models by name. The backend stores them and removes them from the reply.
    """

    client: int
    message: Message | None = field(default_factory=Message)
    # model -> split -> metric -> value
    scores: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    work: dict[str, float] = field(default_factory=dict)
    observations: list[Observation] = field(default_factory=list)
    received: int = 0
    missing: bool = False
    state: State = field(default_factory=State)
    models: dict[str, Tree] = field(default_factory=dict)


OPTIMIZER_TREE = "optimizer"


@dataclass
class Part:
    """A phase of a request that is ready to train: initial weights, context, and the optimiser's state."""

    phase: Phase
    source: Tree
    ctx: Context
    optimizer: Tree


Parts = Generator[Part, tuple[Tree, Tree] | None, ClientReply]


class ClientRunner:
    """A runner of requests, one client at a time in one thread, so that results do not depend on the process.

    Args:
        model: the model, which is copied.
        data: the federation, with the samples of all clients that it runs.
        training: the settings of local training.
        criterion: the loss of logits and labels.
        observers: makers of the observers that phases may name.
        device: name of the device.
        memory: memory layout of images, as for :class:`fl_core.training.workspace.Workspace`.
    """

    def __init__(
        self,
        model: nn.Module,
        data: FederatedData,
        training: Training,
        criterion: Loss,
        observers: Observers,
        device: str = "cpu",
        memory: str | None = None,
    ) -> None:
        self.workspace = Workspace(model, device, memory)
        self.data = data
        self.training = training
        self.criterion = criterion
        self.observers = observers
        self.algorithm: Algorithm

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the class and the arguments with which pickle rebuilds this runner.

        A rebuilt runner gives the same bits.
        """
        model, device = self.workspace.model, str(self.workspace.device)
        arguments = (model, self.data, self.training, self.criterion, self.observers)
        return ClientRunner, (*arguments, device, self.workspace.memory)

    def use(self, algorithm: Algorithm) -> None:
        """Load an algorithm for later requests, and freeze it."""
        freeze(algorithm)
        self.algorithm = algorithm

    def run(self, request: ClientRequest) -> ClientReply:
        """Carry out one request, and return the reply. The client's backend has added the state to the request.

        Raises:
            NonFiniteError: a number is NaN or infinite. The message names the client, and the phase or the scored
                split.
            UsageError: a hook returns or names what does not fit, or a split to be scored has no samples.
        """
        with one_thread():
            parts, answer = self.parts(request), None
            while True:
                try:
                    part = parts.send(answer)
                except StopIteration as end:
                    return end.value
                answer = self.phase(part)

    def parts(self, request: ClientRequest) -> Parts:
        """Run a request as a generator that yields its phases and returns its reply.

        For each phase the caller sends back the result of :meth:`phase`. A message is copied at once, so that the hooks
        of client and server share no tensor.
        """
        if isinstance(request, TrainRequest):
            return self._train(replace(request, message=request.message.clone()))
        if isinstance(request, FinetuneRequest):
            return self._finetune(request)
        return self._score(request)

    def phase(self, part: Part) -> tuple[Tree, Tree]:
        """Train one phase and return the trained tree and the optimiser's state, as a tree too.

        Raises:
            NonFiniteError, UsageError: as :func:`fl_core.training.loop.train`.
        """
        algorithm, phase = self.algorithm, part.phase
        return train(
            self.workspace,
            phase,
            part.source,
            self.data.clients[part.ctx.client].train,
            self.training,
            part.ctx,
            self.observers,
            part.optimizer,
            loss=algorithm.method(phase, "loss"),
            step=algorithm.method(phase, "step") if phase.step else None,
            seed=algorithm.task_info.seed,
            layers=algorithm.task_info.layers,
            frozen=algorithm.task_info.frozen,
        )

    def _train(self, request: TrainRequest) -> Parts:
        algorithm = self.algorithm
        state = State(dict(request.state.trees), dict(request.state.meta))
        optimizer = state.trees.pop(OPTIMIZER_TREE, {})
        client, index = request.client, request.rnd.index
        ctx = self._context(client, index, request.message.trees.get("model", {}))
        ctx.submodel = algorithm.submodel(request.rnd, client)
        self.workspace.hold(ctx.submodel)
        # the weights at which training starts have a random stream of their own
        seed = algorithm.task_info.seed
        seed = seeds.seed_of(seed, "modules", index, client, "begin")
        with seeds.torch_seeded(seed), in_mode(self.workspace.model, True):
            start_tree: Tree = algorithm.call(
                "client_start", state, request.message, ctx, request.rnd, client
            )
        if "model" not in request.message.trees:
            ctx.reference = self._there(start_tree)
        trained_trees = {**state.trees, "model": start_tree}
        trees = {**state.trees, **request.message.trees}
        ctx.trees = {
            name: self._there(t) for name, t in trees.items() if name != "model"
        }
        for phase in algorithm.call("phases", request.rnd, client):
            phase_text = f"tree of phase {phase.name!r}"
            key = check_known(phase_text, phase.state_key, trained_trees)
            answer = yield Part(phase, trained_trees[key], ctx, optimizer)
            assert answer is not None
            trained_trees[key], optimizer = answer[0], {**optimizer, **answer[1]}
        trained_trees |= {
            name: copy_to_cpu(values) for name, values in ctx.scratch.items()
        }
        local_model = trained_trees["model"]
        message = algorithm.call(
            "client_update", state, trained_trees, ctx, request.rnd, client
        )
        if self.training.keep_optimizer:
            state.trees[OPTIMIZER_TREE] = optimizer
        scores = self._scores(
            client, local_model, request.score, LOCAL, index + 1, ctx.submodel
        )
        return ClientReply(
            client,
            message.clone(),  # it shares no memory with the client's state
            {LOCAL: scores} if scores else {},
            work=ctx.work,
            state=state,
            models={LOCAL: local_model} if request.keep else {},
        )

    def _finetune(self, request: FinetuneRequest) -> Parts:
        (tree,) = request.models.values()
        ctx = self._context(request.client, request.done, tree, finetuning=True)
        for phase in self.algorithm.finetuning(request.done, request.client):
            check_known(f"tree of phase {phase.name!r}", phase.state_key, ("model",))
            answer = yield Part(phase, tree, ctx, {})
            assert answer is not None
            tree = answer[0]
        return ClientReply(request.client, work=ctx.work, models={TUNED: tree})

    def _score(self, request: ScoreRequest) -> Parts:
        """Score a client's models, and return the reply.

        Its observations are the algorithm's numbers about the client's evaluated model.
        """
        yield from ()  # no phases
        reply = ClientReply(request.client)
        for name, tree in request.models.items():
            reply.scores[name] = self._scores(
                request.client, tree, SCORED, name, request.done
            )
            if name == self.algorithm.evaluates:
                x = self.workspace.place(self.data.clients[request.client].test.x)
                rnd = Round(request.done)
                reply.observations += self.algorithm.client_observations(
                    self.workspace.model, x, rnd, request.client
                )
        return reply

    def _context(
        self, client: int, index: int, reference: Tree, finetuning: bool = False
    ) -> Context:
        seed, split = self.algorithm.task_info.seed, self.data.clients[client].train

        def batches(stream: str, share: float = 1.0) -> Iterator[tuple[Tensor, Tensor]]:
            draws = seeds.torch_generator(seed, "batches", index, client, stream)
            order = torch.randperm(len(split), generator=draws)
            order = order[: max(1, round(share * len(split)))]
            x = self.workspace.place(split.x[order])
            y = split.y[order].to(self.workspace.device)
            for batch_slice in batch_slices(
                len(order), self.training.batch_size, whole=self.workspace.couples
            ):
                yield x[batch_slice], y[batch_slice]

        def score(model: Tree, what: str) -> dict[str, float]:
            submodel_before = self.workspace.submodel
            with in_mode(self.workspace.model, False):
                scores = self._scores(
                    client, model, ("validation",), f"received {what!r}", index
                )
            self.workspace.hold(submodel_before)
            return scores["validation"]

        return Context(
            algorithm=self.algorithm.name,
            round=index,
            client=client,
            client_name=self.data.clients[client].name,
            n_train=len(split),
            criterion=self.criterion,
            forward=self.workspace.forward,
            reference=self._there(reference),
            infer=self.workspace.infer,
            features=self.workspace.features,
            batches=batches,
            score=score,
            labels=split.y.to(self.workspace.device),
            finetuning=finetuning,
        )

    def _there(self, source: Tree) -> Tree:
        return {
            name: tensor.to(self.workspace.device) for name, tensor in source.items()
        }

    def _scores(
        self,
        client: int,
        tree: Tree,
        splits: tuple[str, ...],
        model: str,
        done: int,
        submodel: frozenset[str] | None = None,
    ) -> dict[str, dict[str, float]]:
        if not splits:
            return {}
        self.workspace.load(tree, submodel)
        self.workspace.model.eval()
        scores: dict[str, dict[str, float]] = {}
        for name in splits:
            split = self.data.clients[client].split(name)
            x = self.workspace.place(split.x)
            y = split.y.to(self.workspace.device)
            batches = batch_slices(
                len(y), evaluate.SCORE_BATCH, whole=self.workspace.couples
            ) or [slice(None)]
            logits = torch.cat(
                [
                    evaluate.predict(
                        self.workspace.model, x[batch], evaluate.SCORE_BATCH + 1
                    )
                    for batch in batches
                ]
            )
            location = f"{self.algorithm.name}, round {done}, client {self.data.clients[client].name!r}"
            subject = f"{location}, scoring the {model} model on {name}"
            with about(subject, NonFiniteError, NonFiniteError):
                scores[name] = evaluate.scores(
                    logits,
                    y,
                    self.criterion,
                    self.data.positive_index,
                    self.data.absent,
                )
        return scores


# --- where clients live ------------------------------------------------------------------------------------------


class Executor(Protocol):
    """An executor of requests that yields their replies in the requests' order."""

    def use(self, algorithm: Algorithm) -> None:
        """Load an algorithm for later requests. It is called again when the plan changes."""

    def run(self, requests: Iterable[ClientRequest]) -> Iterator[ClientReply]:
        """Yield replies in the requests' order. An error in a request is raised in the place of its reply."""

    def close(self) -> None:
        """End any worker processes."""


@dataclass
class Serial:
    """An executor that carries out every request in this process."""

    client_runner: ClientRunner

    def use(self, algorithm: Algorithm) -> None:
        """Load an algorithm for later requests, and freeze it."""
        self.client_runner.use(algorithm)

    def run(self, requests: Iterable[ClientRequest]) -> Iterator[ClientReply]:
        """Carry out requests one after another, and yield their replies in order."""
        for request in requests:
            yield self.client_runner.run(request)

    def close(self) -> None:
        """Do nothing: there are no processes."""


MakesExecutor = Callable[[ClientRunner], Executor]


class ClientStates(Mapping[str, State]):
    """A mapping of every client's state by name, in the clients' order. A state that was never set is the initial one.

    Args:
        names: names of the clients.
        beginning: a function that returns a client's initial state. It is called each time.
        frozen: tensors of the model that no training changes. All clients' states share them.

    Attributes:
        changed: names of the clients whose state the last checkpoint does not have; all of them at first.
    """

    def __init__(
        self,
        names: Sequence[str],
        beginning: Callable[[str], State],
        frozen: Tree | None = None,
    ) -> None:
        self.beginning = beginning
        self.frozen = frozen or {}
        self.changed = set(names)
        self._states: dict[str, State | None] = dict.fromkeys(names)

    def __getitem__(self, name: str) -> State:
        stored = self._states[name]
        if stored is None:
            return self.beginning(name)
        return stored

    def __setitem__(self, name: str, state: State) -> None:
        trees = {
            tree_name: {key: _own(tensor) for key, tensor in values.items()}
            for tree_name, values in state.trees.items()
        }
        if "model" in trees:  # one copy for all clients
            frozen_keys = self.frozen.keys() & trees["model"].keys()
            trees["model"] |= {key: self.frozen[key] for key in frozen_keys}
        self._states[name] = State(trees, state.meta)
        self.changed.add(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._states)

    def __len__(self) -> int:
        return len(self._states)


class LocalClients:
    """Clients in this process. An executor does their work, here or in workers.

    Args:
        client_runner: the runner, with model and data.
        executor: the executor that does the work.
        initial: the model before the first round.
        dropout: the probability that a client's reply is lost in a round (:func:`is_lost`).

    Attributes:
        states: every client's state by name, from :meth:`begin` on.
        kept: the stored models of the current round, by kind (``local`` or
            ``personal``) and client.
    """

    def __init__(
        self,
        client_runner: ClientRunner,
        executor: Executor,
        initial: Tree,
        dropout: float = 0.0,
    ) -> None:
        self.client_runner = client_runner
        self.executor = executor
        self.initial = initial
        self.dropout = dropout
        self.names = client_runner.data.names
        self.index = {name: client for client, name in enumerate(self.names)}
        self.kept: dict[str, dict[str, Tree]] = {}  # models of the current round

    def begin(self, algorithm: Algorithm) -> None:
        """Reset every client to its state before the first round of this algorithm."""
        self.algorithm = algorithm
        proxy = weakref.proxy(self)  # the states do not keep clients and data in memory
        self.states = ClientStates(
            self.names, lambda name: proxy.start(name), self._frozen()
        )

    def use(self, algorithm: Algorithm) -> None:
        """Switch to this algorithm, or to its new plan. Clients that have not replied yet start under it."""
        self.algorithm = algorithm
        self.executor.use(algorithm)

    def _frozen(self) -> Tree:
        frozen_names = self.algorithm.task_info.frozen
        return {
            name: tensor
            for name, tensor in self.initial.items()
            if name in frozen_names
        }

    def start(self, name: str) -> State:
        """Return the state of the client of this name before its first round, under the present plan."""
        state: State = self.algorithm.call(
            "client_state", self.initial, self.index[name]
        )
        return state.clone()

    def run(self, requests: Iterable[ClientRequest]) -> Iterator[ClientReply]:
        """Yield the replies in the requests' order. An error is raised in the place of its reply."""
        pending_requests: deque[ClientRequest] = deque()

        def filled() -> Iterator[ClientRequest]:
            for request in requests:
                pending_requests.append(self._fill(request))
                yield pending_requests[-1]

        for reply in self.executor.run(filled()):
            self._take(pending_requests.popleft(), reply)
            yield reply

    def forget(self) -> None:
        """Remove the locally trained and fine-tuned models that are stored for the current round."""
        self.kept = {}

    def restore(self, checkpoint: Checkpoint) -> None:
        """Set the clients to their states and stored models in a checkpoint."""
        self.states = ClientStates(
            self.names, checkpoint.clients.__getitem__, self._frozen()
        )
        self.states.changed.clear()
        for kind, models in checkpoint.models.items():
            for name in models:
                self.keep(kind, name, models[name])

    def fork(self) -> LocalClients:
        """Return clients with the same runner and executor for another engine, which begins them.

        They share no state with these clients, and none of their replies is lost.
        """
        return LocalClients(self.client_runner, self.executor, self.initial)

    def models(self, client: int, server: State, done: int) -> Mapping[str, Tree]:
        """Return a client's models after ``done`` rounds by name, with the fine-tuned one if there is one.

        Args:
            client: the client's position.
            server: the server's state.
            done: number of completed rounds.
        """
        state = self.states[self.names[client]]
        return self.algorithm.models(server, state, Round(done)) | self._tuned(client)

    def _tuned(self, client: int) -> dict[str, Tree]:
        tuned_model = self.kept.get(TUNED, {}).get(self.names[client])
        if tuned_model is None:
            return {}
        return {TUNED: tuned_model}

    def is_lost(self, request: TrainRequest) -> bool:
        """Return whether the reply to this request is lost by chance, with the probability ``dropout``."""
        return is_lost(
            self.algorithm.task_info.seed,
            request.rnd.index,
            request.client,
            self.dropout,
        )

    def _fill(self, request: ClientRequest) -> ClientRequest:
        """Return a copy of a request with what a worker needs of the client.

        That is the client's state for training, and else its models without the
        server's state. A request whose reply will be lost asks for no scores and no
        model.
        """
        client = request.client
        state = self.states[self.names[client]]
        if isinstance(request, TrainRequest):
            if self.is_lost(request):  # the hooks' changes are lost with the reply
                return replace(request, score=(), keep=False, state=state.clone())
            return replace(request, state=state)
        models = self.algorithm.call(
            "models", request.server, state, Round(request.done)
        )
        check_known(f"model of {self.algorithm.name}", self.algorithm.evaluates, models)
        if isinstance(request, FinetuneRequest):
            models = {self.algorithm.evaluates: models[self.algorithm.evaluates]}
        n_received = received_bytes(models, state)
        if not isinstance(request, FinetuneRequest):
            models = dict(sorted((models | self._tuned(client)).items()))
        return replace(request, server=State(), models=models, received=n_received)

    def _take(self, request: ClientRequest, reply: ClientReply) -> None:
        """Store the state and models of a reply here, and remove them from the reply.

        A lost reply gets None as its message, and its state is dropped.
        """
        name = self.names[request.client]
        if not isinstance(request, TrainRequest):
            reply.received = request.received
        elif self.is_lost(request):
            reply.message = None
        else:
            self.states[name] = reply.state
        for model_kind, model in reply.models.items():
            self.keep(model_kind, name, model)
        reply.state, reply.models = State(), {}

    def keep(self, kind: str, name: str, model: Tree) -> None:
        """Store a client's model next to its state until the next round.

        Args:
            kind: ``local`` for a locally trained model, ``personal`` for a fine-tuned one.
            name: the client's name.
            model: the model's tensors.
        """
        self.kept.setdefault(kind, {})[name] = model


def is_lost(seed: int, index: int, client: int, rate: float) -> bool:
    """Return whether a client's reply is lost by chance in a round.

    The client was sampled, received the server's message and trained. Its reply does not arrive because the client was
    off, disconnected or too late. The server continues with the other replies. The client returns to its state before
    the round, because some states of server and client may only change together, such as SCAFFOLD's variates.

    The result depends on the arguments alone. A reply that is lost at a rate is also lost at each higher rate.

    >>> is_lost(seed=0, index=0, client=3, rate=0.0)
    False

    Args:
        seed: the run's seed.
        index: the round, from 0 on.
        client: the client's position.
        rate: the probability, from 0 to below 1, independent for each client and round.
    """
    if not rate:
        return False
    generator = seeds.numpy_generator(seed, "dropout", index, client)
    return bool(generator.random() < rate)


def received_bytes(models: Mapping[str, Tree], state: State) -> int:
    """Return the bytes of the models' tensors that are not in the client's state, each name counted once.

    A tensor is in the state if the state has the same object. So tensors that the
    algorithm computes count, too.
    """
    own_ids: set[int] = set()
    for tensors in state.trees.values():
        own_ids.update(map(id, tensors.values()))
    received_tensors: Tree = {}
    for model in models.values():
        received_tensors |= {
            name: t for name, t in model.items() if id(t) not in own_ids
        }
    return n_bytes(received_tensors)


def _own(tensor: Tensor) -> Tensor:
    """Return the tensor, copied if it is only a part of a larger block of memory."""
    is_whole_block = (
        tensor.untyped_storage().nbytes() <= tensor.numel() * tensor.element_size()
    )
    if is_whole_block and tensor.is_contiguous():
        return tensor
    return tensor.contiguous().clone()
