"""The stopping rule of a run, from scores on validation samples alone.

A checkpoint stores the rule with its scores so far.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fl_core.errors import COUNT, MapOf, UsageError, check_known, plural, validate
from fl_core.rows import SCORES, label_of, used_model

WINDOW = 3
"""Number of evaluations over which a score is averaged: one, and the two before it."""
STATE = "stopping"
"""The key of the server's stored state that holds a stopping rule."""
BEST_ROUND = "best_round"
"""The metric of the rows that name each model's best round."""
FORM = {
    "patience": COUNT,
    "metrics": [str],
    "models": MapOf(MapOf(MapOf((float, None)))),
}
"""The form of what :meth:`StoppingRule.to_json` writes."""


def weighted_mean(pairs: Iterable[tuple[float, float]]) -> float:
    """Return the mean of (value, weight) pairs. It is NaN if a value is NaN, or without pairs.

    It is NaN, too, if the weights sum to 0.

    >>> weighted_mean([(0.5, 30), (0.9, 10)])
    0.6
    >>> weighted_mean([(0.5, 30), (math.nan, 10)]), weighted_mean([])
    (nan, nan)

    The bits are the same in any order.

    >>> values = [0.1, 1e16, 0.3, -1e16, 0.7, 1e-9, 0.2]
    >>> len({weighted_mean(zip([*values[k:], *values[:k]], [1] * 7)) for k in range(7)})
    1
    """
    pairs = list(pairs)
    total_weight = math.fsum(weight for _, weight in pairs)
    if total_weight:
        return math.fsum(value * weight for value, weight in pairs) / total_weight
    return math.nan


def moving_mean(scores: Mapping[int, float]) -> dict[int, float]:
    """Return the score of each evaluated round averaged with the two evaluations before it, {round: mean}.

    The first two evaluations have no mean, unless there are fewer than three: then the last has the mean of all.

    >>> moving_mean({5: 1.0, 10: 2.0, 15: 6.0, 20: 4.0})
    {15: 3.0, 20: 4.0}

    Args:
        scores: {round: score}, in the order of rounds.
    """
    rounds, values = list(scores), list(scores.values())
    windows = {
        rounds[end - 1]: values[max(0, end - WINDOW) : end]
        for end in range(1, len(rounds) + 1)
    }
    full_windows = list(windows.items())[WINDOW - 1 :] or list(windows.items())[-1:]
    return {
        round_number: math.fsum(window) / len(window)
        for round_number, window in full_windows
    }


def best_round(scores: Mapping[str, Mapping[int, float]]) -> int | None:
    """Return the best round: the one with the least sum of ranks over the smoothed scores (:func:`moving_mean`).

    The candidates are the evaluations so far. Only the newest may replace the best round, because a run keeps the
    models that were best in their time. Equal sums go to the first score, then to the earlier round. So with a single
    score the best round is its best value. A round without the first score is no candidate. The best round is None if
    there is no candidate, or no score.
    Another score that is missing has the worst rank.

    >>> best_round({"macro_f1": {5: 0.2, 10: 0.5, 15: 0.6, 20: 0.4, 25: 0.1}})
    20
    >>> best_round({"accuracy": {1: 0.5, 2: 0.7, 3: 0.9, 4: 0.9}, "loss": {1: 1.0, 2: 1.0, 3: 1.0, 4: 9.0}})
    4

    Args:
        scores: by name, the score of each evaluated round, in the order of rounds.
    """
    smoothed_scores: dict[str, dict[int, float]] = {}
    for name, round_scores in scores.items():
        sign = -1 if SCORES[name] else 1  # lower is better
        smoothed_scores[name] = {
            round_number: math.inf if math.isnan(value) else sign * value
            for round_number, value in moving_mean(round_scores).items()
        }
    first_scores = next(iter(smoothed_scores.values()), {})
    scores_so_far: dict[str, list[float]] = {name: [] for name in smoothed_scores}
    best_candidate: int | None = None
    for round_number in (
        round_number
        for round_number, value in first_scores.items()
        if value != math.inf
    ):
        for name, values in smoothed_scores.items():
            insort(scores_so_far[name], values.get(round_number, math.inf))

        def order(candidate: int) -> tuple[float, float]:
            ranks = (
                bisect_left(scores_so_far[name], values.get(candidate, math.inf))
                + bisect_right(scores_so_far[name], values.get(candidate, math.inf))
                for name, values in smoothed_scores.items()
            )
            return sum(ranks), first_scores[candidate]

        if best_candidate is None or order(round_number) < order(best_candidate):
            best_candidate = round_number
    return best_candidate


class StoppingRule:
    """A rule that ends a run when its main model stops improving on validation samples.

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

    Raises:
        UsageError: there are no scores.
    """

    def __init__(self, patience: int, metrics: Sequence[str]) -> None:
        self.patience = patience
        self.metrics = tuple(metrics)
        if not metrics:
            raise UsageError(f"{STATE} must have a score; got none.")
        self.scores: dict[str, dict[str, dict[int, float]]] = {}

    def add(self, done: int, scores: Mapping[str, Mapping[str, float]]) -> None:
        """Add each model's scores of an evaluated round.

        Args:
            done: the number of the round.
            scores: {model: {score: value}}. A missing score counts as NaN.
        """
        for model, values in scores.items():
            model_scores = self.scores.setdefault(model, {})
            for name in self.metrics:
                model_scores.setdefault(name, {})[done] = values.get(name, math.nan)

    @property
    def best(self) -> dict[str, int]:
        """Return the best round of each model that has one, {model: round}."""
        best_rounds = {
            model: best_round(scores) for model, scores in sorted(self.scores.items())
        }
        return {
            model: round_number
            for model, round_number in best_rounds.items()
            if round_number is not None
        }

    @property
    def main(self) -> str:
        """Return the name of the model that decides when to stop.

        It is ``personal`` if such models have scores, else ``global``.
        """
        return used_model(self.scores)

    @property
    def stops(self) -> bool:
        """Return whether the main model has not improved for ``patience`` evaluations.

        Evaluations after its best round count, or all of them if it has no best round.
        """
        best_number = self.best.get(self.main, 0)
        rounds = self.scores.get(self.main, {}).get(self.metrics[0], {})
        return (
            sum(round_number > best_number for round_number in rounds) >= self.patience
        )

    @property
    def description(self) -> str:
        """Return the rule in words, as rows and tables name it."""
        metrics = " and ".join(self.metrics)
        return f"{metrics} on validation, mean of {WINDOW} evaluations, patience {self.patience}"

    def report(self, done: int, rounds: int) -> str:
        """Return a line on why the run ended, and on the best rounds.

        Args:
            done: number of rounds that were trained.
            rounds: number of rounds at most.
        """
        if self.stops:
            end_text = f"stopped after round {done} of at most {rounds}"
        else:
            end_text = f"ended after round {done}"
        label = " and ".join(map(label_of, self.metrics))
        best_text = ", ".join(
            f"{model} {number}" for model, number in self.best.items()
        )
        reason = ""
        if self.stops:
            reason = f": no better {label} on validation for {plural(self.patience, 'evaluation')}"
        best_round = best_text or "none"
        return f"{end_text}{reason}; best rounds: {best_round}"

    def to_json(self) -> dict[str, Any]:
        """Return the rule and its scores so far as plain data for JSON: ``patience``, ``metrics`` and ``models``.

        The last is {model: {score: {round: value}}}.
        """
        models = {
            model: {
                name: {
                    str(k): None if math.isnan(v) else v
                    for k, v in scores_of_rounds.items()
                }
                for name, scores_of_rounds in scores.items()
            }
            for model, scores in sorted(self.scores.items())
        }
        return {
            "patience": self.patience,
            "metrics": list(self.metrics),
            "models": models,
        }

    @classmethod
    def from_json(cls, stored: Any) -> StoppingRule:
        """Return the rule that :meth:`to_json` wrote.

        Raises:
            UsageError: the stored data have another form, or a score is unknown.
            ValueError: a round is no whole number.
        """
        if fault := validate(stored, FORM, STATE):
            raise UsageError(fault)
        metrics = [check_known("score", name, SCORES) for name in stored["metrics"]]
        rule = cls(stored["patience"], metrics)
        for model, stored_scores in stored["models"].items():
            if stored_scores.keys() != set(metrics):
                raise UsageError(
                    f"{STATE} must have each score of {model}; got others."
                )
            rule.scores[model] = {
                name: {
                    int(k): math.nan if v is None else v for k, v in of_round.items()
                }
                for name, of_round in stored_scores.items()
            }
        return rule
