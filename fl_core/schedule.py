"""The schedule of a run: when to evaluate and save, and which clients take part in a round."""

from __future__ import annotations

from dataclasses import dataclass, field

from fl_core import seeds
from fl_core.dropout import Dropout


@dataclass
class Schedule:
    """When a run evaluates and saves, in rounds, and how much of local training it records.

    Attributes:
        local_scores: score what local training gave in every round, not only where all clients are evaluated.
        pause: the round after which the run stops for now, to be resumed; its checkpoint is written. None = at the end.
        local_models: how many of a round's trained models a checkpoint keeps, those of the first sampled clients.
        dropout: whose replies are lost.
    """

    rounds: int
    participation: float
    eval_every: int
    checkpoint_every: int
    local_scores: bool = False
    local_models: int = 100
    pause: int | None = None
    dropout: Dropout = field(default_factory=Dropout)

    @property
    def end(self) -> int:
        """The round after which training stops, for now or for good."""
        return self.rounds if self.pause is None else min(self.pause, self.rounds)

    def evaluates(self, done: int) -> bool:
        """Whether all clients are evaluated after this many rounds."""
        return done % self.eval_every == 0 or done == self.rounds

    def splits(self, done: int) -> tuple[str, ...]:
        """The splits on which locally trained models are scored, in the round after ``done`` rounds."""
        if self.evaluates(done):
            return ("validation", "test")
        return ("validation",) if self.local_scores else ()

    def saves(self, done: int) -> bool:
        """Whether a checkpoint is written after this many rounds."""
        return done % self.checkpoint_every == 0 or done == self.end


def sampled_clients(seed: int, index: int, count: int, participation: float) -> tuple[int, ...]:
    """The clients of a round, ascending: max(1, floor(participation x count)), the same for all algorithms."""
    take = max(1, int(participation * count + 1e-9))
    if take >= count:
        return tuple(range(count))
    draw = seeds.numpy_generator(seed, "sample", index)
    return tuple(sorted(int(c) for c in draw.choice(count, size=take, replace=False)))
