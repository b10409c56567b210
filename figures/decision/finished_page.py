"""Draw the tuned and finished study: what each way of choosing loses and costs.

``REGISTERED_FINISHED.md`` defines every number. It was written before the runs and says what follows from them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from diagnostics.plots.drawing import COLOURS, MARKERS, style
from figures import items
from figures.decision import finished_regret as regret
from figures.decision.finished import CURVE, JOBS, MAIN_CUT, NAME, STUDY
from figures.decision.finished_ways import RANDOM, Array, Part, parts_of
from figures.drawing import Drawing, Finding
from figures.page import markdown, numbers

POINT = 0.01
LEAST_GAIN = 0.005
"""What a race must gain on the fixed cut to stay the default, in macro-F1."""
DRAWN = {
    "all_but_last, rate not tuned": "all but last, one rate",
    MAIN_CUT: "all but last, tuned in another run",
    "four rates, one cut": "four rates, one cut",
    "four cuts, one rate": "four cuts, one rate",
    "four starts, one cut": "four starts, one cut",
    "race of four, tuned": "race of four, tuned",
    "four rates, then cuts at the best": "four rates, then three cuts (named later)",
    "every cut at every rate": "every cut at every rate",
}
"""The ways that have a cost, in words."""
CUT_NAMES = ("nothing", "quarter", "half", "three_quarters", MAIN_CUT, "all")
PATIENCES = (3, 5, 10)
"""Evaluations without a better score that are tried on the stored curves."""
MOST = (50, 100, 200)
"""The most rounds that are tried on them."""
PARTS: tuple[tuple[str, Callable[[Part], bool]], ...] = (
    ("all", regret.everyone),
    ("natural clients", regret.natural),
    ("new data", regret.new),
    ("without the first look", lambda part: not regret.first_look(part)),
)


def whole(
    header: Mapping[str, Any], frame: pd.DataFrame
) -> tuple[list[Part], pd.DataFrame]:
    """Return the federations whose runs are all there, and their rows."""
    missing = {JOBS[name.rpartition(" ")[0]].federation for name in header["missing"]}
    ours = frame[~frame["run"].map(lambda run: JOBS[run].federation).isin(missing)]
    return parts_of(ours), ours


# --- the numbers -----------------------------------------------------------------------------------------------


def patience(frame: pd.DataFrame) -> pd.DataFrame:
    """Return what a shorter patience and fewer rounds lose on validation, over the stored curves.

    The curves end where a patience of 15 evaluations did. ``lost`` is in macro-F1, ``rounds`` the mean number.
    """
    curves = frame[frame["metric"] == CURVE].sort_values("round")
    found: dict[tuple[int, int], list[tuple[float, float]]] = {
        (most, wait): [] for most in MOST for wait in PATIENCES
    }
    for _, own in curves.groupby(
        ["run", "seed", "estimator", "variant"], observed=True
    ):
        scores, rounds = own["value"].to_numpy(float), own["round"].to_numpy(float)
        for most, wait in found:
            end = stopped_at(scores[rounds <= most], wait)
            found[most, wait].append(
                (float(np.nanmax(scores) - np.nanmax(scores[:end])), rounds[end - 1])
            )
    lines = []
    for (most, wait), pairs in found.items():
        lost, kept = np.array(pairs).T
        lines.append({
            "most": most, "patience": wait, "lost": lost.mean(), "point": float((lost > POINT).mean()),
            "rounds": kept.mean(),
        })  # fmt: skip
    return pd.DataFrame(lines)


def stopped_at(scores: Array, wait: int) -> int:
    """Return the number of evaluations until a patience ends a curve, or the number of all.

    >>> stopped_at(np.array([0.1, 0.3, 0.2, 0.2, 0.4]), 2)
    4
    """
    top, since = -np.inf, 0
    for done, score in enumerate(scores, 1):
        top, since = (score, 0) if score > top else (top, since + 1)
        if since == wait:
            return done
    return len(scores)


# --- the advice ------------------------------------------------------------------------------------------------


def findings(parts: Sequence[Part]) -> tuple[Finding, ...]:
    """Return the registered expectations with their outcomes, the advice first."""
    table = regret.table(parts).set_index("way")
    main = regret.compared(parts, regret.MAIN_COMPARISONS).set_index("what")
    fixed_cut = table.loc[MAIN_CUT]
    race = main.loc[f"race of four against {MAIN_CUT}"]
    found = [
        Finding(
            "All but the last layer, with a tuned rate, loses at most 1 point against the best cut",
            _points(fixed_cut["regret"], fixed_cut["low"], fixed_cut["high"]),
            True
            if fixed_cut["high"] <= POINT
            else False
            if fixed_cut["low"] > POINT
            else None,
        ),
        Finding(
            "A race of four cuts gains at least half a point on all but the last",
            _points(race["gain"], race["low"], race["high"]),
            True
            if race["low"] > 0 and race["gain"] >= LEAST_GAIN
            else False
            if race["high"] < LEAST_GAIN
            else None,
        ),
    ]
    for what, line in main.iterrows():
        if what != race.name:
            found.append(_gain(f"{_worded(str(what))}: the first is better", line))
    worth = regret.worth(parts).set_index("what")
    for what, line in worth.iterrows():
        if str(what).startswith(("algorithm", "state")):
            found.append(
                _gain(
                    f"{_worded(str(what).partition(': ')[2])}: the first is better",
                    line,
                )
            )
    rule, usual = (
        table.loc["sensitivity_ratio", "regret"],
        table.loc["its network's usual cut", "regret"],
    )
    told = f"{100 * rule:+.1f} against {100 * usual:+.1f} points"
    found.append(
        Finding(
            "The rule sensitivity_ratio loses less than its network's usual cut",
            told,
            bool(rule < usual),
        )
    )
    return tuple(found)


def _gain(expected: str, line: Any) -> Finding:
    decided = True if line["low"] > 0 else False if line["high"] < 0 else None
    return Finding(expected, _points(line["gain"], line["low"], line["high"]), decided)


def _worded(what: str) -> str:
    text = what.replace(MAIN_CUT, "all but the last")
    return text[0].upper() + text[1:]


def _points(value: float, low: float, high: float) -> str:
    return f"{100 * value:+.1f} points [{100 * low:+.1f}, {100 * high:+.1f}]"


# --- pictures --------------------------------------------------------------------------------------------------


def _cost_and_regret(parts: Sequence[Part]) -> plt.Figure:
    table = regret.table(parts).set_index("way")
    costs = regret.costs(parts).mean()
    with style():
        figure = plt.figure(figsize=(7.4, 3.9), layout="constrained")
        ax = figure.subplots()
        for k, (way, label) in enumerate(DRAWN.items()):
            line = 100 * table.loc[way, ["regret", "low", "high"]].astype(float)
            spread = [[line["regret"] - line["low"]], [line["high"] - line["regret"]]]
            ax.errorbar(
                costs[way], line["regret"], yerr=spread, fmt=MARKERS[k], color=COLOURS[k % len(COLOURS)], lw=1.1,
                markersize=5, label=label,
            )  # fmt: skip
        ax.axhline(0, color="0.5", lw=0.9, zorder=0)
        random = 100 * float(table.loc[RANDOM, "regret"])
        ax.axhline(
            random,
            color="0.5",
            lw=0.9,
            ls="--",
            zorder=0,
            label="a random cut, tuned in another run",
        )
        ax.set_xscale("log")
        ax.set_xticks(ticks := [1, 2, 4, 8, 16, 32], [str(tick) for tick in ticks])
        ax.minorticks_off()
        ax.set(
            xlabel="cost, in runs of one cut at one rate",
            ylabel="points below the best cut",
        )
        figure.legend(loc="outside right upper", fontsize=7)
    return figure


# --- pages -----------------------------------------------------------------------------------------------------


def _draw(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    parts, ours = whole(header, frame)
    table = regret.table(parts)
    missing = [
        STUDY[name].title for name in STUDY if name not in {part.name for part in parts}
    ]
    caption = (
        "Points of macro-F1 that a way of choosing loses against the best cut, and what it costs. Bars are 95 % "
        f"intervals over {table['families'].iloc[0]} data families. {len(parts)} federations have three seeds each. "
        "The best cut and each cut's rate are chosen on the other seeds. Scores are on samples that the scored run "
        "did not see; tuning used other splits of the same samples. Every run trains to its stop and keeps the "
        "optimiser's state (`keep_optimizer=True`). "
        "The cost is the mean over federations and counts the runs that tune."
    )
    text = [
        "The analysis was [registered](../decision/REGISTERED_FINISHED.md) before the first scored run.",
        f"{len(parts)} of {len(STUDY)} federations are trained."
        + (f" Missing: {', '.join(missing)}." * bool(missing)),
        "## What each way of choosing loses",
        markdown(_regrets(parts)),
        "Points of macro-F1 below the best cut, mean over data families with 95 % intervals. `above` and `below` count "
        "families in which a way loses more or less than a random cut. `p` is of the sign test.",
        "## Which cut wins",
        markdown(_cuts(parts)),
        "Macro-F1 in % on held-out samples, each cut at its tuned rate. The highest is bold.",
        "## What the cut, the rate and the algorithm are worth",
        markdown(_worth(parts)),
        "## How long to wait",
        markdown(_patience(ours)),
        "Fewer rounds and a shorter patience on the stored curves of validation. The study waited for 15 evaluations, "
        "one every 2 rounds. 100 rounds and 10 evaluations are the defaults for your own data.",
        "## Checks",
        markdown(_checks(parts)),
    ]
    return Drawing(
        _cost_and_regret(parts),
        table,
        caption,
        findings(parts),
        "\n\n".join(text),
        _lead(parts),
    )


def _lead(parts: Sequence[Part]) -> str:
    table = regret.table(parts).set_index("way")
    cut, random = table.loc[MAIN_CUT], table.loc[RANDOM]
    return (
        f"**With tuned rates and finished training, sharing all but the last layer loses {100 * cut['regret']:.1f} "
        f"points against the best cut. A random cut loses {100 * random['regret']:.1f}.** "
        "Whether to race is answered below."
    )


def _regrets(parts: Sequence[Part]) -> dict[str, list[str]]:
    tables = {
        name: regret.table(parts, among)
        for name, among in PARTS
        if any(map(among, parts))
    }
    first = tables["all"]
    costs = regret.costs(parts).mean()
    columns = {"way": list(first["way"])}
    columns["cost"] = [
        f"{costs[way]:.1f}" if way in costs else "–" for way in first["way"]
    ]
    for name, table in tables.items():
        columns[name] = [
            f"{100 * line.regret:+.1f} [{100 * line.low:+.1f}, {100 * line.high:+.1f}]"
            for line in table.itertuples()
        ]
    columns["median"] = [f"{100 * value:+.1f}" for value in first["median"]]
    columns["above"], columns["below"] = (
        list(map(str, first[name])) for name in ("above", "below")
    )
    columns["p"] = numbers(first["p"])
    return columns


def _cuts(parts: Sequence[Part]) -> dict[str, list[str]]:
    table = regret.winners(parts)
    columns = {
        "federation": [STUDY[name].title for name in table["federation"]],
        "clients": [STUDY[name].clients for name in table["federation"]],
    }
    for cut in (name for name in CUT_NAMES if name in table):
        cells = [
            (f"{100 * score:.1f}", top == cut)
            for score, top in zip(table[cut], table["best"], strict=True)
        ]
        columns[cut] = [
            "" if text == "nan" else f"**{text}**" if won else text
            for text, won in cells
        ]
    columns["rate of all_but_last, first seed"] = numbers(table["rate"], "g")
    return columns


def _worth(parts: Sequence[Part]) -> dict[str, list[str]]:
    lines = list(regret.worth(parts).itertuples())
    return {
        "question": [str(line.what) for line in lines],
        "points": [_points(line.gain, line.low, line.high) for line in lines],
        "median": [f"{100 * line.median:+.1f}" for line in lines],
        "families better / worse": [f"{line.above} / {line.below}" for line in lines],
        "p": [f"{line.p:.2f}" for line in lines],
    }


def _patience(frame: pd.DataFrame) -> dict[str, list[str]]:
    lines = list(patience(frame).itertuples())
    return {
        "rounds, at most": [str(line.most) for line in lines],
        "evaluations without a better score": [str(line.patience) for line in lines],
        "lost on validation, points": [f"{100 * line.lost:.2f}" for line in lines],
        "runs that lose over 1 point": [f"{100 * line.point:.0f} %" for line in lines],
        "rounds trained": [f"{line.rounds:.0f}" for line in lines],
    }


def _checks(parts: Sequence[Part]) -> dict[str, list[str]]:
    against = regret.table(parts, reference=regret.highest).set_index("way")
    layers = np.concatenate([part.decided["sensitivity_ratio"] for part in parts])
    found = {
        "tuned rates at an end of the grid": f"{100 * regret.at_edge(parts):.0f} %",
        "runs that trained all rounds, without a stop": f"{100 * regret.unstopped(parts):.0f} %",
        **{
            f"{name}: points lost against the cut that is best over all seeds": _lost(
                against.loc[name]
            )
            for name in (MAIN_CUT, RANDOM, *regret.LATER)
        },
        "`sensitivity_ratio` shares one layer": f"in {(layers == 1).sum()} of {len(layers)} runs",
    }
    return {"check": list(found), "value": list(found.values())}


def _lost(line: Any) -> str:
    return f"{100 * line['regret']:.1f} [{100 * line['low']:.1f}, {100 * line['high']:.1f}]"


TUNED = items.register(
    items.Item(
        "decision.tuned",
        "What ways of choosing lose with tuned rates",
        source=NAME,
        draw=_draw,
    )
)
