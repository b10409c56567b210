"""The result of a race: the arms, the winner, the three answers, and what it cost."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from fedlayers.studies.answers import Answers, answers
from fedlayers.studies.arms import Arm
from fedlayers.studies.inference import Inference, rank_arms
from fedlayers.studies.race import Entry, Standing
from fedlayers.studies.rates import Rates
from fedlayers.studies.runtime_estimate import Cost
from fl_core import __version__
from fl_core.display import Displayed, Summary
from fl_core.errors import plural
from fl_core.plan import LayerPlan
from fl_core.rows import records
from fl_core.scores import column_of, in_column, label_of, main_score

ALL_TRAINED = (75, 70, 3.1)
"""Races in 100 that lose less than 1 point to the best cut: the model that won, and its plan in another run.

Nine of ten models lose at most the third number, in points.

From ``decision.tuned``: four rates were tried before four cuts at the best, on the data of other people.
"""
JUDGED = (79, 74, 3.1)
"""The same of a race that a judge stops early, from ``decision.judge``."""
PROMISES = "The scores are of the trained models. A new run with the winner's plan may gain less."
"""What a race promises of the model that won, and of the plan for another run."""


def certainty(models: int, plans: int, tail: float) -> str:
    """Return the same in numbers, where rates were tuned first."""
    return (
        f"Of 100 such races in our tests, {models} lose less than 1 point of macro-F1 to the best cut, and 90 lose at "
        f"most {tail}. A new run with the plan loses less than 1 point in {plans} of 100."
    )


@dataclass(frozen=True, repr=False)
class Choice(Displayed):
    """The result of a race.

    Attributes:
        winner: the arm to use: of those without a significant difference, the one that sends least.
        arms: all that raced.
        standing: the scores at the end of the race.
        inference: how certain the decision is.
        run: the winner's run directory.
        of_seed: the run that each seed's validation samples alone choose; empty if a judge stopped the race early. Only
            this run may be scored on the seed's test samples, which other seeds use for validation.
        until: the round after which the race was judged.
        cost: the estimate; ``measured`` is the cost of the runs; ``seconds`` the time of this call.
        rates: the learning rates that were tried, where they were tuned.
    """

    winner: Arm
    arms: tuple[Arm, ...]
    standing: Standing
    inference: Inference
    run: Path
    of_seed: dict[int, Entry]
    until: int
    cost: Cost
    measured: Cost
    seconds: float
    rates: Rates | None = None

    @property
    def plan(self) -> LayerPlan | None:
        """The winner's layer plan."""
        return self.winner.plan

    @property
    def main(self) -> str:
        """The score that arms are judged by, in addition to the loss."""
        return main_score(self.standing.judged.columns)

    @property
    def table(self) -> pd.DataFrame:
        """A table with a row per arm, the leader first: its mean scores over the seeds that did not fail."""
        judged = self.standing.judged
        return (
            judged.groupby("arm")[[self.main, "loss", "score"]]
            .mean()
            .loc[rank_arms(judged)]
            .reset_index()
        )

    def summary(self) -> Summary:
        """Return the decision, the scores of the arms, and the plan."""
        layers = None if self.plan is None else self.plan.by_layer()
        return Summary.of_frame(self.lead(), self.table, layers)

    def text(self) -> str:
        """Return the decision, its certainty, and the table of arms."""
        seeds, word = self.standing.judged["seed"].nunique(), label_of(self.main)
        columns = {
            "arm": self.table["arm"],
            column_of(self.main): [
                in_column(self.main, value) for value in self.table[self.main]
            ],
            "loss": [f"{value:.3f}" for value in self.table["loss"]],
        }
        if self.inference.early is None:
            columns["score"] = [f"{value:+.2f}" for value in self.table["score"]]
            best = (
                "each arm's best round" if self.standing.best else f"round {self.until}"
            )
            legend = (
                f"Validation samples, last evaluated rounds up to {best}, {plural(seeds, 'seed')}. "
                f"Score = z({word}) - z(loss); higher is better. z: standard deviations above the mean of the arms."
            )
        else:
            judged = self.standing.judged.set_index("arm").loc[self.table["arm"]]
            columns["forecast"] = [
                in_column(self.main, value) for value in judged["forecast"]
            ]
            columns |= {
                "status": judged["status"].tolist(),
                "rounds": judged["trained"].tolist(),
            }
            legend = (
                f"Validation samples. Forecast: points of {word} above the kept arm at the end. Only that arm has a "
                "final score; the same command with --thorough trains the others on."
            )
        shown = pd.DataFrame(columns).replace("nan", "-")
        cost = self.cost.compare_line(self.measured)
        rates = [] if self.rates is None else [self.rates.text()]
        table = shown.to_string(index=False)
        found = [
            self.lead(),
            table,
            *self.standing.notes,
            legend,
            *rates,
            self.promises,
            cost,
        ]
        return "\n\n".join(found)

    @property
    def promises(self) -> str:
        """The expected loss of the model and of the plan, in numbers if rates were tuned for classes."""
        if self.rates is None or self.main != "macro_f1":
            return PROMISES
        return f"{PROMISES} {certainty(*(ALL_TRAINED if self.inference.early is None else JUDGED))}"

    @property
    def answers(self) -> Answers:
        """The three answers. Is a split better? Which one? Is it better than guessing?"""
        return answers(self.inference, self.arms, self.winner)

    def lead(self) -> str:
        """Return what to use, and the three answers, one per line."""
        return "\n".join(
            [self.answers.head, *(f"- {line}" for line in self.answers.lines)]
        )

    def to_json(self) -> dict[str, Any]:
        """Return the choice as a dictionary for JSON, as in ``choice.json``."""
        seen, stake = self.inference, self.inference.at_stake(self.winner.name)
        return {
            "winner": self.winner.name,
            "algorithm": self.winner.algorithm,
            "shared": None if self.plan is None else list(self.plan.shared),
            "verdict": seen.verdict,
            "left": list(seen.remaining),
            "answers": self.answers.codes,
            "at_stake": None if pd.isna(stake) else stake,
            "judged": records(self.standing.judged),
            "failed": [
                {"arm": arm, "seed": seed, "why": why}
                for (arm, seed), why in self.standing.failed.items()
            ],
            "left_out": [
                {"client": name, "seed": seed, "why": why}
                for (name, seed), why in self.standing.left_out.items()
            ],
            "until": self.until,
            **({} if seen.early is None else {"early": asdict(seen.early)}),
            "rates": None if self.rates is None else self.rates.to_json(),
            "best_rounds": [
                {"arm": a, "seed": s, "round": at}
                for (a, s), at in self.standing.best.items()
            ],
            "foreseen": asdict(self.cost),
            "measured": asdict(self.measured),
            "seconds": self.seconds,
            "version": __version__,
        }
