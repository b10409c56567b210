"""The numbers of PLayer-FL's tables in two readings: scores, fairness and incentive by dataset, method and seed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from fedlayers.decision.comparison import BASELINES, main_model
from figures.differences import LEAST_SEEDS
from figures.papers import published, published_table
from figures.player_fl.runs import ABSENT, BESIDE, CASES, METHODS
from figures.ranking import Ranking
from figures.recipe import where
from figures.verdicts import median_ends
from fl_core.rows import SCORES

SCORE, FAIRNESS, INCENTIVE = "score", "fairness", "incentive"
CONTROL = "playerfl"


@dataclass(frozen=True)
class Reading:
    """One way to read scores from the runs' rows.

    Attributes:
        title: the title in words.
        trained: whether a method is judged by what each client has after its last local training, also where the
            method's result is a global model.
        random: the method that stands in the row PLayer-FL-Random.
        transposed: whether Friedman's test takes the datasets for treatments.
    """

    name: str
    title: str
    trained: bool
    random: str
    transposed: bool


DEFAULT = Reading(
    "default", "final personal model, or global", False, "playerfl_random", False
)
RELEASED = Reading(
    "released",
    "clients' models after local training, with PLayer-FL−1 in the row Random",
    True,
    "playerfl_minus",
    True,
)
"""As the authors' code makes the tables: every method is judged by the clients' locally trained models (there the best
of them in validation, here the last), the row Random holds the runs with one layer less, and Friedman's test has the
datasets for treatments."""
READINGS = (DEFAULT, RELEASED)


@dataclass(frozen=True)
class Table:
    """One published table of scores.

    Attributes:
        place: where it is printed.
        kind: the score itself, its variance over clients (``fairness``), or the share of clients above both baselines.
        metric: one of :data:`fl_core.rows.SCORES`.
    """

    place: str
    kind: str
    metric: str

    @property
    def methods(self) -> tuple[str, ...]:
        """Return the ranked methods. For fairness and incentive only methods that federate, except FedAvg."""
        return tuple(
            method
            for method in METHODS
            if self.kind == SCORE or method not in BASELINES
        )

    @property
    def factor(self) -> float:
        """Return the factor to the printed unit.

        It is 100 for scores and incentive (percent), 1 for fairness (a variance).
        """
        if self.kind == FAIRNESS:
            return 1.0
        return 100.0

    @property
    def higher_is_better(self) -> bool:
        return {SCORE: SCORES[self.metric], FAIRNESS: False, INCENTIVE: True}[self.kind]

    @property
    def quantity(self) -> str:
        """Return the quantity's name in the published numbers."""
        if self.kind == SCORE:
            return self.metric
        return f"{self.metric} {self.kind}"

    @property
    def word(self) -> str:
        """Return what the metric is called."""
        if self.metric == "macro_f1":
            return "macro-F1"
        return self.metric

    @property
    def label(self) -> str:
        """Return the axis label: the quantity in its printed unit."""
        return {
            SCORE: f"{self.word} × 100" if self.metric == "loss" else f"{self.word} %",
            FAIRNESS: f"variance of {self.word}",
            INCENTIVE: f"clients with better {self.word} %",
        }[self.kind]

    def printed(self, values: str = "value") -> pd.DataFrame:
        """Return the printed table, methods x datasets; ``values`` may be ``spread``."""
        printed_scores = published_table(
            "player_fl", self.place, quantity=self.quantity, values=values
        )
        return printed_scores.reindex(index=list(self.methods))

    def printed_ranks(self) -> pd.Series:
        """Return the printed mean ranks."""
        return (
            published_table("player_fl", self.place, quantity="mean rank")
            .iloc[:, 0]
            .reindex(list(self.methods))
        )

    def printed_ranking(self) -> Ranking:
        """Return ranks and tests recomputed from the printed cells."""
        return Ranking(self.printed(), self.higher_is_better)


def clients(frame: pd.DataFrame, reading: Reading) -> pd.DataFrame:
    """Return every client's test scores in a reading."""
    client_scores = frame[frame["metric"].isin(list(SCORES))]
    if reading.trained:
        client_scores = client_scores[client_scores["model"] == "local"]
    else:
        client_scores = main_model(client_scores, "run", "seed")
    run_parts = client_scores["run"].str.split(".", n=1, expand=True)
    client_scores = client_scores.assign(dataset=run_parts[0], method=run_parts[1])
    if reading.random != "playerfl_random":
        replacement_rows = client_scores[
            client_scores["method"] == reading.random
        ].assign(method="playerfl_random")
        client_scores = pd.concat(
            [
                client_scores[client_scores["method"] != "playerfl_random"],
                replacement_rows,
            ]
        )
    return client_scores[
        ["dataset", "method", "seed", "client", "metric", "value", "n_train"]
    ]


def by_seed(client_scores: pd.DataFrame, table: Table) -> pd.DataFrame:
    """Return the table's quantity in its printed unit, one row a dataset, method and seed.

    It is NaN where a client has no value. Incentive needs both baselines.
    """
    metric_rows, group_keys = (
        client_scores[client_scores["metric"] == table.metric],
        ["dataset", "seed"],
    )
    scores_by_method = metric_rows.pivot(
        index=[*group_keys, "client"], columns="method", values="value"
    )
    if table.kind == SCORE:
        weights = (
            metric_rows.groupby([*group_keys, "client"])["n_train"]
            .first()
            .loc[scores_by_method.index]
        )
        total_weights = weights.groupby(level=group_keys).transform("sum")
        combined = (
            scores_by_method.mul(weights / total_weights, axis=0)
            .groupby(level=group_keys)
            .sum()
        )
    elif table.kind == FAIRNESS:
        combined = scores_by_method.groupby(level=group_keys).var(ddof=0)
    else:
        baseline_scores = scores_by_method.reindex(columns=list(BASELINES))
        higher_is_better = SCORES[table.metric]
        if higher_is_better:
            threshold = baseline_scores.max(axis=1, skipna=False)
        else:
            threshold = baseline_scores.min(axis=1, skipna=False)
        is_better = (
            scores_by_method.gt(threshold, axis=0)
            if higher_is_better
            else scores_by_method.lt(threshold, axis=0)
        )
        combined = (
            is_better.astype(float)
            .where(threshold.notna(), axis=0)
            .groupby(level=group_keys)
            .mean()
        )
    is_complete = scores_by_method.notna().groupby(level=group_keys).all()
    long_values = (
        (table.factor * combined.where(is_complete))
        .stack(future_stack=True)
        .rename("value")
    )
    present_keys = pd.MultiIndex.from_frame(
        metric_rows[[*group_keys, "method"]].drop_duplicates()
    )
    return long_values[long_values.index.isin(present_keys)].reset_index()


@dataclass(frozen=True)
class Cells:
    """A table's measured values in one reading.

    Attributes:
        each: dataset, method, seed, value.
        cells: dataset, method -> ``value``, the median over seeds, ``low`` and ``high``, the ends of its
            95 % interval (below six seeds their range), and ``n`` seeds.
        ranking: the ranked methods over the datasets that have them all.
    """

    table: Table
    reading: Reading
    each: pd.DataFrame
    cells: pd.DataFrame
    ranking: Ranking

    @property
    def enough(self) -> bool:
        """Return whether every ranked cell has enough seeds for an order."""
        ranked_cells = self.cells[
            self.cells.index.isin(list(self.ranking.blocks.columns), level="dataset")
        ]
        return bool(len(ranked_cells)) and bool(
            (ranked_cells["n"] >= LEAST_SEEDS).all()
        )


def cells(frame: pd.DataFrame, table: Table, reading: Reading = DEFAULT) -> Cells:
    """Return the values of a published table, computed from the runs' rows in one reading."""
    seeds_table = by_seed(clients(frame, reading), table)
    cell_rows = {}
    for cell_key, cell_values in seeds_table.groupby(["dataset", "method"], sort=False):
        cell_rows[cell_key] = {
            **median_ends(cell_values["value"])._asdict(),
            "n": len(cell_values),
        }
    index = pd.MultiIndex.from_tuples(list(cell_rows), names=["dataset", "method"])
    cell_table = pd.DataFrame(
        list(cell_rows.values()), index=index, columns=["value", "low", "high", "n"]
    )
    medians = cell_table["value"].unstack("dataset")
    datasets = [dataset for dataset in CASES if dataset in medians.columns]
    ranked_medians = medians.reindex(index=list(table.methods), columns=datasets)
    return Cells(
        table,
        reading,
        seeds_table,
        cell_table,
        Ranking(ranked_medians, table.higher_is_better),
    )


# --- published beside measured ---------------------------------------------------------------------------------


def lines(result: Cells) -> list[dict[str, Any]]:
    """Return a table's rows in one reading, published next to measured. They hold cells, mean ranks and p values."""
    table, reading, ranking = result.table, result.reading, result.ranking
    printed_values, printed_spreads = (
        table.printed(),
        table.printed("spread") if table.kind == SCORE else None,
    )
    methods = [
        method_name
        for method_name in (*METHODS, *BESIDE)
        if method_name in table.methods or method_name in BESIDE
    ]
    table_rows: list[dict[str, Any]] = []
    for dataset in (*CASES, *ABSENT):
        published_dataset = dataset
        if dataset in CASES:
            published_dataset = CASES[dataset].printed
        for method in methods:
            table_row: dict[str, Any] = {
                "quantity": table.quantity,
                "dataset": dataset,
                "method": method,
            }
            if method in printed_values.index:
                table_row |= {
                    "published": printed_values.loc[method, published_dataset],
                    "published_dataset": published_dataset,
                }
                if printed_spreads is None:
                    table_row |= {}
                else:
                    table_row |= {
                        "published_spread": printed_spreads.loc[
                            method, published_dataset
                        ]
                    }
            table_rows.append(table_row | _cell(result.cells, dataset, method))
    printed_ranks, printed_ranking = table.printed_ranks(), table.printed_ranking()
    for method in table.methods:
        table_row = {
            "quantity": "mean rank",
            "method": method,
            "published": printed_ranks[method],
        }
        table_rows.append(
            table_row
            | {
                "published_recomputed": printed_ranking.ranks[method],
                **_measured(ranking.ranks[method], ranking),
            }
        )
        table_row = {
            "quantity": f"nemenyi p against {CONTROL}",
            "method": method,
            "published_recomputed": printed_ranking.nemenyi.loc[method, CONTROL],
        }
        p_value = ranking.nemenyi.loc[method, CONTROL]
        table_rows.append(table_row | _measured(p_value, ranking, ranking.status))
    p_value = friedman_printed(table)
    measured_test, printed_test = (
        source_ranking.transposed if reading.transposed else source_ranking.friedman
        for source_ranking in (ranking, printed_ranking)
    )
    table_row = {
        "quantity": "friedman p",
        "published": p_value,
        "published_recomputed": printed_test.p_value,
    }
    table_rows.append(
        table_row | _measured(measured_test.p_value, ranking, measured_test.status)
    )
    return [{"definition": reading.name, **table_row} for table_row in table_rows]


def _cell(cells: pd.DataFrame, dataset: str, method: str) -> dict[str, Any]:
    if dataset in ABSENT:
        return {"seeds": 0, "status": f"{ABSENT[dataset]} is not available"}
    if (dataset, method) not in cells.index:
        return {"seeds": 0, "status": "no run"}
    cell = cells.loc[(dataset, method)]
    columns = {
        "measured": cell["value"],
        "low": cell["low"],
        "high": cell["high"],
        "seeds": int(cell["n"]),
    }
    baselines = " and ".join(BASELINES)
    return columns | {
        "status": "ok" if math.isfinite(cell["value"]) else f"needs {baselines}"
    }


def _measured(value: float, ranking: Ranking, status: str = "ok") -> dict[str, Any]:
    value_status = "no dataset has all methods"
    if math.isfinite(value):
        value_status = "ok"
    return {
        "measured": value,
        "datasets": ranking.blocks.shape[1],
        "status": status if status != "ok" else value_status,
    }


def friedman_printed(table: Table) -> str:
    """Return the printed p of Friedman's test; empty if unknown."""
    rows = published("player_fl")
    rows = where(rows, place=table.place, quantity="friedman p")
    if rows.empty:
        return ""
    printed_row = rows.iloc[0]
    if math.isnan(printed_row["value"]):
        return f"< {printed_row['high']:g}"
    return f"{printed_row['value']:g}"


def frame_of(table_rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Return a table's rows as a frame with all its columns."""
    return pd.DataFrame(table_rows, columns=list(LINE))


LINE: Mapping[str, str] = {
    "definition": "the reading: default, or released",
    "quantity": "of the table; mean rank; p of a test",
    "dataset": "as the registry names it",
    "method": "as the registry names it",
    "published_dataset": "whose number is printed",
    "published": "as printed",
    "published_spread": "half of the printed interval",
    "published_recomputed": "what the printed cells give",
    "measured": "median over seeds, in the printed unit; of ranks and tests the value",
    "low": "of the median's 95 % interval; below six seeds the least of them",
    "high": "of the median's 95 % interval; below six seeds the greatest of them",
    "seeds": "behind the cell",
    "datasets": "behind a rank or test",
    "status": "ok, or why there is no value",
}
"""Columns of the tables of this paper."""
