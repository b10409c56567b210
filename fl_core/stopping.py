"""The stopping rule of a run, and the best round of each model, from scores on validation samples alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from fl_core.errors import UsageError, check_known
from fl_core.scores import SCORES, label_of
from fl_core.storage.schema import COUNT, MapOf, validate

WINDOW = 3
"""Evaluations over which a score is smoothed: one and those before it."""
STATE = "stopping"
"""The key of the server's stored state that holds a stopping rule."""
BEST_ROUND = "best_round"
"""The metric of the rows that name each model's best round."""
FORM = {
    "patience": COUNT,
    "metric": str,
    "models": MapOf({"rounds": [COUNT], "scores": [(float, None)]}),
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


def best_round(
    scores: Mapping[int, float], higher_is_better: bool = True
) -> int | None:
    """Return the round with the best smoothed score, of equal ones the first; None if none is a number.

    >>> best_round({5: 0.2, 10: 0.5, 15: 0.6, 20: 0.4, 25: 0.1})
    20

    Args:
        scores: The score of each evaluated round, in the order of rounds.
    """
    sign = 1 if higher_is_better else -1
    numbers = {
        done: sign * value
        for done, value in moving_mean(scores).items()
        if not math.isnan(value)
    }
    return max(numbers, key=numbers.__getitem__) if numbers else None


class StoppingRule:
    """Stops a run when its main model no longer improves on validation samples.

    The score is the mean over clients by training samples, smoothed over three evaluations. The main model is
    ``personal`` where clients have one, else ``global``. Every model has a best round of its own, one for all clients.

    >>> rule = StoppingRule(patience=2, metric="macro_f1")
    >>> for done, score in enumerate([0.4, 0.6, 0.5, 0.3, 0.2], 1):
    ...     rule.add(done, {"global": score})
    >>> rule.best, rule.stops
    ({'global': 3}, True)

    It is fed by :meth:`take`, client by client, and :meth:`close`, or by :meth:`add`.

    Args:
        patience: Evaluations without an improvement after which the run stops.
        metric: The score, one of :data:`fl_core.scores.SCORES`.
    """

    def __init__(self, patience: int, metric: str) -> None:
        self.patience, self.metric = patience, metric
        self.scores: dict[str, dict[int, float]] = {}
        self._taken: tuple[int, dict[str, list[tuple[float, float]]]] = (0, {})

    def take(
        self,
        done: int,
        model: str,
        scores: Mapping[str, float],
        client: str,
        n_train: int,
    ) -> None:
        """Take in one client's validation scores after a round.

        Raises:
            UsageError: The client has no score before the first round, so that it never will have one.
        """
        value = scores.get(self.metric, math.nan)
        if done == 0 and math.isnan(value):
            raise UsageError(
                f"patience must have the validation samples of every client to judge by; {client!r} has none with a "
                f"{label_of(self.metric)}. Use --patience 0 in a new folder, or give that client more samples."
            )
        if self._taken[0] != done:
            self._taken = done, {}
        self._taken[1].setdefault(model, []).append((value, n_train))

    def close(self, done: int) -> None:
        """Add the means over clients of what was taken in after this round."""
        if self._taken[0] == done:
            self.add(
                done,
                {
                    model: weighted_mean(pairs)
                    for model, pairs in self._taken[1].items()
                },
            )

    def add(self, done: int, scores: Mapping[str, float]) -> None:
        """Take in each model's score after a round with an evaluation."""
        for model, value in scores.items():
            self.scores.setdefault(model, {})[done] = value

    @property
    def best(self) -> dict[str, int]:
        """The best round of each model that has one."""
        found = {
            model: best_round(scores, SCORES[self.metric])
            for model, scores in sorted(self.scores.items())
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
        return (
            sum(done > best for done in self.scores.get(self.main, {})) >= self.patience
        )

    @property
    def description(self) -> str:
        """The rule as rows and tables name it."""
        return f"{self.metric} on validation, mean of {WINDOW} evaluations, patience {self.patience}"

    def report(self, done: int, rounds: int) -> str:
        """Say in one line why the run ended, and where the best rounds are."""
        end = (
            f"stopped after round {done} of at most {rounds}"
            if self.stops
            else f"ended after round {done}"
        )
        label, best = (
            label_of(self.metric),
            ", ".join(f"{model} {at}" for model, at in self.best.items()),
        )
        why = (
            f": {label} on validation has not improved for {self.patience} evaluations"
            if self.stops
            else ""
        )
        return f"{end}{why}; best rounds: {best or 'none'}"

    def to_json(self) -> dict[str, Any]:
        """Return the rule and what it has seen, for JSON."""
        models = {
            model: {
                "rounds": list(scores),
                "scores": [None if math.isnan(v) else v for v in scores.values()],
            }
            for model, scores in sorted(self.scores.items())
        }
        return {"patience": self.patience, "metric": self.metric, "models": models}

    @classmethod
    def from_json(cls, found: Any) -> StoppingRule:
        """Return the rule that :meth:`to_json` wrote.

        Raises:
            UsageError: Something else was stored.
        """
        if wrong := validate(found, FORM, STATE):
            raise UsageError(wrong)
        rule = cls(found["patience"], check_known("score", found["metric"], SCORES))
        for model, seen in found["models"].items():
            if len(seen["rounds"]) != len(seen["scores"]):
                raise UsageError(
                    f"{STATE} must have one score for each round of {model}; got {len(seen['scores'])}."
                )
            values = (math.nan if value is None else value for value in seen["scores"])
            rule.scores[model] = dict(zip(seen["rounds"], values, strict=True))
        return rule
