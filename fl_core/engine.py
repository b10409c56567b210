"""The round loop: sample, send, train, collect, aggregate, evaluate, record, save."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from tqdm.auto import tqdm

from fl_core import costs, seeds, tree
from fl_core.algorithms.base import Algorithm, Problem, Round, State, Update
from fl_core.algorithms.partial import MEASURED, PLayerFL
from fl_core.data import FederatedData
from fl_core.errors import NonFiniteError, UsageError
from fl_core.executors import Executor
from fl_core.layers import Layer
from fl_core.local import Observer, Phase
from fl_core.plan import LayerPlan
from fl_core.rows import Row, row
from fl_core.site import FinishJob, Result, ScoreJob, Site, TrainJob
from fl_core.store import Checkpoint, Writer
from fl_core.tree import Tree

Work = defaultdict[tuple[int, str, str], float]  # (client, metric, variant) -> value
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


@dataclass
class Schedule:
    """When things happen, in rounds."""

    rounds: int
    participation: float
    eval_every: int
    checkpoint_every: int

    def evaluates(self, done: int) -> bool:
        """Whether all clients are evaluated after this many rounds."""
        return done % self.eval_every == 0 or done == self.rounds

    def saves(self, done: int) -> bool:
        """Whether a checkpoint is written after this many rounds."""
        return done % self.checkpoint_every == 0 or done == self.rounds


def sampled_clients(seed: int, index: int, count: int, participation: float) -> tuple[int, ...]:
    """The clients of a round, ascending: max(1, floor(participation x count)) of them, the same for all algorithms."""
    take = max(1, int(participation * count + 1e-9))
    draw = seeds.numpy_generator(seed, "sample", index)
    return tuple(sorted(int(c) for c in draw.choice(count, size=take, replace=False)))


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
        self.server = State({"model": tree.clone(initial)})
        self.clients = [] if measure_first else self._fresh_clients(self.algorithm)
        self.kept: dict[str, dict[str, Tree]] = {}  # local and fine-tuned models of the current round
        self.rows: list[Row] = []
        self.done = 0
        self._flops: dict[frozenset[str], float] = {}
        self._seconds: dict[str, float] = defaultdict(float)

    # --- the loop ---

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint."""
        self.server, self.done = checkpoint.server, checkpoint.round
        self.clients = [checkpoint.clients[name] for name in self.names]
        self.kept = checkpoint.models
        if "plan" in self.server.meta:
            self.algorithm.plan = LayerPlan.from_json(self.server.meta["plan"])
            self.measure_first = False

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
            self._evaluate_all()
            self._flush()
        label = f"{self.algorithm.name} seed {self.problem.seed}"
        bar = tqdm(total=self.schedule.rounds, initial=self.done, desc=label, unit="round", disable=not progress)
        with bar:
            while self.done < self.schedule.rounds:
                self._round()
                bar.update()

    def _round(self) -> None:
        index = self.done
        sampled = sampled_clients(self.problem.seed, index, len(self.names), self.schedule.participation)
        self.kept = {}
        work = Work(float)
        exchanges = self.algorithm.exchanges(index)
        for exchange in exchanges:
            rnd = Round(index, exchange, sampled)
            with self._timed("train"):
                replies = self._exchange(rnd, work, last=exchange == exchanges[-1])
                self.algorithm.aggregate(self.server, replies, rnd)
                for _ in replies:  # whatever the algorithm did not ask for still reaches the clients' states
                    pass
            if self.algorithm.decides and MEASURED in self.server.meta:
                self._adopt(self._decide(self.server.meta.pop(MEASURED)))
                for client in set(range(len(self.names))) - set(sampled):  # they have yet to keep what became local
                    self.clients[client] = self.algorithm.start(tree.clone(self.initial), client)
        self.done += 1
        self._check_finite()
        self._record_work(work)
        if self.done == self.schedule.rounds:
            with self._timed("finish"):
                self._finish()
        if self.schedule.evaluates(self.done):
            with self._timed("evaluate"):
                self._evaluate_all()
        self._flush()
        if self.writer and self.schedule.saves(self.done):
            with self._timed("save"):
                clients = dict(zip(self.names, self.clients, strict=True))
                self.writer.checkpoint(Checkpoint(self.done, self.server, clients, self.kept))
        if self.writer:
            self.writer.add_timing({"round": self.done, **self._seconds})
        self._seconds.clear()

    def _exchange(
        self, rnd: Round, work: Work, last: bool, tally: Callable[[Result], None] | None = None
    ) -> Iterator[Update]:
        """Send, run the clients, take their states and records in, and hand their updates on, one at a time."""
        done = rnd.index + 1
        keep = last and self.schedule.saves(done)
        splits = ("validation", "test") if self.schedule.evaluates(done) else ("validation",)

        def jobs() -> Iterable[TrainJob]:
            for client in rnd.sampled:
                message = self.algorithm.send(self.server, client, rnd)
                message = message.clone()
                work[client, "bytes_down", ""] += message.bytes
                yield TrainJob(client, rnd, message, self.clients[client], splits if last else (), keep)

        for result in self.executor.run(jobs()):
            client = result.client
            self.clients[client] = result.state
            work[client, "bytes_up", ""] += result.message.bytes
            self._count_work(work, rnd, result)
            if result.tree is not None:
                self.kept.setdefault("local", {})[self.names[client]] = result.tree
            self._record_scores(client, "local", result.scores, done)
            yield Update(client, self.problem.n_train[client], result.message)

    # --- the decision ---

    def _measure_first(self) -> None:
        """The measuring epoch of PLayer-FL for an algorithm that takes a plan; only its cost and its plan remain."""
        scout = PLayerFL(self.problem, None)
        self.executor.use(scout)
        sampled = sampled_clients(self.problem.seed, 0, len(self.names), self.schedule.participation)
        rnd = Round(0, "stats", sampled)
        main, work = self.algorithm, Work(float)
        self.algorithm = scout
        self.clients = self._fresh_clients(scout)
        scout.aggregate(self.server, self._exchange(rnd, work, last=False), rnd)
        self.algorithm = main
        self._record_work(work, variant="plan")
        self._adopt(self._decide(self.server.meta.pop(MEASURED)))
        self.clients = self._fresh_clients(main)
        self.measure_first = False

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

    def _fresh_clients(self, algorithm: Algorithm) -> list[State]:
        return [algorithm.start(tree.clone(self.initial), c) for c in range(len(self.names))]

    # --- evaluation ---

    def _finish(self) -> None:
        """Fine-tune a copy of every client's model; the copies are kept beside the states, under ``personal``."""
        if not self.algorithm.finish(0):
            return
        rnd = Round(self.done, "finish", tuple(range(len(self.names))))
        models = {c: self.algorithm.models(self.server, state, rnd) for c, state in enumerate(self.clients)}
        jobs = (FinishJob(c, self.done, models[c][self.algorithm.evaluates]) for c in rnd.sampled)
        work = Work(float)
        for client in rnd.sampled:  # everyone fine-tunes the final model, so everyone receives it once more
            work[client, "bytes_down", ""] = self.algorithm.send(self.server, client, rnd).bytes
        for result in self.executor.run(jobs):
            self._count_work(work, rnd, result)
            if result.tree is not None:
                self.kept.setdefault("personal", {})[self.names[result.client]] = result.tree
        self._record_work(work, variant="finish")

    def models(self, client: int) -> dict[str, Tree]:
        """The models of one client as they stand: global and/or personal, and the fine-tuned one after the end."""
        found = self.algorithm.models(self.server, self.clients[client], Round(self.done))
        tuned = self.kept.get("personal", {}).get(self.names[client])
        return found if tuned is None else {**found, "personal": tuned}

    def _evaluate_all(self) -> None:
        asked = [(c, name, t) for c in range(len(self.names)) for name, t in sorted(self.models(c).items())]
        jobs = (ScoreJob(client, t, ("validation", "test"), name, self.done) for client, name, t in asked)
        for (client, name, _), result in zip(asked, self.executor.run(jobs), strict=True):
            self._record_scores(client, name, result.scores, self.done)

    # --- records ---

    def _record_scores(self, client: int, model: str, scores: Mapping[str, Mapping[str, float]], done: int) -> None:
        for split, values in scores.items():
            n = len(self.data.clients[client].split(split))
            for metric, value in values.items():
                self._row(metric, value, done, client=self.names[client], model=model, split=split, n_samples=n)

    def _count_work(self, work: Work, rnd: Round, result: Result) -> None:
        client = result.client
        phases = self.algorithm.finish(client) if rnd.exchange == "finish" else self.algorithm.phases(rnd, client)
        for phase in phases:
            samples = result.work.get(f"{phase.name}/samples", 0)
            work[client, "steps", ""] += result.work.get(f"{phase.name}/steps", 0)
            work[client, "flops", ""] += samples * self._flops_of(phase)
            if f"{phase.name}/loss" in result.work:
                work[client, "train_loss", phase.name] = result.work[f"{phase.name}/loss"]

    def _flops_of(self, phase: Phase) -> float:
        if phase.train not in self._flops:
            self._flops[phase.train] = costs.training_flops(self.site.workspace, self.data.shape, phase.train)
        return self._flops[phase.train]

    def _record_work(self, work: Work, variant: str = "") -> None:
        for (client, metric, part), value in sorted(work.items()):  # not in the order in which clients answered
            self._row(metric, value, self.done, client=self.names[client], split="train", variant=variant or part)

    def _row(self, metric: str, value: float, done: int, *, client: str, **columns: Any) -> None:
        n_train = self.problem.n_train[self.names.index(client)]
        self.rows.append(
            row(
                metric,
                value,
                round=done,
                client=client,
                n_train=n_train,
                unit=UNITS.get(metric, ""),
                **self.columns,
                **columns,
            )
        )

    def _flush(self) -> None:
        if self.writer:
            self.writer.add_rows(self.rows)
            self.rows = []

    def _check_finite(self) -> None:
        for name, found in self.server.trees.items():
            bad = tree.first_nonfinite(found)
            if bad is not None:
                layer = next((x.name for x in self.problem.layers if bad in x.tensors), "?")
                raise NonFiniteError(
                    f"{self.algorithm.name}, round {self.done}, server, aggregation: {bad!r} of {name!r} "
                    f"(layer {layer!r}) is not finite"
                )

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._seconds[name] += time.perf_counter() - began


__all__ = ["Decide", "Engine", "Instruments", "Schedule", "sampled_clients"]
