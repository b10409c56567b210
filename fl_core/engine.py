"""The round: sample, send, train, aggregate, evaluate. Whatever records, stops or saves listens to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar

from fl_core import tree
from fl_core.algorithms import contract
from fl_core.algorithms.base import Algorithm, Round, TaskInfo, Update
from fl_core.client_runner import SCORED, FinetuneRequest, ScoreRequest, TrainRequest
from fl_core.clients import LocalClients
from fl_core.data import FederatedData
from fl_core.errors import warn
from fl_core.plan import LayerPlan
from fl_core.records.store import Checkpoint
from fl_core.stopping import EVALUATE, FINISH, Listener, Schedule, sampled_clients
from fl_core.tree import Tree

LOCAL_MODELS = 100
"""The most locally trained models in a checkpoint, for diagnoses: those of the round's first clients."""
Heard = TypeVar("Heard", bound=Listener)


class Engine:
    """One run of one algorithm on one federation.

    Args:
        algorithm: under the plan in force, if there is one yet. It is frozen from here on.
        data: names and sizes of the clients. The engine reads none of their samples.
        initial: the model before the first round.
        clients: where the clients live.
        listeners: what records, stops and saves, in the order in which it hears.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        data: FederatedData,
        initial: Tree,
        clients: LocalClients,
        schedule: Schedule,
        listeners: Sequence[Listener] = (),
    ) -> None:
        self.algorithm, self.data, self.initial = algorithm, data, initial
        self.clients, self.schedule, self.listeners = clients, schedule, listeners
        self.names = [client.name for client in data.clients]
        self.server = algorithm.server_state(tree.clone(initial))
        self.done = 0
        self.stopped = False
        clients.begin(algorithm)

    @property
    def task_info(self) -> TaskInfo:
        """The facts of the task that the algorithm may know."""
        return self.algorithm.task_info

    @property
    def finished(self) -> bool:
        """True if no round is left to train, by their number or by the stopping rule."""
        return self.done == self.schedule.rounds or self.stopped

    @tree.one_thread()
    def run(self) -> None:
        """Run the remaining rounds, until the last one or the end by the stopping rule.

        Raises:
            NonFiniteError: training or aggregation met NaN or infinity; earlier checkpoints stay.
            UsageError: a decision is needed and no instruments were given, or a client has no validation score that
                the stopping rule needs.
        """
        self.use(self.algorithm)
        self.tell("before_run")
        if self.done == 0:
            self.tune()
            self.evaluate()
            self.tell("after_round")
        while self.done < self.schedule.end and not self.finished:
            self.step()

    @tree.one_thread()
    def step(self) -> None:
        """Run one round: train, aggregate, and evaluate where due.

        In one thread: what is done here is small, and a second one would wait for a core that clients train on.
        """
        info, schedule, done = self.task_info, self.schedule, self.done + 1
        exchanges = self.algorithm.exchanges(self.done)
        self.clients.forget()
        sampled = sampled_clients(
            info.seed, self.done, len(self.names), schedule.participation
        )
        for exchange in exchanges:
            last = exchange == exchanges[-1]
            score = SCORED if last and schedule.evaluates(done) else ()
            kept = LOCAL_MODELS if last and schedule.keeps_local(done) else 0
            rnd = Round(self.done, exchange, sampled)
            sampled = self.exchange(rnd, score, sampled[:kept])
        self.done = done
        self.tell("after_training")
        if schedule.evaluates(done) or schedule.saves(done):
            self.tune()
        if schedule.evaluates(done):
            self.evaluate()
        self.tell("after_round")

    def exchange(
        self,
        rnd: Round,
        score: tuple[str, ...] = (),
        keep: Sequence[int] = (),
    ) -> tuple[int, ...]:
        """Send to the sampled clients, train them, and aggregate their replies as they come.

        Without any reply the server keeps its state.

        Args:
            score: on which splits locally trained models are scored.
            keep: the clients whose locally trained models are kept.

        Returns:
            The clients that replied.
        """
        replied: list[int] = []

        def requests() -> Iterator[TrainRequest]:
            for client in rnd.sampled:
                message = self.algorithm.server_message(self.server, client, rnd)
                message = message.clone()
                self.tell("on_message", rnd, client, message)
                yield TrainRequest(client, rnd, message, score, client in keep)

        def updates() -> Iterator[Update]:
            for reply in self.clients.run(requests()):
                self.tell("on_reply", rnd, reply)
                if reply.message is not None:
                    replied.append(reply.client)
                    weight = self.task_info.weight(reply.client)
                    yield Update(reply.client, weight, reply.message)

        self.tell("before_exchange", rnd)
        replies = updates()
        first = list(islice(replies, 1))
        if first:
            self.algorithm.aggregate(self.server, _joined(first, replies), rnd)
        for _ in replies:  # the algorithm may not have asked for all of them
            pass
        self.tell("after_exchange", rnd)
        return tuple(replied)

    def tune(self) -> None:
        """Let every client fine-tune a copy of its model if the algorithm asks for it now, and keep it."""
        if not self.algorithm.finetuning(self.done, 0):
            return
        rnd = Round(self.done, FINISH, tuple(range(len(self.names))))

        def requests() -> Iterator[FinetuneRequest]:
            for client in rnd.sampled:
                message = self.algorithm.server_message(self.server, client, rnd)
                self.tell("on_message", rnd, client, message)
                yield FinetuneRequest(client, self.done, self.server)

        self.tell("before_exchange", rnd)
        for reply in self.clients.run(requests()):
            self.tell("on_reply", rnd, reply)
        self.tell("after_exchange", rnd)

    def evaluate(self) -> None:
        """Score every client's models on validation and test samples."""
        rnd = Round(self.done, EVALUATE, tuple(range(len(self.names))))
        self.tell("before_exchange", rnd)
        requests = (ScoreRequest(k, self.done, self.server) for k in rnd.sampled)
        for reply in self.clients.run(requests):
            self.tell("on_reply", rnd, reply)
        self.tell("after_exchange", rnd)

    # --- around the rounds ---

    def tell(self, moment: str, *facts: Any) -> None:
        """Call a hook of every listener."""
        for each in self.listeners:
            getattr(each, moment)(self, *facts)

    def listener(self, kind: type[Heard]) -> Heard:
        """Return the listener of a kind, which must be there."""
        return next(each for each in self.listeners if isinstance(each, kind))

    def use(self, algorithm: Algorithm) -> None:
        """Work with this algorithm from now on, and freeze it."""
        contract.freeze(algorithm)
        self.algorithm = algorithm
        self.clients.use(algorithm)

    def adopt(self, plan: LayerPlan) -> None:
        """Continue with the algorithm rebuilt under the plan that was decided on."""
        in_force = self.algorithm.resolve_plan(plan)
        for note in in_force.notes():
            warn(note)
        self.use(self.algorithm.with_plan(in_force))
        self.server.meta["plan"] = in_force.to_json()

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint; clients' states are read from it when they are needed."""
        self.server, self.done = checkpoint.server, checkpoint.round
        self.clients.restore(checkpoint)
        if "plan" in self.server.meta:
            plan = LayerPlan.from_json(self.server.meta["plan"])
            self.algorithm = self.algorithm.with_plan(plan)

    def fork(self, algorithm: Algorithm, listeners: Sequence[Listener] = ()) -> Engine:
        """Return a second engine with the same clients and start, whose exchanges change nothing of this run."""
        clients = self.clients.fork()
        other = Engine(
            algorithm, self.data, self.initial, clients, self.schedule, listeners
        )
        other.use(algorithm)
        return other

    def models(self, client: int) -> Mapping[str, Tree]:
        """Return the present models of one client: global or personal ones, and a fine-tuned one."""
        return self.clients.models(client, self.server, self.done)


def _joined(first: list[Update], others: Iterator[Update]) -> Iterator[Update]:
    """Yield all updates in order; none is kept here."""
    yield first.pop()
    yield from others


__all__ = ["Engine", "Schedule", "sampled_clients"]
