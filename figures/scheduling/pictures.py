"""Layer scheduling's pictures: classes by client (Fig. 2), accuracy by round (3 and 4) and by client (5 and 6)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import ticker
from scipy.stats import entropy

from diagnostics.plots.drawing import legend
from figures import items, names
from figures.differences import Difference, difference
from figures.forms import Line, curves, matrix, sheet
from figures.items import Drawing, Finding, Item, set_apart
from figures.page import missing_runs
from figures.recipe import held, held_by
from figures.scheduling.runs import (
    ACCURACY,
    FULL,
    METHODS,
    NAME,
    SCHEDULES,
    TITLES,
    columns,
    incomparable,
    judge,
    learnt,
    plain,
    scores,
    setting,
)
from figures.verdicts import MARGIN, NO_LOWER, TRAIL
from fl_core import rows
from fl_core.run import runner

BY_ROUND = [method for method in METHODS if method != "local_adaptation"]
"""Methods that have a curve of their own; FedAvg's is LocalAdaptation's until that is fine-tuned."""
LATE = ("fedavg", "fedbabu", *SCHEDULES)
"""Methods of the claim on earlier rounds, which are drawn."""
SORTED = ("fedbabu", *SCHEDULES)
"""Methods of which the paper's pictures show the clients."""
POINTS = {0: "worst", 10: "p10", 50: "p50", 90: "p90"}
"""Percentiles over the clients, and what tables call them."""

# --- who holds what (Fig. 2) -----------------------------------------------------------------------------------


def _dealt(task: runner.Task, run: str, folder: Path) -> pd.DataFrame:
    """Return rows of the samples of each class at each client, over all splits."""
    class_counts = sum(
        (task.data.class_counts(split) for split in ("validation", "test")),
        task.data.class_counts("train"),
    )
    return rows.frame(held(class_counts, {"seed": task.config.execution.seed}))


def effective(counts: pd.DataFrame) -> pd.Series:
    """Return the effective number of classes of a client: exp of its labels' entropy, 1 to the number of classes."""
    return pd.Series(np.exp(entropy(counts, axis=1)), counts.index)


def _draw_dealt(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    config = next(iter(header["runs"].values()))["config"]
    counts_by_seed = {
        int(seed): held_by(seed_rows) for seed, seed_rows in frame.groupby("seed")
    }
    class_counts = counts_by_seed[0].astype(int)
    effective_numbers = pd.concat(
        {seed: effective(seed_counts) for seed, seed_counts in counts_by_seed.items()}
    )
    client_sizes = pd.concat(
        {seed: seed_counts.sum(axis=1) for seed, seed_counts in counts_by_seed.items()}
    )
    half_classes = class_counts.shape[1] / 2
    few_count = int((effective_numbers < half_classes).sum())
    finding = Finding(
        f"most clients have effectively fewer than {half_classes:g} of the {class_counts.shape[1]} classes "
        "(exp of the entropy of their labels)",
        f"{few_count} of {len(effective_numbers)} over {len(counts_by_seed)} seeds, median "
        f"{effective_numbers.median():.1f}; {client_sizes.min():.0f} to "
        f"{client_sizes.max():.0f} images a client",
        few_count > len(effective_numbers) / 2,
    )
    tick_labels = [
        f"{client}  ({images:,})" for client, images in class_counts.sum(axis=1).items()
    ]
    with sheet(6.4, 3.6) as figure:
        ax = figure.subplots()
        matrix(
            ax,
            class_counts,
            texts=class_counts.astype(str),
            colours="Blues",
            bar="images",
            yticklabels=tick_labels,
        )
        ax.set(xlabel="class", ylabel="client (images)")
        ax.tick_params(axis="x", labelrotation=45)
    caption = (
        f"Each class of CIFAR-10's {config['max_samples']:,} training images is divided among {config['clients']} "
        f"clients by Dirichlet({config['alpha']:g}). Clients with an equal share of the images receive no further "
        "class. Seed 0 is shown."
    )
    client_table = class_counts.assign(
        images=class_counts.sum(axis=1), effective_classes=effective(class_counts)
    ).reset_index()
    return Drawing(figure, client_table, caption, (finding,))


# --- accuracy by round (Figs. 3, 4) ----------------------------------------------------------------------------


def _draw_rounds(
    header: Mapping[str, Any], frame: pd.DataFrame, dataset: str
) -> Drawing:
    column, unfreeze_rounds = (
        columns(header)[dataset],
        columns(header)[dataset].unfreeze,
    )
    curve_rows = learnt(frame, dataset, BY_ROUND)
    runs = plain(dataset, methods=BY_ROUND)
    with sheet(7.0, 3.8) as figure:
        ax = figure.subplots()
        curves(
            ax,
            [_line(curve_rows, method) for method in LATE],
            factor=100,
            verticals=unfreeze_rounds[1:],
            xlabel="round",
            ylabel="test accuracy, % (higher is better)",
        )
        legend(ax, title="mean over seeds,\nband: lowest to highest")
    round_accuracies = curve_rows.astype({"seed": int, "round": int})
    round_table = (
        round_accuracies.groupby(["algorithm", "round"], sort=False)["value"]
        .agg(["mean", "min", "max", "count"])
        .reset_index()
    ).rename(columns={"algorithm": "method", "count": "seeds"})
    missing_text, setting_text = (
        missing_runs(header, runs),
        setting(header, frame, dataset),
    )
    caption = (
        "Accuracy on all clients' own test samples before any fine-tuning, of the four methods that the paper compares "
        "here. Methods with a head of their own lie far above. Dotted lines: a layer is "
        f"unfrozen.{missing_text} {setting_text}"
    )
    return Drawing(
        figure,
        round_table,
        caption,
        set_apart(
            _of_rounds(round_accuracies, dataset, column.at[-1], unfreeze_rounds[-1]),
            incomparable(header, scores(frame), dataset, list(LATE)),
        ),
    )


def _line(curve_rows: pd.DataFrame, method: str) -> Line:
    """Return a method's mean accuracy by round, with the lowest and the highest seed."""
    method_rows = curve_rows[curve_rows["algorithm"] == method].astype({"round": int})
    seed_curves = method_rows.pivot(
        index="round", columns="seed", values="value"
    ).astype(float)
    seed_range = seed_curves.min(axis=1), seed_curves.max(axis=1)
    mark_interval = max(1, len(seed_curves) // 8)
    return Line(
        seed_curves.mean(axis=1),
        names.title(method),
        seed_range,
        {"markevery": mark_interval},
    )


def _of_rounds(
    values: pd.DataFrame, dataset: str, last_round: int, thaw_round: int
) -> list[Finding]:
    """Return findings on the curves: whether schedules are below while layers are frozen, and what happens after."""
    early_rows = values[(values["round"] > 0) & (values["round"] <= thaw_round)]
    means_by_moment = {
        "frozen": early_rows.groupby(["algorithm", "seed"])["value"]
        .mean()
        .unstack("seed")
    }
    means_by_moment["end"] = values[values["round"] == last_round].pivot(
        index="algorithm", columns="seed", values="value"
    )
    gaps: dict[str, dict[str, Difference]] = {moment: {} for moment in means_by_moment}
    for moment, method_means in means_by_moment.items():
        for method in SCHEDULES:
            for baseline in ("fedavg", "fedbabu"):
                gap = difference(method_means, method, baseline)
                gaps[moment][f"{method} − {baseline}"] = gap
    frozen_verdict, end_verdict = (
        judge(gaps["frozen"], TRAIL),
        judge(gaps["end"], NO_LOWER),
    )
    return [
        frozen_verdict.finding(
            f"{TITLES[dataset]}: until all layers are unfrozen the schedules lie below FedAvg and FedBABU",
            f"mean up to round {thaw_round}, in points: ",
        ),
        end_verdict.finding(
            f"{TITLES[dataset]}: at the end the schedules lie at most {100 * MARGIN:g} point below both",
            f"after {last_round} rounds, in points: ",
        ),
    ]


# --- client by client (Figs. 5, 6) -----------------------------------------------------------------------------


def ordered(frame: pd.DataFrame, run: str) -> pd.DataFrame:
    """Return every client's accuracy after the last round, ascending within each seed: rank from 1 on x seeds."""
    client_rows = frame[
        (frame["run"] == run) & (frame["metric"] == ACCURACY) & (frame["client"] != "")
    ]
    sorted_accuracies = pd.DataFrame(
        {
            int(seed): np.sort(seed_rows["value"].to_numpy(float))
            for seed, seed_rows in client_rows.groupby("seed")
        }
    )
    sorted_accuracies.index += 1
    return sorted_accuracies


def _draw_clients(
    header: Mapping[str, Any], frame: pd.DataFrame, dataset: str
) -> Drawing:
    accuracies_by_method = {
        method: ordered(frame, f"{dataset}.{method}") for method in METHODS
    }
    main_accuracies = {
        method: accuracies
        for method, accuracies in accuracies_by_method.items()
        if method in SORTED
    }
    curve_lines = []
    for (method, accuracies), line_style in zip(
        main_accuracies.items(), ("-", "--", "-."), strict=True
    ):
        seed_range = accuracies.min(axis=1), accuracies.max(axis=1)
        look = {"marker": "", "linestyle": line_style}
        curve_lines.append(
            Line(accuracies.mean(axis=1), names.title(method), seed_range, look)
        )
    other_means = pd.DataFrame(
        {
            method: accuracies.mean(axis=1)
            for method, accuracies in accuracies_by_method.items()
            if method not in main_accuracies
        }
    )
    grey_look = {"color": "0.75", "linewidth": 0.8, "zorder": 1, "marker": ""}
    curve_lines.append(Line(other_means, "each other method", look=grey_look))
    with sheet(7.0, 3.6) as figure:
        ax = figure.subplots()
        curves(
            ax,
            curve_lines,
            factor=100,
            xlabel="client, in ascending order of each method's own",
            ylabel="test accuracy, % (higher is better)",
        )
        ax.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
        legend(ax)
    table = pd.DataFrame([
        {
            "method": method, "seeds": accuracies.shape[1],
            **{label: 100 * accuracies.quantile(percentile / 100).mean() for percentile, label in POINTS.items()},
            "mean": 100 * accuracies.to_numpy().mean(),
        }
        for method, accuracies in accuracies_by_method.items()
    ])  # fmt: skip
    missing_text = missing_runs(header, plain(dataset))
    setting_text = setting(header, frame, dataset)
    caption = (
        "Each client's test accuracy after the last round (and after fine-tuning if the method has it). "
        f"Lines are means over seeds. Bands reach from the lowest to the highest seed.{missing_text} {setting_text}"
    )
    reason = incomparable(header, scores(frame), dataset, SORTED)
    return Drawing(
        figure, table, caption, set_apart(_of_clients(main_accuracies, dataset), reason)
    )


def _of_clients(
    accuracies_by_method: Mapping[str, pd.DataFrame], dataset: str
) -> list[Finding]:
    """Return findings on whether a schedule is above FedBABU at all percentiles of clients, paired by seed."""
    findings = []
    for method in SCHEDULES:
        gaps: dict[str, Difference] = {}
        for percentile in POINTS:
            method_table = pd.DataFrame(
                {
                    compared_method: accuracies_by_method[compared_method].quantile(
                        percentile / 100
                    )
                    for compared_method in (method, "fedbabu")
                }
            ).T
            gaps[f"percentile {percentile}"] = difference(
                method_table, method, "fedbabu"
            )
        gaps = {"worst client": gaps.pop("percentile 0"), **gaps}
        title = names.title(method)
        findings.append(
            judge(gaps).finding(
                f"{TITLES[dataset]}: {title} lies above FedBABU at the worst client and at percentiles 10, 50 and 90"
            )
        )
    return findings


items.register(Item(
    "scheduling.fig2", "CIFAR-10 partitioned among 10 clients",
    {"cifar10": FULL.with_keys(dataset="cifar10", clients=10, max_samples=50_000)},
    seeds=3, budget="some seconds; nothing is trained", measure=_dealt, draw=_draw_dealt,
))  # fmt: skip
for _by_round, _by_client, _dataset in (
    ("fig3", "fig5", "cifar100"),
    ("fig4", "fig6", "tiny_imagenet"),
):
    items.register(Item(
        f"scheduling.{_by_round}", f"Accuracy by round, {TITLES[_dataset]}", source=NAME,
        draw=partial(_draw_rounds, dataset=_dataset), shown=plain(_dataset, methods=BY_ROUND),
    ))  # fmt: skip
    items.register(Item(
        f"scheduling.{_by_client}", f"Accuracy of each client, {TITLES[_dataset]}", source=NAME,
        draw=partial(_draw_clients, dataset=_dataset), shown=plain(_dataset),
    ))  # fmt: skip
