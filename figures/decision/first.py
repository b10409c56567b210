"""Write the table of the page "Share everything first" from its rows.

    python -m figures.decision.first

A row of ``first.parquet`` is one decision. ``first_runs.py`` of commit a02f7cb4 made them.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pandas as pd

from figures.decision.known import BLOCK
from figures.page import markdown
from fl_core.statistics import Interval, mean_interval

ROWS = Path(__file__).with_name("first.parquet")
PAGE = Path(__file__).parents[2] / "docs/results/share_first.md"
ALONE = re.compile(r"nothing-lr([\d.e-]+)-\d")
RATES = {True: "the policy's is higher", False: "equal or lower"}
MARGINS = {"default": 0.01, "macro_f1": 0.5}
SCORES = {
    "default": "loss, nats",
    "macro_f1": "macro-F1, points",
    "auroc": "AUROC, points",
}


def decisions() -> pd.DataFrame:
    """Return a line for each decision that did not fail, with the test score of what it names."""
    rows = pd.read_parquet(ROWS)
    rows = rows[rows["failed"] == ""]
    answers = pd.DataFrame([*rows["found"].map(json.loads)], index=rows.index)
    value = [value.get("model", value["base_rate"]) for value in answers.pop("value")]
    harmed_share = answers["loses"] / answers["clients"]
    return (
        rows.drop(columns="found")
        .join(answers)
        .assign(value=value, harmed=harmed_share)
    )


def paired(column: str, mode: str) -> pd.DataFrame:
    """Return a column for each commit and a line for each table, the mean of the seeds that both have."""
    mode_rows = decisions().query("mode == @mode")
    paired_values = mode_rows.pivot(
        index=["table", "seed"], columns="commit", values=column
    ).dropna()
    return paired_values.groupby("table").mean()


def sided(values: pd.Series) -> Interval:
    """Return a mean with two one-sided 95 % bounds over tables."""
    return mean_interval(values.to_numpy(float), level=0.9)


def shown(gap: Interval, digits: int) -> str:
    """Return a difference with its bounds."""
    return f"{gap.value:+.{digits}f} [{gap.low:+.{digits}f}, {gap.high:+.{digits}f}]"


def verdict(mode: str, gap: Interval) -> str:
    """Return whether the policy is shown to be not worse, by the registered margins; AUROC has none."""
    if mode == "auroc":
        return "no margin"
    if mode == "default":
        holds, fails = gap.high < MARGINS[mode], gap.low > MARGINS[mode]
    else:
        holds, fails = gap.low > -MARGINS[mode], gap.high < -MARGINS[mode]
    if holds:
        return "not worse"
    if fails:
        return "worse"
    return "undecided"


def table() -> str:
    """Return a line for each mode."""
    table_rows = []
    for mode in SCORES:
        paired_values = paired("value", mode)
        factor = 1 if mode == "default" else 100
        gap = sided(factor * (paired_values["policy"] - paired_values["comparator"]))
        mean_runs = paired("price", mode).mean()
        harmed_share = sided(100 * paired("harmed", mode)["policy"])
        table_rows.append(
            {
                "mode, score": f"{mode}, {SCORES[mode]}",
                "tables": len(paired_values),
                "policy minus comparator": shown(gap, 4 if mode == "default" else 2),
                "verdict": verdict(mode, gap),
                "runs, policy": f"{mean_runs['policy']:.1f}",
                "comparator": f"{mean_runs['comparator']:.1f}",
                "clients that lose, %": f"{harmed_share.value:.1f}, at most {harmed_share.high:.1f}",
            }
        )
    return markdown(pd.DataFrame(table_rows))


def images() -> str:
    """Return what the policy gains over a race of four cuts, on macro-F1 of the stored runs of the study of depth.

    FedAvg alone has own epochs, and each arm has one rate. Ends are tried where training alone or own epochs lead the
    shared model. The ends are the arms that are nearest: 12 of 17 blocks shared, and the last 6.
    """
    rows = pd.read_parquet(ROWS.with_name("depth.parquet")).query(
        "seed < 90 and arm != 'one round'"
    )
    tuned_rows = rows[rows["arm"] == "all"].assign(arm="own")
    for score_name in ("validation_macro_f1", "test_macro_f1"):
        tuned_rows[score_name] = tuned_rows[f"tuned_{score_name}"]
    rows = pd.concat([rows, tuned_rows])
    rows["test"] = rows["test_macro_f1"].map(np.mean)
    row_keys = ["source", "dose", "seed"]
    rows = rows.pivot(
        index=row_keys, columns="arm", values=["validation_macro_f1", "test"]
    )
    validation_score, score = rows["validation_macro_f1"], 100 * rows["test"]
    is_local_better = (
        validation_score[["0", "own"]].max(axis=1) > validation_score["all"]
    )

    def best(arms: list[str]) -> pd.Series:
        chosen_arms = validation_score[arms].idxmax(axis=1)
        return pd.Series(
            [score.loc[score_key] for score_key in chosen_arms.items()],
            chosen_arms.index,
        )

    race_scores, shared_scores = best(["0", "6", "12", "all"]), best(["all", "own"])
    policy_scores = best(["all", "own", "0", "12", "last 6"]).where(
        is_local_better, shared_scores
    )
    table_rows = []
    for way, way_scores, run_count in (
        ("FedAvg and own epochs", shared_scores, 1.0),
        ("the policy", policy_scores, 2 + 2 * is_local_better.mean()),
    ):
        gap = sided((way_scores - race_scores).groupby(["source", "dose"]).mean())
        table_row = {
            "way": way,
            "minus the race": shown(gap, 2),
            "runs": f"{run_count:.1f}",
        }
        table_rows.append(table_row)
    return markdown(pd.DataFrame(table_rows))


def averages() -> str:
    """Return what the average of the predictions of the three best finished models gains over the best one."""
    rows, table_rows = pd.read_csv(ROWS.with_name("averages.csv")), []
    for mode, score_name, factor, digits in (
        ("default", "loss", 1, 4),
        ("macro_f1", "macro_f1", 100, 2),
    ):
        gap = sided(
            factor * (rows[f"average_{score_name}"] - rows[f"best_{score_name}"])
        )
        columns = {"average minus the best model": shown(gap, digits)}
        table_rows.append({"score": SCORES[mode], "tables": len(rows), **columns})
    return markdown(pd.DataFrame(table_rows))


def by_rate() -> str:
    """Return the loss of the default mode's pairs, by which commit trains alone, as all its arms, at a higher rate."""
    default_rows = decisions().query("mode == 'default'")
    local_runs = default_rows["runs"].map(
        lambda names: next(filter(ALONE.match, names))
    )
    default_rows["rate"] = local_runs.str.extract(ALONE, expand=False).astype(float)
    paired_values = default_rows.pivot(
        index=["table", "seed"], columns="commit", values=["rate", "value"]
    ).dropna()
    gap = paired_values["value"]["policy"] - paired_values["value"]["comparator"]
    relation = (
        paired_values["rate"]["policy"] > paired_values["rate"]["comparator"]
    ).map(RATES)
    gap_table = gap.groupby(relation).agg(["size", "mean"]).reindex([*RATES.values()])
    headings = {"size": "pairs", "mean": "policy minus comparator, nats, mean"}
    return markdown(
        gap_table.round(4).rename(columns=headings).reset_index(names="rate")
    )


def written(page: str) -> str:
    """Return the page with its table made from the rows."""
    hours = decisions()["seconds"].sum() / 3600
    tables = {
        "first": table(),
        "rates": by_rate(),
        "images": images(),
        "averages": averages(),
        "hours": f"{len(decisions())} decisions, {hours:.2f} core-hours.",
    }
    return BLOCK.sub(
        lambda match: f"{match[1]}{tables[match[2]].rstrip()}\n{match[3]}", page
    )


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
