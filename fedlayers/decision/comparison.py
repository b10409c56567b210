"""The result of a comparison of algorithms: scores, ranks and differences over seeds."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from fedlayers.decision.simple import BASELINES as NAIVE
from fedlayers.decision.table import TEST, LossTable
from fl_core import rows, statistics
from fl_core.display import Displayed, Summary
from fl_core.errors import UsageError, check_known, listing, plural
from fl_core.records.stopping import BEST_ROUND, WINDOW
from fl_core.rows import (
    SCORES,
    SHOWN,
    TABLE,
    in_column,
    label_of,
    main_score,
    positive_in,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BASELINES = ("local", "fedavg")
_GAP = "\N{NO-BREAK SPACE}"  # so that a page does not wrap within a number
BEST = "@best_val"
"""The suffix of a model's name if it is scored at its best round on validation."""
MOMENTS = {
    False: "after the last round",
    True: f"at each model's best round on validation (main score, mean over clients and {WINDOW} evaluations)",
}
LEGEND = (
    "Test split {moment}; clients weighted by training samples; mean ± half the 95 % interval over {seeds}.\n"
    "fairness: variance of {score} over clients, lower is fairer. incentive: share of clients with {score} {better}\n"
    "both local's and fedavg's, which have none themselves. rank: by {score}, mean over seeds, 1 is best."
)

GAPS = (
    "against: the paired difference with its 95 % interval over test samples and seeds; all hold together "
    "(Bonferroni)."
)


@dataclass(repr=False)
class Comparison(Displayed):
    """The result of a comparison.

    Attributes:
        frame: the rows of all runs.
        best: whether models are scored at their best round on validation samples, in place of the last
            (:func:`headline`).
        training: the local training in words, per algorithm if they differ.
        losses: the table of the score that ranks, for intervals of differences; None without intervals.
        score: the score by which algorithms are ranked, one of
            :data:`fl_core.rows.SCORES`. Default: the task's main score, such as
            macro-F1 for classes and R2 for numbers.
        scores: one value per run and metric: the headline model on the test split, combined over clients by training
            samples (columns algorithm, seed, model, metric, value).
        table: one line per algorithm: each metric's mean and 95 % interval over seeds,
            then fairness, incentive and mean rank (by the score). Baselines
            (:mod:`fedlayers.decision.simple`) have no rank.
        unranked: why there are no ranks; "" if there are.
        clients: the mean over seeds for each algorithm, client and metric; NaN if a seed has no value,
            and left out if the client's samples cannot give the score.
        left_out: a line for each shown score that some clients' samples cannot give.
            The score is the mean over the other clients.
        positive: the class of two whose AUROC and AUPRC are scored, as in the rows;
            also in the table. Empty without one.

    Raises:
        UsageError: no finished run, or rows without the score.
    """

    frame: pd.DataFrame
    best: bool = False
    training: str = ""
    losses: LossTable | None = None
    score: str = field(default="", kw_only=True)
    scores: pd.DataFrame = field(init=False)
    table: pd.DataFrame = field(init=False)
    clients: pd.DataFrame = field(init=False)
    unranked: str = field(default="", init=False)
    positive: str = field(default="", init=False)
    left_out: list[str] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        final_rows = headline(self.frame, best=self.best).reset_index(drop=True)
        if final_rows.empty:
            raise UsageError(
                "rows must have test scores of a finished run; got none. Finish the run first."
            )
        metrics = list(final_rows["metric"].unique())
        self.score = check_known(
            "score in these rows", self.score or main_score(metrics), metrics
        )
        self.positive = positive_in(final_rows)
        lacks_score = rows.without_score(final_rows)
        means = (
            final_rows[~lacks_score]
            .groupby(["algorithm", "client", "metric"], sort=False)["value"]
            .mean(skipna=False)
        )
        self.clients = means.reset_index()
        self.left_out = rows.left_out(
            final_rows[
                lacks_score
                & final_rows["metric"].isin([*_scores_to_show(metrics), self.score])
            ]
        )
        self.scores = scores_of(final_rows)
        blocks = self._blocks.drop(index=list(NAIVE), errors="ignore")
        try:
            ranks = statistics.ranks(blocks, higher_is_better=SCORES[self.score])
        except UsageError as error:  # the other columns are still valid
            ranks, self.unranked = pd.Series(dtype=float), str(error)
        self.table = self._table(ranks)

    @property
    def _blocks(self) -> pd.DataFrame:
        """Return the scores that rank as a table algorithms x seeds."""
        score_rows = self.scores[self.scores["metric"] == self.score]
        return score_rows.pivot(index="algorithm", columns="seed", values="value").loc[
            score_rows["algorithm"].unique()
        ]

    def _table(self, ranks: pd.Series) -> pd.DataFrame:
        metrics, algorithms = set(self.scores["metric"]), set(self.clients["algorithm"])
        order = dict.fromkeys((*_scores_to_show(metrics), *SCORES))
        lines = []
        for name, algorithm_rows in self.scores.groupby("algorithm", sort=False):
            line: dict[str, Any] = {
                "algorithm": name,
                "model": algorithm_rows["model"].iloc[0],
            }
            line["seeds"] = algorithm_rows["seed"].nunique()
            for metric in filter(metrics.__contains__, order):
                values = algorithm_rows.loc[algorithm_rows["metric"] == metric, "value"]
                interval = statistics.UNKNOWN
                if len(values):
                    interval = statistics.mean_interval(values)
                line |= interval.columns(metric)
            scores = self._of(name)
            line["fairness"] = statistics.fairness(scores)
            line["incentive"] = math.nan
            if name not in BASELINES and set(BASELINES) <= algorithms:
                local, fedavg = map(self._of, BASELINES)
                higher_is_better = SCORES[self.score]
                line["incentive"] = statistics.incentive(
                    scores, local, fedavg, higher_is_better
                )
            line["rank"] = ranks.get(name, np.nan)
            if self.positive:
                line["positive"] = self.positive
            lines.append(line)
        return pd.DataFrame(lines)

    def _of(self, algorithm: object) -> pd.Series:
        table = self.clients[self.clients["metric"] == self.score]
        return table[table["algorithm"] == algorithm].set_index("client")["value"]

    @property
    def legend(self) -> str:
        """Return the meaning of the table's columns, the local training, the baselines, and why ranks are missing."""
        better_word = "below"
        if SCORES[self.score]:
            better_word = "above"
        columns = LEGEND.format(
            moment=MOMENTS[self.best],
            seeds=plural(self.scores["seed"].nunique(), "seed"),
            score=label_of(self.score, self.positive),
            better=better_word,
        )
        lines = [columns]
        if self.losses is not None:
            lines.append(GAPS)
        lines += [f"{line}." for line in self.left_out]
        if missing_baselines := sorted(set(BASELINES) - set(self.table["algorithm"])):
            lines.append(
                f"no incentive: it needs {listing(missing_baselines)} here, too."
            )
        if partial_algorithms := list(
            self.table["algorithm"][self.table["fairness"].isna()]
        ):
            lines.append(
                f"no fairness and no incentive of {listing(partial_algorithms)}: "
                f"a client has no {self.score} with some seed."
            )
        if self.unranked:
            lines.append(f"{self.unranked}.")
        if self.training:
            lines.append(f"local training: {self.training}.")
        for name in self.table["algorithm"]:
            if name in NAIVE:
                lines.append(f"{name}: {NAIVE[name]}.")
        return "\n".join(lines)

    def shown(self) -> pd.DataFrame:
        """Return the table as text, with each algorithm's difference to the best one in the score that ranks.

        Intervals of the differences are paired within seeds
        (:meth:`fedlayers.decision.table.LossTable.gain`), and hold together
        (Bonferroni). Without ``losses`` there are none.
        """
        score, means = self.score, self._blocks.mean(axis=1).round(3)  # as printed
        best_name = str(means.idxmax() if SCORES[score] else means.idxmin())
        other_names = [str(name) for name in means.index if name != best_name]
        texts = {best_name: ""}
        for name in other_names:
            gap = means[name] - means[best_name]
            ends = ""
            if self.losses is not None and {name, best_name} <= {*self.losses.ways}:
                gain = self.losses.gain(name, best_name, TEST)
                low, high = gain.interval(len(other_names))[1:]
                if not SCORES[score]:
                    low, high = -high, -low
                ends = bracket(score, low, high)
            gap_text = in_column(score, gap)
            texts[name] = f"{gap_text}{ends}"
        table = display_name(self.table, score)
        table.insert(3, f"against {best_name}", table["algorithm"].map(texts))
        return table

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw each algorithm's mean score with its interval, and return the Axes.

        See :func:`diagnostics.plots.runs.comparison`.

        Args:
            ax: the Axes to draw on. Default: those of a new figure.
        """
        from diagnostics import plots

        score = self.score
        columns = {score: "value", f"{score}_low": "low", f"{score}_high": "high"}
        table = self.table.rename(columns={**columns, "seeds": "n"})
        return plots.comparison(table, score, ax)

    def latex(self) -> str:
        """Return a small table for LaTeX: each algorithm's scores, its difference to the best one, and its rank."""
        left_out = ["model", "seeds", "fairness", f"incentive{_GAP}%"]
        shown_table = self.shown().drop(columns=left_out)
        return str(shown_table.to_latex(index=False, escape=True))

    def summary(self) -> Summary:
        """Return the number of algorithms and seeds, and the table."""
        seeds = self.scores["seed"].nunique()
        lead = f"{plural(len(self.table), 'algorithm')}, {plural(seeds, 'seed')}, test samples"
        return Summary.of_frame(lead, self.shown())

    def text(self) -> str:
        """Return the table for a terminal, with the meaning of its columns."""
        shown_table = self.shown().drop(columns=["model", "seeds"])
        return f"{shown_table.to_string(index=False)}\n\n{self.legend}"


def _scores_to_show(there: Iterable[str]) -> tuple[str, ...]:
    """Return the scores to show, out of the available ones."""
    return SHOWN[TABLE[main_score(list(there))].task]


def display_name(table: pd.DataFrame, score: str = "") -> pd.DataFrame:
    """Return a comparison's table with its numbers as text: shares in percent, and intervals after the means.

    Args:
        table: the attribute ``table`` of a :class:`Comparison`.
        score: a further score to show first. Default: only the usual scores of the task.

    Returns:
        A line for each algorithm, with ``algorithm``, ``model``, ``seeds``, the scores, fairness, incentive and rank.
    """
    shown_table = table[["algorithm", "model", "seeds"]].copy()
    shown_scores = _scores_to_show(table.columns)
    positive = str(next(iter(table.get("positive", ())), ""))
    for metric in (
        shown_scores if score in ("", *shown_scores) else (score, *shown_scores)
    ):
        title = label_of(metric, positive) + f"{_GAP}%" * TABLE[metric].share
        half_width = (table[f"{metric}_high"] - table[f"{metric}_low"]) / 2
        in_unit = partial(in_column, metric)
        spread = f"{_GAP}±{_GAP}" + half_width.map(in_unit)
        text = table[metric].map(in_unit) + spread.where(np.isfinite(half_width), "")
        shown_table[title] = text.where(table[metric].notna(), "–")
    columns = {
        "fairness": ("fairness", "{:.1e}", 1),
        f"incentive{_GAP}%": ("incentive", "{:.0f}", 100),
        "rank": ("rank", "{:.1f}", 1),
    }
    for title, (name, form, unit) in columns.items():
        has_value = table[name].notna()
        shown_table[title] = (unit * table[name]).map(form.format).where(has_value, "–")
    return shown_table


def bracket(score: str, low: float, high: float) -> str:
    """Return an interval in brackets; empty if it is unknown, or if the values showed no spread.

    >>> bracket("macro_f1", 0.011, 0.029), bracket("macro_f1", 0.0, 0.0)
    (' [1.1, 2.9]', '')

    Args:
        score: the name of the score, which sets the format. A share is shown in percent.
        low, high: the ends of the interval.
    """
    lowest = in_column(score, low)
    highest = in_column(score, high)
    ends = f" [{lowest}, {highest}]"
    if low < high:
        return ends
    return ""


def main_model(frame: pd.DataFrame, *by: str) -> pd.DataFrame:
    """Return the rows of the model that clients use, the personal one if there is one, in each group.

    Args:
        frame: rows of runs.
        by: the columns that name a group, such as ``algorithm`` and ``seed``.
    """
    models = frame.groupby([*by])["model"]
    used_model = models.transform(
        lambda group_models: rows.used_model(set(group_models))
    )
    return frame[frame["model"] == used_model]


def headline(
    frame: pd.DataFrame, split: str = "test", best: bool = False
) -> pd.DataFrame:
    """Return the rows of each run's main model after its last round: ``personal`` if there is one, else global.

    With ``best`` the scores come from the model's best round under its stopping rule, one for all clients. The model's
    name then ends in ``@best_val``. A model without a best round has its last.

    Args:
        frame: rows of runs, with their scores.
        split: the split that is scored.
        best: whether to score the best round in place of the last.
    """
    run = ["algorithm", "seed"]
    score_rows = frame[frame["metric"].isin(list(SCORES)) & (frame["model"] != "local")]
    split_rows = score_rows[score_rows["split"] == split]
    last_rounds = split_rows.groupby(run)["round"].transform("max")
    final_rows = main_model(split_rows[split_rows["round"] == last_rounds], *run)
    if not best:
        return final_rows
    model_keys = [*run, "model"]
    stored_rounds = frame.loc[frame["metric"] == BEST_ROUND, [*model_keys, "value"]]
    model_rounds = final_rows[[*model_keys, "round"]].drop_duplicates()
    model_rounds = model_rounds.merge(stored_rounds, how="left")
    model_rounds["round"] = (
        model_rounds.pop("value").astype("Int64").fillna(model_rounds["round"])
    )
    best_rows = split_rows.merge(model_rounds)
    return best_rows.assign(model=best_rows["model"] + BEST)


def scores_of(final: pd.DataFrame) -> pd.DataFrame:
    """Return the means over clients of the scores of :func:`headline`, weighted by training samples.

    Returns:
        Columns ``algorithm``, ``seed``, ``model``, ``metric`` and ``value``.
    """
    keys = ["algorithm", "seed", "model", "metric"]
    lacks_score = rows.without_score(final)
    lines = [
        (*key, rows.client_mean(client_scores, lacks_score))
        for key, client_scores in final.groupby(keys, sort=False)
    ]
    return pd.DataFrame(lines, columns=[*keys, "value"])
