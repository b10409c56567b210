"""Write the page of the leaderboard and its picture from the stored rows: ``python -m benchmarks.leaderboard --write``.

A list stands between ``<!-- list:KIND -->`` and ``<!-- end -->``, as on the pages of :mod:`docs.lists`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes

from benchmarks.leaderboard import analysis
from benchmarks.leaderboard.federations import FEDERATIONS
from benchmarks.leaderboard.methods import BOUNDS, METHODS, REFERENCES
from benchmarks.leaderboard.runs import STORED, read
from diagnostics.plots.drawing import COLOURS, style
from docs.lists import BLOCK
from figures.page import markdown
from figures.ranking import Ranking, diagram
from fl_core.errors import check_known, listing

PAGE = Path(__file__).parents[2] / "docs" / "results" / "leaderboard.md"
PICTURE = PAGE.with_suffix(".png")


def answer(runs: pd.DataFrame) -> str:
    """Return the answer."""
    return "\n".join(f"- {line}" for line in analysis.lead(runs))


def methods(runs: pd.DataFrame) -> str:
    """Return the main table."""
    return markdown(analysis.display_table(runs).to_dict("list"))


def advice(runs: pd.DataFrame) -> str:
    """Return every method's difference to the advice."""
    gaps = analysis.differences(runs, REFERENCES[1])
    return markdown({
        "method": [analysis.title(name) for name in gaps.index],
        "points to the advice": [f"{100 * value:+.1f}" for value in gaps["difference"]],
        "95 % interval": [_interval(low, high) for low, high in zip(gaps["low"], gaps["high"], strict=True)],
        "corrected p": [_number(value, "{:.2f}") for value in gaps["p_value"]],
        "verdict": list(gaps["verdict"]),
    })  # fmt: skip


def winners(runs: pd.DataFrame) -> str:
    """Return the best method of each federation."""
    won = analysis.winners(runs)
    about = [FEDERATIONS[str(name)] for name in won.index]
    return markdown({
        "federation": [each.title for each in about],
        "clients": [each.clients for each in about],
        "best": [analysis.title(name) for name in won["best"]],
        "macro-F1": [f"{100 * value:.1f}" for value in won[analysis.MAIN]],
        "points to the next": [f"{100 * value:.1f}" for value in won["next"]],
        **{f"points to {analysis.title(name)}": [f"{100 * value:.1f}" for value in won[name]] for name in REFERENCES},
        "same winner in two seeds": [f"{100 * value:.0f} %" for value in won["agree"]],
    })  # fmt: skip


def prediction(runs: pd.DataFrame) -> str:
    """Return what ways to pick a method lose."""
    lost = analysis.prediction(runs)
    return markdown(
        {
            "way to pick": list(lost.index),
            "points lost": [f"{100 * value:.1f}" for value in lost],
        }
    )


def settings(runs: pd.DataFrame) -> str:
    """Return the settings that tuning chose, by method and federation."""
    chosen = {}
    for row in read(STORED):
        if (
            row["clients"] is not None
            and row["setting"]
            and row["federation"] in set(runs["federation"])
        ):
            chosen[row["method"], row["federation"]] = row["setting"]
    names = list(dict.fromkeys(federation for _, federation in chosen))
    rows = [name for name in METHODS if any(method == name for method, _ in chosen)]
    columns = {"method": [analysis.title(name) for name in rows]}
    for federation in names:
        columns[federation] = [
            _setting(chosen.get((name, federation), {})) for name in rows
        ]
    return markdown(columns)


def _setting(setting: dict[str, object]) -> str:
    words = [f"{setting['lr']:g}"] if "lr" in setting else []
    words += [
        f"{key} {value:g}"
        for key, value in setting.items()
        if key not in ("lr", "keep_optimizer", "plan")
    ]
    words += ["state kept"] if setting.get("keep_optimizer") else []
    plan = setting.get("plan")
    words += (
        [f"shares {listing(map(str, plan))}" if plan else "shares nothing"]
        if isinstance(plan, list)
        else []
    )
    return ", ".join(words)


def _interval(low: float, high: float) -> str:
    return "" if pd.isna(low) else f"{100 * low:.1f} to {100 * high:.1f}"


def _number(value: float, form: str) -> str:
    return "" if pd.isna(value) else form.format(value)


LISTS: dict[str, Callable[[pd.DataFrame], str]] = {
    "answer": answer, "methods": methods, "advice": advice, "winners": winners, "prediction": prediction,
    "settings": settings,
}  # fmt: skip


def updated(text: str, runs: pd.DataFrame) -> str:
    """Return the page's text with its lists made from these runs."""
    return BLOCK.sub(
        lambda found: (
            f"{found[1]}{LISTS[check_known('list', found[2], LISTS)](runs)}\n{found[3]}"
        ),
        text,
    )


def draw(runs: pd.DataFrame, path: Path) -> Ranking:
    """Draw each method's difference to the first reference, and mean ranks with the critical difference."""
    values = analysis.by_family(runs).drop(index=list(BOUNDS))
    ranking = Ranking(values, higher_is_better=True)
    with style():
        figure, (above, below) = plt.subplots(
            2,
            figsize=(9, 9.6),
            height_ratios=(5.4, 4.2),
            layout="constrained",
            gridspec_kw={"hspace": 0.06},
        )
        _differences(above, runs, values)
        diagram(below, ranking, {name: analysis.title(name) for name in values.index})
        below.set_title(
            "Mean rank over data families, 1 is the best. A bar joins methods without a difference."
        )
        figure.savefig(path, dpi=130, bbox_inches="tight", metadata={"Software": None})
        plt.close(figure)
    return ranking


def _differences(ax: Axes, runs: pd.DataFrame, values: pd.DataFrame) -> None:
    """Draw differences with intervals, one row a method, the best on top; light dots are data families."""
    gaps = analysis.differences(runs, REFERENCES[0])[::-1]
    of_family = 100 * (values - values.loc[REFERENCES[0]]).loc[gaps.index]
    rows = range(len(gaps))
    ax.axvspan(-100 * analysis.MARGIN, 100 * analysis.MARGIN, color="0.93", zorder=0)
    for family in of_family:
        ax.scatter(of_family[family], rows, s=12, color="0.6", zorder=2)
    ax.hlines(
        rows,
        100 * gaps["low"],
        100 * gaps["high"],
        color=COLOURS[0],
        linewidth=1.6,
        zorder=3,
    )
    ax.scatter(100 * gaps["difference"], rows, s=26, color=COLOURS[0], zorder=4)
    ax.axvline(0, color="0.3", linewidth=0.8)
    ax.set_yticks(rows, [analysis.title(str(name)) for name in gaps.index])
    ax.set_xlabel(f"macro-F1 minus that of {analysis.title(REFERENCES[0])}, points")
    ax.set_title(
        "Mean with 95 % interval. Small dots are data families. Grey: within 1 point."
    )


def write() -> Path:
    """Write page and picture. Return the page's path."""
    runs = analysis.scored_runs(read(STORED))
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8"), runs), encoding="utf-8")
    draw(runs, PICTURE)
    return PAGE
