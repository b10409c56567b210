"""Write the tables of the page "What each command sees" from the rows of :mod:`figures.decision.known_runs`.

    python -m figures.decision.known

A table stands between ``<!-- rows:NAME -->`` and ``<!-- end -->``. The rest of the page stays as it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from diagnostics.plots.drawing import COLOURS, style
from diagnostics.tuning.differ import DIFFER
from figures.decision import known_plans
from figures.decision.known_runs import CONFIRMED, KNOWN, ROWS, ends
from figures.decision.known_signals import REFERENCES
from figures.page import markdown, numbers
from fl_core.statistics import mean_interval

PAGE = Path(__file__).parents[2] / "docs/results/what_each_command_sees.md"
BLOCK = re.compile(r"(<!-- rows:(\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
AT_HEAD = ("labels", "shares")
"""What differs at the head. All else is at the inputs."""
SIGNALS = (
    "layer_tuning",
    "all but one layer tuned",
    "share of parameters",
    "Auto-RGN",
    "change after tuning all",
    "gradient conflict",
)
RULES = {"first rule": "whether", "clients_differ": "differ"}


def read() -> pd.DataFrame:
    """Return the rows, with what a job found as a dict."""
    rows = pd.read_parquet(ROWS)
    return rows.assign(found=rows["found"].map(json.loads))


def of(rows: pd.DataFrame, arm: str, dealt: bool = False) -> dict[Any, Any]:
    """Return what jobs of an arm found, by federation, seed and draw. Of failed ones nothing is known."""
    its = rows[(rows["arm"] == arm) & ((rows["draw"] > 0) == dealt)]
    keys = zip(its["federation"], its["seed"], its["draw"], strict=True)
    return dict(zip(keys, its["found"], strict=True))


def count(found: dict[Any, Any], score: str, verdict: str = DIFFER) -> str:
    """Return how many jobs have a verdict, of how many."""
    said = [each.get(f"verdict, {score}") == verdict for each in found.values()]
    return f"{sum(said)} of {len(said)}" if said else "–"


def whether(rows: pd.DataFrame) -> str:
    """Return each rule's answers: on dealt samples, and where clients differ by construction."""
    lines = []
    for rule, arm in RULES.items():
        true, dealt = of(rows, arm), of(rows, arm, dealt=True)
        known = {key: each for key, each in true.items() if key[0] in KNOWN}
        alike = {k: each for k, each in known.items() if k[0] == "known_neither"}
        differ = {k: each for k, each in known.items() if k not in alike}
        unseen = {k: each for k, each in true.items() if k[0] in CONFIRMED}
        for score in ("loss", "accuracy"):
            own = [count(each, score) for each in (dealt, alike, differ, unseen)]
            lines.append([f"{rule}, {score}", *own])
    names = [
        "rule, score",
        "dealt samples",
        "`known_neither`",
        "the other known data sets",
        "unseen federations",
    ]
    return markdown(dict(zip(names, zip(*lines, strict=True), strict=True)))


def score(rows: pd.DataFrame, name: str, seed: int, arm: str) -> float:
    """Return an arm's accuracy on test samples in points; NaN without its row."""
    if arm in ("all", "nothing"):
        found = of(rows, "whether").get((name, seed, 0), {}).get(arm, {})
    else:
        found = of(rows, arm).get((name, seed, 0), {})
    return 100 * float(found.get("test", np.nan))


ARMS = {
    "all": ["all"],
    "before": ["0", "0 1"],
    "head": ["2", "1 2"],
    "nothing": ["nothing"],
}
"""The local layers of each kind of plan, by number."""


def plans_of(rows: pd.DataFrame, name: str) -> pd.DataFrame:
    """Return the accuracy of each kind of plan on a known data set (column), a line for each seed.

    Of the plans of a kind it is the one with the best mean.
    """
    seeds = sorted({seed for own, seed, _ in of(rows, "1 2") if own == name})
    found = {}
    for kind, own in ARMS.items():
        table = pd.DataFrame(
            {arm: [score(rows, name, seed, arm) for seed in seeds] for arm in own}
        )
        found[kind] = table[table.mean().idxmax()]
    return pd.DataFrame(found)


def truth(rows: pd.DataFrame) -> str:
    """Return the accuracy of each kind of plan on the known data sets, means over seeds."""
    lines = []
    for name in KNOWN:
        table = plans_of(rows, name)
        gap = mean_interval(table["head"] - table["before"])
        lines.append(
            [
                f"`{name}`",
                *numbers(table.mean(), ".1f"),
                f"{gap[0]:.1f} [{gap[1]:.1f}, {gap[2]:.1f}]",
                str(len(table)),
            ]
        )
    names = ["federation", *ARMS, "head minus before, 95 %", "seeds"]
    return markdown(dict(zip(names, zip(*lines, strict=True), strict=True)))


def picture(rows: pd.DataFrame) -> Figure:
    """Draw of three known data sets what each layer alone recovers, and the score of each plan."""
    columns = {
        "known_labels": "labels coded",
        "known_inputs": "inputs changed",
        "known_neither": "nothing differs",
    }
    with style():
        figure, axes = plt.subplots(
            2, 3, figsize=(7.2, 3.6), sharey="row", layout="constrained"
        )
        for (name, title), (above, below) in zip(columns.items(), axes.T, strict=True):
            found = of(rows, "differ")[name, 0, 0]
            value, error = found["training alone, others, loss"]
            answer = (
                "differ" if found["verdict, loss"] == DIFFER else "not shown to differ"
            )
            above.set_title(
                f"{title}\nclients {answer}\n(own model leads by {value:.2f} ± {1.96 * error:.2f})",
                fontsize=8,
            )
            tuned = of(rows, "profile")[name, 0, 0]["layer_tuning"]
            layers = [f"fc{k + 1}" for k in range(len(tuned))]
            above.bar(layers, tuned, color=COLOURS[0], width=0.6)
            table = plans_of(rows, name)
            for k, kind in enumerate(table):
                mean, low, high = mean_interval(table[kind])
                ends = [[mean - low], [high - mean]]
                below.errorbar([k], [mean], ends, fmt="o", color=COLOURS[1], capsize=2)
            below.set_xticks(
                range(len(ARMS)),
                ["all\nshared", "first\nlocal", "head\nlocal", "all\nlocal"],
            )
        axes[0, 0].set_ylabel("tuning it alone\nrecovers, nats")
        axes[1, 0].set_ylabel("accuracy, %")
    return figure


def layers_of(name: str) -> int:
    """Return the number of layers of a federation's network."""
    return 3 if name in KNOWN or name.startswith("mlp") else 5


def plans(rows: pd.DataFrame, name: str) -> list[float]:
    """Return the scores of all, head local, first half local and nothing."""
    return [
        score(rows, name, 0, arm) for arm in ("all", *ends(layers_of(name)), "nothing")
    ]


def confirmation(rows: pd.DataFrame) -> str:
    """Return verdicts and plans of the unseen federations that are done."""
    lines = []
    verdicts = [of(rows, arm) for arm in RULES.values()]
    for name in CONFIRMED:
        said = [
            each.get((name, 0, 0), {}).get("verdict, loss", "–") for each in verdicts
        ]
        if said != ["–", "–"]:
            lines.append([name, *said, *numbers(plans(rows, name), ".1f")])
    names = [
        "federation",
        "first rule",
        "`clients_differ`",
        "all",
        "head local",
        "first half local",
        "nothing",
    ]
    return markdown(dict(zip(names, zip(*lines, strict=True), strict=True)))


def claim(found: dict[str, Any]) -> str:
    """Return the end that references claim, or "" where the interval contains their middle."""
    (value, error), *others = (
        found[f"ratio {name}".strip()] for name in ("", *REFERENCES)
    )
    labels, inputs = (each[0] for each in others)
    middle = (labels + inputs) / 2
    if not labels > inputs or not abs(value - middle) > 1.96 * error:
        return ""
    return "head" if value > middle else "before"


def named(rows: pd.DataFrame) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield each signal, and the end that it names in each federation with a profile."""
    profiles = {
        name: each
        for (name, *_), each in of(rows, "profile").items()
        if "ratio" in each
    }
    yield "always the head", dict.fromkeys(profiles, "head")
    for signal in SIGNALS:
        yield (
            signal,
            {
                name: "head"
                if np.argmax(each[signal]) == len(each[signal]) - 1
                else "before"
                for name, each in profiles.items()
            },
        )
    yield (
        "a classifier of the client by its inputs",
        {
            name: "before"
            if each["inputs differ"][0] > 1.5 * each["inputs differ"][1]
            else "head"
            for name, each in profiles.items()
        },
    )
    yield (
        "`layer_tuning` against references",
        {name: claim(each) for name, each in profiles.items()},
    )


def signals(rows: pd.DataFrame) -> str:
    """Return how often each signal names the kind that was made and the better end, and what its end loses."""
    lines = []
    for signal, each in named(rows):
        each = {name: end for name, end in each.items() if name.split()[0] not in KNOWN}
        claims = {name: end for name, end in each.items() if end}
        right = [
            (name.split()[2] in AT_HEAD) == (end == "head")
            for name, end in claims.items()
        ]
        loss, better = [], []
        for name, end in claims.items():
            _, head, first, _ = plans(rows, name)
            own, other = (head, first) if end == "head" else (first, head)
            loss.append(own - max(head, first))
            better.append(own >= other)
        mean = "–" if not loss else f"{np.nanmean(loss):.1f}"
        lines.append(
            [
                signal,
                f"{len(claims)} of {len(each)}",
                str(sum(right)),
                str(sum(better)),
                mean,
            ]
        )
    names = [
        "signal",
        "names an end",
        "of these the kind",
        "of these the better end",
        "points below the better end",
    ]
    return markdown(dict(zip(names, zip(*lines, strict=True), strict=True)))


def hours(rows: pd.DataFrame) -> str:
    """Return the rows and their core-hours."""
    return f"{len(rows)} rows, {rows['seconds'].sum() / 3600:.2f} core-hours.\n"


def algorithms(_: pd.DataFrame) -> str:
    """Return what the plan of a known answer does for other algorithms."""
    return known_plans.table()


TABLES = {
    each.__name__: each
    for each in (whether, truth, algorithms, confirmation, signals, hours)
}


def written(page: str) -> str:
    """Return a page with its tables made from the rows."""
    rows = read()

    def table(match: re.Match[str]) -> str:
        return f"{match[1]}{TABLES[match[2]](rows).rstrip()}\n{match[3]}"

    return BLOCK.sub(table, page)


if __name__ == "__main__":
    picture(read()).savefig(PAGE.with_name("known_plans.png"), dpi=160)
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
