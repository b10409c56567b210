"""Layer scheduling's Sec. 5.3: what it changes to unfreeze layers twice as early."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd

from diagnostics.plots.drawing import style
from figures import items, names
from figures.differences import draw as draw_differences, last_evaluations, settled
from figures.items import Drawing, Finding, View
from figures.scheduling.runs import (
    EARLY,
    NAMES,
    SCHEDULES,
    THAW,
    THAWING,
    columns,
    finished,
    incomparable,
    judge,
    listed,
    missing,
    setting,
)
from figures.scheduling.tables import PRINTED, dots, interval, lines
from figures.verdicts import TRAIL


def thawed(header: Mapping[str, Any], frame: pd.DataFrame) -> pd.DataFrame:
    """A row per dataset, schedule and time of unfreezing: accuracy in percent, and the published one."""
    known = items.published("scheduling")
    known = known[known["place"] == "Sec. 5.3"].set_index(
        ["dataset", "setting", "method"]
    )["value"]
    values, table = last_evaluations(finished(frame)), []
    for dataset, column in columns(header).items():
        for method in SCHEDULES:
            for suffix, parts in (("", 1), (EARLY, 2)):
                unfreeze = listed([since // parts for since in column.unfreeze])
                printed = f"{column.at[-1]} rounds, unfrozen at {unfreeze}"
                seeds, mean, low, high = interval(values, f"{dataset}.{method}{suffix}")
                table.append({
                    "dataset": dataset, "method": method, "rounds": column.at[-1], "unfreeze": unfreeze,
                    "seeds": seeds, "accuracy": mean, "low": low, "high": high,
                    "published": known.get((dataset, printed, method), math.nan),
                })  # fmt: skip
    return pd.DataFrame(table)


def _draw(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    table, values = thawed(header, frame), finished(frame)
    gaps = {
        dataset: {
            f"{dataset}.{method}": settled(
                values, f"{dataset}.{method}{EARLY}", f"{dataset}.{method}"
            )
            for method in SCHEDULES
        }
        for dataset in columns(header)
    }
    findings = []
    for dataset, each in gaps.items():
        found = judge(each, TRAIL)
        findings.append(
            Finding(
                f"{NAMES[dataset]}: unfreezing twice as early costs both schedules accuracy (paper: 0.3 to 1 point)",
                f"early − late, in points: {found.text}",
                found.held,
                incomparable(header, frame, dataset, SCHEDULES) or found.incomparable,
            )
        )
    with style():
        figure = plt.figure(figsize=(7.4, 1.9 + 0.5 * len(gaps)), layout="constrained")
        *axes, last = figure.subplots(1, len(gaps) + 1)
        for ax, (dataset, part) in zip(
            axes, table.groupby("dataset", sort=False), strict=True
        ):
            dots(
                ax,
                part,
                [
                    f"{names.title(row.method)}, {row.unfreeze}"
                    for row in part.itertuples()
                ],
            )
            ax.set_title(NAMES[str(dataset)], fontsize=9)
        each = {run: gap for own in gaps.values() for run, gap in own.items()}
        draw_differences(last, list(each.values()), "early − late, points")
        printed = table.groupby(["dataset", "method"], sort=False)["published"].agg(
            lambda two: two.iloc[1] - two.iloc[0]
        )
        last.plot(printed, range(len(printed)), linestyle="none", zorder=1, **PRINTED)
        last.set_yticks(
            range(len(each)),
            [names.title(run.partition(".")[2]) for run in each],
            fontsize=7.5,
        )
        last.set_title("paired by seed", fontsize=9)
        figure.legend(
            *axes[-1].get_legend_handles_labels(), loc="outside upper center", ncols=2
        )
    caption = (
        "Accuracy after fine-tuning, with 95 % intervals. It is the mean of the last three evaluations. The labels "
        "give the rounds at which layers are unfrozen. The last panel shows what unfreezing twice as early changes."
        f"{missing(header, list(THAW.runs))} {setting(header, frame, *columns(header))}"
    )
    return Drawing(
        figure,
        table,
        caption,
        tuple(findings),
        lines(table, ("dataset", "method", "unfreeze")),
    )


SEC53 = items.register(View(
    "scheduling.sec53", "When layers are unfrozen: earlier against later", THAWING, _draw,
))  # fmt: skip
