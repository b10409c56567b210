"""The schedule of a run: rounds with evaluation and checkpoints, and the clients of each round."""

from __future__ import annotations

from dataclasses import dataclass

from fl_core import seeds


@dataclass
class Schedule:
    """The rounds of a run with an evaluation or a checkpoint, and the extent of its records of local training.

    Attributes:
        pause: the round after which the run stops for now, with a checkpoint. None means at the end.
        client_dropout: probability that a client's reply is lost in a round.
        save_seconds: least time between two checkpoints. The last round is saved at once.
    """

    rounds: int
    participation: float
    eval_every: int
    checkpoint_every: int
    pause: int | None = None
    client_dropout: float = 0.0
    save_seconds: float = 0.0

    @property
    def end(self) -> int:
        """Return the round after which training stops, for now or for good."""
        return self.rounds if self.pause is None else min(self.pause, self.rounds)

    def evaluates(self, done: int) -> bool:
        """Return whether all clients are evaluated after ``done`` rounds."""
        return done % self.eval_every == 0 or done == self.rounds

    def splits(self, done: int) -> tuple[str, ...]:
        """Return the splits for scoring locally trained models in the round after ``done`` rounds."""
        return ("validation", "test") if self.evaluates(done) else ()

    def saves(self, done: int) -> bool:
        """Return whether a checkpoint is written after ``done`` rounds."""
        return done % self.checkpoint_every == 0 or done == self.end


def sampled_clients(
    seed: int, index: int, count: int, participation: float
) -> tuple[int, ...]:
    """Draw the clients of a round, ascending: max(1, floor(participation x count)), the same for all algorithms."""
    take = max(1, int(participation * count + 1e-9))
    if take >= count:
        return tuple(range(count))
    draw = seeds.numpy_generator(seed, "sample", index)
    return tuple(sorted(int(c) for c in draw.choice(count, size=take, replace=False)))
