"""The order of a run: its schedule, the clients of each round, and what listens to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fl_core.algorithms.exchange import Message, Round
    from fl_core.client_runner import ClientReply
    from fl_core.engine import Engine

FINISH, EVALUATE = "finish", "evaluate"
"""The exchanges after a round's training: fine-tuning of models, and their scores."""


@dataclass
class Schedule:
    """The rounds of a run with an evaluation or a checkpoint.

    Attributes:
        pause: the round after which the run stops for now, with a checkpoint. None means at the end.
        save_seconds: least time between two checkpoints. The last round is saved at once.
        keeps: whether checkpoints are written, which hold locally trained models.
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
    may_stop: bool = False
    measure_every: int = 0

    @property
    def end(self) -> int:
        """Return the round after which training stops, for now or for good."""
        return self.rounds if self.pause is None else min(self.pause, self.rounds)

    def evaluates(self, done: int) -> bool:
        """Return whether all clients are evaluated after ``done`` rounds."""
        return done % self.eval_every == 0 or done == self.rounds

    def saves(self, done: int) -> bool:
        """Return whether a checkpoint is written after ``done`` rounds."""
        return done % self.checkpoint_every == 0 or done == self.end

    def measures(self, done: int) -> bool:
        """Return whether the layers are measured after ``done`` rounds."""
        every = self.measure_every
        return every > 0 and (done % every == 0 or done == self.rounds)

    def keeps_local(self, done: int) -> bool:
        """Return whether locally trained models are kept for a checkpoint or a measurement."""
        may_save = self.saves(done) or (self.may_stop and self.evaluates(done))
        return (self.keeps and may_save) or self.measures(done)


def sampled_clients(
    seed: int, index: int, count: int, participation: float
) -> tuple[int, ...]:
    """Draw the clients of a round, ascending: max(1, floor(participation x count)), the same for all algorithms."""
    from fl_core import seeds  # with torch, which a schedule alone does without

    take = max(1, int(participation * count + 1e-9))
    if take >= count:
        return tuple(range(count))
    draw = seeds.numpy_generator(seed, "sample", index)
    return tuple(sorted(int(c) for c in draw.choice(count, size=take, replace=False)))


def rounds_done(rnd: Round) -> int:
    """Return the rounds that are complete with an exchange's values."""
    return rnd.index if rnd.exchange in (FINISH, EVALUATE) else rnd.index + 1


class Listener:
    """A listener to a run: it records, stops or saves what it hears of.

    The engine calls the hooks of all listeners in their order. Each does nothing by default. Fine-tuning and
    evaluation are exchanges, too, by the names :data:`FINISH` and :data:`EVALUATE`.
    """

    def before_run(self, engine: Engine) -> None:
        """Prepare before the first round, or the first one after a checkpoint."""

    def before_exchange(self, engine: Engine, rnd: Round) -> None:
        """Hear of an exchange that begins."""

    def on_message(
        self, engine: Engine, rnd: Round, client: int, message: Message
    ) -> None:
        """Hear of the server's message to a client."""

    def on_reply(self, engine: Engine, rnd: Round, reply: ClientReply) -> None:
        """Hear of a client's reply, before it is aggregated."""

    def after_exchange(self, engine: Engine, rnd: Round) -> None:
        """Hear of an exchange that has ended."""

    def after_training(self, engine: Engine) -> None:
        """Hear that a round has trained and aggregated."""

    def after_round(self, engine: Engine) -> None:
        """Hear that a round is complete, or the evaluation before the first one."""
