"""FedPFT's pictures: features of seven methods (Fig. 2), of two kinds of prompts (Fig. 3), and attention (Fig. 6)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd

from diagnostics.plots.drawing import style
from diagnostics.plots.features import tsne_panels
from fedlayers.studies.comparison import main_model
from figures import items, names
from figures.algorithm_state import ATTENTION_LABEL, prompt_attention
from figures.differences import FEWEST, LEAST, UNDECIDED, against, outcome
from figures.fedpft.class_shares import dots
from figures.fedpft.insides import (
    COUNT,
    ENTROPY,
    FEDPFT,
    MILD,
    NAME,
    PAIRS,
    RUNS,
    SELF,
    SIMILAR,
    SPREAD,
    TITLES,
    of_runs,
)
from figures.items import Drawing, Finding, View, set_apart
from figures.page import markdown, missing_runs, percent, seeds_in_words
from figures.planes import CLUSTERED, MEANING, plane
from figures.verdicts import little_learned
from fl_core.algorithms.fedpft import ATTENTION
from fl_core.errors import UsageError, listing
from fl_core.models.extended import PROMPTS

KINDS = {PROMPTS[0]: "classification prompts", PROMPTS[1]: "contrastive prompts"}
CLAIMS = (
    ("no_contrast", "fedavg"),
    (FEDPFT, "no_contrast"),
    ("fedavg", "fedper"),
    ("no_alternating", "fedavg"),
    ("no_contrast", "no_alternating"),
    (FEDPFT, "personal_head"),
)
"""Pairs of runs: the paper calls the features of the first clearer than those of the second."""
GUESSING = 0.1
"""Accuracy of guessing one of ten classes."""
METHODS = {"no_contrast": "fedpft w/o l_con"}
"""The published names of runs that are called otherwise."""


# --- what the drawings share -----------------------------------------------------------------------------------


def setting(header: Mapping[str, Any]) -> str:
    config = next(iter(header["runs"].values()))["config"]
    return (
        f"Each of the {config['clients']} clients has {config['samples_per_client']} training images of CIFAR-10. "
        f"{names.network(config['model'])} trains for {config['rounds']} rounds of {config['epochs']} epochs."
    )


def _last_words(header: Mapping[str, Any]) -> str:
    """The caption's sentence on limits: missing or diverged runs, and that few seeds decide no order."""
    seeds = header["seeds"]
    said = f" Drawn: seed 0 of {seeds_in_words(seeds)}." + (
        " No order is claimed." if seeds < LEAST else ""
    )
    return said + missing_runs(header)


def scores(frame: pd.DataFrame) -> pd.DataFrame:
    """Mean accuracy over clients of the personal models, or of the global one without any, runs x seeds."""
    final = main_model(frame[frame["metric"] == "accuracy"], "run", "seed")
    means = final.groupby(["run", "seed"], sort=False)["value"].mean()
    return means.unstack("seed").sort_index(axis=1)


def far(frame: pd.DataFrame, runs: Sequence[str]) -> str:
    """Evidence that rows are not comparable with the paper's: the runs' levels against its Table 7."""
    accuracy = scores(frame).mean(axis=1)
    known = (
        items.published_table(
            "fedpft", "Table 7", setting="dirichlet 0.1", dataset="cifar10"
        )["accuracy"]
        / 100
    )
    sides = {
        TITLES[run]: (accuracy[run], known.get(METHODS.get(run, run), math.nan))
        for run in runs
        if run in accuracy
    }
    return little_learned(sides, (GUESSING, GUESSING))


def _present(header: Mapping[str, Any], wanted: Sequence[str]) -> list[str]:
    """The wanted runs that finished with seed 0, the drawn one.

    Raises:
        UsageError: none of them did.
    """
    found = [run for run in wanted if 0 in header["had"].get(run, [])]
    if not found:
        raise UsageError(
            f"rows must have seed 0 of {listing(wanted)}; got none. Train with --train."
        )
    return found


def compared(
    expected: str,
    values: pd.DataFrame,
    run: str,
    other: str,
    names: Mapping[str, str],
    above: bool = True,
) -> list[Finding]:
    """A finding on whether a run's value is above (or below) another's, paired by seed; none if one is missing."""
    if not {run, other} <= set(values.index):
        return []
    gap, pairs = against(values, run, other)
    verdict = outcome(gap, pairs)
    held = (
        None
        if verdict in ("", UNDECIDED)
        else verdict == ("above" if above else "below")
    )
    said = f"{names[run]} {values.loc[run].mean():.3g}, {names[other]} {values.loc[other].mean():.3g}"
    return [Finding(expected, said + ("" if verdict else f" ({FEWEST})"), held)]


# --- seven methods (Fig. 2) ------------------------------------------------------------------------------------


def _draw_methods(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    shown = _present(header, [run for run in RUNS if run != MILD])
    planes = {TITLES[run]: plane(frame, run) for run in shown}
    with style():
        figure = plt.figure(figsize=(9.2, 4.6), layout="constrained")
        grid = figure.subplots(2, 4)
        own = frame[
            (frame["run"] == shown[0])
            & (frame["metric"] == COUNT)
            & (frame["seed"] == 0)
        ]
        counts = own.pivot(index="client", columns="variant", values="value")
        counts = counts.reindex(
            index=own["client"].unique(), columns=own["variant"].unique()
        )
        first, *rest = grid.flat
        dots(first, counts, counts.max().max())
        first.set_xticks(
            range(counts.shape[1]), list(counts.columns), rotation=90, fontsize=7
        )
        first.set_yticks(range(len(counts)), list(counts.index), fontsize=7)
        first.set_title("training images")

        tsne_panels(planes, rest[: len(shown)], centres=False)
        for ax in rest[: len(shown)]:
            ax.set_xlabel("")
        for spare in rest[len(shown) :]:
            spare.remove()
    table, values = by_run(frame, shown)
    findings = []
    for run, other in CLAIMS:
        expected = f"classes stand further apart in the features of {TITLES[run]} than in those of {TITLES[other]}"
        findings += compared(f"{expected} (silhouette)", values, run, other, TITLES)
    one = next(iter(planes.values()))
    caption = (
        "Top left: the training images of each client. A dot's area is the number of images. "
        f"Other panels: t-SNE of the classifier's inputs for {len(one)} test images of all clients. "
        "Colours are classes and markers are clients. The panels' axes are not related. "
        f"{setting(header)} The split is Dirichlet(0.1). The t-SNE has perplexity {one.attrs['perplexity']:.3g}."
        f"{_last_words(header)}"
    )
    return Drawing(
        figure, table, caption, set_apart(findings, far(frame, shown)), runs_page(table)
    )


def by_run(
    frame: pd.DataFrame, shown: Sequence[str]
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return a row for each run with its means over seeds and the published accuracy. Silhouettes are runs x seeds."""
    values = {metric: of_runs(frame, metric) for metric in CLUSTERED}
    accuracy = scores(frame)
    known = items.published_table(
        "fedpft", "Table 7", setting="dirichlet 0.1", dataset="cifar10"
    )["accuracy"]
    lines = [
        {
            "run": run,
            "seeds": int(accuracy.loc[run].notna().sum()),
            "accuracy": accuracy.loc[run].mean(),
            "published_accuracy": known.get(METHODS.get(run, run)),
            **{metric: each.loc[run].mean() for metric, each in values.items()},
        }
        for run in shown
    ]
    return pd.DataFrame(lines), values["silhouette_class"]


def runs_page(table: pd.DataFrame) -> str:
    published = [
        f"{value:.2f}" if pd.notna(value) else "–"
        for value in table["published_accuracy"]
    ]
    cells = markdown(
        {
            "method": [TITLES[run] for run in table["run"]],
            "seeds": list(table["seeds"]),
            "accuracy %": [
                percent(value, float("nan"), float("nan"))
                for value in table["accuracy"]
            ],
            "published, 40 clients": published,
            **{
                title: [f"{value:+.3f}" for value in table[metric]]
                for metric, title in CLUSTERED.items()
            },
        }
    )
    note = "Published: Table 7, whose federations differ from ours. It has the best round and we have the last."
    return f"{cells}\n\n{note} {MEANING}"


# --- two kinds of prompts (Fig. 3) -----------------------------------------------------------------------------


def _draw_prompts(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    _present(header, [FEDPFT])
    own = frame[frame["run"] == FEDPFT]
    planes = {title: plane(frame, FEDPFT, kind) for kind, title in KINDS.items()}
    with style():
        figure = plt.figure(figsize=(7.6, 3.3), layout="constrained")
        for ax in tsne_panels(planes, figure):
            ax.set_xlabel("")
    distances = own[own["metric"] == SIMILAR]
    quantities = {(metric, ""): title for metric, title in CLUSTERED.items()}
    for pair in PAIRS:
        quantities[SIMILAR, " and ".join(pair)] = (
            f"distance of {' and '.join(pair)} / mean of all pairs"
        )
    measured = pd.concat([own[own["metric"].isin(list(CLUSTERED))], distances])
    by_kind = {key: _kinds_by_seed(measured, *key) for key in quantities}
    table = pd.DataFrame(
        [
            {
                "quantity": title,
                "prompts": kind,
                "value": values.loc[kind].mean(),
                "seeds": values.shape[1],
            }
            for (key, title), values in zip(
                quantities.items(), by_kind.values(), strict=True
            )
            for kind in KINDS
        ]
    )
    findings = compared(
        "features behind classification prompts follow the clients more than those behind contrastive ones (purity by "
        "client)",
        by_kind["purity_client", ""],
        *PROMPTS,
        KINDS,
    )
    for pair in PAIRS:
        name = " and ".join(pair)
        findings += compared(
            f"{name} are closer to each other behind contrastive prompts, relative to all pairs of classes",
            by_kind[SIMILAR, name],
            PROMPTS[1],
            PROMPTS[0],
            KINDS,
            above=False,
        )
    one = next(iter(planes.values()))
    caption = (
        f"t-SNE of FedPFT's features behind either kind of prompts, for {len(one)} test images of all clients. "
        "Large markers are the centres of a client's images of one class. "
        f"{setting(header)} The split is Dirichlet(0.1). The t-SNE has perplexity {one.attrs['perplexity']:.3g}."
        f"{_last_words(header)}"
    )
    wide = table.pivot(index="quantity", columns="prompts", values="value").loc[
        list(quantities.values())
    ]
    cells = {
        "quantity": list(wide.index),
        **{KINDS[kind]: [f"{v:+.3f}" for v in wide[kind]] for kind in KINDS},
    }
    return Drawing(
        figure,
        table,
        caption,
        set_apart(findings, far(frame, [FEDPFT])),
        markdown(cells),
    )


def _kinds_by_seed(measured: pd.DataFrame, metric: str, variant: str) -> pd.DataFrame:
    """A score of FedPFT's features, kinds of prompts x seeds."""
    own = measured[(measured["metric"] == metric) & (measured["variant"] == variant)]
    return own.pivot(index="layer", columns="seed", values="value")


# --- attention (Fig. 6) ----------------------------------------------------------------------------------------


def _draw_attention(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    shown = _present(header, [FEDPFT, MILD])
    alphas = {run: header["runs"][run]["config"]["alpha"] for run in shown}
    seen = frame[(frame["metric"] == ATTENTION) & (frame["seed"] == 0)]
    with style():
        figure = plt.figure(figsize=(8.4, 5.6), layout="constrained")
        grid = figure.subplots(2, len(shown), squeeze=False)
        for axes, (kind, title) in zip(grid, KINDS.items(), strict=True):
            for ax, run in zip(axes, shown, strict=True):
                prompt_attention(seen[seen["run"] == run], ax, kind)
                ax.set_title(f"{title}, α = {alphas[run]:g}")
                ax.set(ylabel="test image" if run == shown[0] else "", xlabel="")
                ax.set_yticks(
                    ax.get_yticks(),
                    [
                        text.get_text().removeprefix("sample ")
                        for text in ax.get_yticklabels()
                    ],
                )
                ax.set_xticks(
                    ax.get_xticks(),
                    [
                        text.get_text().removeprefix("prompt ")
                        for text in ax.get_xticklabels()
                    ],
                )
        figure.colorbar(
            grid[0][0].collections[0],
            ax=list(grid.flat),
            shrink=0.6,
            label=ATTENTION_LABEL,
        )
    client = seen["client"].iloc[0]
    metrics = {
        SELF: "weight on the own feature",
        SPREAD: "spread over samples",
        ENTROPY: "evenness",
    }
    means = (
        frame[frame["metric"].isin(list(metrics))]
        .groupby(["metric", "layer", "run", "seed"])["value"]
        .mean()
    )
    findings = []
    for kind, title in KINDS.items():
        expected = (
            f"the larger α is, the more samples differ in their weights on the {title}"
        )
        values = means.loc[SPREAD, kind].unstack("seed")
        names = {run: f"α = {alpha:g}:" for run, alpha in alphas.items()}
        findings += compared(
            f"{expected} (spread, mean of all clients)", values, MILD, FEDPFT, names
        )
    table = (
        means.groupby(["metric", "layer", "run"])
        .agg(value="mean", seeds="size")
        .reset_index()
    )
    table["alpha"] = table["run"].map(alphas)
    images = seen["variant"].str.partition(">")[0].nunique()
    caption = (
        f"Attention of {images} test images of {client} to themselves (feature) and to each prompt. A row sums to 1. "
        f"{setting(header)}{_last_words(header)}"
    )
    wide = table.pivot(
        index=["metric", "layer"], columns="alpha", values="value"
    ).sort_index(axis=1)
    wide = wide.loc[[(metric, kind) for metric in metrics for kind in KINDS]]
    cells: dict[str, list[str]] = {
        "mean of all clients": [
            f"{metrics[m]}, {KINDS[kind]}" for m, kind in wide.index
        ]
    }
    cells |= {
        f"α = {alpha:g}": [f"{value:.3g}" for value in wide[alpha]]
        for alpha in wide.columns
    }
    note = (
        "Spread is the standard deviation of the weight on a prompt over a client's samples. It is a mean over the "
        "prompts. Evenness is the entropy of a sample's weights divided by its largest possible value."
    )
    return Drawing(
        figure,
        table,
        caption,
        set_apart(findings, far(frame, [FEDPFT])),
        f"{markdown(cells)}\n\n{note}",
    )


FIG2 = items.register(
    View(
        "fedpft.fig2",
        "Classes of 10 clients, and t-SNE of seven methods' features, one seed",
        NAME,
        _draw_methods,
    )
)
FIG3 = items.register(
    View(
        "fedpft.fig3",
        "t-SNE of FedPFT's features behind either kind of prompts, one seed",
        NAME,
        _draw_prompts,
    )
)
FIG6 = items.register(
    View(
        "fedpft.fig6",
        "Attention of samples to the prompts, by Dirichlet's parameter, one seed",
        NAME,
        _draw_attention,
    )
)
