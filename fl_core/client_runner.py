"""Requests to a client, its replies, and the runner that makes one of the other.

Where clients live adds to a request what its runner needs of the client, and removes from the reply what must stay.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

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
from fl_core.data import FederatedData, Split
from fl_core.errors import NonFiniteError, check_known
from fl_core.layers import Layer
from fl_core.training import evaluate
from fl_core.training.loop import train
from fl_core.training.losses import Loss
from fl_core.training.phases import Context, Observer, Phase, Training, batch_slices
from fl_core.training.workspace import Workspace
from fl_core.tree import Tree, copy_to_cpu, in_mode, one_thread

LOCAL = "local"  # the name of the model after local training
TUNED = "personal"  # the name of a fine-tuned model
SCORED = ("validation", "test")


@dataclass(frozen=True)
class TrainRequest:
    """A request to take part in one exchange.

    Attributes:
        score: splits on which to score the locally trained model.
        keep: keep that model, under ``local``.
        state: the client's state, which its backend adds for a worker.
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
        server: the server's state. The client's backend makes models of it for a worker.
        models: these models. received: bytes of the server's tensors in them.
    """

    client: int
    done: int
    server: State = field(default_factory=State)
    models: dict[str, Tree] = field(default_factory=dict)
    received: int = 0


class FinetuneRequest(_ModelsRequest):
    """A request to fine-tune a copy of the client's evaluated model. It is kept as ``personal``."""


class ScoreRequest(_ModelsRequest):
    """A request to score the client's models on validation and test samples. The reply also carries observations."""


ClientRequest = TrainRequest | FinetuneRequest | ScoreRequest


@dataclass
class ClientReply:
    """A client's reply: messages and numbers. Fields that do not apply stay empty.

    Attributes:
        message: None if it was lost on its way. The client has then returned to its state before the request.
        missing: whether no reply came in time from the client's site.
        received: bytes of the server's tensors in the models that were scored or tuned.
        state: the client's new state, which its backend takes out.
        models: models that the backend takes out and keeps, by name.
    """

    client: int
    message: Message | None = field(default_factory=Message)
    scores: dict[str, dict[str, dict[str, float]]] = field(
        default_factory=dict
    )  # model -> split -> metric -> value
    work: dict[str, float] = field(default_factory=dict)
    observations: list[Observation] = field(default_factory=list)
    received: int = 0
    missing: bool = False
    state: State = field(default_factory=State)
    models: dict[str, Tree] = field(default_factory=dict)


OPTIMIZER_TREE = "optimizer"
SCORE_BATCH = 1024


@dataclass
class Part:
    """A phase of a request that is ready to train: initial weights, context, and the optimiser's state."""

    phase: Phase
    source: Tree
    ctx: Context
    optimizer: Tree


Parts = Generator[Part, tuple[Tree, Tree] | None, ClientReply]


class ClientRunner:
    """A runner of requests, one client at a time in one thread, so that results do not depend on the process."""

    def __init__(
        self,
        model: nn.Module,
        data: FederatedData,
        training: Training,
        criterion: Loss,
        layers: tuple[Layer, ...],
        observers: Mapping[str, Callable[[tuple[Layer, ...]], Observer]],
        device: str = "cpu",
        memory: str | None = None,
    ) -> None:
        self.workspace = Workspace(model, device, memory)
        self.data, self.training, self.criterion = data, training, criterion
        self.layers, self.makers = layers, observers
        self.algorithm: Algorithm

    def made_of(self) -> dict[str, Any]:
        """Return the arguments with which another process builds a runner that gives the same bits."""
        return {
            "model": self.workspace.model,
            "data": self.data,
            "training": self.training,
            "criterion": self.criterion,
            "layers": self.layers,
            "observers": self.makers,
            "device": str(self.workspace.device),
            "memory": self.workspace.memory,
        }

    def use(self, algorithm: Algorithm) -> None:
        """Load an algorithm for later requests, and freeze it."""
        freeze(algorithm)
        self.algorithm = algorithm

    def run(self, request: ClientRequest) -> ClientReply:
        """Do what one request asks. It holds what its client's backend adds.

        Raises:
            NonFiniteError: a number is NaN or infinite. The error names the client, the phase and the layer.
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

        It expects the answer of :meth:`phase` to be sent back for each. A message is copied at once, so that the hooks
        of client and server share no tensor.
        """
        if isinstance(request, TrainRequest):
            return self._train(replace(request, message=request.message.clone()))
        if isinstance(request, FinetuneRequest):
            return self._finetune(request)
        return self._score(request)

    def phase(self, part: Part) -> tuple[Tree, Tree]:
        """Train one phase and return the trained tree and the optimiser's state."""
        observers = {
            name: (lambda make=make: make(self.layers))
            for name, make in self.makers.items()
        }
        split = self.data.clients[part.ctx.client].train
        return train(
            self.workspace,
            self.algorithm,
            part.phase,
            part.source,
            split,
            self.training,
            part.ctx,
            observers,
            part.optimizer,
        )

    def _train(self, request: TrainRequest) -> Parts:
        algorithm = self.algorithm
        state = State(dict(request.state.trees), dict(request.state.meta))
        optimizer = state.trees.pop(OPTIMIZER_TREE, {})
        ctx = self._context(
            algorithm,
            request.client,
            request.rnd.index,
            request.message.trees.get("model", {}),
        )
        ctx.submodel = algorithm.submodel(request.rnd, request.client)
        start = self._begin(algorithm, request, state, ctx)
        if "model" not in request.message.trees:
            ctx.reference = self._there(start)
        trained = {**state.trees, "model": start}
        beside = {**state.trees, **request.message.trees}
        ctx.trees = {
            name: self._there(t) for name, t in beside.items() if name != "model"
        }
        for phase in algorithm.call("phases", request.rnd, request.client):
            of = f"tree of phase {phase.name!r}"
            key = check_known(of, phase.state_key, trained)
            answer = yield Part(phase, trained[key], ctx, optimizer)
            assert answer is not None
            trained[key], optimizer = answer[0], {**optimizer, **answer[1]}
        trained |= {name: copy_to_cpu(kept) for name, kept in ctx.scratch.items()}
        local = trained["model"]
        message = algorithm.call(
            "client_update", state, trained, ctx, request.rnd, request.client
        )
        if self.training.keep_optimizer:
            state.trees[OPTIMIZER_TREE] = optimizer
        done = request.rnd.index + 1
        scores = self._scores(
            request.client, local, request.score, LOCAL, done, ctx.submodel
        )
        return ClientReply(
            request.client,
            message.clone(),  # it shares no memory with the client's state
            {LOCAL: scores} if scores else {},
            work=ctx.work,
            state=state,
            models={LOCAL: local} if request.keep else {},
        )

    def _begin(
        self, algorithm: Algorithm, request: TrainRequest, state: State, ctx: Context
    ) -> Tree:
        """Return the weights at which local training starts, computed under a random stream of their own."""
        seed = seeds.seed_of(
            algorithm.task_info.seed,
            "modules",
            request.rnd.index,
            request.client,
            "begin",
        )
        self.workspace.hold(ctx.submodel)
        with seeds.torch_seeded(seed), in_mode(self.workspace.model, True):
            start: Tree = algorithm.call(
                "client_start", state, request.message, ctx, request.rnd, request.client
            )
            return start

    def _finetune(self, request: FinetuneRequest) -> Parts:
        algorithm = self.algorithm
        (tree,) = request.models.values()
        ctx = self._context(
            algorithm, request.client, request.done, tree, finetuning=True
        )
        for phase in algorithm.finetuning(request.done, request.client):
            check_known(f"tree of phase {phase.name!r}", phase.state_key, ("model",))
            answer = yield Part(phase, tree, ctx, {})
            assert answer is not None
            tree = answer[0]
        return ClientReply(request.client, work=ctx.work, models={TUNED: tree})

    def _score(self, request: ScoreRequest) -> Parts:
        """Score a client's models, and note the algorithm's numbers about its evaluated one."""
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
        self,
        algorithm: Algorithm,
        client: int,
        index: int,
        reference: Tree,
        finetuning: bool = False,
    ) -> Context:
        def batches(stream: str, share: float = 1.0) -> Iterator[tuple[Tensor, Tensor]]:
            return self._batches(algorithm.task_info.seed, index, client, stream, share)

        def score(model: Tree, what: str) -> dict[str, float]:
            present = self.workspace.submodel
            with in_mode(self.workspace.model, False):
                scores = self._scores(
                    client, model, ("validation",), f"received {what!r}", index
                )
            self.workspace.hold(present)
            return scores["validation"]

        return Context(
            algorithm=algorithm.name,
            round=index,
            client=client,
            client_name=self.data.clients[client].name,
            n_train=len(self.data.clients[client].train),
            criterion=self.criterion,
            forward=self.workspace.forward,
            reference=self._there(reference),
            infer=self.workspace.infer,
            features=self.workspace.features,
            batches=batches,
            score=score,
            labels=self.data.clients[client].train.y.to(self.workspace.device),
            finetuning=finetuning,
        )

    def _batches(
        self, seed: int, index: int, client: int, stream: str, share: float
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches of a share of a client's training samples, in a random order of their own.

        At least one sample is used.
        """
        split = self.data.clients[client].train
        order = torch.randperm(
            len(split),
            generator=seeds.torch_generator(seed, "batches", index, client, stream),
        )
        order = order[: max(1, round(share * len(split)))]
        x, y = (
            self.workspace.place(split.x[order]),
            split.y[order].to(self.workspace.device),
        )
        for part in batch_slices(
            len(order), self.training.batch_size, whole=self.workspace.couples
        ):
            yield x[part], y[part]

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
            split: Split = getattr(self.data.clients[client], name)
            x, y = self.workspace.place(split.x), split.y.to(self.workspace.device)
            parts = batch_slices(len(y), SCORE_BATCH, whole=self.workspace.couples) or [
                slice(None)
            ]
            logits = torch.cat(
                [
                    evaluate.predict(self.workspace.model, x[part], SCORE_BATCH + 1)
                    for part in parts
                ]
            )
            try:
                scores[name] = evaluate.scores(
                    logits,
                    y,
                    self.criterion,
                    self.data.positive_index,
                    self.data.absent,
                )
            except NonFiniteError as error:
                who = f"{self.algorithm.name}, round {done}, client {self.data.clients[client].name!r}"
                raise NonFiniteError(
                    f"{who}, scoring the {model} model on {name}: {error}"
                ) from error
        return scores
