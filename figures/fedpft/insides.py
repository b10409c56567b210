"""Inside FedPFT: features of seven methods (Fig. 2) and of two kinds of prompts (Fig. 3), and attention (Fig. 6).

After 12 rounds FedAvg has learned too little to compare how far classes stand apart (Sec. 4.5) with the paper's. So
``fedpft.separation`` has more.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.spatial.distance import pdist
from scipy.stats import entropy
from torch import nn

from diagnostics.representation.embedding import Pool, pool
from fedlayers.decision.comparison import main_model
from figures import items, names
from figures.differences import difference
from figures.forms import marks, matrix, planes, seeds_and_mean, sheet
from figures.items import Drawing, Finding, Item, set_apart
from figures.page import (
    markdown,
    missing_runs,
    numbers,
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
from figures.verdicts import little_learned, plain
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


def behind(model: Prompted, prompts: str) -> Prompted:
    """Return the same model with other prompts before the classifier, whose inputs FedPFT's Fig. 3 shows.

    Args:
        prompts: one of :data:`fl_core.models.extended.PROMPTS`.
    """
    model_copy = copy.deepcopy(model)
    model_copy.prompts, model_copy.contrast_prompts = getattr(model_copy, prompts), None
    return model_copy


def by_prompts(
    models: Mapping[str, nn.Module], run: str
) -> Iterator[tuple[str, dict[str, nn.Module]]]:
    """Yield the prompts that features pass through ("" for none), with the models that use them by client.

    FedPFT has both kinds.
    """
    prompted_models = {
        client: model for client, model in models.items() if isinstance(model, Prompted)
    }
    if not prompted_models:
        yield "", dict(models)
        return
    for prompts in PROMPTS:
        if run != FEDPFT and prompts != PROMPTS[0]:
            continue
        yield (
            prompts,
            {
                client: behind(model, prompts)
                for client, model in prompted_models.items()
            },
        )


def class_distance(pooled: Pool, class_pair: tuple[str, str]) -> float | None:
    """Return distance between the mean features of two classes / the mean of that over all pairs of classes.

    Below 1 these two are closer than usual. None if one of them has no sample, or all means are equal.
    """
    means = {
        class_name: pooled.x[pooled.classes == class_name].mean(
            axis=0, dtype=np.float64
        )
        for class_name in set(pooled.classes)
    }
    if not set(class_pair) <= set(means):
        return None
    distances = pdist(np.stack(list(means.values())))
    if not distances.any():
        return None
    return float(
        np.linalg.norm(means[class_pair[0]] - means[class_pair[1]]) / distances.mean()
    )


def _measure(task: runner.Task, run: str, folder: Path) -> pd.DataFrame:
    """Record accuracy, class counts and attention, and scores and places of the test samples' features."""
    engine, frame = trained(task)
    final_rows, seed = tested(frame), task.config.execution.seed
    final_rows = final_rows[final_rows["round"] == task.config.federation.rounds]
    data = {client.name: client.test for client in task.data.clients}
    table_rows = list(
        held(task.data.class_counts(), {"split": "train", **labels(task)})
    )
    for prompts, models in by_prompts(final_models(engine, task.model), run):
        pooled = pool(
            models, data, classes=task.data.classes, samples=POOLED, seed=seed
        )
        label_columns: dict[str, Any] = {
            "round": task.config.federation.rounds,
            "split": "test",
            "layer": prompts,
            **labels(task),
        }
        table_rows += scored(pooled, label_columns)
        if run != MILD:  # whose plane no figure shows
            table_rows += placed(pooled, seed, label_columns)
        for class_pair in PAIRS:
            distance = class_distance(pooled, class_pair)
            label_columns["status"] = "ok"
            if distance is None:
                label_columns["status"] = "no samples of both classes, or no distances"
            variant = " and ".join(class_pair)
            table_rows.append(
                rows.row(SIMILAR, distance, variant=variant, **label_columns)
            )
    frames = [final_rows[final_rows["model"].isin(["global", "personal"])]]
    attention_rows = frame[frame["metric"] == ATTENTION]
    if run in (FEDPFT, MILD):
        table_rows += _attended(attention_rows, labels(task))
        frames.append(attention_rows[attention_rows["client"] == engine.names[0]])
    return pd.concat([*frames, rows.frame(table_rows)], ignore_index=True)


def by_key(attention: pd.DataFrame) -> pd.DataFrame:
    """Return the attention of one client's samples to the feature itself and each prompt, queries x keys."""
    attention_keys = attention["variant"].str.extract(
        r"(?:sample )?(?P<query>.*)>(?:prompt )?(?P<key>.*)"
    )
    attention_table = attention.join(attention_keys).pivot(
        index="query", columns="key", values="value"
    )
    return attention_table.loc[
        attention_keys["query"].unique(), attention_keys["key"].unique()
    ]


def _attended(
    attention: pd.DataFrame, label_columns: Mapping[str, Any]
) -> Iterator[rows.Row]:
    """Summarise each client's attention to each kind of prompts: weight on the feature itself, spread, evenness."""
    for (client, layer), layer_rows in attention.groupby(
        ["client", "layer"], sort=False
    ):
        attention_table = by_key(layer_rows)
        summaries = {
            SELF: (attention_table["feature"].mean(), "mean over samples"),
            SPREAD: (
                attention_table.drop(columns="feature").std(ddof=0).mean(),
                "deviation over samples, mean over prompts",
            ),
            ENTROPY: (
                np.mean(entropy(attention_table.to_numpy(np.float64), axis=1))
                / math.log(attention_table.shape[1]),
                "mean over samples, 1 = all keys alike",
            ),
        }
        for metric_name, (value, estimator) in summaries.items():
            yield rows.row(
                metric_name, float(value), client=str(client), layer=str(layer), round=int(layer_rows["round"].max()),
                split="test", n_samples=len(attention_table), estimator=estimator, **label_columns,
            )  # fmt: skip


# --- what the drawings share -----------------------------------------------------------------------------------


def setting(header: Mapping[str, Any]) -> str:
    """Return a sentence on the federation and its training."""
    config = next(iter(header["runs"].values()))["config"]
    network = names.network(config["model"])
    return (
        f"Each of the {config['clients']} clients has {config['samples_per_client']} training images of CIFAR-10. "
        f"{network} trains for {config['rounds']} rounds of {config['epochs']} epochs."
    )


def _last_words(header: Mapping[str, Any], plane: pd.DataFrame | None = None) -> str:
    """The last sentences of a caption: the split and t-SNE of a plane, and the seeds."""
    seeds_text, missing_text = seeds_in_words(header["seeds"]), missing_runs(header)
    text = f"Drawn: seed 0 of {seeds_text}.{missing_text}"
    if plane is None:
        return text
    perplexity = plane.attrs["perplexity"]
    return f"The split is Dirichlet(0.1). The t-SNE has perplexity {perplexity:.3g}. {text}"


def by_run(frame: pd.DataFrame, runs: Sequence[str]) -> tuple[pd.DataFrame, str]:
    """Return a row for each run with its means over seeds and the published accuracy, and the same in Markdown."""
    accuracy, published_accuracy = scores(frame), published()
    scores_by_metric = {
        metric_name: of_runs(frame, metric_name) for metric_name in CLUSTERED
    }
    run_table = pd.DataFrame(
        {
            "run": runs,
            "seeds": [int(accuracy.loc[run].notna().sum()) for run in runs],
            "accuracy": [accuracy.loc[run].mean() for run in runs],
            "published_accuracy": [published_accuracy[run] for run in runs],
        }
    )
    for metric_name, metric_scores in scores_by_metric.items():
        run_table[metric_name] = [metric_scores.loc[run].mean() for run in runs]
    columns = {
        "method": [TITLES[run] for run in runs],
        "seeds": list(run_table["seeds"]),
        "accuracy %": numbers(100 * run_table["accuracy"], ".1f"),
        "published, 40 clients": numbers(run_table["published_accuracy"]),
    }
    for metric_name, title in CLUSTERED.items():
        columns[title] = numbers(run_table[metric_name], "+.3f")
    note = "Published: Table 7, whose federations differ from ours. It has the best round and we have the last."
    return run_table, "\n\n".join([markdown(columns), f"{note} {MEANING}"])


def scores(frame: pd.DataFrame) -> pd.DataFrame:
    """Return mean accuracy over clients of the personal models, or of the global one without any, runs x seeds."""
    final_rows = main_model(frame[frame["metric"] == "accuracy"], "run", "seed")
    means = final_rows.groupby(["run", "seed"], sort=False)["value"].mean()
    return means.unstack("seed").sort_index(axis=1)


def published() -> pd.Series:
    """Return Table 7's accuracies in the skewed federation, in percent, by run."""
    published_accuracies = items.published_table(
        "fedpft", "Table 7", setting="dirichlet 0.1", dataset="cifar10"
    )["accuracy"]
    return pd.Series(
        {
            run: published_accuracies.get(PRINTED.get(run, run), math.nan)
            for run in TITLES
        }
    )


def far(frame: pd.DataFrame, runs: Sequence[str]) -> str:
    """Return evidence that rows are not comparable with the paper's: the runs' levels against its Table 7."""
    accuracy, published_accuracy = scores(frame).mean(axis=1), published() / 100
    levels = {
        TITLES[run]: (accuracy.get(run, math.nan), published_accuracy[run])
        for run in runs
    }
    return little_learned(levels, (GUESSING, GUESSING))


def compared(
    expected: str,
    values: pd.DataFrame,
    run: str,
    other_run: str,
    titles: Mapping[str, str],
    expects_above: bool = True,
) -> Finding:
    """Return a finding on whether a run's value is above another's, paired by seed.

    Args:
        values: runs x seeds.
        titles: how each run is called in the text.
        expects_above: False if the value is expected below.
    """
    gap = difference(values, run, other_run)
    means = [
        (titles[compared_run], values.loc[compared_run].mean())
        for compared_run in (run, other_run)
    ]
    text = ", ".join(f"{compared_run} {mean:.3g}" for compared_run, mean in means)
    if gap.few:
        text += f" ({gap.few})"
    else:
        interval_text = plain(gap.interval)
        text += f", difference {interval_text}"
    verdict = gap.above
    if verdict is not None and not expects_above:
        verdict = not verdict
    return Finding(expected, text, verdict)


def of_runs(frame: pd.DataFrame, metric_name: str) -> pd.DataFrame:
    """Return a score of the inputs of each run's classifier, runs x seeds."""
    score_rows = frame[
        (frame["metric"] == metric_name) & frame["layer"].isin(["", PROMPTS[0]])
    ]
    return score_rows.pivot(index="run", columns="seed", values="value")


# --- seven methods (Fig. 2) ------------------------------------------------------------------------------------


def _draw_methods(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    runs = [run for run in RUNS if run != MILD]
    silhouettes = of_runs(frame, "silhouette_class")
    planes_by_title = {}
    for run in runs:
        silhouette = silhouettes.loc[run].mean()
        planes_by_title[f"{TITLES[run]}\nsilhouette {silhouette:+.2f}"] = plane(
            frame, run
        )
    class_counts = held_by(where(frame, run=runs[0], seed=0))
    with sheet(9.2, 5.6) as figure:
        counts_ax, *plane_axes = figure.subplots(2, 4).flat
        matrix(counts_ax, class_counts, colours="Blues", with_names=True)
        counts_ax.set_title("training images")
        planes(planes_by_title, plane_axes)
    run_table, text = by_run(frame, runs)
    findings = []
    for run, other_run in CLAIMS:
        expected = (
            f"classes stand further apart in the features of {TITLES[run]} than in those of {TITLES[other_run]} "
            "(silhouette)"
        )
        findings.append(compared(expected, silhouettes, run, other_run, TITLES))
    first_plane = next(iter(planes_by_title.values()))
    setting_text, closing_text = setting(header), _last_words(header, first_plane)
    caption = (
        f"Top left: the training images of each client; a darker cell has more, up to {class_counts.max().max():.0f}. "
        f"Other panels: t-SNE of the classifier's inputs for {len(first_plane)} test images of all clients. "
        "Colours are classes and markers are clients. The panels' axes are not related. The silhouettes are by class, "
        f"of the inputs themselves, higher if classes stand further apart. {setting_text} {closing_text}"
    )
    marked_findings = set_apart(findings, far(frame, runs))
    return Drawing(figure, run_table, caption, marked_findings, text)


# --- two kinds of prompts (Fig. 3) -----------------------------------------------------------------------------


def _draw_prompts(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    method_rows = frame[frame["run"] == FEDPFT]
    planes_by_title = {
        title: plane(frame, FEDPFT, kind) for kind, title in KINDS.items()
    }
    with sheet(7.6, 3.3) as figure:
        planes(planes_by_title, figure, centres=True)
    pair_names = [" and ".join(pair_name) for pair_name in PAIRS]
    quantities = {(metric_name, ""): title for metric_name, title in CLUSTERED.items()}
    for pair_name in pair_names:
        quantities[SIMILAR, pair_name] = f"distance of {pair_name} / mean of all pairs"
    scores_by_quantity = {
        (metric_name, variant): where(
            method_rows, metric=metric_name, variant=variant
        ).pivot(index="layer", columns="seed", values="value")
        for metric_name, variant in quantities
    }
    table_rows = []
    for quantity_key, title in quantities.items():
        for kind, kind_scores in (
            scores_by_quantity[quantity_key].loc[list(KINDS)].iterrows()
        ):
            table_row = {
                "quantity": title,
                "prompts": kind,
                "value": kind_scores.mean(),
            }
            table_rows.append({**table_row, "seeds": len(kind_scores)})
    table = pd.DataFrame(table_rows)
    findings = [
        compared(
            "features behind classification prompts follow the clients more than those behind contrastive ones (purity "
            "by client)",
            scores_by_quantity["purity_client", ""],
            *PROMPTS,
            KINDS,
        )
    ]
    for pair_name in pair_names:
        expected = f"{pair_name} are closer to each other behind contrastive prompts, relative to all pairs of classes"
        distances = scores_by_quantity[SIMILAR, pair_name]
        findings.append(
            compared(expected, distances, *PROMPTS[::-1], KINDS, expects_above=False)
        )
    first_plane = next(iter(planes_by_title.values()))
    setting_text, closing_text = setting(header), _last_words(header, first_plane)
    caption = (
        f"t-SNE of FedPFT's features behind either kind of prompts, for {len(first_plane)} test images of all clients. "
        "Large markers are the centres of a client's images of one class. "
        f"{setting_text} {closing_text}"
    )
    wide_table = table.pivot(index="quantity", columns="prompts", values="value")
    wide_table = wide_table.loc[list(quantities.values())]
    columns = {"quantity": list(wide_table.index)}
    for kind, title in KINDS.items():
        columns[title] = numbers(wide_table[kind], "+.3f")
    marked_findings = set_apart(findings, far(frame, [FEDPFT]))
    return Drawing(figure, table, caption, marked_findings, markdown(columns))


# --- attention (Fig. 6) ----------------------------------------------------------------------------------------


def _draw_attention(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    runs = [FEDPFT, MILD]
    alphas = {run: header["runs"][run]["config"]["alpha"] for run in runs}
    attention_rows = where(frame, metric=ATTENTION, seed=0)
    weights = {}
    for kind, title in KINDS.items():
        for run, alpha in alphas.items():
            attention = by_key(where(attention_rows, run=run, layer=kind))
            weights[f"{title}, α = {alpha:g}"] = attention.drop(columns="feature")
    highest_weight = max(
        float(weight_table.max(axis=None)) for weight_table in weights.values()
    )
    with sheet(8.4, 5.6) as figure:
        axes_grid = figure.subplots(2, len(runs))
        for ax, (title, weight_table) in zip(
            axes_grid.flat, weights.items(), strict=True
        ):
            image = matrix(ax, weight_table, high=highest_weight, with_names=True)
            ax.set_title(title)
        for ax in axes_grid[:, 0]:
            ax.set_ylabel("test image")
        figure.colorbar(image, ax=axes_grid, shrink=0.6, label="attention to a prompt")
    metrics = {
        SELF: "weight on the own feature",
        SPREAD: "spread over samples",
        ENTROPY: "evenness",
    }
    mean_values = (
        frame[frame["metric"].isin(list(metrics))]
        .groupby(["metric", "layer", "run", "seed"])["value"]
        .mean()
    )
    run_titles = {run: f"α = {alpha:g}:" for run, alpha in alphas.items()}
    findings = [
        compared(
            f"the larger α is, the more samples differ in their weights on the {title} (spread, mean of all clients)",
            mean_values.loc[SPREAD, kind].unstack("seed"),
            MILD,
            FEDPFT,
            run_titles,
        )
        for kind, title in KINDS.items()
    ]
    weight_table = (
        mean_values.groupby(["metric", "layer", "run"])
        .agg(value="mean", seeds="size")
        .reset_index()
    )
    weight_table["alpha"] = weight_table["run"].map(alphas)
    wide_table = weight_table.pivot(
        index=["metric", "layer"], columns="alpha", values="value"
    )
    wide_table = wide_table.loc[pd.MultiIndex.from_product([metrics, KINDS])]
    columns = {
        "mean of all clients": [
            f"{metrics[metric_name]}, {KINDS[kind]}"
            for metric_name, kind in wide_table.index
        ]
    }
    for alpha in wide_table:
        columns[f"α = {alpha:g}"] = numbers(wide_table[alpha], ".3g")
    image_count, client = (
        attention_rows["variant"].str.partition(">")[0].nunique(),
        attention_rows["client"].iloc[0],
    )
    setting_text, closing_text = setting(header), _last_words(header)
    caption = (
        f"Attention of {image_count} test images of {client} to each prompt. The rest, up to 1, is to the "
        f"image's own feature. {setting_text} {closing_text}"
    )
    note = (
        "Spread is the standard deviation of the weight on a prompt over a client's samples. It is a mean over the "
        "prompts. Evenness is the entropy of a sample's weights divided by its largest possible value."
    )
    marked_findings = set_apart(findings, far(frame, [FEDPFT]))
    text = "\n\n".join([markdown(columns), note])
    return Drawing(figure, weight_table, caption, marked_findings, text)


# --- how far classes stand apart (Sec. 4.5) --------------------------------------------------------------------


def _draw_separation(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    runs = list(LONGER)
    run_table, text = by_run(frame, runs)
    scores_by_metric = {
        metric_name: of_runs(frame, metric_name) for metric_name in CLUSTERED
    }
    titles = [TITLES[run] for run in runs]
    with sheet(6.6, 2.7) as figure:
        for ax, metric_name in zip(
            figure.subplots(1, 2), ("silhouette_class", "purity_class"), strict=True
        ):
            seed_scores = scores_by_metric[metric_name].loc[runs]
            marks(
                ax,
                seeds_and_mean(seed_scores),
                titles,
                upright=True,
                xlim=(-0.6, len(runs) - 0.4),
                ylabel=CLUSTERED[metric_name],
            )
    setting_text, missing_text = setting(header), missing_runs(header)
    seeds_text = seeds_in_words(seeds_behind(header)).capitalize()
    caption = (
        "How far classes stand apart in the classifier's inputs. A dot is a seed and a bar the mean. "
        f"{setting_text} The split is Dirichlet(0.1). {seeds_text}.{missing_text}"
    )
    finding = compared(
        f"after {ROUNDS} rounds classes stand further apart in the features of FedPFT w/o contrast than in FedAvg's "
        "(silhouette)",
        scores_by_metric["silhouette_class"],
        "no_contrast",
        "fedavg",
        TITLES,
    )
    kinds = ("silhouette_class", "silhouette_client")
    scores_by_kind = pd.DataFrame(
        {kind: scores_by_metric[kind].loc["no_contrast"] for kind in kinds}
    ).T
    class_finding = compared(
        "FedPFT w/o contrast's features stand apart by class more than by client (silhouette)",
        scores_by_kind,
        *kinds,
        {"silhouette_class": "by class", "silhouette_client": "by client"},
    )
    findings = set_apart([finding, class_finding], far(frame, runs))
    return Drawing(figure, run_table, caption, findings, text)


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
    budget="some two hours of one core; a run takes 4 to 8 minutes", measure=_measure, draw=_draw_separation,
))  # fmt: skip
