"""Inside FedPFT: features of seven methods (Fig. 2) and of two kinds of prompts (Fig. 3), and attention (Fig. 6).

After 12 rounds FedAvg has learned too little to compare how far classes stand apart (Sec. 4.5) with the paper's. So
``fedpft.separation`` has more.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib import ticker
from matplotlib.axes import Axes
from scipy.stats import entropy
from torch import nn

from diagnostics.plots.drawing import COLOURS, NICE, Panel, heat, style
from diagnostics.plots.layers import tsne_panels
from diagnostics.representation.embedding import Pool, pool
from fedlayers.decision.comparison import main_model
from figures import items, names
from figures.differences import difference
from figures.items import Drawing, Finding, Item, set_apart
from figures.page import (
    markdown,
    missing_runs,
    numbers,
    percent,
    seeds_behind,
    seeds_in_words,
)
from figures.planes import CLUSTERED, MEANING, placed, plane, scored
from figures.recipe import (
    PLAIN_SGD,
    by_method,
    final_models,
    held,
    held_by,
    labels,
    scored_at_end,
    tested,
    trained,
    where,
)
from figures.verdicts import little_learned
from fl_core import rows
from fl_core.algorithms.fedpft import ATTENTION
from fl_core.config import RunConfig
from fl_core.models.extended import PROMPTS, Prompted
from fl_core.run import runner

NAME, SEPARATION = "fedpft.insides", "fedpft.separation"
SIMILAR = "class_distance"
SELF, SPREAD, ENTROPY = "attention_self", "attention_spread", "attention_entropy"
POOLED = 300
"""Test samples in a plane, of all clients together."""
PAIRS = (("cat", "dog"), ("automobile", "truck"))
"""Classes of which the paper says that their images are alike."""
KINDS = {PROMPTS[0]: "classification prompts", PROMPTS[1]: "contrastive prompts"}
GUESSING = 0.1
"""Accuracy of guessing one of ten classes."""
PRINTED = {"no_contrast": "fedpft w/o l_con"}
"""The published names of runs that are called otherwise."""

BASE = scored_at_end(RunConfig(
    dataset="cifar10", partition="fedpft_dirichlet", alpha=0.1, clients=10, samples_per_client=200,
    model="resnet8", rounds=12, epochs=5, batch_size=25, lr=0.1, **PLAIN_SGD | {"momentum": 0.9},
))  # fmt: skip
"""The paper's federation for these pictures, with a fifth of its 1000 images a client and few of its 1000 rounds."""
SKEWED: dict[str, Any] = {"feature_epochs": 3}
"""Epochs a round for the features where alpha is 0.1, as FedPFT has it; of the other alphas the default, 4."""
FEDPFT, MILD = "fedpft", "fedpft_alpha_1"
RUNS = {
    **by_method(BASE, ("fedavg", "fedper", "fedcac"), {}),
    "no_contrast": BASE.with_keys(
        algorithm="fedpft", options={**SKEWED, "contrast": False}
    ),
    FEDPFT: BASE.with_keys(algorithm="fedpft", options=SKEWED),
    "no_alternating": BASE.with_keys(algorithm="fedpft", options={"alternate": False}),
    "personal_head": BASE.with_keys(
        algorithm="fedpft", options={**SKEWED, "personal_head": True}
    ),
    MILD: BASE.with_keys(algorithm="fedpft", alpha=1.0),
}
"""Figure 2's seven methods in its order, and FedPFT where clients are alike."""
ROUNDS = 40
LONGER = {
    run: RUNS[run].with_keys(rounds=ROUNDS, eval_every=ROUNDS, checkpoint_every=ROUNDS)
    for run in ("fedavg", "no_contrast")
}
TITLES = {
    "fedavg": "FedAvg",
    "fedper": "FedPer",
    "fedcac": "FedCAC",
    "no_contrast": "FedPFT w/o contrast",
    FEDPFT: "FedPFT",
    "no_alternating": "FedPFT w/o alternating",
    "personal_head": "FedPFT, personal head",
    MILD: "FedPFT, α = 1",
}
CLAIMS = (
    ("no_contrast", "fedavg"),
    (FEDPFT, "no_contrast"),
    ("fedavg", "fedper"),
    ("no_alternating", "fedavg"),
    ("no_contrast", "no_alternating"),
    (FEDPFT, "personal_head"),
)
"""Pairs of runs: the paper calls the features of the first clearer than those of the second."""

# --- measuring -------------------------------------------------------------------------------------------------


def dots(ax: Axes, counts: pd.DataFrame, most: float) -> None:
    """Draw a dot for each class that a client holds, its area by the samples; classes across, clients down.

    Args:
        most: samples of a dot of the full size, so that panels can be compared.
    """
    cells = [
        (x, y, n)
        for y, line in enumerate(counts.to_numpy())
        for x, n in enumerate(line)
        if n
    ]
    across, down, sizes = (
        np.array(column, dtype=float) for column in zip(*cells, strict=True)
    )
    ax.scatter(
        across, down, s=110 * sizes / most, color=COLOURS[3], alpha=0.75, linewidths=0
    )
    ax.set(xlim=(-0.8, counts.shape[1] - 0.2), ylim=(len(counts) - 0.1, -0.9))
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(ticker.MaxNLocator(integer=True, steps=NICE))
    ax.grid(False)


def behind(model: Prompted, prompts: str) -> Prompted:
    """The same model with other prompts before the classifier, whose inputs FedPFT's Fig. 3 shows.

    Args:
        prompts: one of :data:`fl_core.models.extended.PROMPTS`.
    """
    turned = copy.deepcopy(model)
    turned.prompts, turned.contrast_prompts = getattr(turned, prompts), None
    return turned


def by_prompts(
    models: Mapping[str, nn.Module], run: str
) -> Iterator[tuple[str, dict[str, nn.Module]]]:
    """The prompts that features pass through ("" for none), with the models that use them; FedPFT has both kinds."""
    prompted = {
        name: model for name, model in models.items() if isinstance(model, Prompted)
    }
    if not prompted:
        yield "", dict(models)
    for prompts in (PROMPTS if run == FEDPFT else PROMPTS[:1]) if prompted else ():
        yield (
            prompts,
            {name: behind(model, prompts) for name, model in prompted.items()},
        )


def class_distance(pooled: Pool, pair: tuple[str, str]) -> float | None:
    """Distance between the mean features of two classes / the mean of that over all pairs of classes.

    Below 1 these two are closer than usual. None if one of them has no sample, or all means are equal.
    """
    means = {
        name: pooled.x[pooled.classes == name].mean(axis=0, dtype=np.float64)
        for name in set(pooled.classes)
    }
    if not set(pair) <= set(means):
        return None
    every = np.stack(list(means.values()))
    gaps = np.linalg.norm(every[:, None] - every[None], axis=2)[
        np.triu_indices(len(every), 1)
    ]
    return (
        float(np.linalg.norm(means[pair[0]] - means[pair[1]]) / gaps.mean())
        if gaps.any()
        else None
    )


def _measure(task: runner.Task, run: str, folder: Path) -> pd.DataFrame:
    """Record accuracy, class counts and attention, and scores and places of the test samples' features."""
    engine, frame = trained(task)
    final, seed = tested(frame), task.config.execution.seed
    final = final[final["round"] == task.config.federation.rounds]
    data = {client.name: client.test for client in task.data.clients}
    lines = list(held(task.data.class_counts(), {"split": "train", **labels(task)}))
    for prompts, models in by_prompts(final_models(engine, task.model), run):
        pooled = pool(
            models, data, classes=task.data.classes, samples=POOLED, seed=seed
        )
        named: dict[str, Any] = {
            "round": task.config.federation.rounds,
            "split": "test",
            "layer": prompts,
            **labels(task),
        }
        lines += scored(pooled, named)
        if run != MILD:  # whose plane no figure shows
            lines += placed(pooled, seed, named)
        for pair in PAIRS:
            distance = class_distance(pooled, pair)
            status = "no samples of both classes, or no distances"
            named["status"] = status if distance is None else "ok"
            variant = " and ".join(pair)
            lines.append(rows.row(SIMILAR, distance, variant=variant, **named))
    frames = [final[final["model"].isin(["global", "personal"])]]
    attended = frame[frame["metric"] == ATTENTION]
    if run in (FEDPFT, MILD):
        lines += _attended(attended, labels(task))
        frames.append(attended[attended["client"] == engine.names[0]])
    return pd.concat([*frames, rows.frame(lines)], ignore_index=True)


def by_key(attention: pd.DataFrame) -> pd.DataFrame:
    """Attention of one client's samples to the feature itself and each prompt, queries x keys, as they are stored."""
    keys = attention["variant"].str.extract(
        r"(?:sample )?(?P<query>.*)>(?:prompt )?(?P<key>.*)"
    )
    table = attention.join(keys).pivot(index="query", columns="key", values="value")
    return table.loc[keys["query"].unique(), keys["key"].unique()]


def _attended(attention: pd.DataFrame, named: Mapping[str, Any]) -> Iterator[rows.Row]:
    """Summarise each client's attention to each kind of prompts: weight on the feature itself, spread, evenness."""
    for (client, layer), part in attention.groupby(["client", "layer"], sort=False):
        table = by_key(part)
        summaries = {
            SELF: (table["feature"].mean(), "mean over samples"),
            SPREAD: (
                table.drop(columns="feature").std(ddof=0).mean(),
                "deviation over samples, mean over prompts",
            ),
            ENTROPY: (
                np.mean(entropy(table.to_numpy(np.float64), axis=1))
                / math.log(table.shape[1]),
                "mean over samples, 1 = all keys alike",
            ),
        }
        for metric, (value, estimator) in summaries.items():
            yield rows.row(
                metric, float(value), client=str(client), layer=str(layer), round=int(part["round"].max()),
                split="test", n_samples=len(table), estimator=estimator, **named,
            )  # fmt: skip


# --- what the drawings share -----------------------------------------------------------------------------------


def setting(header: Mapping[str, Any]) -> str:
    """A sentence on the federation and its training."""
    config = next(iter(header["runs"].values()))["config"]
    return (
        f"Each of the {config['clients']} clients has {config['samples_per_client']} training images of CIFAR-10. "
        f"{names.network(config['model'])} trains for {config['rounds']} rounds of {config['epochs']} epochs."
    )


def _last_words(header: Mapping[str, Any], plane: pd.DataFrame | None = None) -> str:
    """The last sentences of a caption: the split and t-SNE of a plane, and the seeds."""
    seeds = header["seeds"]
    text = (
        ""
        if plane is None
        else f"The split is Dirichlet(0.1). The t-SNE has perplexity {plane.attrs['perplexity']:.3g}. "
    )
    return f"{text}Drawn: seed 0 of {seeds_in_words(seeds)}.{missing_runs(header)}"


def by_run(frame: pd.DataFrame, shown: Sequence[str]) -> tuple[pd.DataFrame, str]:
    """Return a row for each run with its means over seeds and the published accuracy, and the same in Markdown."""
    accuracy, printed = scores(frame), published()
    values = {metric: of_runs(frame, metric) for metric in CLUSTERED}
    table = pd.DataFrame([
        {
            "run": run, "seeds": int(accuracy.loc[run].notna().sum()), "accuracy": accuracy.loc[run].mean(),
            "published_accuracy": printed[run], **{metric: each.loc[run].mean() for metric, each in values.items()},
        }
        for run in shown
    ])  # fmt: skip
    cells = {
        "method": [TITLES[run] for run in shown],
        "seeds": list(table["seeds"]),
        "accuracy %": [percent(each, math.nan, math.nan) for each in table["accuracy"]],
        "published, 40 clients": [
            "–" if math.isnan(printed[run]) else f"{printed[run]:.2f}" for run in shown
        ],
    }
    for metric, title in CLUSTERED.items():
        cells[title] = numbers(table[metric], "+.3f")
    note = "Published: Table 7, whose federations differ from ours. It has the best round and we have the last."
    return table, f"{markdown(cells)}\n\n{note} {MEANING}"


def scores(frame: pd.DataFrame) -> pd.DataFrame:
    """Mean accuracy over clients of the personal models, or of the global one without any, runs x seeds."""
    final = main_model(frame[frame["metric"] == "accuracy"], "run", "seed")
    means = final.groupby(["run", "seed"], sort=False)["value"].mean()
    return means.unstack("seed").sort_index(axis=1)


def published() -> pd.Series:
    """Return Table 7's accuracies in the skewed federation, in percent, by run."""
    printed = items.published_table(
        "fedpft", "Table 7", setting="dirichlet 0.1", dataset="cifar10"
    )["accuracy"]
    return pd.Series(
        {run: printed.get(PRINTED.get(run, run), math.nan) for run in TITLES}
    )


def far(frame: pd.DataFrame, runs: Sequence[str]) -> str:
    """Evidence that rows are not comparable with the paper's: the runs' levels against its Table 7."""
    accuracy, printed = scores(frame).mean(axis=1), published() / 100
    sides = {TITLES[run]: (accuracy.get(run, math.nan), printed[run]) for run in runs}
    return little_learned(sides, (GUESSING, GUESSING))


def compared(
    expected: str,
    values: pd.DataFrame,
    run: str,
    other: str,
    named: Mapping[str, str],
    above: bool = True,
) -> Finding:
    """A finding on whether a run's value is above (or below) another's, paired by seed; values are runs x seeds."""
    gap = difference(values, run, other)
    text = ", ".join(
        f"{named[name]} {values.loc[name].mean():.3g}" for name in (run, other)
    )
    few = f" ({gap.few})" if gap.few else ""
    verdict = None if gap.above is None else gap.above == above
    return Finding(expected, text + few, verdict)


def of_runs(frame: pd.DataFrame, metric: str) -> pd.DataFrame:
    """A score of the inputs of each run's classifier, runs x seeds."""
    part = frame[(frame["metric"] == metric) & frame["layer"].isin(["", PROMPTS[0]])]
    return part.pivot(index="run", columns="seed", values="value")


# --- seven methods (Fig. 2) ------------------------------------------------------------------------------------


def _draw_methods(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    shown = [run for run in RUNS if run != MILD]
    values = of_runs(frame, "silhouette_class")
    planes = {
        f"{TITLES[run]}\nsilhouette {values.loc[run].mean():+.2f}": plane(frame, run)
        for run in shown
    }
    counts = held_by(where(frame, run=shown[0], seed=0))
    with style():
        figure = plt.figure(figsize=(9.2, 5.6), layout="constrained")
        first, *rest = figure.subplots(2, 4).flat
        dots(first, counts, counts.max().max())
        first.set_xticks(
            range(counts.shape[1]), list(counts.columns), rotation=90, fontsize=7
        )
        first.set_yticks(range(len(counts)), list(counts.index), fontsize=7)
        first.set_title("training images")
        for ax in tsne_panels(planes, rest, centres=False):
            ax.set_xlabel("")
    table, text = by_run(frame, shown)
    findings = [
        compared(
            f"classes stand further apart in the features of {TITLES[run]} than in those of {TITLES[other]} "
            "(silhouette)",
            values,
            run,
            other,
            TITLES,
        )
        for run, other in CLAIMS
    ]
    one = next(iter(planes.values()))
    caption = (
        "Top left: the training images of each client. A dot's area is the number of images. "
        f"Other panels: t-SNE of the classifier's inputs for {len(one)} test images of all clients. "
        "Colours are classes and markers are clients. The panels' axes are not related. The silhouettes are by class, "
        f"of the inputs themselves, higher if classes stand further apart. {setting(header)} {_last_words(header, one)}"
    )
    apart = set_apart(findings, far(frame, shown))
    return Drawing(figure, table, caption, apart, text)


# --- two kinds of prompts (Fig. 3) -----------------------------------------------------------------------------


def _draw_prompts(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    rows = frame[frame["run"] == FEDPFT]
    planes = {title: plane(frame, FEDPFT, kind) for kind, title in KINDS.items()}
    with style():
        figure = plt.figure(figsize=(7.6, 3.3), layout="constrained")
        for ax in tsne_panels(planes, figure):
            ax.set_xlabel("")
    pairs = [" and ".join(pair) for pair in PAIRS]
    quantities = {(metric, ""): title for metric, title in CLUSTERED.items()}
    for pair in pairs:
        quantities[SIMILAR, pair] = f"distance of {pair} / mean of all pairs"
    by_kind = {
        (metric, variant): where(rows, metric=metric, variant=variant).pivot(
            index="layer", columns="seed", values="value"
        )
        for metric, variant in quantities
    }
    table = pd.DataFrame([
        {"quantity": title, "prompts": kind, "value": by_kind[key].loc[kind].mean(), "seeds": by_kind[key].shape[1]}
        for key, title in quantities.items()
        for kind in KINDS
    ])  # fmt: skip
    findings = [
        compared(
            "features behind classification prompts follow the clients more than those behind contrastive ones (purity "
            "by client)",
            by_kind["purity_client", ""],
            *PROMPTS,
            KINDS,
        )
    ]
    for pair in pairs:
        expected = f"{pair} are closer to each other behind contrastive prompts, relative to all pairs of classes"
        values = by_kind[SIMILAR, pair]
        findings.append(compared(expected, values, *PROMPTS[::-1], KINDS, above=False))
    one = next(iter(planes.values()))
    caption = (
        f"t-SNE of FedPFT's features behind either kind of prompts, for {len(one)} test images of all clients. "
        "Large markers are the centres of a client's images of one class. "
        f"{setting(header)} {_last_words(header, one)}"
    )
    wide = table.pivot(index="quantity", columns="prompts", values="value")
    cells = {"quantity": list(quantities.values())} | {
        title: [f"{wide.loc[metric, kind]:+.3f}" for metric in quantities.values()]
        for kind, title in KINDS.items()
    }
    apart = set_apart(findings, far(frame, [FEDPFT]))
    return Drawing(figure, table, caption, apart, markdown(cells))


# --- attention (Fig. 6) ----------------------------------------------------------------------------------------


def _draw_attention(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    shown = [FEDPFT, MILD]
    alphas = {run: header["runs"][run]["config"]["alpha"] for run in shown}
    seen = where(frame, metric=ATTENTION, seed=0)
    weights = {
        (kind, run): by_key(where(seen, run=run, layer=kind)).drop(columns="feature")
        for kind, run in product(KINDS, shown)
    }
    high = max(float(table.max(axis=None)) for table in weights.values())
    with style():
        figure = plt.figure(figsize=(8.4, 5.6), layout="constrained")
        grid = figure.subplots(2, len(shown), squeeze=False)
        for axes, (kind, title) in zip(grid, KINDS.items(), strict=True):
            for ax, run in zip(axes, shown, strict=True):
                panel = Panel(ax, True, True)
                heat(panel, weights[kind, run], high=high, names=(40, 40))
                ax.set_title(f"{title}, α = {alphas[run]:g}")
                ax.set(ylabel="test image" if run == shown[0] else "", xlabel="")
        figure.colorbar(
            grid[0][0].collections[0], ax=list(grid.flat), shrink=0.6, label="attention to a prompt",
        )  # fmt: skip
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
    named = {run: f"α = {alpha:g}:" for run, alpha in alphas.items()}
    findings = [
        compared(
            f"the larger α is, the more samples differ in their weights on the {title} (spread, mean of all clients)",
            means.loc[SPREAD, kind].unstack("seed"),
            MILD,
            FEDPFT,
            named,
        )
        for kind, title in KINDS.items()
    ]
    table = (
        means.groupby(["metric", "layer", "run"])
        .agg(value="mean", seeds="size")
        .reset_index()
    )
    table["alpha"] = table["run"].map(alphas)
    wide = table.pivot(index=["metric", "layer"], columns="alpha", values="value")
    wide = wide.loc[[(metric, kind) for metric in metrics for kind in KINDS]]
    cells = {
        "mean of all clients": [
            f"{metrics[metric]}, {KINDS[kind]}" for metric, kind in wide.index
        ]
    }
    for alpha in wide:
        cells[f"α = {alpha:g}"] = numbers(wide[alpha], ".3g")
    images = seen["variant"].str.partition(">")[0].nunique()
    caption = (
        f"Attention of {images} test images of {seen['client'].iloc[0]} to each prompt. The rest, up to 1, is to the "
        f"image's own feature. {setting(header)} {_last_words(header)}"
    )
    note = (
        "Spread is the standard deviation of the weight on a prompt over a client's samples. It is a mean over the "
        "prompts. Evenness is the entropy of a sample's weights divided by its largest possible value."
    )
    apart = set_apart(findings, far(frame, [FEDPFT]))
    return Drawing(figure, table, caption, apart, f"{markdown(cells)}\n\n{note}")


# --- how far classes stand apart (Sec. 4.5) --------------------------------------------------------------------


def _draw_separation(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    shown = list(LONGER)
    table, text = by_run(frame, shown)
    values = {metric: of_runs(frame, metric) for metric in CLUSTERED}
    with style():
        figure = plt.figure(figsize=(6.6, 2.7), layout="constrained")
        for ax, metric in zip(
            figure.subplots(1, 2), ("silhouette_class", "purity_class"), strict=True
        ):
            for at, run in enumerate(shown):
                by_seed = values[metric].loc[run].dropna()
                ax.plot(
                    [at] * len(by_seed), by_seed, "o", color=COLOURS[at], markersize=4, alpha=0.7,
                )  # fmt: skip
                ax.hlines(by_seed.mean(), at - 0.2, at + 0.2, color=COLOURS[at])
            ax.set_xticks(range(len(shown)), [TITLES[run] for run in shown])
            ax.set(xlim=(-0.6, len(shown) - 0.4), ylabel=CLUSTERED[metric])
    caption = (
        "How far classes stand apart in the classifier's inputs. A dot is a seed and a line the mean. "
        f"{setting(header)} The split is Dirichlet(0.1). "
        f"{seeds_in_words(seeds_behind(header)).capitalize()}.{missing_runs(header)}"
    )
    finding = compared(
        f"after {ROUNDS} rounds classes stand further apart in the features of FedPFT w/o contrast than in FedAvg's "
        "(silhouette)",
        values["silhouette_class"],
        "no_contrast",
        "fedavg",
        TITLES,
    )
    kinds = ("silhouette_class", "silhouette_client")
    by_kind = pd.DataFrame({kind: values[kind].loc["no_contrast"] for kind in kinds}).T
    over = compared(
        "FedPFT w/o contrast's features stand apart by class more than by client (silhouette)",
        by_kind,
        *kinds,
        {"silhouette_class": "by class", "silhouette_client": "by client"},
    )
    findings = set_apart([finding, over], far(frame, shown))
    return Drawing(figure, table, caption, findings, text)


items.register(Item(
    NAME, "FedPFT from the inside: features and attention on CIFAR-10", RUNS, seeds=1, own_seeds={FEDPFT: 10},
    budget="about an hour of one idle core; a run takes 1 to 5 minutes", measure=_measure,
))  # fmt: skip
items.register(Item(
    "fedpft.fig2", "Classes of 10 clients, and t-SNE of seven methods' features, one seed", source=NAME,
    draw=_draw_methods,
))  # fmt: skip
items.register(Item(
    "fedpft.fig6", "Attention of samples to the prompts, by Dirichlet's parameter, one seed", source=NAME,
    draw=_draw_attention,
))  # fmt: skip
items.register(Item(
    "fedpft.fig3", "t-SNE of FedPFT's features behind either kind of prompts, one seed", source=NAME,
    draw=_draw_prompts,
))  # fmt: skip
items.register(Item(
    SEPARATION, "How far classes stand apart in the features of FedPFT and FedAvg, CIFAR-10", LONGER, seeds=5,
    budget="about one hour of one core; a run takes 4 to 8 minutes", measure=_measure, draw=_draw_separation,
))  # fmt: skip
