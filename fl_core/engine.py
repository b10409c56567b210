"""The round loop: sample, send, train, collect, aggregate, evaluate, record, save."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import islice
from typing import Any

import pandas as pd

from fl_core import rows, tree
from fl_core.algorithms import contract
from fl_core.algorithms.base import (
    Algorithm,
    Observation,
    Round,
    State,
    TaskInfo,
    Update,
)
from fl_core.algorithms.model_template import ModelTemplate, make_template
from fl_core.costs.flops import training_flops
from fl_core.data import FederatedData
from fl_core.divergence import Limit, check_finite, guessing_loss, starts_of
from fl_core.dropout import CHANCE, REPLY_LOST, TIMEOUT, draw_lost
from fl_core.errors import UsageError, warn
from fl_core.execution.client_backend import ClientBackend, LocalClients
from fl_core.execution.client_runner import ClientRunner
from fl_core.execution.requests import (
    TUNED,
    ClientReply,
    ClientRequest,
    FinetuneRequest,
    ScoreRequest,
    TrainRequest,
)
from fl_core.ledger import CostCounter, Ledger
from fl_core.loggers.base import Logger
from fl_core.models.lora import base
from fl_core.plan import LayerPlan
from fl_core.plan_selection import PlanSelection
from fl_core.progress import progress_bar
from fl_core.records.store import Checkpoint
from fl_core.records.timing import Clock
from fl_core.records.writing import Writer
from fl_core.rows import Row
from fl_core.schedule import Schedule, sampled_clients
from fl_core.stopping import BEST_ROUND, STATE, StoppingRule
from fl_core.tree import Tree

LOCAL_MODELS = 100
"""The most locally trained models in a checkpoint, for diagnoses: those of the round's first clients."""


class Engine:
    """One run of one algorithm on one federation.

    Args:
        algorithm: under the plan in force, if there is one yet. It is frozen: from here on nothing is kept on it.
        data: names and sizes of the clients; of the samples the engine reads nothing.
        client_runner: counts floating point operations, and knows the criterion; they run at ``clients``.
        clients: where the clients live.
        plan_selection: how the run comes to a plan, if it begins without one that it needs.
        columns: further ones of every row.
        on_divergence: ``note`` or ``stop``, once a client's loss is beyond the limit of :mod:`fl_core.divergence`.
        loggers: that get every round's rows once they are complete.
        stopping: ends the run before its last round; what it has seen is stored in the server's state.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        data: FederatedData,
        initial: Tree,
        client_runner: ClientRunner,
        clients: ClientBackend,
        schedule: Schedule,
        plan_selection: PlanSelection | None = None,
        *,
        columns: Mapping[str, Any] | None = None,
        writer: Writer | None = None,
        on_divergence: str = "note",
        loggers: Sequence[Logger] = (),
        stopping: StoppingRule | None = None,
    ) -> None:
        self.algorithm, self.data, self.initial = algorithm, data, initial
        self.client_runner, self.clients, self.schedule = (
            client_runner,
            clients,
            schedule,
        )
        self.plan_selection, self.writer = plan_selection or PlanSelection(), writer
        self.names = [client.name for client in data.clients]
        self.server = algorithm.server_state(tree.clone(initial))
        self.done = 0
        self.limit = Limit(
            guessing_loss(client_runner.criterion, data.n_classes), on_divergence
        )
        columns = {
            "algorithm": algorithm.name,
            "seed": self.task_info.seed,
            **(columns or {}),
        }
        flops = cache(partial(training_flops, client_runner.workspace, data.shape))
        self.ledger = Ledger(data, columns, flops, self.limit, writer, loggers)
        self.pace = self.ledger.pace  # the time of all rounds, by part
        self.stopping = stopping
        self.best: tuple[State, list[Tree]] | None = (
            None  # server and main models, without a directory
        )
        self._saved = time.monotonic()  # or begun
        self._missing: set[int] = (
            set()
        )  # who did not answer in time in the present round
        clients.begin(algorithm)

    @property
    def task_info(self) -> TaskInfo:
        """The facts of the task that the algorithm may know."""
        return self.algorithm.task_info

    def fork(self, algorithm: Algorithm) -> Engine:
        """A second engine with the same clients and start; its exchanges change nothing of this run but its timing."""
        other = Engine(
            algorithm,
            self.data,
            self.initial,
            self.client_runner,
            self.clients.fork(),
            self.schedule,
        )
        other.ledger.clock = self.clock
        other._use(algorithm)
        return other

    # --- the loop ---

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint; clients' states are read from it when they are needed."""
        self.server, self.done = checkpoint.server, checkpoint.round
        self.clients.restore(checkpoint)
        if self.stopping and STATE in self.server.meta:
            self.stopping = StoppingRule.from_json(self.server.meta[STATE])
        if self.writer:
            run = self.writer.run
            self.limit.stored = lambda: starts_of(run, self.limit.tuned)
        if "plan" in self.server.meta:
            self.algorithm = self.algorithm.with_plan(
                LayerPlan.from_json(self.server.meta["plan"])
            )

    @property
    def finished(self) -> bool:
        """True if no round is left to train, by their number or by the stopping rule."""
        return self.done == self.schedule.rounds or (
            self.stopping is not None and self.stopping.stops
        )

    @tree.one_thread()
    def run(self, progress: bool = True) -> None:
        """Run the remaining rounds, until the last one or the end by the stopping rule.

        Raises:
            NonFiniteError: training or aggregation met NaN or infinity; earlier checkpoints stay.
            DivergedError: a loss is finite and beyond the limit, and ``on_divergence`` is ``stop``.
            UsageError: a decision is needed and no instruments were given; or, before anything is trained, the
                algorithm's phases name a loss, a step or an observer that is not there, or a client has no validation
                score that the stopping rule needs.
        """
        if self.done == 0:
            self.plan_selection.check(self.algorithm)
            plan = self.plan_selection.before_training(self)
            if plan is not None:
                self._adopt(plan)
                self.clients.begin(self.algorithm)
            self._check_phases()
        self._use(self.algorithm)
        self.limit.tuned = frozenset({TUNED} if self.algorithm.finetuning(0, 0) else ())
        if self.done == 0:
            if frozen := base(self.client_runner.workspace.model):
                self.ledger.row("bytes_base", tree.n_bytes(frozen), 0, None)
            self._evaluate_all(self._finetune(recorded=False))
            self._close_round()
        label = f"{self.algorithm.name} seed {self.task_info.seed}"
        with progress_bar(
            self.schedule.end, label, "round", shown=progress, initial=self.done
        ) as bar:
            while self.done < self.schedule.end and not self.finished:
                self.step()
                bar.set_postfix_str(
                    f"{self.pace.rate:,.0f} steps/s: {self.pace.shares()}",
                    refresh=False,
                )
                bar.update()

    @tree.one_thread()
    def step(self) -> None:
        """Run one round: train, aggregate, and where due evaluate, record and save.

        In one thread: what is done here is small, and a second one would wait for a core that clients train on.
        """
        index = self.done
        sampled = sampled_clients(
            self.task_info.seed, index, len(self.names), self.schedule.participation
        )
        self.clients.forget()
        self._missing.clear()
        work = CostCounter(float)
        exchanges, due = self.algorithm.exchanges(index), self.schedule.saves(index + 1)
        keeps = due or (
            self.stopping is not None and self.schedule.evaluates(index + 1)
        )
        lost = draw_lost(
            self.task_info.seed, index, sampled, self.schedule.client_dropout
        )
        work.update({(client, REPLY_LOST, CHANCE): 1.0 for client in lost})
        for exchange in exchanges:
            rnd, last = Round(index, exchange, sampled), exchange == exchanges[-1]
            kept = sampled[:LOCAL_MODELS] if last and self.writer and keeps else ()
            self.exchange(
                rnd, work, self.schedule.splits(index + 1) if last else (), kept, lost
            )
            gone = {*lost, *self._missing}
            sampled = tuple(
                client for client in sampled if client not in gone
            )  # the round goes on without them
            plan = self.plan_selection.after_exchange(self)
            if plan is not None:
                self._adopt(plan)
        self.done += 1
        check_finite(self.algorithm, self.server, self.done, self.initial)
        self.record_work(work)
        last, evaluates = (
            self.done == self.schedule.rounds,
            self.schedule.evaluates(self.done),
        )
        untuned = (
            self._finetune(recorded=last)
            if last or evaluates or due
            else frozenset[int]()
        )
        waited = time.monotonic() - self._saved
        early = (
            0 <= waited < self.schedule.save_seconds
        )  # a clock that went back is no reason to wait
        saves = due and (self.done == self.schedule.end or not early)
        if evaluates:
            self._evaluate_all(untuned)
            saves |= self._judge_round()
        self._close_round(saves)

    def _close_round(self, saves: bool = False) -> None:
        self.ledger.flush()
        self.ledger.log()
        if self.writer and saves:
            with self.clock.charge("save"):
                self.clients.save(self.writer, self.done, self.server)
            self._saved = time.monotonic()
        self.ledger.note_time(self.done, saves)

    def exchange(
        self,
        rnd: Round,
        work: CostCounter,
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
        with self.clock.charge("aggregate"):
            replies = self._replies(
                rnd, work, splits, frozenset(keep_local), frozenset(lost)
            )
            if first := list(
                islice(replies, 1)
            ):  # who answers in time is not known before
                self.algorithm.aggregate(
                    self.server, _collect_updates(first, replies), rnd
                )
            for _ in replies:  # whatever the algorithm did not ask for still reaches the clients' states
                pass

    def _replies(
        self,
        rnd: Round,
        work: CostCounter,
        splits: tuple[str, ...],
        keep_local: frozenset[int],
        lost: frozenset[int],
    ) -> Iterator[Update]:
        """Yield the sampled clients' updates one by one, recording their numbers on the way."""

        def requests() -> Iterator[TrainRequest]:
            for client in rnd.sampled:
                with self.clock.charge("aggregate"):
                    message = self.algorithm.server_message(
                        self.server, client, rnd
                    ).clone()
                    work[client, "bytes_down", ""] += message.bytes
                yield TrainRequest(
                    client, rnd, message, splits, client in keep_local, client in lost
                )

        for reply in self._run("train", requests()):
            client = reply.client
            if reply.missing:
                work[client, REPLY_LOST, TIMEOUT] = 1.0
                self._missing.add(client)
                continue
            phases, submodel = (
                self.algorithm.phases(rnd, client),
                self.algorithm.submodel(rnd, client),
            )
            if client in lost:
                reply.work = {
                    name: value
                    for name, value in reply.work.items()
                    if "/loss" not in name
                }
                self.ledger.count(
                    work, client, phases, submodel, reply.work, rnd.index + 1
                )
                continue
            work[client, "bytes_up", ""] += reply.message.bytes
            self.ledger.count(work, client, phases, submodel, reply.work, rnd.index + 1)
            self._record_scores(reply, rnd.index + 1)
            yield Update(client, self.task_info.weight(client), reply.message)

    def _run(
        self, part: str, requests: Iterable[ClientRequest]
    ) -> Iterator[ClientReply]:
        """Yield the clients' replies, and charge the waiting time to a part of the run, moving data apart."""
        replies = self.clients.run(requests)
        while True:
            before = self.clients.transfer_seconds
            with self.clock.charge(part):
                reply = next(replies, None)
            self.clock.shift(part, "move", self.clients.transfer_seconds - before)
            if reply is None:
                return
            yield reply

    # --- the algorithm ---

    def _check_phases(self) -> None:
        """Refuse phases of the first exchange or of fine-tuning that name a loss, step or tree that does not exist."""
        phases = self.algorithm.phases(
            Round(0, self.algorithm.exchanges(0)[0], (0,)), 0
        )
        phases += self.algorithm.finetuning(self.schedule.rounds, 0)
        contract.check_phases(self.algorithm, phases, self.client_runner.makers)

    def _use(self, algorithm: Algorithm) -> None:
        contract.freeze(algorithm)
        self.algorithm = algorithm
        self.clients.use(algorithm)

    def _adopt(self, plan: LayerPlan) -> None:
        """Continue with the algorithm rebuilt under the plan that was decided on."""
        in_force = self.algorithm.resolve_plan(plan)
        for note in in_force.notes():
            warn(note)
        self._use(self.algorithm.with_plan(in_force))
        self.server.meta["plan"] = in_force.to_json()
        if self.writer:
            in_force.save(self.writer.path / "plan.json")

    # --- evaluation ---

    def _offer(self, client: int, rnd: Round) -> ModelTemplate:
        return make_template(
            self.algorithm, self.server, self.clients.visible_state(client), rnd
        )

    def _offers(
        self, clients: Iterable[int], rnd: Round, sent: dict[int, int]
    ) -> Iterator[tuple[int, ModelTemplate]]:
        """Yield what each client makes its models of, and note its bytes in ``sent``."""
        for client in clients:
            made = self._offer(client, rnd)
            sent[client] = made.bytes
            yield client, made

    def _finetune(self, recorded: bool) -> frozenset[int]:
        """Let every client fine-tune a copy of its model if the algorithm asks for it now, and keep it.

        Returns:
            Who did not answer in time.
        """
        untuned: set[int] = set()
        if not self.algorithm.finetuning(self.done, 0):
            return frozenset()
        rnd = Round(self.done, "finish", tuple(range(len(self.names))))
        work = CostCounter(float)
        sent: dict[int, int] = {}
        offers = self._offers(rnd.sampled, rnd, sent)
        asked = (
            FinetuneRequest(k, self.done, each, self.algorithm.evaluates)
            for k, each in offers
        )
        for client in (
            rnd.sampled
        ):  # everyone fine-tunes the final model, so everyone receives it once more
            work[client, "bytes_down", ""] = self.algorithm.server_message(
                self.server, client, rnd
            ).bytes
        for reply in self._run("train" if recorded else "evaluate", asked):
            if reply.missing:
                untuned.add(reply.client)
                continue
            phases = self.algorithm.finetuning(self.done, reply.client)
            self.ledger.count(
                work,
                reply.client,
                phases,
                self.task_info.tensors,
                reply.work,
                self.done,
            )
        if not recorded:
            self._record_sent(sent, variant="finish")
        self.record_work(
            work, variant="finish", rows=recorded
        )  # what is tuned to be evaluated is no cost of training
        return frozenset(untuned)

    def models(self, client: int) -> Mapping[str, Tree]:
        """The present models of one client: global and/or personal, and the fine-tuned one after the end.

        Raises:
            UsageError: the backend keeps the clients' models elsewhere.
        """
        if not isinstance(self.clients, LocalClients):
            raise UsageError(
                f"the models of {self.names[client]!r} must be in this process; got a remote backend."
            )
        return self.clients.models(
            client, self._offer(client, Round(self.done)), self.done
        )

    def _evaluate_all(self, untuned: frozenset[int]) -> None:
        """Score every client's models, except the personal models of ``untuned`` clients."""
        seen: list[Observation] = []
        clients = [client for client in range(len(self.names)) if client not in untuned]
        sent: dict[int, int] = {}
        asked = (
            ScoreRequest(k, self.done, each)
            for k, each in self._offers(clients, Round(self.done), sent)
        )
        with self.clock.charge("evaluate"):
            for client in sorted(untuned):
                self.ledger.row(
                    REPLY_LOST, 1.0, self.done, client, split="test", variant=TIMEOUT
                )
            for reply in self._run("evaluate", asked):
                if reply.missing:
                    self.ledger.row(
                        REPLY_LOST,
                        1.0,
                        self.done,
                        reply.client,
                        split="test",
                        variant=TIMEOUT,
                    )
                self._record_scores(reply, self.done)
                seen += reply.observations
            self._record_sent(sent)
            for each in (
                *self.algorithm.observations(self.server, Round(self.done)),
                *seen,
            ):
                other = "" if each.client_b is None else self.names[each.client_b]
                columns = {
                    "layer": each.layer,
                    "variant": each.variant,
                    "client_b": other,
                }
                self.ledger.row(
                    each.metric, each.value, self.done, each.client, **columns
                )

    # --- records ---

    @property
    def rows(self) -> list[Row]:
        """The rows that are not yet in a run directory."""
        return self.ledger.rows

    def to_frame(self) -> pd.DataFrame:
        """Return the rows of a run that is not written to a directory as a tidy table."""
        return rows.frame(self.rows)

    @property
    def clock(self) -> Clock:
        """The clock that charges time to parts of the run."""
        return self.ledger.clock

    def record_work(
        self, work: CostCounter, variant: str = "", rows: bool = True
    ) -> None:
        """Count the steps of local training, and record rows of its cost."""
        self.ledger.work(work, self.done, variant, rows)

    def _record_sent(self, sent: Mapping[int, int], variant: str = "") -> None:
        """Record the bytes of models that were sent to be evaluated."""
        for client, count in sent.items():
            self.ledger.row(
                "bytes_evaluation", count, self.done, client, variant=variant
            )

    def _record_scores(self, reply: ClientReply, done: int) -> None:
        for model, scores in reply.scores.items():
            self.ledger.scores(reply.client, model, scores, done)
            if self.stopping and "validation" in scores:
                n_train = len(self.data.clients[reply.client].train)
                self.stopping.take(
                    done, model, scores["validation"], self.names[reply.client], n_train
                )

    def _judge_round(self) -> bool:
        """Put the round's scores to the stopping rule; returns whether a checkpoint is due.

        One is due at the end, and after the best round so far of some model.
        """
        if self.stopping is None:
            return False
        self.stopping.close(self.done)
        self.server.meta[STATE] = self.stopping.to_json()
        best = self.stopping.best
        if (
            self.writer is None
            and best.get(self.stopping.main) == self.done
            and isinstance(self.clients, LocalClients)
        ):
            models = [
                self.models(client)[self.stopping.main]
                for client in range(len(self.names))
            ]
            self.best = self.server.clone(), [tree.clone(model) for model in models]
        for model, at in best.items() if self.finished else ():
            columns = {
                "model": model,
                "split": "validation",
                "estimator": self.stopping.description,
            }
            self.ledger.row(BEST_ROUND, at, self.done, None, **columns)
        return self.finished or self.done in best.values()


def _collect_updates(first: list[Update], others: Iterator[Update]) -> Iterator[Update]:
    """All updates in order, none of them kept here."""
    yield first.pop()
    yield from others


__all__ = ["Engine", "Schedule", "sampled_clients"]
