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
    harmed = answers["loses"] / answers["clients"]
    return rows.drop(columns="found").join(answers).assign(value=value, harmed=harmed)


def paired(what: str, mode: str) -> pd.DataFrame:
    """Return a column for each commit and a line for each table, the mean of the seeds that both have."""
    of_mode = decisions().query("mode == @mode")
    wide = of_mode.pivot(
        index=["table", "seed"], columns="commit", values=what
    ).dropna()
    return wide.groupby("table").mean()


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
    lines = []
    for mode in SCORES:
        values = paired("value", mode)
        factor = 1 if mode == "default" else 100
        gap = sided(factor * (values["policy"] - values["comparator"]))
        price = paired("price", mode).mean()
        harmed = sided(100 * paired("harmed", mode)["policy"])
        lines.append(
            {
                "mode, score": f"{mode}, {SCORES[mode]}",
                "tables": len(values),
                "policy minus comparator": shown(gap, 4 if mode == "default" else 2),
                "verdict": verdict(mode, gap),
                "runs, policy": f"{price['policy']:.1f}",
                "comparator": f"{price['comparator']:.1f}",
                "clients that lose, %": f"{harmed.value:.1f}, at most {harmed.high:.1f}",
            }
        )
    return markdown(pd.DataFrame(lines))


def images() -> str:
    """Return what the policy gains over a race of four cuts, on macro-F1 of the stored runs of the study of depth.

    FedAvg alone has own epochs, and each arm has one rate. Ends are tried where training alone or own epochs lead the
    shared model. The ends are the arms that are nearest: 12 of 17 blocks shared, and the last 6.
    """
    rows = pd.read_parquet(ROWS.with_name("depth.parquet")).query(
        "seed < 90 and arm != 'one round'"
    )
    tuned = rows[rows["arm"] == "all"].assign(arm="own")
    for name in ("validation_macro_f1", "test_macro_f1"):
        tuned[name] = tuned[f"tuned_{name}"]
    rows = pd.concat([rows, tuned])
    rows["test"] = rows["test_macro_f1"].map(np.mean)
    keys = ["source", "dose", "seed"]
    rows = rows.pivot(index=keys, columns="arm", values=["validation_macro_f1", "test"])
    validation_score, score = rows["validation_macro_f1"], 100 * rows["test"]
    differ = validation_score[["0", "own"]].max(axis=1) > validation_score["all"]

    def best(arms: list[str]) -> pd.Series:
        chosen = validation_score[arms].idxmax(axis=1)
        return pd.Series([score.loc[name] for name in chosen.items()], chosen.index)

    race, shared = best(["0", "6", "12", "all"]), best(["all", "own"])
    policy = best(["all", "own", "0", "12", "last 6"]).where(differ, shared)
    lines = []
    for way, scores_of_way, runs in (
        ("FedAvg and own epochs", shared, 1.0),
        ("the policy", policy, 2 + 2 * differ.mean()),
    ):
        gap = sided((scores_of_way - race).groupby(["source", "dose"]).mean())
        line = {"way": way, "minus the race": shown(gap, 2), "runs": f"{runs:.1f}"}
        lines.append(line)
    return markdown(pd.DataFrame(lines))


def averages() -> str:
    """Return what the average of the predictions of the three best finished models gains over the best one."""
    rows, lines = pd.read_csv(ROWS.with_name("averages.csv")), []
    for mode, name, factor, digits in (
        ("default", "loss", 1, 4),
        ("macro_f1", "macro_f1", 100, 2),
    ):
        gap = sided(factor * (rows[f"average_{name}"] - rows[f"best_{name}"]))
        cells = {"average minus the best model": shown(gap, digits)}
        lines.append({"score": SCORES[mode], "tables": len(rows), **cells})
    return markdown(pd.DataFrame(lines))


def by_rate() -> str:
    """Return the loss of the default mode's pairs, by which commit trains alone, as all its arms, at a higher rate."""
    of_default = decisions().query("mode == 'default'")
    alone = of_default["runs"].map(lambda names: next(filter(ALONE.match, names)))
    of_default["rate"] = alone.str.extract(ALONE, expand=False).astype(float)
    wide = of_default.pivot(
        index=["table", "seed"], columns="commit", values=["rate", "value"]
    ).dropna()
    gap = wide["value"]["policy"] - wide["value"]["comparator"]
    higher = (wide["rate"]["policy"] > wide["rate"]["comparator"]).map(RATES)
    sizes = gap.groupby(higher).agg(["size", "mean"]).reindex([*RATES.values()])
    heads = {"size": "pairs", "mean": "policy minus comparator, nats, mean"}
    return markdown(sizes.round(4).rename(columns=heads).reset_index(names="rate"))


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
    return BLOCK.sub(lambda m: f"{m[1]}{tables[m[2]].rstrip()}\n{m[3]}", page)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
