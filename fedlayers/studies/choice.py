"""The result of a race: the arms, the recommended model, its evidence, and what it cost."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from fedlayers.studies.arms import Arm
from fedlayers.studies.comparison import gains_of
from fedlayers.studies.hint import NO_COST, Cost, format_seconds
from fedlayers.studies.inference import Answers, Inference, answers
from fedlayers.studies.jobs import TrainingJob
from fedlayers.studies.race import Rates, Standing
from fl_core import __version__
from fl_core.display import Displayed, Summary
from fl_core.errors import UsageError, plural
from fl_core.plan import LayerPlan
from fl_core.rows import (
    CLASSIFICATION,
    MULTILABEL,
    SCORES,
    column_of,
    in_column,
    records,
)
from fl_core.task import Task


@dataclass(frozen=True, repr=False)
class Choice(Displayed):
    """The result of a race.

    Attributes:
        winner: the arm to use; None if nothing is better than the base rate.
        arms: all that raced.
        standing: the scores at the end of the race.
        inference: how certain the decision is.
        run: the directory of the recommended model: the arm's best finished run on validation samples.
        of_seed: the run that each seed's validation samples alone choose. Only this run may be scored on the seed's
            test samples, which other seeds use for validation.
        until: the round after which the race was judged.
        task: of the first seed.
        cost: the estimate; ``measured`` is the cost of the runs; ``seconds`` the time of this call, and
            ``baseline_seconds`` that of fitting the baselines.
        rates: the learning rates that were tried, where they were tuned.
        trials: a line per finished run and per predictor that needs none: ``name``, ``lr``, ``seed``, its main score
            and ``loss`` on validation, the loss ``above`` the base rate's with its interval, and ``refused``.
        clients: a line per client on test samples: the recommended model's scores, and its loss, that of training alone
            and of the base rate (:meth:`~fedlayers.studies.harmless.Bench.of_clients`).
        positives: for two classes the recommended model's probabilities of the positive one on test samples
            (:meth:`~fedlayers.studies.harmless.Bench.positives`).
        notes: sentences on test samples.
        cheapest: of the arms that remain, the one that sends least.
        recommended: the recommended arm's run in each seed.
    """

    winner: Arm | None
    arms: tuple[Arm, ...]
    standing: Standing
    inference: Inference
    run: Path | None
    of_seed: dict[int, TrainingJob]
    until: int
    task: Task
    cost: Cost = NO_COST
    measured: Cost = NO_COST
    seconds: float = 0.0
    baseline_seconds: float = 0.0
    rates: Rates | None = None
    trials: pd.DataFrame = field(default_factory=pd.DataFrame)
    clients: pd.DataFrame = field(default_factory=pd.DataFrame)
    positives: pd.DataFrame = field(default_factory=pd.DataFrame)
    notes: tuple[str, ...] = ()
    cheapest: str = ""
    recommended: dict[int, TrainingJob] = field(default_factory=dict)

    @property
    def plan(self) -> LayerPlan | None:
        """The layer plan of the recommended arm."""
        return None if self.winner is None else self.winner.plan

    @property
    def main(self) -> str:
        """The score that arms are compared by."""
        return self.inference.main

    @property
    def table(self) -> pd.DataFrame:
        """A table with a row per arm, the leader first: its mean scores over the seeds that did not fail."""
        judged = self.standing.judged
        columns = list(dict.fromkeys((self.main, "loss", "score")))
        means = judged.groupby("arm", sort=False)[columns].mean()
        return means.sort_values("score", ascending=False, kind="stable").reset_index()

    def gains(self) -> pd.DataFrame:
        """Return what sharing up to a layer gains on validation over sharing nothing (layer, value, low, high)."""
        scores = self.standing.judged.pivot(
            index="seed", columns="arm", values=self.main
        )
        base, last = "", {}
        for arm in self.arms:
            if arm.name not in scores or arm.plan is None:
                continue
            names = arm.plan.trainable
            shared = [name for name in names if name in arm.plan.shared]
            if not shared:
                base = arm.name
            elif shared == list(names[: len(shared)]):
                last[arm.name] = shared[-1]
        if not base:
            raise UsageError(
                "the race must have the arm nothing to show gains; got none. Add it."
            )
        return gains_of(scores, base, last, 1 if SCORES[self.main] else -1)

    @property
    def answers(self) -> Answers:
        """What to use, and the evidence."""
        return answers(self.inference, self.arms, self.cheapest, self.notes)

    def lead(self) -> str:
        """Return what to use, and its evidence, one per line."""
        return self.answers.text()

    def summary(self) -> Summary:
        """Return the decision, the scores of the arms, and the plan."""
        layers = None if self.plan is None else self.plan.by_layer()
        return Summary.of_frame(self.lead(), self.table, layers)

    def text(self) -> str:
        """Return the decision, its evidence, and the table of all runs and predictors."""
        table = self.shown().drop(columns=["above base", "low", "high"])
        parts = [self.lead(), table.to_string(index=False)]
        parts += [*self.standing.notes, self.legend]
        if len(losing := self.losing):
            parts.append(f"Clients that lose by sharing, on test samples: {losing}.")
        if self.rates is not None:
            parts.append(self.rates.text())
        return "\n\n".join([*parts, self.promise, self.cost_line])

    @property
    def promise(self) -> str:
        """What the scores are of, and whether there is a plan."""
        if self.winner is None:
            return (
                "The scores are of the arms' runs. None of them is recommended, so there is no plan.json and no "
                "recommended model."
            )
        told = "The test scores are of the recommended model."
        if self.plan is None:
            return f"{told} {self.winner.algorithm} uses no plan, so there is no plan.json."
        return f"{told} A new run with plan.json may score less."

    @property
    def cost_line(self) -> str:
        """The estimated and the measured cost, and that of the baselines."""
        line = self.cost.compare_line(self.measured)
        if self.baseline_seconds:
            line += f"; baselines {format_seconds(self.baseline_seconds)}"
        return f"{line}."

    def shown(self) -> pd.DataFrame:
        """Return the table of all finished runs, stopped arms, the base rate and the baselines as text."""
        forms = dict.fromkeys(("loss", "above", "low", "high"), "{:.3f}".format)
        forms |= {"lr": "{:g}".format, "seed": "{:.0f}".format}
        if self.main != "loss":
            forms[self.main] = partial(in_column, self.main)
        table = self.trials.drop(columns="refused")
        for name, form in forms.items():
            table[name] = table[name].map(form).where(table[name].notna(), "")
        titles = {"name": "arm", "lr": "rate", "above": "above base"}
        return table.rename(columns={**titles, self.main: column_of(self.main)})

    @property
    def left_out(self) -> pd.DataFrame:
        """The clients whose samples give no main score (client, seed, why)."""
        lines = self.standing.left_out[["client", "seed", "status"]].drop_duplicates()
        return lines.rename(columns={"status": "why"})

    @property
    def legend(self) -> str:
        """The meaning of the table."""
        seeds = plural(self.standing.judged["seed"].nunique(), "seed")
        best = "its best round" if self.standing.best else f"round {self.until}"
        how = ""
        if self.task.data.task in (CLASSIFICATION, MULTILABEL):
            how = (
                "A temperature and a weight of the base rate calibrate it, fitted on the other half of "
                "the samples. "
            )
        return (
            f"Validation samples, {seeds}, each run at {best}. The loss ranks. {how}"
            "The base rate ignores the features."
        )

    @property
    def losing(self) -> str:
        """The clients whose test loss is significantly higher than when they train alone."""
        if self.clients.empty or "loses" not in self.clients:
            return ""
        return ", ".join(self.clients.loc[self.clients["loses"], "client"])

    def to_json(self) -> dict[str, Any]:
        """Return the choice as a dictionary for JSON, as in ``choice.json``."""
        seen, stake = self.inference, self.inference.at_stake()
        winner = self.winner
        return {
            "winner": None if winner is None else winner.name,
            "algorithm": None if winner is None else winner.algorithm,
            "shared": None if self.plan is None else list(self.plan.shared),
            "run": None if self.run is None else f"arms/{self.run.name}",
            "verdict": seen.verdict,
            "left": list(seen.remaining),
            "refused": list(seen.refused),
            "answers": [self.answers.head, *self.answers.lines],
            "at_stake": None if pd.isna(stake) else stake,
            "trials": records(self.trials),
            "clients": records(self.clients),
            "judged": records(self.standing.judged),
            "failed": self.standing.failed,
            "left_out": records(self.left_out),
            "until": self.until,
            **({} if seen.early is None else {"early": asdict(seen.early)}),
            "rates": None if self.rates is None else self.rates.to_json(),
            "best_rounds": self.standing.best,
            "foreseen": asdict(self.cost),
            "measured": asdict(self.measured),
            "seconds": self.seconds,
            "baseline_seconds": self.baseline_seconds,
            "version": __version__,
        }
