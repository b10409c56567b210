"""Draw what races lose that stop arms early, on the families that the judge never saw.

``REGISTERED_JUDGE.md`` defines every number and says what follows from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd

from diagnostics.plots.drawing import COLOURS, MARKERS, style
from fedlayers.studies.judge import FROZEN, Judge
from figures import items
from figures.decision import judge
from figures.decision.finished import NAME
from figures.decision.finished_page import (
    POINT,
    calibrated,
    calibration,
    certainty,
    certainty_columns,
    whole,
)
from figures.decision.finished_regret import natural
from figures.decision.finished_ways import Part
from figures.drawing import Drawing, Finding
from figures.page import markdown

TARGET = 0.003
"""What the main race may lose on the new families, in macro-F1."""
PLANNED = 2.0
"""What it may cost, in planned maxima of rounds."""


def findings(new: pd.DataFrame) -> tuple[Finding, ...]:
    """Return the registered expectations on the new families, each with its outcome."""
    main, plain = new.iloc[1], new.iloc[2]
    return (
        Finding(
            "Cuts judged early lose at most 0.3 points, and cost at most 2 planned maxima",
            f"{_points(main, 'lost', 'low', 'high')}, {main['planned']:.1f}",
            bool(main["lost"] <= TARGET and main["planned"] <= PLANNED),
        ),
        Finding(
            "The judge loses less than the best score at the same round",
            f"{100 * main['lost']:+.1f} against {100 * plain['lost']:+.1f} points",
            bool(main["lost"] < plain["lost"]),
        ),
        Finding(
            "Cuts judged early lose at most 1 point more than four rates and four cuts, at the upper end",
            _points(main, "more", "more_low", "more_high"),
            bool(main["more_high"] <= POINT),
        ),
    )


def _points(line: Any, *names: str) -> str:
    value, low, high = (100 * line[name] for name in names)
    return f"{value:+.1f} points [{low:+.1f}, {high:+.1f}]"


def _columns(table: pd.DataFrame) -> dict[str, list[str]]:
    lines = [line for _, line in table.iterrows()]
    return {
        "race": [str(line["way"]) for line in lines],
        "points lost": [_points(line, "lost", "low", "high") for line in lines],
        "more than the first": [
            _points(line, "more", "more_low", "more_high") for line in lines
        ],
        "race alone, runs": [f"{line['race']:.1f}" for line in lines],
        "race alone, planned maxima": [f"{line['planned']:.1f}" for line in lines],
        "total with rates, runs": [f"{line['total']:.1f}" for line in lines],
    }


def _picture(table: pd.DataFrame) -> plt.Figure:
    with style():
        figure = plt.figure(figsize=(7.4, 3.4), layout="constrained")
        ax = figure.subplots()
        for k, (_, line) in enumerate(table.iterrows()):
            value, low, high = (100 * line[name] for name in ("lost", "low", "high"))
            ax.errorbar(
                line["total"], value, yerr=[[value - low], [high - value]], fmt=MARKERS[k], color=COLOURS[k], lw=1.1,
                markersize=5, label=line["way"].replace(", ", ",\n"),
            )  # fmt: skip
        ax.axhline(0, color="0.5", lw=0.9, zorder=0)
        ax.set(
            xlabel="cost with rates, in runs of one cut at one rate",
            ylabel="points below the best cut",
            xlim=(0, 7),
        )
        figure.legend(loc="outside right upper", fontsize=7)
    return figure


def _draw(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    parts, ours = whole(header, frame)
    curves = judge.curves_of(ours)
    old, new = (
        [part for part in parts if judge.known(part) == known]
        for known in (True, False)
    )
    of_new = judge.table(new, curves, lambda part: FROZEN)
    left_out = judge.without_family(old, curves)
    of_old = judge.table(old, curves, left_out)

    def unseen(part: Part) -> Judge | None:
        return left_out(part) if judge.known(part) else FROZEN

    def races(part: Part) -> list[tuple[float, float, float]]:
        return judge.losses(part, curves, unseen(part))

    def thorough(part: Part) -> list[tuple[float, float, float]]:
        return judge.losses(part, curves, None)

    main, first = of_new.iloc[1], of_new.iloc[0]
    lead = (
        f"**On {main['families']} new data families, a race that stops three of four cuts at 15 % of the rounds loses "
        f"{100 * main['lost']:+.1f} points against the best cut. The full race loses {100 * first['lost']:+.1f}.** "
        "A judge that was fitted on other families chooses the cut that goes on."
    )
    caption = (
        "Points of macro-F1 below the best cut, and the cost with the tuning of rates, on the new data families. Bars "
        "are 95 % intervals over families. The judge was frozen before."
    )
    text = [
        "The judge and the races were [registered](../decision/REGISTERED_JUDGE.md) before they met these families.",
        "## New families",
        markdown(_columns(of_new)),
        "A run is one of all but the last layer at the rate that is not tuned. A planned maximum is the most rounds "
        "that a run may have; most runs stop before. Costs are means over federations.",
        "## Families of before",
        markdown(_columns(of_old)),
        "Each family was left out of the fit. Shares and numbers were chosen on these, so this table flatters.",
        "## All families",
        markdown(_columns(judge.table(parts, curves, unseen))),
        "## Natural clients",
        markdown(
            _columns(
                judge.table([part for part in parts if natural(part)], curves, unseen)
            )
        ),
        "The federations whose data name their clients.",
        "## How certain one race is",
        markdown(certainty_columns(certainty(parts, races))),
        "All families, cuts judged by the judge; those of before by one that was fitted without them. The distance is "
        "how much more the judge forecasts for its first cut than for its second.",
        calibrated(calibration(parts, races)),
        "The same with `--thorough`, all cuts to the end. The distance is between scores on validation.",
        markdown(certainty_columns(certainty(parts, thorough))),
        calibrated(calibration(parts, thorough)),
    ]
    return Drawing(
        _picture(of_new), of_new, caption, findings(of_new), "\n\n".join(text), lead
    )


JUDGE = items.register(
    items.View("decision.judge", "What races lose that stop arms early", NAME, _draw)
)
