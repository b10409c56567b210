"""Regret of rules on real datasets: every cut is trained, and each rule's choice is compared with the best cut.

The stored rows hold validation and test scores, so that the test split is what is held out here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from diagnostics import plots
from diagnostics.plots.drawing import MARKERS, MEAN, style
from fedlayers.studies.regret import RANDOM, REFERENCES, SPLITS, Regret, regret
from figures import items
from figures.differences import LEAST
from figures.items import Drawing, Finding
from figures.page import markdown, percent
from figures.player_fl.runs import CASES, NETWORKS, network
from figures.recipe import Recipe, labels, scored_at_end
from fl_core import rows, runner
from fl_core.config import RunConfig
from fl_core.statistics import mean_interval

NAME = "regret.datasets"
SCORE = "macro_f1"
CUT, DECISION = "score of a cut", "decision of a rule"
RULE = "sensitivity_ratio"
RULES = (
    RULE,
    "largest_jump",
    "change_point",
    "grad_variance=largest_jump",
    "cka=largest_jump",
)
"""PLayer-FL's rule, and others that cost little: three of federation sensitivity, one of another metric each."""
SHAPES = MARKERS[len(RULES) :]
"""Markers of datasets: others than those of the rules, and grey, so that no mark means two things in one picture."""
GREYS = ("0.15", "0.55", "white")
TITLES = {name: case.title for name, case in CASES.items()} | {"mnist": "MNIST"}
SMALL = 0.02
"""A regret below it is no more than seeds differ."""


def recipes() -> dict[str, RunConfig]:
    """FedPer on each dataset, as small as in the comparison of PLayer-FL's methods; MNIST like Fashion-MNIST.

    Clients keep the state of their optimiser (AdamW) from round to round, as in the decision's federations.
    """
    sizes = {name: dict(case.quick) for name, case in CASES.items()}
    sizes = {"heart": sizes.pop("heart"), "mnist": sizes["fashion_mnist"], **sizes}
    sizes["heart"]["rounds"] = CASES["heart"].rounds
    return {
        name: scored_at_end(
            RunConfig(
                dataset=name,
                model=NETWORKS.get(name),
                algorithm="fedper",
                keep_optimizer=True,
                **size,
            )
        )
        for name, size in sizes.items()
    }


def _measure(task: runner.Task, run: str, folder: Path) -> pd.DataFrame:
    """Record validation and test scores of every cut, and every rule's decision after the first epoch."""
    seed = task.config.execution.seed
    with TemporaryDirectory() as out:
        judged = regret(task.config, RULES, (seed,), out, score=SCORE, progress=False)
    named = labels(task)
    lines = [
        rows.row(
            CUT,
            line[split],
            layer=line["last"],
            variant=str(line["cut"]),
            split=split,
            model="personal",
            **named,
        )
        for line in judged.scores.to_dict("records")
        for split in SPLITS
    ]
    for line in judged.decisions.to_dict("records"):
        cut = None if pd.isna(line["cut"]) else int(line["cut"])
        last = judged.layers[cut - 1] if cut else ""
        lines.append(
            rows.row(
                DECISION,
                cut,
                layer=last,
                variant=line["rule"],
                status=line["status"],
                **named,
            )
        )
    sizes = dict(
        zip(
            (client.name for client in task.data.clients),
            task.data.weights,
            strict=True,
        )
    )
    lines += [
        rows.row("samples", n, client=name, n_train=n, split="train", **named)
        for name, n in sizes.items()
    ]
    return rows.frame(lines)


def of_dataset(frame: pd.DataFrame, dataset: str) -> Regret:
    """The stored regret of one dataset, rebuilt from its rows."""
    part = frame[frame["run"] == dataset]
    scores = part[part["metric"] == CUT].assign(
        cut=lambda t: t["variant"].astype(int), last=lambda t: t["layer"]
    )
    table = scores.pivot(
        index=["seed", "cut", "last"], columns="split", values="value"
    ).reset_index()
    table = table.sort_values(["seed", "cut"], ignore_index=True)
    table["held_out"] = table.get("held_out", table["test"])
    layers = tuple(table.drop_duplicates("cut").sort_values("cut")["last"])[1:]
    decided = part[part["metric"] == DECISION].rename(
        columns={"variant": "rule", "value": "cut"}
    )
    return Regret(
        SCORE,
        layers,
        table,
        decided[["rule", "seed", "cut", "status"]].reset_index(drop=True),
    )


# --- drawing ---------------------------------------------------------------------------------------------------


def _draw(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    regrets = {
        name: of_dataset(frame, name) for name in TITLES if (frame["run"] == name).any()
    }
    mean = summary(regrets)
    with style():
        deep = -(-len(regrets) // 2)
        figure = plt.figure(figsize=(8.4, 2.25 * deep + 2.7), layout="constrained")
        above, below = figure.subfigures(
            2, 1, squeeze=False, height_ratios=[2.25 * deep, 2.5]
        )[:, 0]
        grid = above.subplots(deep, 2, squeeze=False)
        for ax, (name, each) in zip(grid.flat, regrets.items(), strict=False):
            plots.regret(each.scores, each.decisions, SCORE, ax)
            _trim(ax, TITLES[name])
        _one_span(grid.flat[: len(regrets)])
        for spare in list(grid.flat)[len(regrets) :]:
            spare.remove()
        handles, labels = grid.flat[0].get_legend_handles_labels()
        labels[0] = "mean over seeds"
        above.legend(handles, labels, loc="outside upper center", ncols=4, fontsize=7)
        _summary(below.subplots(), regrets, mean)
    caption = (
        f"Above: macro-F1 on the test split after the last round of FedPer, under every cut from none to all layers. "
        f"Neither training nor a rule saw that split. Coloured marks: each rule's choice after the first epoch. "
        f"The axes end at 0 and 100 %. An interval of few seeds may reach beyond. "
        f"Below: regret, the score of the best mean over seeds (the star) minus the choice's. A "
        f"grey mark is a dataset's mean over seeds. The bar is the mean over datasets with its 95 % interval. "
        f"{_sizes(header, frame, regrets)}"
        + (
            f" {len(header['missing'])} runs are missing (listed on the page)."
            if header["missing"]
            else ""
        )
    )
    text = _page(regrets, mean) + (
        f"\n\nMissing (run and seed): {', '.join(header['missing'])}."
        * bool(header["missing"])
    )
    return Drawing(
        figure, _table(regrets, mean), caption, _findings(regrets, mean), text
    )


def _one_span(panels: Sequence[Axes]) -> None:
    """Give panels axes of the same length, within what a score can be, so that their slopes compare."""
    ends = [
        (max(low, 0.0), min(high, 1.0))
        for low, high in (ax.get_ylim() for ax in panels)
    ]
    span = max(high - low for low, high in ends)
    for ax, (low, high) in zip(panels, ends, strict=True):
        bottom = min(max(0.0, (low + high - span) / 2), 1.0 - span)
        ax.set_ylim(bottom, bottom + span)


def _trim(ax: Axes, title: str) -> None:
    """Remove legend and long labels from one panel of several, since they are drawn elsewhere."""
    legend = ax.get_legend()
    if legend is not None:
        legend.remove()
    ax.set_title(title, fontsize=8)
    ax.set_ylabel("macro-F1, %", fontsize=7)
    ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0, symbol=""))
    ax.set_xlabel("layers federated, and the last of them", fontsize=6.5)
    ax.tick_params(labelsize=6.5)
    ax.tick_params(axis="x", labelrotation=0)


def summary(regrets: Mapping[str, Regret]) -> pd.DataFrame:
    """Mean regret over seeds, rules and references x datasets."""
    columns = {
        name: each.table.set_index("rule")["regret"] for name, each in regrets.items()
    }
    return pd.DataFrame(columns).reindex([*RULES, *REFERENCES])


def _summary(ax: Axes, regrets: Mapping[str, Regret], mean: pd.DataFrame) -> None:
    y = np.arange(len(mean))
    for k, name in enumerate(regrets):
        look: dict[str, Any] = {
            "marker": SHAPES[k % len(SHAPES)],
            "markerfacecolor": GREYS[k % len(GREYS)],
            "label": TITLES[name],
        }
        ax.plot(
            100 * mean[name],
            y,
            linestyle="none",
            markersize=6,
            markeredgecolor="0.15",
            mew=0.7,
            **look,
        )
    overall = [mean_interval(line.dropna()) for _, line in mean.iterrows()]
    ax.hlines(
        y + 0.3,
        [100 * m.low for m in overall],
        [100 * m.high for m in overall],
        color=MEAN,
        linewidth=1.4,
    )
    bar: dict[str, Any] = {
        "linestyle": "none",
        "marker": "|",
        "markersize": 8,
        "mew": 2,
        "color": MEAN,
    }
    ax.plot(
        [100 * m.value for m in overall], y + 0.3, label="mean, 95 % interval", **bar
    )
    ax.axvline(0, color="0.6", linewidth=0.8)
    ax.set_yticks(y, list(mean.index), fontsize=7.5)
    ax.axhline(len(RULES) - 0.5, color="0.6", linewidth=0.6)
    ax.set(
        ylim=(len(mean) - 0.4, -0.6),
        xlabel="regret, points of macro-F1 (0 = the cut with the best mean)",
    )
    ax.legend(loc="upper left", bbox_to_anchor=(1.01, 1.02), fontsize=7)


def _sizes(
    header: Mapping[str, Any], frame: pd.DataFrame, regrets: Mapping[str, Regret]
) -> str:
    parts = []
    for name, each in regrets.items():
        config = header["runs"][name]["config"]
        samples = (
            frame[(frame["run"] == name) & (frame["metric"] == "samples")]
            .groupby("client")["value"]
            .median()
        )
        parts.append(
            f"{TITLES[name][0].upper()}{TITLES[name][1:]}: {len(samples)} clients × {samples.min():.0f}-"
            f"{samples.max():.0f} training samples and {each.scores['seed'].nunique()} seeds. They train "
            f"{network(config)} in {config['rounds']} rounds."
        )
    return " ".join(parts)


# --- table, page and findings ----------------------------------------------------------------------------------


def _table(regrets: Mapping[str, Regret], mean: pd.DataFrame) -> pd.DataFrame:
    """Every dataset's table of rules, one below another, and means over datasets."""
    parts = [each.table.assign(dataset=name) for name, each in regrets.items()]
    over = [
        dict(
            zip(
                ("regret", "regret_low", "regret_high"),
                mean_interval(line.dropna()),
                strict=True,
            )
        )
        | {"dataset": "mean over datasets", "rule": rule, "seeds": ""}
        for rule, line in mean.iterrows()
        if line.notna().any()
    ]
    table = pd.concat([*parts, pd.DataFrame(over)], ignore_index=True)
    return table[["dataset", *(name for name in table.columns if name != "dataset")]]


def _findings(regrets: Mapping[str, Regret], mean: pd.DataFrame) -> tuple[Finding, ...]:
    enough = bool(regrets) and all(
        each.scores["seed"].nunique() >= LEAST for each in regrets.values()
    )
    enough = enough and len(regrets) >= LEAST
    gaps = (mean.loc[RANDOM] - mean.loc[RULE]).dropna()
    gap = mean_interval(gaps) if len(gaps) else mean_interval([math.nan])
    better = None if not gap.low > 0 and not gap.high < 0 else bool(gap.low > 0)
    losses = mean.loc[RULE].dropna()
    far = {TITLES[str(name)]: value for name, value in losses.items() if value > SMALL}
    margins = {name: part_against_whole(each) for name, each in regrets.items()}
    over = mean_interval(list(margins.values()) or [math.nan])
    told = (
        None
        if math.isnan(over.low)
        else True
        if over.low > 0
        else False
        if over.high < 0
        else None
    )
    return (
        Finding(
            f"{RULE} loses less than a random cut",
            f"{percent(gap.value, gap.low, gap.high, '+')} points less over {len(gaps)} datasets",
            better if enough else None,
        ),
        Finding(
            f"{RULE} loses at most {SMALL:.0%} of macro-F1 against the best cut on every dataset",
            ", ".join(
                f"{TITLES[str(name)]} {100 * value:.1f}"
                for name, value in losses.items()
            )
            or "no decision",
            not far if enough else None,
        ),
        Finding(
            "a part of the layers is better than none and all (chosen on the other seeds)",
            f"{percent(over.value, over.low, over.high, '+')} points over {len(margins)} datasets: "
            + ", ".join(
                f"{TITLES[name]} {100 * margin:+.1f}"
                for name, margin in margins.items()
            ),
            told if enough else None,
        ),
    )


def part_against_whole(regret: Regret) -> float:
    """Return the gain of sharing a part of the layers over none and all, by the best of each kind over the other seeds.

    The mean over seeds of the held-out score of the cut 1 .. L-1 that is best over the other seeds, minus that of the
    better one of the cuts 0 and L over these. Nothing is chosen by the score that counts, so that the gain is not that
    of a maximum of noisy scores. NaN of a single seed.
    """
    scores, whole = regret.held_out, [0, len(regret.layers)]
    inner = [cut for cut in scores.index if cut not in whole]
    gains = []
    for seed in scores.columns:
        others = scores.drop(columns=seed).mean(axis=1)
        if others.isna().any():
            return math.nan
        gains.append(
            scores.loc[others[inner].idxmax(), seed]
            - scores.loc[others[whole].idxmax(), seed]
        )
    return float(np.mean(gains))


def _page(regrets: Mapping[str, Regret], mean: pd.DataFrame) -> str:
    columns: dict[str, list[str]] = {"rule": [str(name) for name in mean.index]}
    for name, each in regrets.items():
        table = each.table.set_index("rule").reindex(mean.index)
        columns[TITLES[name]] = [
            percent(line["regret"], math.nan, math.nan)
            + (
                ""
                if pd.isna(line["regret_low"])
                else f" ({100 * line['regret_low']:.1f} to {100 * line['regret_high']:.1f})"
            )
            + (
                f" [{line['cuts']}]"
                if isinstance(line["cuts"], str) and line["cuts"]
                else ""
            )
            for _, line in table.iterrows()
        ]
    columns["mean"] = [
        percent(*mean_interval(line.dropna())) for _, line in mean.iterrows()
    ]
    failed = [
        f"{line.rule} does not decide on {TITLES[name]} with seed {line.seed}: {line.status}."
        for name, each in regrets.items()
        for line in each.choices.itertuples()
        if line.status != "ok"
    ]
    note = (
        "Regret in points of macro-F1 on the test split against the cut with the best mean over seeds. Parentheses "
        "have 95 % t intervals over the seeds. "
        "Square brackets have the cuts of the seeds. These test splits are small. "
        "[decision.regret](decision.regret.md) asks the same question on held-out samples of more federations."
    )
    return "\n\n".join([markdown(columns), note, *failed])


ITEM = items.register(Recipe(
    NAME, "Regret of the rules over six datasets: every cut is trained", recipes(), seeds=3, more_seeds={"heart": 10},
    budget="about an hour and a half of one core", measure=_measure, draw=_draw,
))  # fmt: skip
