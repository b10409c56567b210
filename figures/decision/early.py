"""Replay races that judge rates early, on federations that the judge did not see: ``python -m figures.decision.early``.

``REGISTERED_EARLY.md`` defines every number, and has the tables.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd

from fedlayers.studies.judge import FROZEN, judged_round
from fedlayers.studies.race import with_score
from figures.decision.finished_ways import ARMS
from figures.decision.judge import THREE
from figures.decision.selection import BASE, EVERY, ROUNDS, SETS, TEMPERED
from figures.decision.selection_page import (
    MAIN_CUT,
    ROWS,
    RULES,
    TAKEN,
    federations,
    stopped,
)
from figures.page import markdown
from fl_core.statistics import mean_interval
from fl_core.stopping import best_round, moving_mean

AT = judged_round(ROUNDS, EVERY)
Line = dict[str, Any]
RATES: dict[str, Callable[[pd.DataFrame], int]] = {
    "macro-F1": lambda table: int(table["macro_f1"].idxmax()),
    "two ranks": lambda table: int(
        with_score(table.assign(seed=0), ("macro_f1", "loss"))
        .sort_values(["score", "macro_f1"], ascending=False, kind="stable")
        .index[0]
    ),
    "tempered": lambda table: int(table[TEMPERED].idxmin()),
}
"""The rules for the rate, of a table with a line for each rate."""
TODAY = "today"


def at_best(own: pd.DataFrame, until: int) -> Line:
    """Return a run's smoothed validation scores at its best round so far, and the test scores there."""
    seen = own[own.index <= until]
    curves = {
        str(name): seen["validation"][name].to_dict() for name in seen["validation"]
    }
    selecting = {name: curves[name] for name in ("macro_f1", "loss")}
    best = (
        stopped(curves, RULES[TAKEN].round)
        if until == ROUNDS
        else best_round(selecting)
    )
    assert best is not None
    smooth = {
        name: moving_mean(values).get(best, values[best])
        for name, values in curves.items()
    }
    if until < ROUNDS:  # the early rules read the best score so far
        smooth["macro_f1"] = max(moving_mean(curves["macro_f1"]).values())
    return {
        **smooth,
        **{f"test {name}": float(own["test"][name][best]) for name in curves},
        "best": best,
    }


def raced(table: pd.DataFrame, way: str) -> Line:
    """Return the scores of the run that a race recommends in one federation and seed."""
    runs = list(dict.fromkeys(table.index.get_level_values(0)))
    own = {
        (run, arm): table.loc[(run, arm)].sort_index() for run in runs for arm in ARMS
    }
    until = ROUNDS if way == TODAY else AT
    rule = RATES[TEMPERED if way == TODAY else way]
    rates = pd.DataFrame([at_best(own[run, MAIN_CUT], until) for run in runs])
    rate = runs[rule(rates)]
    arms = ARMS if way == TODAY else THREE
    curves = [
        own[rate, arm]["validation"]["macro_f1"].loc[:AT].to_numpy(float)
        for arm in arms
    ]
    kept = arms[int(FROZEN.gains(curves).sum(axis=1).argmax())]
    finished = [(rate, kept)]
    if way == TODAY:
        finished += [(run, MAIN_CUT) for run in runs]
    ends = pd.DataFrame([at_best(own[run], ROUNDS) for run in finished])
    return {"rate": rate, "arm": kept, **ends.loc[RATES[TEMPERED](ends)]}


def replay(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a line for each federation, seed and race."""
    lines = []
    for name, seed, base, table in federations(frame):
        for way in (TODAY, *RATES):
            lines.append(
                {
                    "way": way,
                    "federation": name,
                    "seed": seed,
                    BASE: base,
                    **raced(table, way),
                }
            )
    return pd.DataFrame(lines)


def summary(found: pd.DataFrame) -> pd.DataFrame:
    """Return for each race its mean test scores over federations, and their differences to today's."""
    means = found.groupby(["way", "federation"], sort=False).mean(numeric_only=True)
    today, lines = means.loc[TODAY], []
    for way in dict.fromkeys(found["way"]):
        own, line = means.loc[way], {"way": way}
        for name in ("macro_f1", TEMPERED):
            value, low, high = mean_interval(
                own[f"test {name}"] - today[f"test {name}"]
            )
            line |= {
                name: own[f"test {name}"].mean(),
                f"{name} more": value,
                f"{name} low": low,
                f"{name} high": high,
            }
        line["above"] = int((own[f"test {TEMPERED}"] > own[BASE]).sum())
        lines.append(line)
    return pd.DataFrame(lines)


def table() -> str:
    """Return the published table of the stored runs."""
    lines = summary(replay(pd.read_parquet(ROWS))).to_dict("records")

    def more(line: Line, name: str, scale: float, digits: int) -> str:
        value, low, high = (
            f"{scale * line[f'{name} {end}']:+.{digits}f}"
            for end in ("more", "low", "high")
        )
        return f"{value} [{low}, {high}]"

    return markdown({
        "the rate by": [line["way"] for line in lines],
        "log loss": [f"{line[TEMPERED]:.3f}" for line in lines],
        "more than today": [more(line, TEMPERED, 1, 3) for line in lines],
        "points of macro-F1 more": [more(line, "macro_f1", 100, 1) for line in lines],
        "above the base rate": [f"{line['above']} of {len(SETS)}" for line in lines],
    })  # fmt: skip


if __name__ == "__main__":
    print(table())
