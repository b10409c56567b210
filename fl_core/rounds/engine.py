"""The round: sample, send, train, aggregate, evaluate. Whatever records, stops or saves listens to it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from fl_core import seeds, tree
from fl_core.algorithms.base import Algorithm, Message, Round, TaskInfo, Update, freeze
from fl_core.data import FederatedData
from fl_core.errors import NonFiniteError, warn
from fl_core.layers import tensor_in_layer
from fl_core.plan import LayerPlan
from fl_core.records.store import Checkpoint
from fl_core.rounds.clients import (
    SCORED,
    ClientReply,
    ClientRequest,
    FinetuneRequest,
    LocalClients,
    ScoreRequest,
    TrainRequest,
)
from fl_core.tree import Tree

LOCAL_MODELS = 100
"""The most locally trained models in a checkpoint, for diagnoses: those of the round's first clients."""

FINISH, EVALUATE = "finish", "evaluate"
"""The exchanges after a round's training: fine-tuning of models, and their scores."""


@dataclass
class Schedule:
    """The rounds of a run with an evaluation or a checkpoint. The last round has both.

    >>> schedule = Schedule(rounds=7, participation=1.0, eval_every=3, checkpoint_every=2)
    >>> [done for done in range(1, 8) if schedule.evaluates(done)]
    [3, 6, 7]
    >>> [done for done in range(1, 8) if schedule.saves(done)]
    [2, 4, 6, 7]

    Attributes:
        rounds: number of rounds.
        participation: share of the clients in a round, above 0 and at most 1.
        eval_every, checkpoint_every: rounds between two evaluations, and between two checkpoints.
        pause: the round after which the run stops for now, with a checkpoint. None means at the end.
        save_seconds: least time between two checkpoints. The last round is saved at once.
        keeps: whether checkpoints are written, which hold locally trained models.
        keeps_last: whether the locally trained models of the last round stay in memory, or those of the best one.
        may_stop: whether a stopping rule may end the run, so that it may save after any evaluation.
        measure_every: rounds between two measurements of the layers. 0 means none.
    """

    rounds: int
    participation: float
    eval_every: int
    checkpoint_every: int
    pause: int | None = None
    save_seconds: float = 0.0
    keeps: bool = False
    keeps_last: bool = False
    may_stop: bool = False
    measure_every: int = 0

    @property
    def end(self) -> int:
        """Return the number of completed rounds at which training stops, for now or for good."""
        if self.pause is None:
            return self.rounds
        return min(self.pause, self.rounds)

    def evaluates(self, done: int) -> bool:
        """Return whether all clients are evaluated after ``done`` rounds."""
        return done % self.eval_every == 0 or done == self.rounds

    def saves(self, done: int) -> bool:
        """Return whether a checkpoint is due after ``done`` rounds.

        The run still leaves it out if less than ``save_seconds`` have passed since the
        one before, unless training stops here or a model has its best round.
        """
        return done % self.checkpoint_every == 0 or done == self.end

    def measures(self, done: int) -> bool:
        """Return whether the layers are measured after ``done`` rounds."""
        interval = self.measure_every
        return interval > 0 and (done % interval == 0 or done == self.rounds)

    def keeps_local(self, done: int) -> bool:
        """Return whether locally trained models of the ``done``-th round are stored.

        A checkpoint, a measurement of the layers or the result needs them. Rounds are
        counted from 1 here.
        """
        may_end = done == self.end or (self.may_stop and self.evaluates(done))
        if self.keeps_last and may_end:
            return True
        return (self.keeps and (self.saves(done) or may_end)) or self.measures(done)


def sampled_clients(
    seed: int, index: int, count: int, participation: float
) -> tuple[int, ...]:
    """Draw the clients of a round: max(1, floor(participation * count)) of them, the same for all algorithms.

    Args:
        seed: the run's seed.
        index: the round, from 0 on.
        count: number of all clients.
        participation: share of clients in a round, above 0 and at most 1.

    Returns:
        Positions of the clients, ascending.
    """
    n_sampled = max(1, int(participation * count + 1e-9))
    if n_sampled >= count:
        return tuple(range(count))
    generator = seeds.numpy_generator(seed, "sample", index)
    return tuple(
        sorted(int(c) for c in generator.choice(count, size=n_sampled, replace=False))
    )


def rounds_done(rnd: Round) -> int:
    """Return the number of completed rounds to which the values of an exchange belong.

    Exchanges of training belong to the end of their round. Fine-tuning and evaluation follow the rounds completed.
    """
    if rnd.exchange in (FINISH, EVALUATE):
        return rnd.index
    return rnd.index + 1


class Listener:
    """A listener to a run, which records, saves or stops it.

    The engine calls the hooks of all listeners in their order. Each does nothing by default. Fine-tuning and
    evaluation are exchanges, too, by the names :data:`FINISH` and :data:`EVALUATE`.
    """

    def before_run(self, engine: Engine) -> None:
        """Prepare before the first round, or the first one after a checkpoint."""

    def before_exchange(self, engine: Engine, rnd: Round) -> None:
        """React to the beginning of an exchange."""

    def on_message(
        self, engine: Engine, rnd: Round, client: int, message: Message
    ) -> None:
        """React to the server's message to the client at a position."""

    def on_reply(self, engine: Engine, rnd: Round, reply: ClientReply) -> None:
        """React to a client's reply, before it is aggregated."""

    def after_exchange(self, engine: Engine, rnd: Round) -> None:
        """React to the end of an exchange."""

    def after_training(self, engine: Engine) -> None:
        """React to the end of a round's training and aggregation, before its evaluation."""

    def after_round(self, engine: Engine) -> None:
        """React to the end of a round, or of the evaluation before the first one."""

    def after_run(self, engine: Engine) -> None:
        """React to the end of the run: it is done, pauses, or fails."""


Heard = TypeVar("Heard", bound=Listener)


class Engine:
    """One run of one algorithm on one federation.

    Args:
        algorithm: the algorithm, with the plan in force if there is one yet. The engine freezes it.
        data: the federation. The engine reads names and sizes of the clients, and no samples.
        initial: the model before the first round.
        clients: the clients, in this process or at sites.
        schedule: the rounds, and which of them have an evaluation or a checkpoint.
        listeners: listeners that record, save and stop, in the order in which they are called.

    Attributes:
        server: the server's state.
        done: the number of completed rounds.
        stopped: whether the stopping rule has ended the run.
        names: the clients' names, by position.
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
        self.algorithm = algorithm
        self.data = data
        self.initial = initial
        self.clients = clients
        self.schedule = schedule
        self.listeners = listeners
        self.names = data.names
        self.server = algorithm.call("server_state", tree.clone(initial))
        self.done = 0
        self.stopped = False
        clients.begin(algorithm)

    @property
    def task_info(self) -> TaskInfo:
        """Return the facts of the task that the algorithm may know."""
        return self.algorithm.task_info

    @property
    def finished(self) -> bool:
        """Return whether no round is left to train: all are done, or the stopping rule has ended the run.

        >>> import fedlayers as fl
        >>> fl.run(dataset="heart", rounds=1, progress=False).engine.finished
        True
        """
        return self.done == self.schedule.rounds or self.stopped

    @tree.one_thread()
    def run(self) -> None:
        """Run the remaining rounds, until the last one, a pause or an early stop.

        Raises:
            NonFiniteError: training or aggregation met NaN or infinity; earlier checkpoints stay.
            UsageError: a plan must be chosen and the run has no functions to choose it, or a client has no validation
                score that the stopping rule needs.
        """
        self.use(self.algorithm)
        try:
            self.tell("before_run")
            if self.done == 0:
                self.tune()
                self.evaluate()
                self.tell("after_round")
            while self.done < self.schedule.end and not self.finished:
                self.step()
        finally:
            self.tell("after_run")

    @tree.one_thread()
    def step(self) -> None:
        """Run one round: train, aggregate, and where due fine-tune and evaluate.

        The engine uses one thread: its work is small, and a second thread would wait for a core that clients use.

        Raises:
            NonFiniteError, UsageError: as for :meth:`run`.
        """
        schedule, done = self.schedule, self.done + 1
        exchanges = self.algorithm.call("exchanges", self.done)
        self.clients.forget()
        round_clients = self.sampled()
        for exchange in exchanges:
            is_last = exchange == exchanges[-1]
            score = SCORED if is_last and schedule.evaluates(done) else ()
            n_local = LOCAL_MODELS if is_last and schedule.keeps_local(done) else 0
            rnd = Round(self.done, exchange, round_clients)
            round_clients = self.exchange(rnd, score, round_clients[:n_local])
        self.done = done
        self.check_finite()
        self.tell("after_training")
        if schedule.evaluates(done) or schedule.saves(done):
            self.tune()
        if schedule.evaluates(done):
            self.evaluate()
        self.tell("after_round")

    def exchange(
        self, rnd: Round, score: tuple[str, ...] = (), keep: Sequence[int] = ()
    ) -> tuple[int, ...]:
        """Send to the sampled clients, train them, and aggregate their replies as they come.

        Without any reply the server keeps its state.

        Args:
            rnd: the round, the exchange's name and the sampled clients.
            score: the splits on which locally trained models are scored.
            keep: positions of the clients whose locally trained models are stored.

        Returns:
            Positions of the clients that replied.
        """
        replied_clients: list[int] = []
        requests = (
            TrainRequest(client, rnd, message, score, client in keep)
            for client, message in self.messages(rnd)
        )

        def updates() -> Iterator[Update]:
            for reply in self.clients.run(requests):
                self.tell("on_reply", rnd, reply)
                if reply.message is not None:
                    replied_clients.append(reply.client)
                    weight = self.task_info.weight(reply.client)
                    name = self.names[reply.client]
                    yield Update(reply.client, weight, reply.message, name)

        self.tell("before_exchange", rnd)
        replies = updates()
        first_updates = list(islice(replies, 1))
        if first_updates:
            self.algorithm.call(
                "aggregate", self.server, _joined(first_updates, replies), rnd
            )
            # an algorithm may move parameters after their mean
            self.task_info.buffers.renew(self.server.trees.get("model", {}))
        for _ in replies:  # the algorithm may not have asked for all of them
            pass
        self.tell("after_exchange", rnd)
        return tuple(replied_clients)

    def messages(self, rnd: Round) -> Iterator[tuple[int, Message]]:
        """Yield the position of each client of an exchange with the server's message to it."""
        for client in rnd.sampled:
            message = self.algorithm.call("server_message", self.server, client, rnd)
            self.tell("on_message", rnd, client, message)
            yield client, message

    def ask(self, rnd: Round, requests: Iterable[ClientRequest]) -> None:
        """Send the requests of an exchange whose replies are not aggregated. Listeners receive the replies."""
        self.tell("before_exchange", rnd)
        for reply in self.clients.run(requests):
            self.tell("on_reply", rnd, reply)
        self.tell("after_exchange", rnd)

    def measure(self, clients: tuple[int, ...], keep: bool = False) -> None:
        """Run PLayer-FL's measuring exchange alone.

        The server's state then has the clients' measurements in its ``meta``, by the
        key :data:`~fl_core.algorithms.fedper.MEASURED`. If no client replies, it has none.

        Args:
            clients: positions of the clients.
            keep: whether their locally trained models are stored.
        """
        self.use(self.algorithm)
        self.exchange(Round(0, "stats", clients), keep=clients if keep else ())

    def tune(self) -> None:
        """Let every client fine-tune a copy of its model, if the algorithm has fine-tuning after this round.

        The phases of the first client decide whether it has. The clients' backend stores
        the copies as ``personal``.
        """
        if not self.algorithm.finetuning(self.done, 0):
            return
        rnd = Round(self.done, FINISH, tuple(range(len(self.names))))
        requests = (
            FinetuneRequest(client, self.done, self.server)
            for client, _ in self.messages(rnd)
        )
        self.ask(rnd, requests)

    def evaluate(self) -> None:
        """Score every client's models on validation and test samples.

        The scores go to the listeners.
        """
        rnd = Round(self.done, EVALUATE, tuple(range(len(self.names))))
        requests = (ScoreRequest(k, self.done, self.server) for k in rnd.sampled)
        self.ask(rnd, requests)

    # --- around the rounds ---

    def sampled(self) -> tuple[int, ...]:
        """Draw the clients of the next round, and return their positions, ascending."""
        count = len(self.names)
        share = self.schedule.participation
        return sampled_clients(self.task_info.seed, self.done, count, share)

    def check_finite(self) -> None:
        """Check that the server's state has no NaN or infinity, besides those of the initial model.

        Raises:
            NonFiniteError: a tensor has one. The message names the first tensor, and its layer.
        """
        for name, values in self.server.trees.items():
            bad_name = tree.first_nonfinite(values, before=self.initial)
            if bad_name is not None:
                tensor = tensor_in_layer(bad_name, self.task_info.layers)
                raise NonFiniteError(
                    f"{self.algorithm.name}, round {self.done}, server, aggregation: {tensor} of {name!r} is not "
                    "finite"
                )

    def tell(self, moment: str, *facts: object) -> None:
        """Call a hook of every listener with this engine and further arguments.

        Args:
            moment: name of the hook, a method of :class:`Listener`.
            facts: the hook's arguments after the engine.
        """
        for listener in self.listeners:
            getattr(listener, moment)(self, *facts)

    def listener(self, kind: type[Heard]) -> Heard:
        """Return the run's first listener of a class or a subclass of it.

        Raises:
            StopIteration: there is none.
        """
        return next(
            listener for listener in self.listeners if isinstance(listener, kind)
        )

    def use(self, algorithm: Algorithm) -> None:
        """Switch to this algorithm, and freeze it."""
        freeze(algorithm)
        self.algorithm = algorithm
        self.clients.use(algorithm)

    def adopt(self, plan: LayerPlan) -> None:
        """Continue with the algorithm made again with a chosen plan, which is stored in the server's state.

        A warning gives each note on the plan.

        Raises:
            UsageError: the algorithm cannot use such a plan.
        """
        new_plan = self.algorithm.resolve_plan(plan)
        for note in new_plan.notes():
            warn(note)
        self.use(self.algorithm.with_plan(new_plan))
        self.server.meta["plan"] = new_plan.to_json()

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint; clients' states are read from it when they are needed."""
        self.server = checkpoint.server
        self.done = checkpoint.round
        self.clients.restore(checkpoint)
        if "plan" in self.server.meta:
            plan = LayerPlan.from_json(self.server.meta["plan"])
            self.algorithm = self.algorithm.with_plan(plan)

    def models(self, client: int) -> Mapping[str, Tree]:
        """Return the present models of the client at a position, by name.

        The names are ``global``, ``personal`` or both. A fine-tuned model has the name ``personal``.
        """
        return self.clients.models(client, self.server, self.done)


def _joined(first: list[Update], others: Iterator[Update]) -> Iterator[Update]:
    """Yield the update in a list of one, then the others.

    The list is emptied, so that no update stays in memory here.
    """
    yield first.pop()
    yield from others
