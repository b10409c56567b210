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
    has = (counts > 0).astype(float)
    return (has @ has.T).div(has.sum(axis=1), axis=0)


def correlations(
    weights: pd.DataFrame, shared: pd.DataFrame
) -> tuple[float | None, float | None]:
    """Pearson's and Spearman's correlation of off-diagonal entries; None if all weights are equal."""
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
    named = labels(task)
    lines = list(mean_accuracy(frame, named))
    for metric in ("bytes_down", "bytes_up"):
        sent = frame[frame["metric"] == metric]["value"].mean()
        lines.append(
            rows.row(
                metric,
                sent,
                unit="byte",
                estimator="mean over rounds and clients",
                **named,
            )
        )
    weights = frame[frame["metric"] == WEIGHT]
    if weights.empty:
        return rows.frame(lines)
    shared = overlap(task.data.class_counts())
    lines += _weights(weights, shared, named)
    if task.config.execution.seed:
        return rows.frame(lines)
    lines += (
        rows.row(OVERLAP, value, client=str(receiver), client_b=str(sender), **named)
        for (receiver, sender), value in shared.stack().items()
    )
    parts_kept = [_drawn(weights, shared), frame[frame["metric"] == RETAINED]]
    return pd.concat([rows.frame(lines), *parts_kept], ignore_index=True)


def _weights(
    weights: pd.DataFrame, shared: pd.DataFrame, named: Mapping[str, Any]
) -> Iterator[rows.Row]:
    """Rows of each layer's weights and of their mean: correlation with the classes, and weights on oneself."""
    for done, part in weights.groupby("round"):
        layers = {
            str(layer): of_layer
            for layer, of_layer in part.groupby("layer", sort=False)
        }
        tables = {
            layer: of_layer.pivot(index="client", columns="client_b", values="value")
            for layer, of_layer in layers.items()
        }
        tables[""] = (
            part.groupby(["client", "client_b"])["value"].mean().unstack("client_b")
        )
        for layer, table in tables.items():
            columns = {"round": int(done), "layer": layer, **named}
            diagonal = float(np.diag(table.loc[shared.index, shared.index]).mean())
            yield rows.row(SELF, diagonal, estimator="mean over clients", **columns)
            yield rows.row(
                SELF_LARGEST,
                self_largest(table),
                estimator="share of clients",
                **columns,
            )
            for variant, value in zip(
                ("pearson", "spearman"), correlations(table, shared), strict=True
            ):
                status = "all weights are equal"
                if value is not None:
                    status = "ok"
                yield rows.row(
                    CORRELATION, value, variant=variant, status=status, **columns
                )


def self_largest(weights: pd.DataFrame) -> float:
    """Return the share of clients whose largest weight is the one on themselves, from receivers x senders."""
    return float((weights.idxmax(axis=1) == weights.index).mean())


def shared_classes(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the stored class overlap of seed 0, clients x clients."""
    overlaps = where(frame, metric=OVERLAP, seed=0)
    return overlaps.pivot(index="client", columns="client_b", values="value")


def chosen_pairs(shared: pd.DataFrame) -> list[tuple[str, str]]:
    """Return the pair of different clients with most classes in common, and the one with fewest."""
    other_pairs = shared.where(~np.eye(len(shared), dtype=bool)).stack()
    return [
        (str(receiver), str(sender))
        for receiver, sender in (other_pairs.idxmax(), other_pairs.idxmin())
    ]


def _drawn(weights: pd.DataFrame, shared: pd.DataFrame) -> pd.DataFrame:
    """The weights to draw: all of the last round; of earlier rounds self-weights and the chosen pairs."""
    pairs = pd.MultiIndex.from_frame(weights[["client", "client_b"]])
    followed = (weights["client"] == weights["client_b"]) | pairs.isin(
        chosen_pairs(shared)
    )
    return weights[followed | (weights["round"] == weights["round"].max())]


# --- drawing ---------------------------------------------------------------------------------------------------


def _learnt(frame: pd.DataFrame, *models: str) -> pd.DataFrame:
    """Return accuracy of a kind of model through training, (run, round) x seeds."""
    accuracy = frame[(frame["metric"] == "accuracy") & frame["model"].isin(models)]
    return accuracy.pivot(index=["run", "round"], columns="seed", values="value")


def _draw(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    frame = frame[frame["run"].isin(SHOWN)]
    shown = where(frame, run="pfedla", seed=0)
    final = last_evaluations(_learnt(frame, "global", "personal"))
    follows = _last(frame, CORRELATION, "pearson").drop(index="")
    most = str(follows.mean(axis=1).idxmax())
    weights = weights_of(shown, most)
    itself = np.eye(len(weights), dtype=bool)
    with sheet(8.4, 5.4) as figure:
        parts: Any = figure.subfigures(2, 1, height_ratios=[2.8, 2.6])
        top, bottom = parts
        left, middle, following = top.subplots(1, 3, width_ratios=[1, 1, 1.1])
        classes(left, shared_classes(shown))
        matrix(
            middle,
            weights.mask(itself),
            bar="aggregation weight",
            bar_below=True,
            square=True,
        )
        middle.set(xlabel="sender", ylabel="receiver")
        middle.set_title(f"weight on the others, {most}", fontsize=8)
        curves(
            following,
            _correlation(frame),
            level=0,
            level_look={"linestyle": "-", "linewidth": 0.8},
            xlabel="round",
            ylim=(-1, 1),
        )
        following.set_title("correlation of the two, all layers", fontsize=8)
        below = bottom.subplots()
        curves(
            below,
            _learning(frame),
            factor=100,
            xlabel="round",
            ylabel="accuracy %,\nbefore local training",
        )
        for ax in (following, below):
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
        figure, _table(frame, final), caption, _findings(frame), _page(frame, final)
    )


def weights_of(frame: pd.DataFrame, layer: str) -> pd.DataFrame:
    """Return a layer's weights in the last round of one run and seed, receivers x senders."""
    weights = where(frame, metric=WEIGHT, layer=layer)
    last = weights[weights["round"] == weights["round"].max()]
    return last.pivot(index="client", columns="client_b", values="value")


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
    accuracy = frame[(frame["metric"] == "accuracy") & (frame["model"] != "local")]
    lines = []
    for run, of_run in accuracy.groupby("run", sort=False):
        by_seed = of_run.pivot(index="round", columns="seed", values="value")
        by_seed.index = by_seed.index.astype(float)
        intervals = pd.DataFrame(over_seeds(by_seed, by_seed.index), by_seed.index)
        lines.append(
            Line(
                by_seed.mean(axis=1),
                names.title(str(run)),
                (intervals["low"], intervals["high"]),
                {"markersize": 3.5, "markevery": 2},
            )
        )
    return lines


def _correlation(frame: pd.DataFrame) -> list[Line]:
    """Return both correlations over all layers by round, a line for each seed."""
    lines = []
    for variant, dash in (("pearson", "-"), ("spearman", "--")):
        part = where(frame, run="pfedla", metric=CORRELATION, layer="", variant=variant)
        by_seed = part.pivot(index="round", columns="seed", values="value")
        by_seed.index = by_seed.index.astype(float)
        look = {"marker": "", "linestyle": dash}
        lines.append(Line(by_seed, f"{variant.title()}'s", look=look))
    return lines


def _last(frame: pd.DataFrame, metric: str, variant: str = "") -> pd.DataFrame:
    """A quantity of the layers after the last round, layers x seeds."""
    by_layer = through_training(frame, metric, variant).groupby(
        level="layer", sort=False
    )
    return by_layer.tail(1).droplevel("round")


def _table(frame: pd.DataFrame, final: pd.DataFrame) -> pd.DataFrame:
    lines = [
        {
            "quantity": "accuracy before local training",
            "what": run,
            "seed": seed,
            "value": value,
        }
        for (run, seed), value in final.stack().items()
    ]
    for metric, variant in (
        (CORRELATION, "pearson"),
        (CORRELATION, "spearman"),
        (SELF, ""),
    ):
        for (layer, seed), value in _last(frame, metric, variant).stack().items():
            quantity = f"{metric} {variant}".strip()
            lines.append(
                {
                    "quantity": quantity,
                    "what": layer or "mean of layers",
                    "seed": seed,
                    "value": value,
                }
            )
    return pd.DataFrame(lines, columns=["quantity", "what", "seed", "value"])


def _page(frame: pd.DataFrame, final: pd.DataFrame) -> str:
    runs, sent = list(final.index), _sent(frame)
    lines = {
        "run": list(map(names.title, runs)),
        "seeds": list(final.notna().sum(axis=1)),
        "before local training %": means(final, runs),
        "after it %": means(last_evaluations(_learnt(frame, "local")), runs),
        "sent": [
            f"{sent[run]:.0f} bytes a client and round, {sent[run] / sent['pfedla']:.3f} of pFedLA's"
            for run in runs
        ],
    }
    layers = _last(frame, SELF).mean(axis=1)
    follows = {
        variant: _last(frame, CORRELATION, variant).mean(axis=1)
        for variant in ("pearson", "spearman")
    }
    inside = {
        "layer": [name or "mean" for name in layers.index],
        "self-weight": numbers(layers),
        **{
            f"{name}'s r": [f"{values[layer]:+.2f}" for layer in layers.index]
            for name, values in follows.items()
        },
    }
    note = (
        "With one layer retained pFedLA's Table 3 has 418.97 of 693.98 MB, a share of 0.604. From these numbers we "
        "infer that every client retains fc1."
    )
    parts = [markdown(lines), note]
    return "\n\n".join([*parts, markdown(inside)])


def _sent(frame: pd.DataFrame) -> pd.Series:
    """Bytes that a client receives and sends in a round, by run."""
    amounts = frame[frame["metric"].isin(["bytes_down", "bytes_up"])]
    return amounts.groupby(["run", "metric"])["value"].mean().groupby("run").sum()


def through_training(
    frame: pd.DataFrame, metric: str, variant: str = "", run: str = "pfedla"
) -> pd.DataFrame:
    """Return a quantity of the layers through training, (layer, round) x seeds."""
    part = where(frame, run=run, metric=metric, variant=variant)
    return part.pivot_table(
        index=["layer", "round"], columns="seed", values="value", sort=False
    )


def _findings(frame: pd.DataFrame) -> tuple[Finding, ...]:
    follows = last_evaluations(through_training(frame, CORRELATION, "pearson"))
    verdict = judged({"r": Difference(follows.loc[""].dropna())}, show=plain)
    findings = [
        verdict.finding("weights of other clients correlate with classes in common")
    ]
    learnt = _learnt(frame, "global", "personal")
    printed = items.published_table(
        "pfedla", "Table 1", setting="non-iid 1, 10 clients", dataset="cifar10"
    ).squeeze(axis=1)
    for reference in ("local", "fedavg"):
        theirs = (printed["pfedla"] - printed[reference]) / 100
        gap = settled(learnt, "pfedla", reference, printed=theirs)
        verdict = judged({"points": gap})
        expected = f"pFedLA's mixture before local training lies above {reference}"
        findings.append(verdict.finding(expected))
    trust = _last(frame, SELF).drop(index="")
    ranked = trust.mean(axis=1).sort_values(ascending=False)
    listed = ", ".join(f"{layer} {value:.2f}" for layer, value in ranked.items())
    sentence = f"{listed}. The paper does not name these layers. They are inferred from the bytes of its Table 3"
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
