"""What ends a run: its stopping rule, from scores on validation samples alone, and losses that diverge."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fl_core.errors import (
    COUNT,
    DivergedError,
    MapOf,
    UsageError,
    check_known,
    validate,
    warn,
)
from fl_core.rows import SCORES, label_of

if TYPE_CHECKING:
    from fl_core.algorithms.base import Message, Round, State
    from fl_core.records.store import Run
    from fl_core.rounds.clients import ClientReply
    from fl_core.rounds.engine import Engine
    from fl_core.rounds.recorder import Recorder
    from fl_core.tree import Tree

WINDOW = 3
"""Evaluations over which a score is smoothed: one and those before it."""
STATE = "stopping"
"""The key of the server's stored state that holds a stopping rule."""
BEST_ROUND = "best_round"
"""The metric of the rows that name each model's best round."""
FORM = {
    "patience": COUNT,
    "metrics": [str],
    "models": MapOf(MapOf(MapOf((float, None)))),
}
"""What :meth:`StoppingRule.to_json` writes."""


def weighted_mean(pairs: Iterable[tuple[float, float]]) -> float:
    """Return the mean of (value, weight) pairs, whatever their order; NaN where a value is, or without any.

    >>> weighted_mean([(0.5, 30), (0.9, 10)])
    0.6
    """
    pairs = list(pairs)
    total = math.fsum(weight for _, weight in pairs)
    return (
        math.fsum(value * weight for value, weight in pairs) / total
        if total
        else math.nan
    )


def moving_mean(scores: Mapping[int, float]) -> dict[int, float]:
    """Return the mean of each three scores in a row, by the last one's round; of fewer scores, the mean of all.

    >>> moving_mean({5: 1.0, 10: 2.0, 15: 6.0, 20: 4.0})
    {15: 3.0, 20: 4.0}
    """
    rounds, values = list(scores), list(scores.values())
    windows = {
        rounds[end - 1]: values[max(0, end - WINDOW) : end]
        for end in range(1, len(rounds) + 1)
    }
    whole = list(windows.items())[WINDOW - 1 :] or list(windows.items())[-1:]
    return {done: math.fsum(window) / len(window) for done, window in whole}


def best_round(scores: Mapping[str, Mapping[int, float]]) -> int | None:
    """Return the best round: the least sum of ranks over the scores, each smoothed.

    The candidates are the evaluations so far. Only the newest may replace the best round, because a run keeps the
    models that were best in their time. Equal sums go to the first score, then to the earlier round. So with a single
    score the best round is its best value. A round without the first score is no candidate; None if there is none.
    Another score that is missing has the worst rank.

    >>> best_round({"macro_f1": {5: 0.2, 10: 0.5, 15: 0.6, 20: 0.4, 25: 0.1}})
    20
    >>> best_round({"accuracy": {1: 0.5, 2: 0.7, 3: 0.9, 4: 0.9}, "loss": {1: 1.0, 2: 1.0, 3: 1.0, 4: 9.0}})
    4

    Args:
        scores: by name, the score of each evaluated round, in the order of rounds.
    """
    smooth: dict[str, dict[int, float]] = {}
    for name, of_round in scores.items():
        sign = -1 if SCORES[name] else 1  # lower is better
        smooth[name] = {
            done: math.inf if math.isnan(value) else sign * value
            for done, value in moving_mean(of_round).items()
        }
    first = next(iter(smooth.values()))
    seen: dict[str, list[float]] = {name: [] for name in smooth}
    best: int | None = None
    for done in (done for done, value in first.items() if value != math.inf):
        for name, values in smooth.items():
            insort(seen[name], values.get(done, math.inf))

        def order(candidate: int) -> tuple[float, float]:
            ranks = (
                bisect_left(seen[name], values.get(candidate, math.inf))
                + bisect_right(seen[name], values.get(candidate, math.inf))
                for name, values in smooth.items()
            )
            return sum(ranks), first[candidate]

        if best is None or order(done) < order(best):
            best = done
    return best


class StoppingRule:
    """Stops a run when its main model no longer improves on validation samples.

    A score is the mean over clients by training samples, smoothed over three evaluations. The main model is
    ``personal`` where clients have one, else ``global``. Every model has a best round of its own, one for all clients
    (:func:`best_round`).

    >>> rule = StoppingRule(patience=2, metrics=("macro_f1",))
    >>> for done, score in enumerate([0.4, 0.6, 0.5, 0.3, 0.2], 1):
    ...     rule.add(done, {"global": {"macro_f1": score}})
    >>> rule.best, rule.stops
    ({'global': 3}, True)

    Args:
        patience: Evaluations without an improvement after which the run stops.
        metrics: The scores that select, of :data:`fl_core.rows.SCORES`, the main one first.
    """

    def __init__(self, patience: int, metrics: Sequence[str]) -> None:
        self.patience, self.metrics = patience, tuple(metrics)
        self.scores: dict[str, dict[str, dict[int, float]]] = {}

    def add(self, done: int, scores: Mapping[str, Mapping[str, float]]) -> None:
        """Take in each model's scores after a round with an evaluation."""
        for model, values in scores.items():
            of_model = self.scores.setdefault(model, {})
            for name in self.metrics:
                of_model.setdefault(name, {})[done] = values.get(name, math.nan)

    @property
    def best(self) -> dict[str, int]:
        """The best round of each model that has one."""
        found = {
            model: best_round(scores) for model, scores in sorted(self.scores.items())
        }
        return {model: done for model, done in found.items() if done is not None}

    @property
    def main(self) -> str:
        """The model that decides when to stop."""
        return "personal" if "personal" in self.scores else "global"

    @property
    def stops(self) -> bool:
        """True if the main model has not improved for ``patience`` evaluations."""
        best = self.best.get(self.main, 0)
        rounds = self.scores.get(self.main, {}).get(self.metrics[0], {})
        return sum(done > best for done in rounds) >= self.patience

    @property
    def description(self) -> str:
        """The rule as rows and tables name it."""
        return f"{' and '.join(self.metrics)} on validation, mean of {WINDOW} evaluations, patience {self.patience}"

    def report(self, done: int, rounds: int) -> str:
        """Say in one line why the run ended, and where the best rounds are."""
        end = (
            f"stopped after round {done} of at most {rounds}"
            if self.stops
            else f"ended after round {done}"
        )
        label = " and ".join(map(label_of, self.metrics))
        best = ", ".join(f"{model} {at}" for model, at in self.best.items())
        why = (
            f": no better {label} on validation for {self.patience} evaluations"
            if self.stops
            else ""
        )
        return f"{end}{why}; best rounds: {best or 'none'}"

    def to_json(self) -> dict[str, Any]:
        """Return the rule and what it has seen, for JSON."""
        models = {
            model: {
                name: {str(k): None if math.isnan(v) else v for k, v in seen.items()}
                for name, seen in scores.items()
            }
            for model, scores in sorted(self.scores.items())
        }
        return {
            "patience": self.patience,
            "metrics": list(self.metrics),
            "models": models,
        }

    @classmethod
    def from_json(cls, found: Any) -> StoppingRule:
        """Return the rule that :meth:`to_json` wrote.

        Raises:
            UsageError: Something else was stored.
        """
        if wrong := validate(found, FORM, STATE):
            raise UsageError(wrong)
        metrics = [check_known("score", name, SCORES) for name in found["metrics"]]
        if not metrics:
            raise UsageError(f"{STATE} must have a score; got none.")
        rule = cls(found["patience"], metrics)
        for model, seen in found["models"].items():
            if seen.keys() != set(metrics):
                raise UsageError(
                    f"{STATE} must have each score of {model}; got others."
                )
            rule.scores[model] = {
                name: {
                    int(k): math.nan if v is None else v for k, v in of_round.items()
                }
                for name, of_round in seen.items()
            }
        return rule


def rule_of(engine: Engine) -> StoppingRule | None:
    """Return the stopping rule of a run with what it has seen, if there is one."""
    found = [each for each in engine.listeners if isinstance(each, EarlyStopping)]
    return found[0].rule if found else None


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

    def after_run(self, engine: Engine) -> None:
        """Hear that the run is done, pauses, or fails."""


class EarlyStopping(Listener):
    """A stopping rule that ends a run, with a row for each model's best round. It is stored in the server's state.

    Args:
        keeps_best: keep the best models here, for a run without a directory.

    Attributes:
        best: the server's state and the clients' main models at the best round so far.
    """

    def __init__(
        self, rule: StoppingRule, recorder: Recorder, keeps_best: bool = False
    ) -> None:
        self.rule, self.recorder, self.keeps_best = rule, recorder, keeps_best
        self.best: tuple[State, list[Tree]] | None = None
        self._taken: dict[str, list[tuple[Mapping[str, float], int]]] = {}

    def before_run(self, engine: Engine) -> None:
        if STATE in engine.server.meta:
            self.rule = StoppingRule.from_json(engine.server.meta[STATE])
            engine.stopped = self.rule.stops

    def on_reply(self, engine: Engine, rnd: Round, reply: ClientReply) -> None:
        """Take in a client's validation scores.

        Raises:
            UsageError: The client has no score before the first round, so that it never will have one.
        """
        client = engine.data.clients[reply.client]
        main = self.rule.metrics[0]
        for model, splits in reply.scores.items():
            if (scores := splits.get("validation")) is None:
                continue
            if rounds_done(rnd) == 0 and math.isnan(scores.get(main, math.nan)):
                raise UsageError(
                    f"patience must have the validation samples of every client to judge by; {client.name!r} has none "
                    f"with a {label_of(main)}. Use --patience 0 in a new folder, or give that client more samples."
                )
            self._taken.setdefault(model, []).append((scores, len(client.train)))

    def after_exchange(self, engine: Engine, rnd: Round) -> None:
        if rnd.exchange != EVALUATE:
            return
        rule, taken = self.rule, self._taken
        self._taken = {}
        if engine.done == 0:
            return
        means = {
            model: {
                name: weighted_mean((each.get(name, math.nan), n) for each, n in pairs)
                for name in rule.metrics
            }
            for model, pairs in taken.items()
        }
        rule.add(engine.done, means)
        engine.server.meta[STATE] = rule.to_json()
        engine.stopped = rule.stops
        best = rule.best
        if self.keeps_best and best.get(rule.main) == engine.done:
            clients = range(len(engine.names))
            models = [engine.models(client)[rule.main] for client in clients]
            copies = [{n: t.clone() for n, t in model.items()} for model in models]
            self.best = engine.server.clone(), copies
        for model, at in best.items() if engine.finished else ():
            columns = {
                "model": model,
                "split": "validation",
                "estimator": rule.description,
            }
            self.recorder.row(BEST_ROUND, at, engine.done, None, **columns)


# --- divergence ------------------------------------------------------------------------------------------------

STARTS = "initial_losses"
"""The key of the server's stored state for the clients' losses before the first round."""
DIVERGENCE = "divergence"
"""The metric of a row without a value. Its status states how far a client's loss exceeds the limit in that round."""
TIMES = 20.0
"""A loss has diverged above 20 times the larger of the client's initial loss and the uniform predictor's."""


class Divergence(Listener):
    """Rows of losses above the limit, with one warning.

    The limit of a client's loss is :data:`TIMES` times the larger of its initial loss and the uniform predictor's.

    >>> from fl_core.training.losses import build, guessing_loss
    >>> limit = Divergence(None, guessing_loss(build("cross_entropy"), n_classes=2))
    >>> limit.begin("north", 1.5)
    >>> limit.reason_for("north", 30.0)
    ''
    >>> limit.reason_for("north", 31.0)
    'a loss of 31, over 20 times the 1.5 at the start'
    >>> limit.reason_for("south", 31.0)  # of whom no start is known
    'a loss of 31, over 20 times the 0.693 of guessing'

    Args:
        recorder: takes the rows.
        guess: loss of the uniform predictor.

    Attributes:
        starts: each client's initial loss, stored with the server's state. None: it was not finite, so there is no
            limit.
    """

    def __init__(self, recorder: Recorder | None, guess: float) -> None:
        self._recorder, self._guess = recorder, guess
        self._noted = False
        self._tuned: frozenset[str] = frozenset()  # trained before their first scores
        self.starts: dict[str, float | None] = {}

    def before_run(self, engine: Engine) -> None:
        if engine.algorithm.finetuning(0, 0):
            self._tuned = frozenset({"personal"})
        self.starts = engine.server.meta.setdefault(STARTS, self.starts)

    def on_reply(self, engine: Engine, rnd: Round, reply: ClientReply) -> None:
        done = rounds_done(rnd)
        for key, loss in reply.work.items():
            phase, _, quantity = key.partition("/")
            if quantity == "loss" and reply.message is not None:
                self._check(engine, reply, done, loss, split="train", variant=phase)
        for model, scores in reply.scores.items():
            if "validation" not in scores:
                continue
            loss = scores["validation"]["loss"]
            if done:
                columns = {"model": model, "split": "validation"}
                self._check(engine, reply, done, loss, **columns)
            elif model not in self._tuned:
                self.begin(engine.names[reply.client], loss)

    def begin(self, client: str, loss: float) -> None:
        """Record a loss before the first round. For several models the largest is kept."""
        before = self.starts.get(client, loss)
        if before is None or not math.isfinite(loss):
            self.starts[client] = None
        else:
            self.starts[client] = max(loss, before)

    def reason_for(self, client: str, loss: float) -> str:
        """Return why a loss has diverged, or an empty text. Losses that are not finite are handled elsewhere."""
        start = self.starts.get(client, -math.inf)
        if start is None or not math.isfinite(loss):
            return ""
        bound, what = max((self._guess, "of guessing"), (start, "at the start"))
        if not 0 < TIMES * bound < loss:
            return ""
        return f"a loss of {loss:.3g}, over {TIMES:g} times the {bound:.3g} {what}"

    def _check(
        self, engine: Engine, reply: ClientReply, done: int, loss: float, **columns: str
    ) -> None:
        """Record, and report once, a loss that has diverged."""
        name = engine.names[reply.client]
        reason = self.reason_for(name, loss)
        if not reason or self._recorder is None:
            return
        status = f"diverged: {reason}"
        self._recorder.row(
            DIVERGENCE, math.nan, done, reply.client, status=status, **columns
        )
        self._recorder.flush()
        where = f"{engine.algorithm.name}, round {done}, client {name!r}"
        text = f"{where}: training diverges, with {reason}. Use a smaller lr."
        if not self._noted:
            warn(text)
        self._noted = True


def check_end(run: Run, done: int) -> None:
    """Check that no model of a stored run has diverged at its last evaluation, or at its best.

    Args:
        done: the round of that evaluation.

    Raises:
        DivergedError: names the first client and model.
    """
    frame = run.rows()[1]
    found = frame[
        (frame["metric"] == DIVERGENCE)
        & (frame["round"] == done)
        & (frame["split"] == "validation")
    ]
    if len(found):
        first = found.iloc[0]
        raise DivergedError(
            f"{run.path} ended with models that have diverged; first the {first['model']} model of client "
            f"{first['client']!r} ({first['status']}). Train again with a smaller lr."
        )
