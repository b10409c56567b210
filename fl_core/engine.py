"""The round loop: sample, send, train, collect, aggregate, evaluate, record, save."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tqdm.auto import tqdm

from fl_core import costs, tree
from fl_core.algorithms.base import Algorithm, Inside, Problem, Round, State, Update
from fl_core.algorithms.partial import MEASURED, PLayerFL, Scout
from fl_core.data import FederatedData
from fl_core.errors import NonFiniteError, UsageError
from fl_core.execution.executors import Executor
from fl_core.execution.shelf import Clients, Shelf
from fl_core.execution.site import FinishJob, Job, Result, ScoreJob, Site, TrainJob
from fl_core.layers import Layer
from fl_core.plan import LayerPlan
from fl_core.records.store import Checkpoint
from fl_core.records.timing import Clock, Pace
from fl_core.records.writing import Writer
from fl_core.rows import Row, row
from fl_core.schedule import Schedule, sampled_clients
from fl_core.training.local import Observer, Phase
from fl_core.tree import Tree

Work = defaultdict[tuple[int, str, str], float]  # (client, metric, variant) -> value
BUFFER = 10_000  # rows that wait for the end of a round before they are written
UNITS = {"bytes_down": "byte", "bytes_up": "byte", "flops": "FLOP"}


class Decide(Protocol):
    """Turns the clients' measurements of the first round into a plan."""

    def __call__(
        self,
        layers: Sequence[Layer],
        measured: Sequence[Mapping[str, Any]],
        *,
        names: Sequence[str],
        rule: str,
        threshold: float,
        seed: int,
        data: str,
    ) -> LayerPlan:
        """``measured``: one mapping a client with ``client``, ``weight``, ``layers`` and ``importance``."""


@dataclass(frozen=True)
class Instruments:
    """What a run borrows from the rooms above: observers by name, and the decision they serve."""

    observers: Mapping[str, Callable[[tuple[Layer, ...]], Observer]] = field(default_factory=dict)
    decide: Decide | None = None
    rules: tuple[str, ...] = ()  # what ``decide`` takes as its rule


class Engine:
    """One run of one algorithm on one federation.

    Args:
        make: builds the algorithm for a plan (or None where it decides itself).
        plan: a plan, None, or ``measure_first``: run the measuring epoch of PLayer-FL before anything else, throw
            its weights away, and give its plan to the algorithm.
        rule, threshold: how a decision is made, handed to ``instruments.decide``.
    """

    def __init__(
        self,
        problem: Problem,
        make: Callable[[LayerPlan | None], Algorithm],
        data: FederatedData,
        initial: Tree,
        site: Site,
        executor: Executor,
        schedule: Schedule,
        instruments: Instruments,
        *,
        plan: LayerPlan | None = None,
        measure_first: bool = False,
        rule: str = "sensitivity_ratio",
        threshold: float = 1.2,
        columns: Mapping[str, Any] | None = None,
        writer: Writer | None = None,
    ) -> None:
        self.problem, self.make, self.data, self.initial = problem, make, data, initial
        self.site, self.executor, self.schedule, self.instruments = site, executor, schedule, instruments
        self.measure_first, self.rule, self.threshold, self.writer = measure_first, rule, threshold, writer
        self.algorithm = make(plan)
        self.columns = {"algorithm": self.algorithm.name, "seed": problem.seed, **(columns or {})}
        self.names = [client.name for client in data.clients]
        self.server = self.algorithm.open(tree.clone(initial))
        self.index = {name: client for client, name in enumerate(self.names)}
        self.folder = writer.path if writer else None
        self.clients = self._fresh_clients()
        self.kept: dict[str, Shelf] = {}  # local and fine-tuned models of the current round
        self.rows: list[Row] = []
        self.done = 0
        self.clock, self.pace = Clock(), Pace()
        self._steps = 0  # of the current round
        self._flops: dict[tuple[frozenset[str], ...], float] = {}

    # --- the loop ---

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint; what the clients have there is read when it is needed."""
        self.server, self.done = checkpoint.server, checkpoint.round
        self.clients = Clients(self.names, checkpoint.clients.__getitem__, self.folder)
        self.clients.changed.clear()
        for kind, models in checkpoint.models.items():
            for name in models:
                self._keep(kind, name, models[name])
        if "plan" in self.server.meta:
            self.algorithm.plan = LayerPlan.from_json(self.server.meta["plan"])
            self.measure_first = False

    @tree.one_thread()
    def run(self, progress: bool = True) -> None:
        """All rounds that are left.

        Raises:
            NonFiniteError: training or aggregation met NaN or infinity; earlier checkpoints stay.
            UsageError: a decision is needed and no instruments were given.
        """
        if (self.measure_first or self.algorithm.decides) and self.instruments.decide is None and self.done == 0:
            raise UsageError(f"{self.algorithm.name} decides on a plan: pass instruments, or a plan")
        if self.measure_first:
            self._measure_first()
        self.executor.use(self.algorithm)
        if self.done == 0:
            if self.algorithm.tunes(0):
                self._finish(recorded=False)
            self._evaluate_all()
            self._flush()
            self._note_time()
        label = f"{self.algorithm.name} seed {self.problem.seed}"
        bar = tqdm(
            total=self.schedule.end,
            initial=self.done,
            desc=label,
            unit="round",
            disable=not progress,
            smoothing=0.0,  # the estimate to the end is from all rounds, those with an evaluation too
        )
        with bar:
            while self.done < self.schedule.end:
                self.step()
                bar.set_postfix_str(f"{self.pace.rate:,.0f} steps/s: {self.pace.shares()}", refresh=False)
                bar.update()

    @tree.one_thread()
    def step(self) -> None:
        """One round: train, aggregate, and evaluate, record and save when they are due.

        In one thread: what is done here is small, and a second one would wait for a core that clients train on.
        """
        index = self.done
        sampled = sampled_clients(self.problem.seed, index, len(self.names), self.schedule.participation)
        self.kept = {}
        work = Work(float)
        exchanges = self.algorithm.exchanges(index)
        for exchange in exchanges:
            rnd = Round(index, exchange, sampled)
            with self.clock.on("aggregate"):
                replies = self._exchange(rnd, work, last=exchange == exchanges[-1])
                self.algorithm.aggregate(self.server, replies, rnd)
                for _ in replies:  # whatever the algorithm did not ask for still reaches the clients' states
                    pass
            if self.algorithm.decides and MEASURED in self.server.meta:
                self._adopt(self._decide(self.server.meta.pop(MEASURED)))
        self.done += 1
        self._check_finite()
        self._record_work(work)
        last, looks = self.done == self.schedule.rounds, self.schedule.evaluates(self.done)
        if last or (self.algorithm.tunes(self.done) and (looks or self.schedule.saves(self.done))):
            self._finish(recorded=last)
        if self.schedule.evaluates(self.done):
            self._evaluate_all()
        self._flush()
        if self.writer and self.schedule.saves(self.done):
            with self.clock.on("save"):
                checkpoint = Checkpoint(self.done, self.server, self.clients, self.kept)
                self.writer.checkpoint(checkpoint, self.clients.changed)
                self.clients.changed.clear()
        self._note_time()

    def _exchange(self, rnd: Round, work: Work, last: bool, keep: bool = False) -> Iterator[Update]:
        """Send, run the clients, take their states and records in, and hand their updates on, one at a time."""
        done = rnd.index + 1
        saves = last and self.writer is not None and self.schedule.saves(done)
        kept = frozenset(rnd.sampled if keep else rnd.sampled[: self.schedule.local_models] if saves else ())
        splits: tuple[str, ...] = ()
        if last and self.schedule.evaluates(done):
            splits = ("validation", "test")
        elif last and self.schedule.local_scores:
            splits = ("validation",)

        def jobs() -> Iterable[TrainJob]:
            for client in rnd.sampled:
                with self.clock.on("aggregate"):
                    message = self.algorithm.send(self.server, client, rnd)
                    message = message.clone()
                    work[client, "bytes_down", ""] += message.bytes
                    job = TrainJob(client, rnd, message, self.clients[self.names[client]], splits, client in kept)
                yield job

        for result in self._run("train", jobs()):
            client = result.client
            self.clients[self.names[client]] = result.state
            work[client, "bytes_up", ""] += result.message.bytes
            self._count_work(work, rnd, result)
            if result.tree is not None:
                self._keep("local", self.names[client], result.tree)
            self._record_scores(client, "local", result.scores, done)
            yield Update(client, self.problem.n_train[client], result.message)

    def _run(self, part: str, jobs: Iterable[Job]) -> Iterator[Result]:
        """The executor's results; the time until each is charged to a part, but for what moving them takes."""
        results = iter(self.executor.run(jobs))
        while True:
            before = self.executor.moved
            with self.clock.on(part):
                result = next(results, None)
            self.clock.shift(part, "move", self.executor.moved - before)
            if result is None:
                return
            yield result

    def _keep(self, kind: str, name: str, model: Tree) -> None:
        self.kept.setdefault(kind, Shelf(self.folder))[name] = model

    # --- the decision ---

    def _measure_first(self) -> None:
        """The measuring epoch of PLayer-FL for an algorithm that takes a plan; only its cost and its plan remain."""
        self._adopt(self._decide(self.scout()))
        self.clients = self._fresh_clients()
        self.measure_first = False

    def scout(self, keep: bool = False) -> list[dict[str, Any]]:
        """What the clients of the first round measure in the measuring exchange of PLayer-FL, from the common start.

        Args:
            keep: also keep the clients' trained models, in ``kept["local"]``, and report all that was measured.
        """
        sampled = sampled_clients(self.problem.seed, 0, len(self.names), self.schedule.participation)
        rnd = Round(0, "stats", sampled)
        main, work = self.algorithm, Work(float)
        self.algorithm = Scout(self.problem) if keep else PLayerFL(self.problem)
        self.executor.use(self.algorithm)
        self.clients = self._fresh_clients()
        self.algorithm.aggregate(self.server, self._exchange(rnd, work, last=False, keep=keep), rnd)
        self.algorithm = main
        self._record_work(work, variant="plan")
        measured: list[dict[str, Any]] = self.server.meta.pop(MEASURED)
        return measured

    def _decide(self, measured: list[dict[str, Any]]) -> LayerPlan:
        if self.instruments.decide is None:
            raise UsageError(f"{self.algorithm.name} decides on a plan: pass instruments, or a plan")
        plan = self.instruments.decide(
            self.problem.layers,
            measured,
            names=self.names,
            rule=self.rule,
            threshold=self.threshold,
            seed=self.problem.seed,
            data=self.data.digest,
        )
        return plan.with_shared(plan.shared, checkpoint=tree.digest(self.initial))

    def _adopt(self, plan: LayerPlan) -> None:
        self.algorithm.plan = self.algorithm.adopt(plan)
        self.server.meta["plan"] = self.algorithm.plan.to_json()
        self.executor.use(self.algorithm)
        if self.writer:
            self.algorithm.plan.save(self.writer.path / "plan.json")

    def _fresh_clients(self) -> Clients:
        return Clients(self.names, self._start, self.folder)

    def _start(self, name: str) -> State:
        """A client that has yet to take part, as the plan in force has it."""
        state = self.algorithm.start(self.initial, self.index[name])
        return State({kind: tree.clone(each) for kind, each in state.trees.items()}, state.meta)

    # --- evaluation ---

    def _finish(self, recorded: bool) -> None:
        """Fine-tune a copy of every client's model; the copies are kept beside the states, under ``personal``."""
        if not self.algorithm.finish(0):
            return
        rnd = Round(self.done, "finish", tuple(range(len(self.names))))
        work = Work(float)

        def jobs() -> Iterable[FinishJob]:
            for client, name in enumerate(self.names):
                found = self.algorithm.models(self.server, self.clients[name], rnd)
                yield FinishJob(client, self.done, found[self.algorithm.evaluates])

        for client in rnd.sampled:  # everyone fine-tunes the final model, so everyone receives it once more
            work[client, "bytes_down", ""] = self.algorithm.send(self.server, client, rnd).bytes
        for result in self._run("train" if recorded else "evaluate", jobs()):
            self._count_work(work, rnd, result)
            if result.tree is not None:
                self._keep("personal", self.names[result.client], result.tree)
        if recorded:  # what is adapted only to be evaluated is no cost of training
            self._record_work(work, variant="finish")

    def models(self, client: int) -> dict[str, Tree]:
        """The models of one client as they stand: global and/or personal, and the fine-tuned one after the end."""
        name = self.names[client]
        found = self.algorithm.models(self.server, self.clients[name], Round(self.done))
        tuned = self.kept["personal"].get(name) if "personal" in self.kept else None
        return found if tuned is None else {**found, "personal": tuned}

    def _evaluate_all(self) -> None:
        asked: deque[str] = deque()
        insides: list[Inside] = []

        def jobs() -> Iterable[ScoreJob]:
            for client in range(len(self.names)):
                for model, found in sorted(self.models(client).items()):
                    asked.append(model)
                    yield ScoreJob(client, found, ("validation", "test"), model, self.done)

        with self.clock.on("evaluate"):
            for result in self._run("evaluate", jobs()):
                self._record_scores(result.client, asked.popleft(), result.scores, self.done)
                insides += result.insides
            for inside in (*self.algorithm.insides(self.server, Round(self.done)), *insides):
                other = "" if inside.client_b is None else self.names[inside.client_b]
                columns = {"layer": inside.layer, "variant": inside.variant, "client_b": other}
                self._row(inside.metric, inside.value, self.done, inside.client, **columns)

    # --- records ---

    def _record_scores(self, client: int, model: str, scores: Mapping[str, Mapping[str, float]], done: int) -> None:
        for split, values in scores.items():
            n = len(self.data.clients[client].split(split))
            for metric, value in values.items():
                self._row(metric, value, done, client, model=model, split=split, n_samples=n)

    def _count_work(self, work: Work, rnd: Round, result: Result) -> None:
        client = result.client
        if rnd.exchange == "finish":
            phases, held = self.algorithm.finish(client), self.problem.tensors
        else:
            phases, held = self.algorithm.phases(rnd, client), self.algorithm.held(rnd, client)
        for phase in phases:
            samples = result.work.get(f"{phase.name}/samples", 0)
            steps = result.work.get(f"{phase.name}/steps", 0)
            work[client, "steps", ""] += steps
            self._steps += int(steps)
            work[client, "flops", ""] += samples * self._flops_of(phase, held)
            loss = f"{phase.name}/loss"
            for name in result.work:
                if name == loss or name.startswith(loss + "/"):
                    work[client, "train_loss", phase.name + name.removeprefix(loss)] = result.work[name]

    def _flops_of(self, phase: Phase, held: frozenset[str]) -> float:
        case = (phase.train, held)
        if case not in self._flops:
            self._flops[case] = costs.training_flops(self.site.workspace, self.data.shape, *case)
        return self._flops[case]

    def _record_work(self, work: Work, variant: str = "") -> None:
        for (client, metric, part), value in sorted(work.items()):  # not in the order in which clients answered
            self._row(metric, value, self.done, client, split="train", variant=variant or part)

    def _row(self, metric: str, value: float, done: int, client: int | None, **columns: Any) -> None:
        if client is not None:
            columns |= {"client": self.names[client], "n_train": self.problem.n_train[client]}
        columns |= {"round": done, "status": "ok" if math.isfinite(value) else "not finite"}
        self.rows.append(row(metric, value, unit=UNITS.get(metric, ""), **self.columns, **columns))
        if len(self.rows) >= BUFFER:
            self._flush()

    def _flush(self) -> None:
        if self.writer:
            with self.clock.on("save"):
                self.writer.add_rows(self.rows)
            self.rows = []

    def _note_time(self) -> None:
        record = {"round": self.done, "steps": self._steps, **self.clock.take()}
        self.pace.add(record)
        self._steps = 0
        if self.writer:
            self.writer.add_timing(record)

    def _check_finite(self) -> None:
        for name, found in self.server.trees.items():
            bad = tree.first_nonfinite(found)
            if bad is not None:
                layer = next((x.name for x in self.problem.layers if bad in x.tensors), "?")
                raise NonFiniteError(
                    f"{self.algorithm.name}, round {self.done}, server, aggregation: {bad!r} of {name!r} "
                    f"(layer {layer!r}) is not finite"
                )


__all__ = ["Decide", "Engine", "Instruments", "Schedule", "sampled_clients"]
