"""The round loop: sample, send, train, collect, aggregate, evaluate, record, save."""

from __future__ import annotations

import math
import warnings
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from tqdm.auto import tqdm

from fl_core import costs, tree
from fl_core.algorithms import contract
from fl_core.algorithms.base import Algorithm, Observation, Problem, Round, State, Update
from fl_core.data import FederatedData
from fl_core.decision import Decision
from fl_core.divergence import DIVERGENCE, Limit, check_finite, guessing, starts_of
from fl_core.dropout import REPLY_LOST
from fl_core.execution.client_runner import ClientRunner, FinetuneJob, Job, Result, ScoreJob, TrainJob
from fl_core.execution.executors import Executor
from fl_core.execution.spilling import ClientStates, SpillingTrees
from fl_core.loggers.base import Logger
from fl_core.plan import LayerPlan
from fl_core.records.store import Checkpoint
from fl_core.records.timing import Clock, Pace
from fl_core.records.writing import Writer
from fl_core.rows import Row, row
from fl_core.schedule import Schedule, sampled_clients
from fl_core.scores import why_missing
from fl_core.training.local import Phase
from fl_core.tree import Tree

Work = defaultdict[tuple[int, str, str], float]  # (client, metric, variant) -> value
BUFFER = 10_000  # rows that wait for the end of a round before they are written
UNITS = {"bytes_down": "byte", "bytes_up": "byte", "flops": "FLOP"}


class Engine:
    """One run of one algorithm on one federation.

    Args:
        algorithm: under the plan in force, if there is one yet. It is frozen: from here on nothing is kept on it.
        client_runner: of this process; ``executor`` may run clients in others.
        decision: how the run comes to a plan, if it begins without one that it needs.
        columns: further ones of every row.
        on_divergence: ``note`` or ``stop``, once a client's loss is beyond the limit of :mod:`fl_core.divergence`.
        loggers: that get every round's rows once they are complete.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        data: FederatedData,
        initial: Tree,
        client_runner: ClientRunner,
        executor: Executor,
        schedule: Schedule,
        decision: Decision | None = None,
        *,
        columns: Mapping[str, Any] | None = None,
        writer: Writer | None = None,
        on_divergence: str = "note",
        loggers: Sequence[Logger] = (),
    ) -> None:
        self.algorithm, self.data, self.initial = algorithm, data, initial
        self.client_runner, self.executor, self.schedule = client_runner, executor, schedule
        self.decision, self.writer = decision or Decision(), writer
        self.loggers, self._unlogged = loggers, list[Row]()
        self.columns = {"algorithm": algorithm.name, "seed": self.problem.seed, **(columns or {})}
        self.names = [client.name for client in data.clients]
        self.server = algorithm.server_state(tree.clone(initial))
        self.index = {name: client for client, name in enumerate(self.names)}
        self.folder = writer.path if writer else None
        self.clients = self._fresh_clients()
        self.kept: dict[str, SpillingTrees] = {}  # local and fine-tuned models of the current round
        self.rows: list[Row] = []
        self.done = 0
        self.clock, self.pace = Clock(), Pace()
        self.limit = Limit(guessing(client_runner.criterion, data.n_classes), on_divergence)
        self._steps = 0  # of the current round
        self._flops: dict[tuple[frozenset[str], ...], float] = {}

    @property
    def problem(self) -> Problem:
        """What the algorithm may know of the task."""
        return self.algorithm.problem

    def beside(self, algorithm: Algorithm) -> Engine:
        """A second engine with the same clients and start; its exchanges change nothing of this run but its timing."""
        other = Engine(algorithm, self.data, self.initial, self.client_runner, self.executor, self.schedule)
        other.folder, other.clock = self.folder, self.clock
        other._use(algorithm)
        return other

    # --- the loop ---

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint; clients' states are read from it when they are needed."""
        self.server, self.done = checkpoint.server, checkpoint.round
        self.clients = ClientStates(self.names, checkpoint.clients.__getitem__, self.folder)
        self.clients.changed.clear()
        if self.writer:
            self.limit.stored = partial(starts_of, self.writer.run)
        for kind, models in checkpoint.models.items():
            for name in models:
                self._keep(kind, name, models[name])
        if "plan" in self.server.meta:
            self.algorithm = self.algorithm.with_plan(LayerPlan.from_json(self.server.meta["plan"]))

    @tree.one_thread()
    def run(self, progress: bool = True) -> None:
        """Run all remaining rounds.

        Raises:
            NonFiniteError: training or aggregation met NaN or infinity; earlier checkpoints stay.
            DivergedError: a loss is finite and beyond the limit, and ``on_divergence`` is ``stop``.
            UsageError: a decision is needed and no instruments were given; or, before anything is trained, the
                algorithm's phases name a loss, a step or an observer that is not there.
        """
        if self.done == 0:
            self.decision.check(self.algorithm)
            plan = self.decision.before(self)
            if plan is not None:
                self._adopt(plan)
                self.clients = self._fresh_clients()
            self._check_phases()
        self._use(self.algorithm)
        if self.done == 0:
            self._finetune(recorded=False)
            self._evaluate_all()
            self._flush()
            self._log()
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
        """Run one round: train, aggregate, and where due evaluate, record and save.

        In one thread: what is done here is small, and a second one would wait for a core that clients train on.
        """
        index = self.done
        sampled = sampled_clients(self.problem.seed, index, len(self.names), self.schedule.participation)
        self.kept = {}
        work = Work(float)
        exchanges, saves = self.algorithm.exchanges(index), self.schedule.saves(index + 1)
        lost = self.schedule.dropout.lost(self.problem.seed, index, sampled)
        work.update({(client, REPLY_LOST, cause): 1.0 for client, cause in lost.items()})
        for exchange in exchanges:
            rnd, last = Round(index, exchange, sampled), exchange == exchanges[-1]
            kept = sampled[: self.schedule.local_models] if last and self.writer and saves else ()
            self.exchange(rnd, work, self.schedule.splits(index + 1) if last else (), kept, lost)
            sampled = tuple(client for client in sampled if client not in lost)  # the round goes on without the others
            plan = self.decision.amid(self)
            if plan is not None:
                self._adopt(plan)
        self.done += 1
        contract.check_unchanged(self.algorithm)
        check_finite(self.algorithm, self.server, self.done)
        self.record_work(work)
        last, evaluates = self.done == self.schedule.rounds, self.schedule.evaluates(self.done)
        if last or evaluates or saves:
            self._finetune(recorded=last)
        if evaluates:
            self._evaluate_all()
        self._flush()
        self._log()
        if self.writer and saves:
            with self.clock.on("save"):
                checkpoint = Checkpoint(self.done, self.server, self.clients, self.kept)
                self.writer.checkpoint(checkpoint, self.clients.changed)
                self.clients.changed.clear()
        self._note_time()

    def exchange(
        self,
        rnd: Round,
        work: Work,
        splits: tuple[str, ...] = (),
        keep_local: tuple[int, ...] = (),
        lost: Collection[int] = (),
    ) -> None:
        """Run one exchange: send to the sampled clients, train them, and aggregate their replies as they come.

        Without any reply the server keeps its state.

        Args:
            work: what it costs is added here.
            splits: on which locally trained models are scored.
            keep_local: the clients whose locally trained models are kept.
            lost: the clients whose replies do not arrive. Their training costs what it costs, and leaves no trace.
        """
        with self.clock.on("aggregate"):
            replies = self._replies(rnd, work, splits, frozenset(keep_local), frozenset(lost))
            if not set(rnd.sampled) <= set(lost):
                self.algorithm.aggregate(self.server, replies, rnd)
            for _ in replies:  # whatever the algorithm did not ask for still reaches the clients' states
                pass

    def _replies(
        self, rnd: Round, work: Work, splits: tuple[str, ...], keep_local: frozenset[int], lost: frozenset[int]
    ) -> Iterator[Update]:
        """Yield the sampled clients' updates one by one, storing their states and recorded numbers on the way."""

        def jobs() -> Iterable[TrainJob]:
            for client in rnd.sampled:
                with self.clock.on("aggregate"):
                    message = self.algorithm.send(self.server, client, rnd)
                    message = message.clone()
                    work[client, "bytes_down", ""] += message.bytes
                    job = TrainJob(client, rnd, message, self.clients[self.names[client]], splits, client in keep_local)
                    if client in lost:  # what hooks write into the state is lost with the reply
                        job = TrainJob(client, rnd, message, job.state.clone())
                yield job

        for result in self._run("train", jobs()):
            client = result.client
            phases, submodel = self.algorithm.phases(rnd, client), self.algorithm.submodel(rnd, client)
            if client in lost:
                result.work = {name: value for name, value in result.work.items() if "/loss" not in name}
                self._count_work(work, phases, submodel, result, rnd.index + 1)
                continue
            self.clients[self.names[client]] = result.state
            work[client, "bytes_up", ""] += result.message.bytes
            self._count_work(work, phases, submodel, result, rnd.index + 1)
            if result.tree is not None:
                self._keep("local", self.names[client], result.tree)
            self._record_scores(client, "local", result.scores, rnd.index + 1)
            yield Update(client, self.problem.weight(client), result.message)

    def _run(self, part: str, jobs: Iterable[Job]) -> Iterator[Result]:
        """Yield the executor's results, and charge the waiting time to a part of the run, moving data apart."""
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
        self.kept.setdefault(kind, SpillingTrees(self.folder))[name] = model

    # --- the algorithm ---

    def _check_phases(self) -> None:
        """Refuse phases of the first exchange or of fine-tuning that name a loss, step or tree that does not exist."""
        phases = self.algorithm.phases(Round(0, self.algorithm.exchanges(0)[0], (0,)), 0)
        phases += self.algorithm.finetuning(self.schedule.rounds, 0)
        contract.check_phases(self.algorithm, phases, self.client_runner.makers)

    def _use(self, algorithm: Algorithm) -> None:
        contract.freeze(algorithm)
        self.algorithm = algorithm
        self.executor.use(algorithm)

    def _adopt(self, plan: LayerPlan) -> None:
        """Continue with the algorithm rebuilt under the plan that was decided on."""
        in_force = self.algorithm.adopt(plan)
        for note in in_force.notes():
            warnings.warn(note, stacklevel=3)
        self._use(self.algorithm.with_plan(in_force))
        self.server.meta["plan"] = in_force.to_json()
        if self.writer:
            in_force.save(self.writer.path / "plan.json")

    def _fresh_clients(self) -> ClientStates:
        return ClientStates(self.names, self._start, self.folder)

    def _start(self, name: str) -> State:
        """The state of a client before its first round, under the present plan."""
        return self.algorithm.client_state(self.initial, self.index[name]).clone()

    # --- evaluation ---

    def _finetune(self, recorded: bool) -> None:
        """Fine-tune a copy of every client's model if the algorithm asks for it now, and keep it under ``personal``."""
        if not self.algorithm.finetuning(self.done, 0):
            return
        rnd = Round(self.done, "finish", tuple(range(len(self.names))))
        work = Work(float)

        def jobs() -> Iterable[FinetuneJob]:
            for client, name in enumerate(self.names):
                models = self.algorithm.models(self.server, self.clients[name], rnd)
                yield FinetuneJob(client, self.done, models[self.algorithm.evaluates])

        for client in rnd.sampled:  # everyone fine-tunes the final model, so everyone receives it once more
            work[client, "bytes_down", ""] = self.algorithm.send(self.server, client, rnd).bytes
        for result in self._run("train" if recorded else "evaluate", jobs()):
            phases = self.algorithm.finetuning(self.done, result.client)
            self._count_work(work, phases, self.problem.tensors, result, self.done)
            if result.tree is not None:
                self._keep("personal", self.names[result.client], result.tree)
        self.record_work(work, variant="finish", rows=recorded)  # what is tuned to be evaluated is no cost of training

    def models(self, client: int) -> dict[str, Tree]:
        """The present models of one client: global and/or personal, and the fine-tuned one after the end."""
        name = self.names[client]
        models = self.algorithm.models(self.server, self.clients[name], Round(self.done))
        tuned = self.kept["personal"].get(name) if "personal" in self.kept else None
        return models if tuned is None else {**models, "personal": tuned}

    def _evaluate_all(self) -> None:
        asked: deque[str] = deque()
        seen: list[Observation] = []

        def jobs() -> Iterable[ScoreJob]:
            for client in range(len(self.names)):
                for name, model in sorted(self.models(client).items()):
                    asked.append(name)
                    yield ScoreJob(client, model, ("validation", "test"), name, self.done)

        with self.clock.on("evaluate"):
            for result in self._run("evaluate", jobs()):
                self._record_scores(result.client, asked.popleft(), result.scores, self.done)
                seen += result.observations
            for each in (*self.algorithm.observations(self.server, Round(self.done)), *seen):
                other = "" if each.client_b is None else self.names[each.client_b]
                columns = {"layer": each.layer, "variant": each.variant, "client_b": other}
                self._row(each.metric, each.value, self.done, each.client, **columns)

    # --- records ---

    def _record_scores(self, client: int, model: str, scores: Mapping[str, Mapping[str, float]], done: int) -> None:
        for split, values in scores.items():
            n = len(self.data.clients[client].split(split))
            for metric, value in values.items():
                self._row(metric, value, done, client, model=model, split=split, n_samples=n)
            if split == "validation" and done:
                self._check_loss(values["loss"], done, client, model=model, split=split)
            elif split == "validation":
                self.limit.begin(self.names[client], values["loss"])

    def _check_loss(self, loss: float, done: int, client: int, **columns: Any) -> None:
        """Record a loss that is finite and beyond the limit, and note it or stop."""
        reason = self.limit.exceeded(self.names[client], loss)
        if reason:
            self._row(DIVERGENCE, math.nan, done, client, status=f"diverged: {reason}", **columns)
            self._flush()
            self.limit.tell(f"{self.algorithm.name}, round {done}, client {self.names[client]!r}", reason)

    def _count_work(
        self, work: Work, phases: Iterable[Phase], submodel: frozenset[str], result: Result, done: int
    ) -> None:
        client = result.client
        for phase in phases:
            samples = result.work.get(f"{phase.name}/samples", 0)
            steps = result.work.get(f"{phase.name}/steps", 0)
            work[client, "steps", ""] += steps
            work[client, "flops", ""] += samples * self._flops_of(phase, submodel)
            loss = f"{phase.name}/loss"
            for name in result.work:
                if name == loss or name.startswith(loss + "/"):
                    work[client, "train_loss", phase.name + name.removeprefix(loss)] = result.work[name]
            if loss in result.work:
                self._check_loss(result.work[loss], done, client, split="train", variant=phase.name)

    def _flops_of(self, phase: Phase, submodel: frozenset[str]) -> float:
        case = (phase.train, submodel)
        if case not in self._flops:
            self._flops[case] = costs.training_flops(self.client_runner.workspace, self.data.shape, *case)
        return self._flops[case]

    def record_work(self, work: Work, variant: str = "", rows: bool = True) -> None:
        """Count the steps of local training, and record rows of its cost."""
        self._steps += sum(int(value) for (_, metric, _), value in work.items() if metric == "steps")
        if not rows:
            return
        for (client, metric, part), value in sorted(work.items()):  # not in the order in which clients answered
            self._row(metric, value, self.done, client, split="train", variant=variant or part)

    def _row(self, metric: str, value: float, done: int, client: int | None, **columns: Any) -> None:
        if client is not None:
            columns |= {"client": self.names[client], "n_train": self.problem.n_train[client]}
        columns = {"round": done, "status": why_missing(metric, value), **columns}
        self.rows.append(row(metric, value, unit=UNITS.get(metric, ""), **self.columns, **columns))
        if self.loggers:
            self._unlogged.append(self.rows[-1])
        if len(self.rows) >= BUFFER:
            self._flush()

    def _flush(self) -> None:
        if self.writer:
            with self.clock.on("save"):
                self.writer.add_rows(self.rows)
            self.rows = []

    def _log(self) -> None:
        for logger in self.loggers:
            logger.log(self._unlogged)
        self._unlogged = []

    def _note_time(self) -> None:
        record = {"round": self.done, "steps": self._steps, **self.clock.take()}
        self.pace.add(record)
        self._steps = 0
        if self.writer:
            self.writer.add_timing(record)


__all__ = ["Engine", "Schedule", "sampled_clients"]
