"""FedPFT's federation before training: which classes each client holds (Fig. 4)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib import ticker
from matplotlib.axes import Axes
from scipy.special import digamma

from diagnostics.plots.drawing import COLOURS, NICE, style
from figures import items
from figures.items import Drawing, Finding, Item
from figures.recipe import COUNT, held
from figures.scheduling.pictures import effective
from fl_core import rows
from fl_core.config import RunConfig
from fl_core.data.partitions import papers
from fl_core.run import runner

ENTROPY = "label_entropy"
POOL = 50_000
"""Samples that are dealt, equally many of each class."""
CLASSES, ALPHAS, CLIENTS, SAMPLES = (10, 50), (0.1, 0.5, 1.0), 20, 500

DEALT = RunConfig(
    dataset="cifar10",
    model="resnet8",
    partition="fedpft_dirichlet",
    clients=CLIENTS,
    samples_per_client=SAMPLES,
    rounds=1,
    keep_optimizer=False,
)


def dealt(
    classes: int, clients: int, samples: int, alpha: float, seed: int
) -> pd.DataFrame:
    """Number of training samples of each class at each client, clients x classes.

    FedPFT's partition of labels alone. Every client draws shares of the classes from a Dirichlet distribution, and gets
    whole numbers of samples near them (:func:`fl_core.data.partitions.papers.by_shares`). It needs no images, so any
    number of classes is possible.

    Raises:
        UsageError: ``alpha`` is not above 0, or more samples than a client's classes have.
    """
    labels = np.repeat(np.arange(classes), POOL // classes)
    shares = papers.label_shares(classes, clients, alpha, seed)
    chosen = papers.by_shares(
        labels, range(classes), shares, [samples], seed, "train side"
    )
    counts = [np.bincount(labels[train], minlength=classes) for (train,) in chosen]
    return pd.DataFrame(counts, columns=range(classes))


def _deal(task: runner.Task, run: str, folder: Path) -> pd.DataFrame:
    """Entropy of each client's labels; for the seed that is drawn also the samples of each class."""
    config = task.config
    counts = dealt(
        int(run.partition(" ")[0]),
        int(config.data.clients or 0),
        int(config.data.samples_per_client or 0),
        float(config.data.alpha or 0.0),
        config.execution.seed,
    )
    lines = [
        rows.row(
            ENTROPY,
            float(value),
            client=str(client),
            seed=config.execution.seed,
            unit="nat",
            n_train=int(own.sum()),
        )
        for (client, own), value in zip(
            counts.iterrows(), np.log(effective(counts)), strict=True
        )
    ]
    if not config.execution.seed:
        lines += (row for row in held(counts, {"seed": 0}) if row["value"])
    return rows.frame(lines)


def counted(frame: pd.DataFrame, clients: int, classes: int) -> pd.DataFrame:
    """The stored samples of one run, clients x classes, 0 without a row."""
    part = frame[frame["metric"] == COUNT]
    part = part.assign(
        client=part["client"].astype(int), variant=part["variant"].astype(int)
    )
    table = part.pivot(index="client", columns="variant", values="value")
    return (
        table.reindex(index=range(clients), columns=range(classes))
        .fillna(0)
        .astype(int)
    )


def entropy_expected(classes: int, alpha: float) -> float:
    """Expected entropy in nats of a Dirichlet distribution with ``alpha`` for each class.

    psi(K alpha + 1) - psi(alpha + 1), psi the digamma function and K the number of classes.
    """
    return float(digamma(classes * alpha + 1) - digamma(alpha + 1))


def dots(ax: Axes, counts: pd.DataFrame, most: float) -> None:
    """Draw a dot for each class that a client holds, its area by the samples; classes across, clients down.

    Args:
        most: samples of a dot of the full size, so that panels can be compared.
    """
    held = [
        (x, y, n)
        for y, line in enumerate(counts.to_numpy())
        for x, n in enumerate(line)
        if n
    ]
    across, down, sizes = (
        np.array(each, dtype=float) for each in zip(*held, strict=True)
    )
    ax.scatter(
        across, down, s=110 * sizes / most, color=COLOURS[3], alpha=0.75, linewidths=0
    )
    ax.set(xlim=(-0.8, counts.shape[1] - 0.2), ylim=(len(counts) - 0.1, -0.9))
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(ticker.MaxNLocator(integer=True, steps=NICE))
    ax.grid(False)


def _draw_dealt(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    lines, far = [], []
    with style():
        figure = plt.figure(figsize=(7.2, 6.0), layout="constrained")
        grid = figure.subplots(len(CLASSES), len(ALPHAS), sharey=True, squeeze=False)
        for axes, classes in zip(grid, CLASSES, strict=True):
            shown = {
                alpha: frame[frame["run"] == named(classes, alpha)] for alpha in ALPHAS
            }
            most = max(
                own.loc[own["metric"] == COUNT, "value"].max() for own in shown.values()
            )
            for ax, (alpha, own) in zip(axes, shown.items(), strict=True):
                counts = counted(
                    own,
                    header["runs"][named(classes, alpha)]["config"]["clients"],
                    classes,
                )
                dots(ax, counts, most)
                ax.set_title(
                    f"{classes} classes, α = {alpha:g}; largest: {counts.max().max()}",
                    fontsize=8,
                )
                entropy, expected = (
                    own.loc[own["metric"] == ENTROPY, "value"],
                    entropy_expected(classes, alpha),
                )
                error = entropy.std(ddof=1) / np.sqrt(len(entropy))
                far.append(abs(entropy.mean() - expected) / error)
                lines.append({
                    "classes": classes, "alpha": alpha, "draws": len(entropy),
                    "classes_held": (counts > 0).sum(axis=1).mean(), "effective_mean": np.exp(entropy).mean(),
                    "effective_low": np.exp(entropy.min()), "effective_high": np.exp(entropy.max()),
                    "entropy": entropy.mean(), "entropy_stderr": error, "entropy_expected": expected,
                })  # fmt: skip
            axes[0].set_ylabel("client")
        for ax in grid[-1]:
            ax.set_xlabel("class")
    table = pd.DataFrame(lines)
    means = {n: own["effective_mean"] for n, own in table.groupby("classes")}
    findings = (
        Finding(
            "the larger α is, the more classes a client holds in effect (exp of the entropy of its labels)",
            "; ".join(
                f"{n} classes: " + ", ".join(f"{value:.1f}" for value in each)
                for n, each in means.items()
            ),
            all(each.is_monotonic_increasing for each in means.values()),
        ),
        Finding(
            "the clients' mean entropy is that of the Dirichlet distribution, psi(K α + 1) - psi(α + 1), within three "
            "standard errors",
            ", ".join(f"{value:.1f}" for value in far) + " standard errors away",
            max(far) <= 3,
        ),
    )
    caption = (
        f"Samples of each class that {CLIENTS} clients draw, by Dirichlet's parameter. Each client draws {SAMPLES}. "
        "A dot's area is the number of samples. Each row of panels has one scale. "
        f"Drawn: seed 0. The findings are of {header['seeds']} seeds. "
        f"Only labels are drawn, from {POOL:,} with equally many of each class."
    )
    return Drawing(figure, table, caption, findings)


def named(classes: int, alpha: float) -> str:
    """The run that Fig. 4 shows."""
    return f"{classes} classes, alpha {alpha:g}"


FIG4 = items.register(Item(
    "fedpft.fig4", "Classes dealt to 20 clients, 10 and 50 classes, by Dirichlet's parameter",
    {named(classes, alpha): DEALT.with_keys(alpha=alpha) for classes in CLASSES for alpha in ALPHAS},
    seeds=3, budget="a minute; nothing is trained", measure=_deal, draw=_draw_dealt,
))  # fmt: skip
