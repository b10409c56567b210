"""pFedLA: whether clients weight those with the same classes, and how good a mixture is before training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from scipy import stats

from fedlayers.diagnostics.pictures.drawing import COLOURS, Panel, heat, style
from fedlayers.diagnostics.pictures.insides import aggregation_history, aggregation_weights, unfreezing
from figures import items
from figures.differences import FEWEST, LEAST, UNDECIDED, against, outcome
from figures.items import Drawing, Finding
from figures.page import markdown, missing_runs, percent
from figures.recipe import PLAIN_SGD, Recipe, by_method, labels, tested, trained
from fl_core import rows, runner, statistics
from fl_core.config import RunConfig

NAME = "algorithms.pfedla_overlap"
OVERLAP, CORRELATION = "class_overlap", "overlap_correlation"
WEIGHT, SELF, RETAINED = "aggregation_weight", "self_weight", "retained"

ACROSS = 4
"""Panels beside each other."""

BASE = RunConfig(
    dataset="cifar10", partition="non_iid_1", clients=10, classes_per_client=4, samples_per_client=600,
    model="pfedla_cnn", bn="local", rounds=40, epochs=10, batch=32, lr=0.01, **PLAIN_SGD,
    eval_every=4, checkpoint_every=40,
)  # fmt: skip
"""The paper's local training, with 40 of its 600 rounds."""
RUNS = by_method(BASE, ("local", "fedavg", "pfedla", "heurpfedla"), {})


# --- rows ------------------------------------------------------------------------------------------------------


def overlap(counts: pd.DataFrame) -> pd.DataFrame:
    """The share of the receiver's classes that the sender has too, clients x clients."""
    has = (counts > 0).astype(float)
    return (has @ has.T).div(has.sum(axis=1), axis=0)


def correlations(weights: pd.DataFrame, shared: pd.DataFrame) -> tuple[float | None, float | None]:
    """Pearson's and Spearman's correlation of off-diagonal entries; None if all weights are equal."""
    off = ~np.eye(len(shared), dtype=bool)
    x, y = weights.loc[shared.index, shared.columns].to_numpy(float)[off], shared.to_numpy(float)[off]
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        return None, None
    return float(stats.pearsonr(x, y).statistic), float(stats.spearmanr(x, y).statistic)


def _measure(task: runner.Task, run: str, folder: Path) -> pd.DataFrame:
    """Record mean accuracies over the rounds, bytes sent, and how a mixing run's weights follow the classes."""
    _, frame = trained(task)
    named = labels(task)
    lines: list[rows.Row] = []
    for (done, model), part in tested(frame).groupby(["round", "model"]):
        n = int(part["n_samples"].sum())
        columns: dict[str, Any] = {"round": int(done), "model": model, "split": "test", "n_samples": n}
        lines.append(rows.row("accuracy", part["value"].mean(), estimator="mean over clients", **columns, **named))
    for metric in ("bytes_down", "bytes_up"):
        sent = frame[frame["metric"] == metric]["value"].mean()
        lines.append(rows.row(metric, sent, unit="byte", estimator="mean over rounds and clients", **named))
    kept = [rows.frame(lines)]
    if (frame["metric"] == WEIGHT).any():
        shared = overlap(task.data.class_counts())
        kept.append(rows.frame(_weights(frame[frame["metric"] == WEIGHT], shared, named)))
        if task.config.seed == 0:
            kept += [_drawn(frame[frame["metric"] == WEIGHT], shared), rows.frame(_pairs(shared, named))]
            kept.append(frame[frame["metric"] == RETAINED])
    return pd.concat(kept, ignore_index=True)


def _weights(weights: pd.DataFrame, shared: pd.DataFrame, named: Mapping[str, Any]) -> Iterator[rows.Row]:
    """Rows of each layer's weights and of their mean: correlation with the classes, and weights on oneself."""
    for done, part in weights.groupby("round"):
        layers = {str(layer): own for layer, own in part.groupby("layer", sort=False)}
        tables = {layer: own.pivot(index="client", columns="client_b", values="value") for layer, own in layers.items()}
        tables[""] = part.groupby(["client", "client_b"])["value"].mean().unstack("client_b")
        for layer, table in tables.items():
            columns = {"round": int(done), "layer": layer, **named}
            diagonal = float(np.diag(table.loc[shared.index, shared.index]).mean())
            yield rows.row(SELF, diagonal, estimator="mean over clients", **columns)
            for variant, value in zip(("pearson", "spearman"), correlations(table, shared), strict=True):
                status = "ok" if value is not None else "all weights are equal"
                yield rows.row(CORRELATION, value, variant=variant, status=status, **columns)


def _pairs(shared: pd.DataFrame, named: Mapping[str, Any]) -> Iterator[rows.Row]:
    for receiver, line in shared.iterrows():
        for sender, value in line.items():
            yield rows.row(OVERLAP, value, client=str(receiver), client_b=str(sender), **named)


def shared_classes(frame: pd.DataFrame) -> pd.DataFrame:
    """The stored class overlap of seed 0, clients x clients."""
    overlaps = frame[(frame["metric"] == OVERLAP) & (frame["seed"] == 0)]
    return overlaps.pivot(index="client", columns="client_b", values="value")


def chosen_pairs(shared: pd.DataFrame) -> list[tuple[str, str]]:
    """The pair of different clients with most classes in common, and the one with fewest."""
    apart = shared.where(~np.eye(len(shared), dtype=bool)).stack()
    return [(str(receiver), str(sender)) for receiver, sender in (apart.idxmax(), apart.idxmin())]


def _drawn(weights: pd.DataFrame, shared: pd.DataFrame) -> pd.DataFrame:
    """The weights to draw: all of the last round; of earlier rounds self-weights and the chosen pairs."""
    pairs = pd.MultiIndex.from_frame(weights[["client", "client_b"]])
    followed = (weights["client"] == weights["client_b"]) | pairs.isin(chosen_pairs(shared))
    return weights[followed | (weights["round"] == weights["round"].max())]


# --- drawing ---------------------------------------------------------------------------------------------------


def _final(frame: pd.DataFrame) -> pd.DataFrame:
    """Accuracy after the last round before fine-tuning, runs x seeds."""
    accuracy = frame[(frame["metric"] == "accuracy") & frame["model"].isin(["global", "personal"])]
    return accuracy[accuracy["round"] == accuracy["round"].max()].pivot(index="run", columns="seed", values="value")


def _draw(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    shown = frame[(frame["run"] == "pfedla") & (frame["seed"] == 0)]
    kept = frame[frame["run"] == "heurpfedla"]
    final = _final(frame)
    layers = list(shown.loc[shown["metric"] == WEIGHT, "layer"].unique())
    shared = shared_classes(shown)
    deep = panel_rows(layers)
    with style():
        figure = plt.figure(figsize=(8.4, 2.0 * deep + 5.0), layout="constrained")
        parts: Any = figure.subfigures(3, 1, height_ratios=[2.0 * deep, 2.3, 2.5])
        top, middle, bottom = parts
        if len(shared):
            heat_maps(top, shared, shown)
            top.axes[-1].set_ylabel("aggregation weight", fontsize=8)
            aggregation_history(shown, chosen_pairs(shared), axes=list(middle.subplots(1, 3)))
        learnt, following, timeline = bottom.subplots(1, 3)
        _learning(learnt, frame)
        _correlation(following, frame[frame["run"] == "pfedla"])
        if (kept["metric"] == RETAINED).any():
            unfreezing(kept, timeline, RETAINED)
        else:
            timeline.remove()
    caption = (
        f"{setting(header)} At most {header['seeds']} seeds, pictures of seed 0. Receivers are rows, senders columns. "
        f"HeurpFedLA keeps one layer a client.{missing_runs(header)}"
    )
    return Drawing(figure, _table(frame, final), caption, _findings(frame, final), _page(frame, final))


def panel_rows(layers: Sequence[str]) -> int:
    """Rows of panels that :func:`heat_maps` needs."""
    return -(-(len(layers) + 1) // ACROSS)


def heat_maps(figure: Any, shared: pd.DataFrame, weights: pd.DataFrame) -> None:
    """Draw into a figure or a part of one: classes in common, and beside them the last weights of every layer."""
    layers = list(weights.loc[weights["metric"] == WEIGHT, "layer"].unique())
    first, *rest = figure.subplots(panel_rows(layers), ACROSS, squeeze=False).flat
    for spare in rest[len(layers) :]:
        spare.remove()
    heat(Panel(first, False, False), shared, square=True)
    first.set_title("share of classes in common", fontsize=8)
    aggregation_weights(weights, axes=rest[: len(layers)])
    for ax in rest[: len(layers)]:
        ax.set(xticks=[], yticks=[], xlabel="", ylabel="")
    first.set(xlabel="sender", ylabel="receiver")


def setting(header: Mapping[str, Any]) -> str:
    """A sentence on the sizes of the runs."""
    config = next(iter(header["runs"].values()))["config"]
    return (
        f"CIFAR-10, {config['clients']} clients with {config['classes_per_client']} classes and "
        f"{config['samples_per_client']} images each, {config['rounds']} rounds of {config['epochs']} epochs, batch "
        f"{config['batch']}, lr {config['lr']:g}."
    )


def _learning(ax: Axes, frame: pd.DataFrame) -> None:
    accuracy = frame[(frame["metric"] == "accuracy") & (frame["model"] != "local")]
    for k, run in enumerate(accuracy["run"].unique()):
        means = accuracy[accuracy["run"] == run].groupby("round")["value"].mean()
        ax.plot(means.index.astype(float), 100 * means, color=COLOURS[k], label=run)
    ax.set(xlabel="round", ylabel="accuracy %, before local training")
    ax.legend(fontsize=6.5)


def _correlation(ax: Axes, frame: pd.DataFrame) -> None:
    rows_ = frame[(frame["metric"] == CORRELATION) & (frame["layer"] == "")]
    for variant, colour in (("pearson", COLOURS[0]), ("spearman", COLOURS[1])):
        for seed, part in rows_[rows_["variant"] == variant].groupby("seed"):
            ax.plot(part["round"].astype(float), part["value"], color=colour, label=variant if seed == 0 else "_")
    ax.axhline(0, color="0.6", linewidth=0.8)
    ax.set(xlabel="round", ylabel="weights of others and\nclasses in common", ylim=(-1, 1), title="correlation")
    ax.legend(fontsize=6.5)


def _last(frame: pd.DataFrame, metric: str, variant: str = "") -> pd.DataFrame:
    """A quantity of the layers after the last round, layers x seeds."""
    part = frame[(frame["run"] == "pfedla") & (frame["metric"] == metric) & (frame["variant"] == variant)]
    part = part[part["round"] == part["round"].max()]
    return part.pivot(index="layer", columns="seed", values="value").reindex(part["layer"].unique())


def _table(frame: pd.DataFrame, final: pd.DataFrame) -> pd.DataFrame:
    lines = [
        {"quantity": "accuracy before local training", "what": run, "seed": seed, "value": value}
        for (run, seed), value in final.stack().items()
    ]
    for metric, variant in ((CORRELATION, "pearson"), (CORRELATION, "spearman"), (SELF, "")):
        for (layer, seed), value in _last(frame, metric, variant).stack().items():
            quantity = f"{metric} {variant}".strip()
            lines.append({"quantity": quantity, "what": layer or "mean of layers", "seed": seed, "value": value})
    return pd.DataFrame(lines, columns=["quantity", "what", "seed", "value"])


def _page(frame: pd.DataFrame, final: pd.DataFrame) -> str:
    lines: dict[str, list[str]] = {"run": [], "seeds": [], "before local training %": [], "after it %": [], "sent": []}
    adapted = frame[(frame["metric"] == "accuracy") & (frame["model"] == "local")]
    sent = frame[frame["metric"].isin(["bytes_down", "bytes_up"])].groupby(["run", "metric"])["value"].mean().unstack()
    whole = sent.loc["pfedla"].sum() if "pfedla" in sent.index else float("nan")
    for run in final.index:
        after = adapted[(adapted["run"] == run) & (adapted["round"] == adapted["round"].max())]["value"]
        scores = final.loc[run].dropna()
        lines["run"].append(run)
        lines["seeds"].append(str(len(scores)))
        lines["before local training %"].append(percent(*statistics.mean_interval(scores)))
        lines["after it %"].append(percent(*statistics.mean_interval(after)) if len(after) else "–")
        amount = sent.loc[run].sum()
        share = f", {amount / whole:.3f} of pFedLA's" if whole > 0 else ""
        lines["sent"].append(f"{amount:.0f} bytes a client and round{share}")
    layers = _last(frame, SELF).mean(axis=1)
    follows = {variant: _last(frame, CORRELATION, variant).mean(axis=1) for variant in ("pearson", "spearman")}
    inside = {
        "layer": [name or "mean" for name in layers.index],
        "self-weight": [f"{value:.2f}" for value in layers],
        **{f"{name}'s r": [f"{values[layer]:+.2f}" for layer in layers.index] for name, values in follows.items()},
    }
    note = (
        "pFedLA's Table 3 has 418.97 of 693.98 MB, 0.604, with one layer retained; that it is fc1, by everybody, is "
        "inferred from these numbers."
    )
    parts = [markdown(lines), note]
    return "\n\n".join(parts + ([markdown(inside)] if len(layers) else []))


def _findings(frame: pd.DataFrame, final: pd.DataFrame) -> tuple[Finding, ...]:
    findings = []
    follows = _last(frame, CORRELATION, "pearson")
    if "" in follows.index:
        means = follows.loc[""].dropna()
        listed = ", ".join(f"{value:+.2f}" for value in means)
        mean = statistics.mean_interval(means)
        listed += f"; mean {mean.value:+.2f}, 95 % interval {mean.low:+.2f} to {mean.high:+.2f}"
        positive = (True if mean.low > 0 else False if mean.high < 0 else None) if len(means) >= LEAST else None
        findings.append(Finding("weights of other clients correlate with classes in common", f"r = {listed}", positive))
    for reference in ("local", "fedavg") if "pfedla" in final.index else ():
        gap, pairs = against(final, "pfedla", reference)
        verdict = outcome(gap, pairs)
        held = None if verdict in ("", UNDECIDED) else verdict == "above"
        text = f"{percent(*gap, sign='+')} points over {pairs} seeds" + ("" if verdict else f" ({FEWEST})")
        findings.append(Finding(f"pFedLA's mixture before local training lies above {reference}", text, held))
    trust = _last(frame, SELF)
    if len(trust):
        ranked = trust.drop(index="", errors="ignore").mean(axis=1).sort_values(ascending=False)
        listed = ", ".join(f"{layer} {value:.2f}" for layer, value in ranked.items())
        said = (
            f"{listed}. The three are no number of the paper's: they are those with which a count of bytes whose two "
            "constants were inferred from its Table 3 gives that table"
        )
        findings.append(Finding("clients trust themselves most in conv2, fc1 and fc3", said, None))
    return tuple(findings)


ITEM = items.register(Recipe(
    NAME, "pFedLA's weights and the classes that clients have in common", RUNS, seeds=3,
    one_seed=frozenset({"heurpfedla"}), budget="about 2 hours of one core; a run takes 6 to 27 minutes",
    measure=_measure, draw=_draw,
))  # fmt: skip
