"""One place where clients run: a process with a model skeleton, the data, and an algorithm."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from fl_core.algorithms.base import Algorithm, Inside, Message, Round, State
from fl_core.data import FederatedData, Split
from fl_core.errors import NonFiniteError
from fl_core.execution.workspace import Workspace
from fl_core.layers import Layer
from fl_core.training import evaluate
from fl_core.training.local import Context, Observer, Phase, Training, batch_slices, train
from fl_core.training.losses import Loss
from fl_core.tree import Tree, one_thread

OPTIMIZER_TREE = "optimizer"
SCORE_BATCH = 1024


@dataclass
class TrainJob:
    """One client's part in one exchange."""

    client: int
    rnd: Round
    message: Message
    state: State
    score: tuple[str, ...] = ()  # splits on which to score the model that local training gave
    keep_local: bool = False  # whether to hand that model back


@dataclass
class FinishJob:
    """Fine-tuning of a copy after the last round."""

    client: int
    index: int
    tree: Tree


@dataclass
class ScoreJob:
    """Scores of one tree on splits of one client."""

    client: int
    tree: Tree
    splits: tuple[str, ...]
    model: str = ""  # what the tree is called, and the rounds completed: for an error message
    done: int = 0


@dataclass
class Part:
    """The phase that a job has come to, and what it works on."""

    phase: Phase
    source: Tree
    ctx: Context
    optimizer: Tree


Parts = Generator[Part, tuple[Tree, Tree] | None, "Result"]


@dataclass
class Result:
    """What comes back from any job; fields that do not apply stay empty."""

    client: int
    message: Message = field(default_factory=Message)
    state: State = field(default_factory=State)
    tree: Tree | None = None
    scores: dict[str, dict[str, float]] = field(default_factory=dict)  # split -> metric -> value
    work: dict[str, float] = field(default_factory=dict)
    insides: list[Inside] = field(default_factory=list)


Job = TrainJob | FinishJob | ScoreJob


class Site:
    """Runs jobs, one client at a time, always with one thread, so that results do not depend on where it runs."""

    def __init__(
        self,
        model: nn.Module,
        data: FederatedData,
        training: Training,
        criterion: Loss,
        layers: tuple[Layer, ...],
        observers: Mapping[str, Callable[[tuple[Layer, ...]], Observer]],
        device: str = "cpu",
        memory: str = "auto",
        keep_frozen: bool = True,
    ) -> None:
        self.workspace = Workspace(model, device, memory, keep_frozen)
        self.data, self.training, self.criterion = data, training, criterion
        self.layers, self.makers = layers, observers
        self.algorithm: Algorithm | None = None

    def run(self, job: Job) -> Result:
        """Run one job."""
        with one_thread():
            parts, answer = self.parts(job), None
            while True:
                try:
                    part = parts.send(answer)
                except StopIteration as end:
                    return end.value
                answer = self.phase(part)

    def parts(self, job: Job) -> Parts:
        """A job from phase to phase: it waits for what each gives (see :meth:`phase`), and returns its result."""
        if isinstance(job, TrainJob):
            return (yield from self._train(job))
        if isinstance(job, FinishJob):
            return (yield from self._finish(job))
        scores = self._scores(job.client, job.tree, job.splits, job.model, job.done)
        return Result(job.client, scores=scores, insides=self._insides(job))

    def phase(self, part: Part) -> tuple[Tree, Tree]:
        """Train one phase: the trained tree, and the optimiser's state."""
        observers = {name: (lambda make=make: make(self.layers)) for name, make in self.makers.items()}
        split = self.data.clients[part.ctx.client].train
        source, kept = part.source, part.optimizer
        return train(
            self.workspace, self._algorithm(), part.phase, source, split, self.training, part.ctx, observers, kept
        )

    def _train(self, job: TrainJob) -> Parts:
        algorithm = self._algorithm()
        state = State(dict(job.state.trees), dict(job.state.meta))
        optimizer = state.trees.pop(OPTIMIZER_TREE, {})
        candidates = algorithm.candidates(state, job.message)
        if candidates:
            done = job.rnd.index
            job.message.meta["losses"] = {
                name: self._scores(job.client, each, ("validation",), f"received {name!r}", done)["validation"]["loss"]
                for name, each in candidates.items()
            }
        trained = {**state.trees, "model": algorithm.begin(state, job.message, job.rnd, job.client)}
        ctx = self._context(algorithm, job.client, job.rnd.index, job.message.trees.get("model", trained["model"]))
        ctx.held = algorithm.held(job.rnd, job.client)
        beside = {**state.trees, **job.message.trees}
        ctx.trees = {name: self._there(t) for name, t in beside.items() if name != "model"}
        for phase in algorithm.phases(job.rnd, job.client):
            answer = yield Part(phase, trained[phase.tree], ctx, optimizer)
            assert answer is not None
            trained[phase.tree], optimizer = answer[0], {**optimizer, **answer[1]}
        for name, kept in ctx.scratch.items():
            trained[name] = {
                key: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
                for key, tensor in kept.items()
            }
        local = trained["model"]
        message = algorithm.reply(state, trained, ctx, job.rnd, job.client)
        if self.training.keep_optimizer:
            state.trees[OPTIMIZER_TREE] = optimizer
        return Result(
            job.client,
            message,
            state,
            tree=local if job.keep_local else None,
            scores=self._scores(job.client, local, job.score, "local", job.rnd.index + 1, ctx.held),
            work=ctx.work,
        )

    def _finish(self, job: FinishJob) -> Parts:
        algorithm = self._algorithm()
        ctx = self._context(algorithm, job.client, job.index, job.tree, finishing=True)
        tree = job.tree
        for phase in algorithm.finish(job.client):
            answer = yield Part(phase, tree, ctx, {})
            assert answer is not None
            tree = answer[0]
        return Result(job.client, tree=tree, work=ctx.work)

    def _context(
        self, algorithm: Algorithm, client: int, index: int, reference: Tree, finishing: bool = False
    ) -> Context:
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
            labels=self.data.clients[client].train.y.to(self.workspace.device),
            finishing=finishing,
        )

    def _there(self, source: Tree) -> Tree:
        return {name: tensor.to(self.workspace.device) for name, tensor in source.items()}

    def _scores(
        self,
        client: int,
        tree: Tree,
        splits: tuple[str, ...],
        model: str,
        done: int,
        held: frozenset[str] | None = None,
    ) -> dict[str, dict[str, float]]:
        if not splits:
            return {}
        self.workspace.load(tree, held)
        self.workspace.model.eval()
        found: dict[str, dict[str, float]] = {}
        for name in splits:
            split: Split = getattr(self.data.clients[client], name)
            x, y = self.workspace.place(split.x), split.y.to(self.workspace.device)
            parts = batch_slices(len(y), SCORE_BATCH, whole=self.workspace.couples) or [slice(None)]
            logits = torch.cat([evaluate.predict(self.workspace.model, x[part], SCORE_BATCH + 1) for part in parts])
            try:
                found[name] = evaluate.scores(logits, y, self.criterion)
            except NonFiniteError as error:
                who = f"{self._algorithm().name}, round {done}, client {self.data.clients[client].name!r}"
                raise NonFiniteError(f"{who}, scoring the {model} model on {name}: {error}") from error
        return found

    def _insides(self, job: ScoreJob) -> list[Inside]:
        """What the algorithm records of the model that was just scored, if it is the one that it evaluates."""
        if self.algorithm is None or job.model != self.algorithm.evaluates:
            return []
        x = self.workspace.place(self.data.clients[job.client].test.x)
        return list(self.algorithm.look(self.workspace.model, x, Round(job.done), job.client))

    def _algorithm(self) -> Algorithm:
        if self.algorithm is None:
            raise RuntimeError("no algorithm was loaded at this site")
        return self.algorithm
