"""Regret of ways of choosing the shared layers, over all federations of the study."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

from diagnostics.plots.drawing import COLOURS, MARKERS, style
from figures import items
from figures.decision.federations import FEDERATIONS
from figures.decision.methods import (
    FINALISTS,
    RACE,
    RANDOM,
    TO_THE_END,
    Federated,
    Method,
    Run,
    federated,
    methods,
    runs_of,
    summary,
)
from figures.decision.runs import HELD_OUT, NAME, WORST
from figures.items import Drawing, Finding
from figures.page import markdown, missing_runs, span
from fl_core.plan import LayerPlan, layer_from_json
from fl_core.statistics import Interval, ratio_interval

QUARTER = 0.25
"""Of a random cut's regret: what a recommended way of choosing may lose at most, at the upper end of its interval."""
LEAST = 4
"""Runs of each federation from which on a promise is held or not."""
CHEAP = "FedAvg, 2 own epochs, depth chosen"
SHOWN = (RANDOM, "share all but the last", TO_THE_END, CHEAP)
DRAWN = (TO_THE_END, FINALISTS, RACE, "sensitivity_ratio", "Ditto", "share all but the last", RANDOM, "share all")
"""The methods of the left panel; the page's table has all."""
PARTS = {
    "all": ("seen", "new", "added", "confirming"),
    "confirming": ("confirming",),
    "seen": ("seen",),
    "unseen": ("new", "added", "confirming"),
}
"""Of federations: all, those named after the race to the end was found, those of the races' development, all others."""
WORDS = {
    "all": "all federations",
    "confirming": "the ten confirming federations",
    "unseen": "all but the development federations",
}
APART = {
    "seen": ("development federations", 0.14),
    "unseen": ("all others", -0.12),
    "confirming": ("the ten confirming ones", -0.24),
}
"""What is drawn beside all federations, with its place from theirs in lines."""
SECONDARY = ("accuracy", "macro_f1", "loss", f"{WORST}macro_f1")


def tables_of(header: Mapping[str, Any], frame: pd.DataFrame) -> tuple[dict[str, pd.DataFrame], list[Run]]:
    """The summary of every method on each part of the federations, and the runs that it is made from."""
    layers = {name: trained_layers(about) for name, about in header["runs"].items()}
    runs = runs_of(frame, layers)
    parts = federated(runs, methods())
    tables = {
        name: summary(chosen, methods())
        for name, kinds in PARTS.items()
        if (chosen := [part for part in parts if FEDERATIONS[part.name].part in kinds])
    }
    return tables, runs


def _draw(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    compared = methods()
    tables, runs = tables_of(header, frame)
    parts = federated(runs, compared)
    with style():
        figure = plt.figure(figsize=(8.8, 8.2), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=[1, 1])
        _ratios(left, tables)
        _by_federation(right, parts, compared)
    counts = [len(part.seeds) for part in parts]
    held_out = (
        frame[(frame["split"] == HELD_OUT) & (frame["metric"] == "macro_f1")].groupby("run")["n_samples"].median()
    )
    caption = (
        f"{len(parts)} federations with {span(counts)} seeds each. Macro-F1 after the last round on "
        f"{held_out.min():.0f} to {held_out.max():.0f} held-out samples a run, which the run did not see. Left: "
        "summed regret of eight methods as a share of a random cut's. Bars are 95 % t intervals over "
        "federations. The cost in full runs is in brackets. Right: regret in each federation against the cut "
        "with the best mean (mean over runs). A value below 0 is better than every cut."
    )
    table = pd.concat([table.assign(part=name) for name, table in tables.items()], ignore_index=True)
    text = _page(header, runs, parts, tables, compared)
    return Drawing(figure, table, caption, _findings(tables, counts), text, _lead(tables["all"]))


def trained_layers(about: Mapping[str, Any]) -> int:
    """Count the layers that train, by the record of a run."""
    return len(LayerPlan(tuple(layer_from_json(layer) for layer in about["layers"]), ()).trainable)


def _ratios(ax: Axes, tables: Mapping[str, pd.DataFrame]) -> None:
    tables = {name: each.set_index("method", drop=False).loc[list(DRAWN)] for name, each in tables.items()}
    table = tables["all"]
    y = np.arange(len(table))
    percent = 100 * table[["ratio", "ratio_low", "ratio_high"]]
    spread = np.abs(percent[["ratio_low", "ratio_high"]].to_numpy().T - percent["ratio"].to_numpy())
    ax.errorbar(percent["ratio"], y, xerr=spread, fmt="o", color="0.1", markersize=4, lw=1.1, label="all federations")
    for k, (name, (label, offset)) in enumerate(APART.items()):
        if name in tables:
            ax.plot(
                100 * tables[name]["ratio"], y + offset, linestyle="none", marker=MARKERS[k + 1],
                markersize=3.2, color=COLOURS[k], label=label,
            )  # fmt: skip
    ax.axvline(100 * QUARTER, color="0.5", lw=0.9, ls="--", zorder=0)
    ax.axvline(100, color="0.5", lw=0.9, zorder=0)
    ax.set_yticks(y, [f"{line.method} ({line.cost:.1f})" for line in table.itertuples()], fontsize=7)
    ax.set_ylim(len(table) - 0.4, -0.6)
    low, high = float(percent["ratio_low"].min()), float(percent["ratio_high"].max())
    ax.set_xscale("symlog", linthresh=100, linscale=1.5)
    ax.set_xlim(min(-40.0, low - 5), max(220.0, high + 50))
    ticks = [at for at in (0, 25, 50, 75, 100, 300, 900) if at <= ax.get_xlim()[1]]
    ax.set_xticks(ticks, [f"{at:g}" for at in ticks], fontsize=8)
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xlabel("regret, % of a random cut's (dashed: a quarter; logarithmic above 100)", fontsize=8)
    ax.legend(fontsize=6.5, loc="lower center", bbox_to_anchor=(0.2, 1.0), ncols=2)


def _by_federation(ax: Axes, parts: Sequence[Federated], compared: Sequence[Method]) -> None:
    names = [method.name for method in compared]
    y = np.arange(len(parts))
    for k, name in enumerate(SHOWN):
        regrets = [100 * part.regrets()[names.index(name)] for part in parts]
        ax.plot(
            regrets,
            y + 0.24 - 0.16 * k,
            linestyle="none",
            marker=MARKERS[k],
            color=COLOURS[k],
            markersize=5,
            label=name,
        )
    ax.axvline(0, color="0.5", lw=0.9)
    labels = [
        f"{FEDERATIONS[part.name].title}{'' if FEDERATIONS[part.name].part == 'seen' else ' (new)'}" for part in parts
    ]
    ax.set_yticks(y, labels, fontsize=7)
    ax.set_ylim(len(parts) - 0.4, -0.6)
    for line in y[:-1] + 0.5:
        ax.axhline(line, color="0.9", lw=0.6)
    ax.set_xlabel("regret, points of macro-F1")
    ax.legend(fontsize=6.5, loc="lower center", bbox_to_anchor=(0.15, 1.0), ncols=2)


# --- page and findings -----------------------------------------------------------------------------------------


def _lead(table: pd.DataFrame) -> str:
    """The regret of the default race and of the best fixed choice."""
    lines = {line.method: line for line in table.itertuples()}
    fixed = min((line for name, line in lines.items() if name.startswith("share ")), key=lambda line: line.ratio)
    race = lines[TO_THE_END]
    return (
        f"**{race.method[0].upper()}{race.method[1:]} loses {_percent(race)} of what a random cut loses and "
        f"costs {race.cost:.1f} full runs.** The best fixed choice ({fixed.method}) loses {_percent(fixed)}."
    )


def _percent(line: Any) -> str:
    return f"{100 * line.ratio:.0f} % [{100 * line.ratio_low:.0f}, {100 * line.ratio_high:.0f}]"


def _would_decide(line: Any) -> str:
    """About how many federations would put the interval below a quarter, if its width falls with their square root."""
    if line.ratio_high <= QUARTER:
        return ""
    if line.ratio >= QUARTER:
        return ". More federations would not bring it below a quarter"
    needed = line.federations * ((line.ratio_high - line.ratio) / (QUARTER - line.ratio)) ** 2
    return f". About {needed:.0f} federations would decide"


def best_of_seen(tables: Mapping[str, pd.DataFrame]) -> str:
    """Return the method that the first registered rule picks: the least ratio on the development federations."""
    seen = tables["seen"].iloc[1:]
    return str(seen.loc[seen["ratio"].idxmin(), "method"])


def _findings(tables: Mapping[str, pd.DataFrame], counts: Sequence[int]) -> tuple[Finding, ...]:
    enough = len(counts) == len(FEDERATIONS) and min(counts) >= LEAST
    lines = {name: {line.method: line for line in table.itertuples()} for name, table in tables.items()}
    others = [name for name in dict.fromkeys((FINALISTS, RACE, best_of_seen(tables))) if name != TO_THE_END]

    def promise(name: str, part: str) -> bool | None:
        line = lines[part][name]
        if not enough:
            return None
        return True if line.ratio_high <= QUARTER else False if line.ratio_low > QUARTER else None

    found = [
        Finding(
            f"{name} loses at most a quarter of what a random cut loses ({WORDS[part]})",
            f"{_percent(lines[part][name])} in {lines[part][name].runs} runs{_would_decide(lines[part][name])}",
            promise(name, part),
        )
        for name, parts in ((TO_THE_END, ("all", "confirming")), *((name, ("all", "unseen")) for name in others))
        for part in parts
        if part in lines
    ]
    rule = lines["all"]["sensitivity_ratio"]
    lower = True if rule.ratio_high < 1 else False if rule.ratio_low > 1 else None
    found.append(Finding("sensitivity_ratio loses less than a random cut", _percent(rule), lower if enough else None))
    return tuple(found)


def _page(
    header: Mapping[str, Any],
    runs: Sequence[Run],
    parts: Sequence[Federated],
    tables: Mapping[str, pd.DataFrame],
    compared: Sequence[Method],
) -> str:
    by_method = {name: {line.method: line for line in table.itertuples()} for name, table in tables.items()}
    columns: dict[str, list[str]] = {"method": [method.name for method in compared]}
    columns["cost, full runs"] = [f"{line.cost:.2f}" for line in tables["all"].itertuples()]
    columns["regret, points"] = [f"{100 * line.regret:.2f}" for line in tables["all"].itertuples()]
    columns["cross-fitted"] = [
        "–" if pd.isna(line.crossfitted) else f"{100 * line.crossfitted:.2f}" for line in tables["all"].itertuples()
    ]
    for name in tables:
        columns[f"% of random, {name}"] = [_percent(by_method[name][method.name]) for method in compared]
    columns["worst"] = [
        f"{100 * line.worst:.1f} {FEDERATIONS[line.worst_federation].title}" for line in tables["all"].itertuples()
    ]
    best = best_of_seen(tables)
    text = [
        "The comparison was [registered](../decision/PREREGISTERED.md) before the runs.",
        f"`fedlayers choose` uses the **{TO_THE_END}** by default. It was found on 72 runs of 25 federations and "
        "registered. Then it was run on the ten confirming federations. The rule registered earlier takes the smallest "
        f"ratio on the development federations. It picks **{best}**.",
        markdown(columns),
        markdown(_cuts_table(parts)),
        "Mean macro-F1 in % of every cut on held-out samples. Brackets have the race's cut in each run.",
        markdown(_secondary(runs, compared, best)),
        "Means over federations and runs on held-out samples.",
        _notes(runs, parts, tables, compared),
    ]
    return "\n\n".join(text) + missing_runs(header)


def _notes(
    runs: Sequence[Run], parts: Sequence[Federated], tables: Mapping[str, pd.DataFrame], compared: Sequence[Method]
) -> str:
    """Write what was noted about the study after it was published."""
    lines = {name: {line.method: line for line in table.itertuples()} for name, table in tables.items()}
    ours = lines["all"][TO_THE_END]
    ratio, low, high = (100 * value for value in in_other_runs(parts, [m.name for m in compared].index(TO_THE_END)))
    notes = [
        "The registration says that a learning rate is the dataset's own. Four federations of digits have 1e-3, "
        "and digits' own rate is 1e-2.",
        "The race to the end was registered on 2026-11-21 at 22:00. It became the default at 22:13, before the rows "
        "that test it were made.",
        f"Runs are short. In the last third of the rounds the best cut still gains {100 * last_third(runs, parts):.1f} "
        f"points on validation samples. A random cut loses {100 * lines['all'][RANDOM].regret:.1f} points.",
        f"The {100 * ours.ratio:.0f} % are of the raced model in its own run. Its plan in the other runs of the "
        f"federation loses {ratio:.0f} % [{low:.0f}, {high:.0f}].",
        f"The {len(parts)} federations come from 8 data sets. The intervals take them for independent.",
        f"`sensitivity_ratio` loses {_percent(lines['seen']['sensitivity_ratio'])} on the federations first seen.",
    ]
    return "\n".join(["Notes of 2026-11-23:", "", *(f"- {note}" for note in notes)])


def in_other_runs(parts: Sequence[Federated], method: int) -> Interval:
    """Return the regret of a method's cuts in the federation's other runs, over a random cut's, with a 95 % interval.

    The best cut is the one with the highest mean over the same other runs. The interval is over federations.
    """
    lost = []
    for part in parts:
        chosen = [part.cut_names.index(end) for end in part.ends[method]]
        others = [np.delete(part.cuts, run, axis=1).mean(axis=1) for run in range(len(chosen))]
        lost.append(np.mean([means.max() - means[cut] for means, cut in zip(others, chosen, strict=True)]))
    return ratio_interval(lost, [part.regrets()[0] for part in parts])


def last_third(runs: Sequence[Run], parts: Sequence[Federated]) -> float:
    """Return what the best cuts gain over the last third of the rounds, in macro-F1 on validation samples."""
    gains = []
    for part in parts:
        curves = [run.rounds.loc[part.best, "macro_f1"] for run in runs if run.federation == part.name]
        then = [curve.index[np.abs(curve.index - curve.index.max() * 2 / 3).argmin()] for curve in curves]
        gains.append(np.mean([curve[curve.index.max()] - curve[at] for curve, at in zip(curves, then, strict=True)]))
    return float(np.mean(gains))


def _cuts_table(parts: Sequence[Federated]) -> dict[str, list[str]]:
    names = ("nothing", "quarter", "half", "three_quarters", "all_but_last", "all")
    columns: dict[str, list[str]] = {"federation": [FEDERATIONS[part.name].title for part in parts]}
    columns["clients differ in"] = [FEDERATIONS[part.name].differs for part in parts]
    columns["runs"] = [str(len(part.seeds)) for part in parts]
    for name in names:
        columns[name] = []
        for part in parts:
            if name not in part.cut_names:
                columns[name].append("")
                continue
            mean = f"{100 * part.cuts[part.cut_names.index(name)].mean():.1f}"
            columns[name].append(f"**{mean}**" if name == part.best else mean)
    race = [method.name for method in methods()].index(TO_THE_END)
    columns["race to the end"] = [f"[{' '.join(part.ends[race])}]" for part in parts]
    return columns


def _secondary(runs: Sequence[Run], compared: Sequence[Method], best: str) -> dict[str, list[str]]:
    fixed = ("share all but the last", "FedAvg, 2 own epochs of all", "Ditto")
    shown = list(dict.fromkeys((RANDOM, TO_THE_END, RACE, CHEAP, best, *fixed)))
    order = [method.name for method in compared]
    columns: dict[str, list[str]] = {"method": shown}
    for score in SECONDARY:
        parts = federated(runs, compared, score)
        means = np.mean([part.methods.mean(axis=1) for part in parts], axis=0)
        chosen = [means[order.index(name)] for name in shown]
        columns[score] = [f"{-v:.3f}" if score.endswith("loss") else f"{100 * v:.1f} %" for v in chosen]
    return columns


ITEM = items.register(
    items.View(
        "decision.regret",
        f"Regret of ways of choosing the shared layers over {len(FEDERATIONS)} federations",
        NAME,
        _draw,
    )
)
