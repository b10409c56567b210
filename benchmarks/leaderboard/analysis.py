"""The analysis of the leaderboard: tables from rows. Data families are the blocks; ``REGISTERED.md`` defines it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.leaderboard.federations import FEDERATIONS, ROUNDS
from benchmarks.leaderboard.methods import BOUNDS, METHODS, REFERENCES, TUNING, Method
from benchmarks.leaderboard.runs import METRICS, Row, complete, number
from fl_core import statistics
from fl_core.errors import UsageError, listing

MAIN = "macro_f1"
SCORES = ("macro_f1", "accuracy", "loss", "worst", "below")
COSTS = ("sent", "computed", "stored")
MARGIN = 0.01
"""Two methods are practically equal within this difference of macro-F1."""
LEVEL = 0.95
ENOUGH = 6
"""Data families from which a table is more than a first look."""
BETTER, WORSE, EQUAL, OPEN = "better", "worse", "practically equal", "undecided"


def scored_runs(
    rows: Sequence[Row], methods: Mapping[str, Method] = METHODS
) -> pd.DataFrame:
    """Return a line for each scored run of the federations that have all methods.

    Columns are ``federation``, ``family``, ``method``, ``seed``, ``stopped`` (the last round), :data:`SCORES` and
    :data:`COSTS`. A score is the mean over clients by training samples. ``worst`` is the lowest macro-F1 of a client.
    ``below`` is the share of clients below Local in the same seed. A run that diverged has the scores of the majority
    class.

    Raises:
        UsageError: no federation has all methods.
    """
    names = dict.fromkeys(row["federation"] for row in rows)
    chosen = [
        name for name in FEDERATIONS if name in names and complete(rows, name, methods)
    ]
    if not chosen:
        raise UsageError(
            f"a federation must have the scored runs of all {len(methods)} methods; got none with them. "
            "Make them with python -m benchmarks.leaderboard --run."
        )
    runs = {
        (row["federation"], row["method"], row["seed"]): row
        for row in rows
        if row["seed"] != TUNING
    }
    lines = []
    for (federation, method, seed), row in runs.items():
        if federation not in chosen or method not in methods:
            continue
        clients = row["clients"] or runs[federation, "majority", seed]["clients"]
        local = (
            runs[federation, "local", seed]["clients"]
            or runs[federation, "majority", seed]["clients"]
        )
        lines.append({
            "federation": federation, "family": FEDERATIONS[federation].family, "method": method, "seed": seed,
            **_of_clients(clients, local), **{name: number(row[name]) for name in ("stopped", *COSTS)},
        })  # fmt: skip
    return pd.DataFrame(lines)


def _of_clients(
    clients: Mapping[str, list[Any]], local: Mapping[str, list[Any]]
) -> dict[str, float]:
    sizes = [values[-1] for values in clients.values()]
    each = {
        metric: [number(values[k]) for values in clients.values()]
        for k, metric in enumerate(METRICS)
    }
    place = METRICS.index(MAIN)
    gaps = np.array(each[MAIN]) - [number(local[name][place]) for name in clients]
    below = float(np.mean(gaps < 0)) if np.isfinite(gaps).all() else math.nan
    means = {
        metric: statistics.combine(values, sizes) for metric, values in each.items()
    }
    return {**means, "worst": float(np.min(each[MAIN])), "below": below}


def by_family(runs: pd.DataFrame, score: str = MAIN) -> pd.DataFrame:
    """Return a score of each method (rows) in each data family (columns): means over seeds, then over federations."""
    means = runs.groupby(["method", "family", "federation"], sort=False)[score].mean()
    return means.groupby(["method", "family"], sort=False).mean().unstack("family")


def table(runs: pd.DataFrame) -> pd.DataFrame:
    """Return a line for each method with the mean of every score and cost over data families, the best first."""
    columns = {
        score: by_family(runs, score).mean(axis=1, skipna=False)
        for score in (*SCORES, *COSTS)
    }
    order = [name for name in METHODS if name in columns[MAIN].index]
    order += [name for name in columns[MAIN].index if name not in order]
    return (
        pd.DataFrame(columns)
        .loc[order]
        .sort_values(MAIN, ascending=False, kind="stable")
    )


def differences(runs: pd.DataFrame, reference: str) -> pd.DataFrame:
    """Return how far each method lies above a reference in macro-F1, paired by data family.

    Columns are ``difference``, ``low`` and ``high`` (95 % t interval), ``p_value`` (paired t test, corrected by Holm
    over the methods), and ``verdict``. Bounds are left out. With one family only the difference is a number.
    """
    values = by_family(runs)
    names = [name for name in table(runs).index if name not in (*BOUNDS, reference)]
    lines = []
    for name in names:
        gaps = (values.loc[name] - values.loc[reference]).to_numpy(float)
        paired = values.loc[[name, reference]].to_numpy(float)
        p = (
            float(statistics.pairwise(paired).p_value[0, 1])
            if len(gaps) > 1
            else math.nan
        )
        narrow = statistics.mean_interval(gaps, level=0.9)
        equal = narrow.low >= -MARGIN and narrow.high <= MARGIN
        lines.append((*statistics.mean_interval(gaps, level=LEVEL), p, equal))
    found = pd.DataFrame(lines, index=pd.Index(names, name="method"))
    found.columns = pd.Index(["difference", "low", "high", "p_value", "equal"])
    found["p_value"] = statistics.holm(found["p_value"].to_numpy(float))
    significant = found["p_value"] <= 1 - LEVEL
    cases = [
        significant & (found["difference"] > 0),
        significant & (found["difference"] < 0),
        found.pop("equal"),
    ]
    found["verdict"] = np.select(cases, [BETTER, WORSE, EQUAL], OPEN)
    return found


def significant_pairs(runs: pd.DataFrame) -> list[tuple[str, str]]:
    """Return each method that is better than a reference, and that reference. Each method is the reference once."""
    names = [str(name) for name in table(runs).index if name not in BOUNDS]
    found = []
    for reference in names:
        verdicts = differences(runs, reference)["verdict"]
        found += [(str(name), reference) for name in verdicts.index[verdicts == BETTER]]
        found += [(reference, str(name)) for name in verdicts.index[verdicts == WORSE]]
    return list(dict.fromkeys(found))


def smallest_visible(runs: pd.DataFrame) -> float:
    """Return the difference in macro-F1 that would be significant between two methods, the median over all pairs.

    It is half the t interval over data families, corrected by Bonferroni over the methods of a comparison.
    """
    values = by_family(runs).drop(index=list(BOUNDS), errors="ignore")
    halves = []
    for one, other in combinations(values.index, 2):
        found = statistics.mean_interval(
            values.loc[one] - values.loc[other], comparisons=len(values) - 1
        )
        halves.append(found.high - found.value)
    return float(np.median(halves))


def winners(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the best method of each federation, and how far the next one and the references lie below it.

    ``agree`` is the share of pairs of seeds with the same best method.
    """
    ranked = runs[~runs["method"].isin(BOUNDS)]
    lines = []
    for federation, own in ranked.groupby("federation", sort=False):
        of_seed = own.pivot(index="method", columns="seed", values=MAIN)
        means = of_seed.mean(axis=1).sort_values(ascending=False, kind="stable")
        firsts = of_seed.idxmax()
        lines.append({
            "federation": federation, "best": means.index[0], MAIN: means.iloc[0],
            "next": means.iloc[0] - means.iloc[1],
            **{name: means.iloc[0] - means[name] for name in REFERENCES},
            "agree": float(np.mean([a == b for a, b in combinations(firsts, 2)])),
        })  # fmt: skip
    return pd.DataFrame(lines).set_index("federation")


def prediction(runs: pd.DataFrame) -> pd.Series:
    """Return the macro-F1 that ways to pick a method lose against each family's best one, means over families.

    The first way picks the best method of the other families. It needs two families.
    """
    values = by_family(runs).drop(index=list(BOUNDS), errors="ignore")
    lost = values.max() - values
    found = {}
    if values.shape[1] > 1:
        picked = [
            values.drop(columns=family).mean(axis=1).idxmax()
            for family in values.columns
        ]
        found["the best method of the other families"] = np.mean(
            [
                lost.loc[name, family]
                for name, family in zip(picked, values.columns, strict=True)
            ]
        )
    found |= {
        f"always {METHODS[name].title}": lost.loc[name].mean() for name in REFERENCES
    }
    found["a random method"] = lost.to_numpy().mean()
    return pd.Series(found)


# --- in words ----------------------------------------------------------------------------------------------------


def title(name: str) -> str:
    """Return a method's name as it is shown."""
    return METHODS[name].title if name in METHODS else name


def lead(runs: pd.DataFrame) -> list[str]:
    """Return the answer in six lines: who is better, the best means, a pick's loss, who wins, the data, the cap."""
    count, families, start = (
        runs["federation"].nunique(),
        runs["family"].nunique(),
        title(REFERENCES[0]),
    )
    found, won, lost = table(runs), winners(runs), prediction(runs)
    ranked = [name for name in found.index if name not in BOUNDS]
    pairs = significant_pairs(runs)
    first = f"{count} federations cannot tell the {len(ranked)} methods apart, Local included"
    if pairs:
        better = listing(f"{title(one)} than {title(other)}" for one, other in pairs)
        first = f"Better with any method as the reference: {better}"
    visible = smallest_visible(runs)
    if math.isfinite(visible):
        first += (
            f". The smallest visible difference is about {100 * visible:.0f} points"
        )
    capped = float((runs.loc[~runs["method"].isin(BOUNDS), "stopped"] >= ROUNDS).mean())
    means = [
        f"{title(name)} {100 * found.loc[name, MAIN]:.1f}"
        for name in (*ranked[:3], REFERENCES[0])
    ]
    return [
        f"{first}.",
        f"Highest mean macro-F1: {listing(means[:3])}. For comparison: {means[3]}, and {title(ranked[-1])}, the "
        f"lowest, {100 * found.loc[ranked[-1], MAIN]:.1f}.",
        f"{start} has {100 * lost[f'always {start}']:.1f} points less than the best method of each data family. A "
        f"random method has {100 * lost['a random method']:.1f} points less.",
        f"The best method differs: {won['best'].nunique()} methods are best in some federation. With another seed the "
        f"best one stays the same in {100 * won['agree'].mean():.0f} % of cases.",
        f"Data: {count} of {len(FEDERATIONS)} registered federations, from {families} data "
        f"famil{'ies' if families > 1 else 'y'}{'' if families >= ENOUGH else '. This first look decides nothing'}.",
        f"A run has at most {ROUNDS} rounds. {100 * capped:.0f} % of the runs end there.",
    ]


def display_table(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the table as it is shown: scores in points, costs a client, and the difference to fine-tuned FedAvg."""
    found, gaps = table(runs), differences(runs, REFERENCES[0])
    out = pd.DataFrame({"method": list(map(title, found.index))}, index=found.index)
    for name, head in (
        ("macro_f1", "macro-F1"),
        ("accuracy", "accuracy"),
        ("worst", "worst client"),
    ):
        out[head] = [f"{100 * value:.1f}" for value in found[name]]
    out["log loss"] = [f"{value:.3f}" for value in found["loss"]]
    out["below Local"] = [f"{100 * value:.0f} %" for value in found["below"]]
    out[f"to {title(REFERENCES[0])}"] = [_gap(gaps, name) for name in found.index]
    units = (
        ("sent", "MB sent", 1e6, 2),
        ("computed", "GFLOP", 1e9, 2),
        ("stored", "kB kept", 1e3, 1),
    )
    for name, head, unit, digits in units:
        out[head] = [
            "" if math.isnan(value) else f"{value / unit:.{digits}f}"
            for value in found[name]
        ]
    return out


def _gap(gaps: pd.DataFrame, name: str) -> str:
    if name not in gaps.index:
        return ""
    line = gaps.loc[name]
    ends = (
        ""
        if math.isnan(line["low"])
        else f" [{100 * line['low']:.1f}, {100 * line['high']:.1f}] {line['verdict']}"
    )
    return f"{100 * line['difference']:+.1f}{ends}"
