"""pFedLA: whether clients weight others with the same classes, and how good a mixture is before training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from scipy import stats

from diagnostics.plots.drawing import COLOURS
from figures import items, names
from figures.differences import Difference, last_evaluations, settled
from figures.forms import Line, curves, matrix, over_seeds, sheet
from figures.items import Drawing, Finding, Item
from figures.page import markdown, means, missing_runs, numbers
from figures.recipe import PLAIN_SGD, by_method, labels, mean_accuracy, trained, where
from figures.verdicts import judged, plain
from fl_core import rows
from fl_core.config import RunConfig
from fl_core.run import runner

NAME = "algorithms.pfedla_overlap"
OVERLAP, CORRELATION = "class_overlap", "overlap_correlation"
WEIGHT, SELF, RETAINED = "aggregation_weight", "self_weight", "retained"
SELF_LARGEST = "self_weight_largest"
"""The share of clients whose largest weight is the one on themselves."""
PAPER_ROUNDS = 600
SHARE = LinearSegmentedColormap.from_list("share", ["white", COLOURS[0]])

BASE = RunConfig(
    dataset="cifar10", partition="non_iid_1", clients=10, classes_per_client=4, samples_per_client=600,
    model="pfedla_cnn", batchnorm="local", rounds=40, epochs=10, batch_size=32, lr=0.01, **PLAIN_SGD,
    eval_every=4, checkpoint_every=40,
)  # fmt: skip
"""The paper's local training, with 40 of its 600 rounds."""
SHOWN = ("local", "fedavg", "pfedla", "heurpfedla")
"""The runs in the picture."""
RETAINING = {1: "heurpfedla", 2: "heurpfedla_2", 3: "heurpfedla_3"}
"""The run of HeurpFedLA by the number of layers that it retains. One is its default."""
RUNS = {
    **by_method(BASE, SHOWN, {}),
    **{
        run: BASE.with_keys(algorithm="heurpfedla", options={"k": k})
        for k, run in RETAINING.items()
        if k > 1
    },
}
LONGER = "pfedla.longer"
ROUNDS = 180
"""Of the study of the weights on oneself, which still change after the other runs' 40 rounds."""


# --- rows ------------------------------------------------------------------------------------------------------


def overlap(counts: pd.DataFrame) -> pd.DataFrame:
    """Return the share of the receiver's classes that the sender has too, clients x clients."""
    has_class = (counts > 0).astype(float)
    return (has_class @ has_class.T).div(has_class.sum(axis=1), axis=0)


def correlations(
    weights: pd.DataFrame, shared: pd.DataFrame
) -> tuple[float | None, float | None]:
    """Return Pearson's and Spearman's correlation of off-diagonal entries; None if all weights are equal."""
    off_diagonal = ~np.eye(len(shared), dtype=bool)
    x, y = (
        weights.loc[shared.index, shared.columns].to_numpy(float)[off_diagonal],
        shared.to_numpy(float)[off_diagonal],
    )
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        return None, None
    return float(stats.pearsonr(x, y).statistic), float(stats.spearmanr(x, y).statistic)


def _measure(task: runner.Task, run: str, folder: Path) -> pd.DataFrame:
    """Record mean accuracies over the rounds, bytes sent, and how a mixing run's weights follow the classes."""
    _, frame = trained(task)
    label_columns = labels(task)
    table_rows = list(mean_accuracy(frame, label_columns))
    for metric_name in ("bytes_down", "bytes_up"):
        mean_bytes = frame[frame["metric"] == metric_name]["value"].mean()
        table_rows.append(
            rows.row(
                metric_name,
                mean_bytes,
                unit="byte",
                estimator="mean over rounds and clients",
                **label_columns,
            )
        )
    weights = frame[frame["metric"] == WEIGHT]
    if weights.empty:
        return rows.frame(table_rows)
    class_overlap = overlap(task.data.class_counts())
    table_rows += _weights(weights, class_overlap, label_columns)
    if task.config.execution.seed:
        return rows.frame(table_rows)
    table_rows += (
        rows.row(
            OVERLAP,
            shared_share,
            client=str(receiver),
            client_b=str(sender),
            **label_columns,
        )
        for (receiver, sender), shared_share in class_overlap.stack().items()
    )
    stored_parts = [_drawn(weights, class_overlap), frame[frame["metric"] == RETAINED]]
    return pd.concat([rows.frame(table_rows), *stored_parts], ignore_index=True)


def _weights(
    weights: pd.DataFrame, class_overlap: pd.DataFrame, label_columns: Mapping[str, Any]
) -> Iterator[rows.Row]:
    """Yield rows of each layer's weights and of their mean: correlation with the classes, and weights on oneself."""
    for round_number, round_rows in weights.groupby("round"):
        rows_by_layer = {
            str(layer): layer_rows
            for layer, layer_rows in round_rows.groupby("layer", sort=False)
        }
        weights_by_layer = {
            layer: layer_rows.pivot(index="client", columns="client_b", values="value")
            for layer, layer_rows in rows_by_layer.items()
        }
        weights_by_layer[""] = (
            round_rows.groupby(["client", "client_b"])["value"]
            .mean()
            .unstack("client_b")
        )
        for layer, layer_weights in weights_by_layer.items():
            columns = {"round": int(round_number), "layer": layer, **label_columns}
            diagonal = float(
                np.diag(
                    layer_weights.loc[class_overlap.index, class_overlap.index]
                ).mean()
            )
            yield rows.row(SELF, diagonal, estimator="mean over clients", **columns)
            yield rows.row(
                SELF_LARGEST,
                self_largest(layer_weights),
                estimator="share of clients",
                **columns,
            )
            for variant, coefficient in zip(
                ("pearson", "spearman"),
                correlations(layer_weights, class_overlap),
                strict=True,
            ):
                status = "all weights are equal"
                if coefficient is not None:
                    status = "ok"
                yield rows.row(
                    CORRELATION, coefficient, variant=variant, status=status, **columns
                )


def self_largest(weights: pd.DataFrame) -> float:
    """Return the share of clients whose largest weight is the one on themselves, from receivers x senders."""
    return float((weights.idxmax(axis=1) == weights.index).mean())


def shared_classes(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the stored class overlap of seed 0, clients x clients."""
    overlaps = where(frame, metric=OVERLAP, seed=0)
    return overlaps.pivot(index="client", columns="client_b", values="value")


def chosen_pairs(class_overlap: pd.DataFrame) -> list[tuple[str, str]]:
    """Return the pair of different clients with most classes in common, and the one with fewest."""
    pair_overlaps = class_overlap.where(~np.eye(len(class_overlap), dtype=bool)).stack()
    return [
        (str(receiver), str(sender))
        for receiver, sender in (pair_overlaps.idxmax(), pair_overlaps.idxmin())
    ]


def _drawn(weights: pd.DataFrame, class_overlap: pd.DataFrame) -> pd.DataFrame:
    """Return the weights to draw: all of the last round; of earlier rounds self-weights and the chosen pairs."""
    client_pairs = pd.MultiIndex.from_frame(weights[["client", "client_b"]])
    is_followed = (weights["client"] == weights["client_b"]) | client_pairs.isin(
        chosen_pairs(class_overlap)
    )
    return weights[is_followed | (weights["round"] == weights["round"].max())]


# --- drawing ---------------------------------------------------------------------------------------------------


def _learnt(frame: pd.DataFrame, *models: str) -> pd.DataFrame:
    """Return accuracy of a kind of model through training, (run, round) x seeds."""
    accuracy_rows = frame[(frame["metric"] == "accuracy") & frame["model"].isin(models)]
    return accuracy_rows.pivot(index=["run", "round"], columns="seed", values="value")


def _draw(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    frame = frame[frame["run"].isin(SHOWN)]
    seed_rows = where(frame, run="pfedla", seed=0)
    final_accuracies = last_evaluations(_learnt(frame, "global", "personal"))
    layer_correlations = _last(frame, CORRELATION, "pearson").drop(index="")
    best_layer = str(layer_correlations.mean(axis=1).idxmax())
    weights = weights_of(seed_rows, best_layer)
    is_diagonal = np.eye(len(weights), dtype=bool)
    with sheet(8.4, 5.4) as figure:
        halves: Any = figure.subfigures(2, 1, height_ratios=[2.8, 2.6])
        top_figure, bottom_figure = halves
        class_ax, weight_ax, correlation_ax = top_figure.subplots(
            1, 3, width_ratios=[1, 1, 1.1]
        )
        classes(class_ax, shared_classes(seed_rows))
        matrix(
            weight_ax,
            weights.mask(is_diagonal),
            bar="aggregation weight",
            bar_below=True,
            square=True,
        )
        weight_ax.set(xlabel="sender", ylabel="receiver")
        weight_ax.set_title(f"weight on the others, {best_layer}", fontsize=8)
        curves(
            correlation_ax,
            _correlation(frame),
            level=0,
            level_look={"linestyle": "-", "linewidth": 0.8},
            xlabel="round",
            ylim=(-1, 1),
        )
        correlation_ax.set_title("correlation of the two, all layers", fontsize=8)
        accuracy_ax = bottom_figure.subplots()
        curves(
            accuracy_ax,
            _learning(frame),
            factor=100,
            xlabel="round",
            ylabel="accuracy %,\nbefore local training",
        )
        for ax in (correlation_ax, accuracy_ax):
            ax.legend(fontsize=6.5)
    setting_text = setting(header)
    missing_text = missing_runs(header, SHOWN)
    caption = (
        "Above, left: the classes that clients share. Above, middle: pFedLA's weights after the last round in the "
        "layer with the highest correlation. Weights on the client itself are grey. Above, right: the correlation by "
        "round, with a line for each seed. Below: accuracies, with 95 % intervals over seeds. "
        "The page has means of the last three evaluations. "
        f"{setting_text} At most {header['seeds']} seeds, matrices of seed 0.{missing_text}"
    )
    return Drawing(
        figure,
        _table(frame, final_accuracies),
        caption,
        _findings(frame),
        _page(frame, final_accuracies),
    )


def weights_of(frame: pd.DataFrame, layer: str) -> pd.DataFrame:
    """Return a layer's weights in the last round of one run and seed, receivers x senders."""
    weights = where(frame, metric=WEIGHT, layer=layer)
    last_rows = weights[weights["round"] == weights["round"].max()]
    return last_rows.pivot(index="client", columns="client_b", values="value")


def classes(ax: Axes, shared: pd.DataFrame) -> None:
    """Draw the share of classes in common, with a bar of its own."""
    matrix(
        ax,
        shared,
        colours=SHARE,
        high=1,
        bar="share of the receiver's classes",
        bar_below=True,
        square=True,
    )
    ax.set(xlabel="sender", ylabel="receiver")
    ax.set_title("classes in common", fontsize=8)


def setting(header: Mapping[str, Any]) -> str:
    """Return a sentence on the sizes of the runs."""
    config = next(iter(header["runs"].values()))["config"]
    return (
        f"CIFAR-10: {config['clients']} clients with {config['classes_per_client']} classes and "
        f"{config['samples_per_client']} images each. They train for {config['rounds']} rounds of {config['epochs']} "
        f"epochs with batch {config['batch_size']} and lr {config['lr']:g}."
    )


def _learning(frame: pd.DataFrame) -> list[Line]:
    """Return each method's accuracy before local training by round, with its interval over seeds."""
    accuracy_rows = frame[(frame["metric"] == "accuracy") & (frame["model"] != "local")]
    curve_lines = []
    for run, run_rows in accuracy_rows.groupby("run", sort=False):
        seed_curves = run_rows.pivot(index="round", columns="seed", values="value")
        seed_curves.index = seed_curves.index.astype(float)
        intervals = pd.DataFrame(
            over_seeds(seed_curves, seed_curves.index), seed_curves.index
        )
        curve_lines.append(
            Line(
                seed_curves.mean(axis=1),
                names.title(str(run)),
                (intervals["low"], intervals["high"]),
                {"markersize": 3.5, "markevery": 2},
            )
        )
    return curve_lines


def _correlation(frame: pd.DataFrame) -> list[Line]:
    """Return both correlations over all layers by round, a line for each seed."""
    curve_lines = []
    for variant, line_style in (("pearson", "-"), ("spearman", "--")):
        correlation_rows = where(
            frame, run="pfedla", metric=CORRELATION, layer="", variant=variant
        )
        seed_curves = correlation_rows.pivot(
            index="round", columns="seed", values="value"
        )
        seed_curves.index = seed_curves.index.astype(float)
        look = {"marker": "", "linestyle": line_style}
        curve_lines.append(Line(seed_curves, f"{variant.title()}'s", look=look))
    return curve_lines


def _last(frame: pd.DataFrame, metric_name: str, variant: str = "") -> pd.DataFrame:
    """Return a quantity of the layers after the last round, layers x seeds."""
    layer_groups = through_training(frame, metric_name, variant).groupby(
        level="layer", sort=False
    )
    return layer_groups.tail(1).droplevel("round")


def _table(frame: pd.DataFrame, final_accuracies: pd.DataFrame) -> pd.DataFrame:
    table_rows = [
        {
            "quantity": "accuracy before local training",
            "what": run,
            "seed": seed,
            "value": accuracy,
        }
        for (run, seed), accuracy in final_accuracies.stack().items()
    ]
    for metric_name, variant in (
        (CORRELATION, "pearson"),
        (CORRELATION, "spearman"),
        (SELF, ""),
    ):
        for (layer, seed), accuracy in (
            _last(frame, metric_name, variant).stack().items()
        ):
            quantity = f"{metric_name} {variant}".strip()
            table_rows.append(
                {
                    "quantity": quantity,
                    "what": layer or "mean of layers",
                    "seed": seed,
                    "value": accuracy,
                }
            )
    return pd.DataFrame(table_rows, columns=["quantity", "what", "seed", "value"])


def _page(frame: pd.DataFrame, final_accuracies: pd.DataFrame) -> str:
    runs, sent_bytes = list(final_accuracies.index), _sent(frame)
    run_columns = {
        "run": list(map(names.title, runs)),
        "seeds": list(final_accuracies.notna().sum(axis=1)),
        "before local training %": means(final_accuracies, runs),
        "after it %": means(last_evaluations(_learnt(frame, "local")), runs),
        "sent": [
            f"{sent_bytes[run]:.0f} bytes a client and round, {sent_bytes[run] / sent_bytes['pfedla']:.3f} of pFedLA's"
            for run in runs
        ],
    }
    self_weights = _last(frame, SELF).mean(axis=1)
    correlations_by_variant = {
        variant: _last(frame, CORRELATION, variant).mean(axis=1)
        for variant in ("pearson", "spearman")
    }
    layer_columns = {
        "layer": [name or "mean" for name in self_weights.index],
        "self-weight": numbers(self_weights),
        **{
            f"{name}'s r": [
                f"{layer_correlations[layer]:+.2f}" for layer in self_weights.index
            ]
            for name, layer_correlations in correlations_by_variant.items()
        },
    }
    note = (
        "With one layer retained pFedLA's Table 3 has 418.97 of 693.98 MB, a share of 0.604. From these numbers we "
        "infer that every client retains fc1."
    )
    sections = [markdown(run_columns), note]
    return "\n\n".join([*sections, markdown(layer_columns)])


def _sent(frame: pd.DataFrame) -> pd.Series:
    """Return the bytes that a client receives and sends in a round, by run."""
    byte_rows = frame[frame["metric"].isin(["bytes_down", "bytes_up"])]
    return byte_rows.groupby(["run", "metric"])["value"].mean().groupby("run").sum()


def through_training(
    frame: pd.DataFrame, metric_name: str, variant: str = "", run: str = "pfedla"
) -> pd.DataFrame:
    """Return a quantity of the layers through training, (layer, round) x seeds."""
    quantity_rows = where(frame, run=run, metric=metric_name, variant=variant)
    return quantity_rows.pivot_table(
        index=["layer", "round"], columns="seed", values="value", sort=False
    )


def _findings(frame: pd.DataFrame) -> tuple[Finding, ...]:
    layer_correlations = last_evaluations(
        through_training(frame, CORRELATION, "pearson")
    )
    verdict = judged({"r": Difference(layer_correlations.loc[""].dropna())}, show=plain)
    findings = [
        verdict.finding("weights of other clients correlate with classes in common")
    ]
    accuracy_curves = _learnt(frame, "global", "personal")
    published_accuracies = items.published_table(
        "pfedla", "Table 1", setting="non-iid 1, 10 clients", dataset="cifar10"
    ).squeeze(axis=1)
    for reference in ("local", "fedavg"):
        published_gap = (
            published_accuracies["pfedla"] - published_accuracies[reference]
        ) / 100
        gap = settled(accuracy_curves, "pfedla", reference, printed=published_gap)
        verdict = judged({"points": gap})
        expected = f"pFedLA's mixture before local training lies above {reference}"
        findings.append(verdict.finding(expected))
    self_weights = _last(frame, SELF).drop(index="")
    ranked_weights = self_weights.mean(axis=1).sort_values(ascending=False)
    layers_text = ", ".join(
        f"{layer} {weight:.2f}" for layer, weight in ranked_weights.items()
    )
    sentence = f"{layers_text}. The paper does not name these layers. They are inferred from the bytes of its Table 3"
    findings.append(
        Finding("clients trust themselves most in conv2, fc1 and fc3", sentence, None)
    )
    return tuple(findings)


ITEM = items.register(Item(
    NAME, "pFedLA's weights and the classes that clients have in common", RUNS, seeds=6,
    budget="about 6 hours of one core; a run takes 6 to 27 minutes",
    measure=_measure, draw=_draw,
))  # fmt: skip
STUDY = items.register(Item(
    LONGER, "pFedLA's weights after more rounds",
    {"pfedla": RUNS["pfedla"].with_keys(rounds=ROUNDS, eval_every=ROUNDS // 20, checkpoint_every=ROUNDS)}, seeds=6,
    budget="about two and a half hours of one core; a run takes 25 minutes", measure=_measure,
))  # fmt: skip
RATES = items.register(Item(
    "pfedla.rates", "pFedLA with other rates of its hypernetwork",
    {f"pfedla_{rate}": RUNS["pfedla"].with_keys(options={"lr": rate}) for rate in (0.05, 0.005)}, seeds=3,
    budget="about an hour of one core; a run takes ten minutes", measure=_measure,
))  # fmt: skip
