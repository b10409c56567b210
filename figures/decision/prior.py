"""A prior over the arms of a race: which two of three to race, from what is known before training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from numpy.typing import NDArray

from diagnostics.plots.drawing import COLOURS, MARKERS, style
from figures import items
from figures.decision import regret
from figures.decision.federations import FEDERATIONS
from figures.decision.methods import (
    RACE,
    RANDOM,
    THREE,
    Federated,
    Method,
    Run,
    federated,
    methods,
    race,
    race_cost,
    summary,
)
from figures.decision.runs import NAME as RUNS, configurations
from figures.items import Drawing, Finding
from figures.page import markdown, missing_runs
from figures.recipe import Recipe, labels
from fl_core import rows, runner
from fl_core.data import Split
from fl_core.plan import LayerPlan
from fl_core.seeds import numpy_generator
from fl_core.statistics import mean_interval

NAME = "decision.prior"
SEEDS = 4
WIDTH = 128
"""Random projections of a sample to which the linear probes are fitted."""
PENALTY = 0.3
"""Of the regression from descriptors, which are standardised, to what an arm scores above the mean of the arms."""
PRIOR, PAIR = "race of the prior's two", "race of half and all but the last"
COMPARED = (RANDOM, RACE, PAIR)
Matrix = NDArray[np.float64]


# --- what is said of a federation ------------------------------------------------------------------------------


def descriptors(task: runner.Task) -> dict[str, float]:
    """Describe a federation before training, from its training and validation samples.

    ``label_skew``: mean total variation between a client's class shares and those of all clients (0 to 1).
    ``input_shift``: distance of a client's mean input from the mean of all, in standard deviations. It is a root mean
    square over projected inputs, corrected for sampling. ``input_shift_within_class`` removes the mean of each class
    first. ``own_probe`` is the balanced accuracy of a linear classifier on validation samples. It is fitted to the
    client's projected training samples, and ``pooled_probe`` to those of all clients. ``probe_gain`` is the second
    minus the first.
    """
    clients = task.data.clients
    projected = [_projected(client.train, task) for client in clients]
    y = [client.train.y.numpy() for client in clients]
    sizes = np.array([len(part) for part in y], dtype=float)
    count = len(task.data.classes)
    shares = np.stack([np.bincount(part, minlength=count) / len(part) for part in y])
    pooled = sizes @ shares / sizes.sum()
    x, everyone = np.concatenate(projected), np.concatenate(y)
    x = (x - x.mean(axis=0)) / (x.std(axis=0) + 1e-9)
    ends = np.cumsum(sizes).astype(int)[:-1]
    centred = (
        x
        - np.stack([x[everyone == k].mean(axis=0) if (everyone == k).any() else 0 * x[0] for k in range(count)])[
            everyone
        ]
    )
    probes = _probes(task, projected, y, count)
    config = task.config
    return {
        "log_clients": float(np.log(len(clients))),
        "log_samples": float(np.log(np.median(sizes))),
        "log_classes": float(np.log(count)),
        "log_rounds": float(np.log(config.rounds or 1)),
        "log_steps": float(np.log(max(1.0, np.median(sizes) / int(config.batch_size or 1)))),
        "participation": config.participation,
        "layers": float(len(LayerPlan(task.layers, ()).trainable)),
        "classes_present": float((shares > 0).mean()),
        "label_skew": float(0.5 * np.abs(shares - pooled).sum(axis=1).mean()),
        "input_shift": _shift(np.split(x, ends)),
        "input_shift_within_class": _shift(np.split(centred, ends)),
        "own_probe": probes[0],
        "pooled_probe": probes[1],
        "probe_gain": probes[1] - probes[0],
    }  # fmt: skip


def _projected(split: Split, task: runner.Task) -> Matrix:
    """Samples [n, ...] as random projections [n, WIDTH]; of a text the words that it has."""
    x = split.x.numpy()
    if task.data.words is not None:
        table = np.zeros((len(x), len(task.data.words) + 3), dtype=np.float32)
        np.put_along_axis(table, np.minimum(x, table.shape[1] - 1), 1.0, axis=1)
        x = table
    flat = x.reshape(len(x), -1).astype(np.float64)
    draw = numpy_generator(0, "projection", flat.shape[1]).normal(size=(flat.shape[1], WIDTH))
    projected: Matrix = flat @ draw / np.sqrt(flat.shape[1])
    return projected


def _shift(parts: Sequence[Matrix]) -> float:
    """Return the distance of clients' means from the mean of all, beyond sampling noise, in standard deviations."""
    everyone = np.concatenate(parts)
    mean, variance = everyone.mean(axis=0), everyone.var(axis=0).mean() + 1e-12
    squares = [((part.mean(axis=0) - mean) ** 2).mean() - variance / len(part) for part in parts]
    return float(np.sqrt(max(0.0, float(np.mean(squares))) / variance))


def _probes(
    task: runner.Task, projected: Sequence[Matrix], y: Sequence[NDArray[Any]], count: int
) -> tuple[float, float]:
    """Balanced accuracy of clients' own and of the pooled ridge classifier, mean over clients by their samples."""
    everyone = _ridge(np.concatenate(projected), np.concatenate(y), count)
    scores, weights = [], []
    for client, x, own in zip(task.data.clients, projected, y, strict=True):
        validation = _projected(client.validation, task)
        truth = client.validation.y.numpy()
        scores.append([_balanced(fit, validation, truth) for fit in (_ridge(x, own, count), everyone)])
        weights.append(len(own))
    own_score, pooled_score = np.average(scores, axis=0, weights=weights)
    return float(own_score), float(pooled_score)


def _ridge(x: Matrix, y: NDArray[Any], count: int) -> tuple[Matrix, Matrix, Matrix]:
    mean, spread = x.mean(axis=0), x.std(axis=0) + 1e-9
    z = np.column_stack([(x - mean) / spread, np.ones(len(x))])
    penalty = np.diag([float(len(x)) ** 0.5] * x.shape[1] + [0.0])
    return mean, spread, np.linalg.lstsq(z.T @ z + penalty, z.T @ np.eye(count)[y], rcond=None)[0]


def _balanced(fit: tuple[Matrix, Matrix, Matrix], x: Matrix, y: NDArray[Any]) -> float:
    mean, spread, weights = fit
    guess = (np.column_stack([(x - mean) / spread, np.ones(len(x))]) @ weights).argmax(axis=1)
    return float(np.mean([(guess[y == k] == k).mean() for k in np.unique(y)]))


def _measure(task: runner.Task, run: str, folder: Path) -> pd.DataFrame:
    """The descriptors of a federation, each the mean over the seeds' splits."""
    config = task.config
    drawn = pd.DataFrame([descriptors(runner.assemble(replace(config, seed=seed))) for seed in range(SEEDS)])
    return rows.frame([rows.row(name, float(drawn[name].mean()), **labels(task)) for name in drawn])


# --- the prior -------------------------------------------------------------------------------------------------


def predicted(table: pd.DataFrame, parts: Sequence[Federated], left_out: str) -> pd.Series:
    """Predict each arm's score above the arms' mean by ridge regression over all other federations.

    Args:
        table: descriptors [federation, name].
        parts: the federations' scores on held-out samples.
    """
    known = [part for part in parts if part.name != left_out]
    x = table.loc[[part.name for part in known]].to_numpy(dtype=float)
    mean, spread = x.mean(axis=0), x.std(axis=0) + 1e-9
    z = (x - mean) / spread
    scores = np.stack([[part.cuts[part.cut_names.index(arm)].mean() for arm in THREE] for part in known])
    y = scores - scores.mean(axis=1, keepdims=True)
    weights = np.linalg.solve(z.T @ z + PENALTY * len(z) * np.eye(z.shape[1]), z.T @ (y - y.mean(axis=0)))
    here = (table.loc[left_out].to_numpy(dtype=float) - mean) / spread
    return pd.Series(here @ weights + y.mean(axis=0), index=list(THREE))


def prior_method(table: pd.DataFrame, runs: Sequence[Run]) -> Method:
    """The race of the two arms with the highest prior. The prior is learned without the federation itself."""
    parts = federated(runs, (methods()[0],))
    pairs = {part.name: tuple(predicted(table, parts, part.name).nlargest(2).index) for part in parts}
    return Method(
        PRIOR,
        lambda run: race(pairs[run.federation])(run),
        lambda run: race_cost(pairs[run.federation])(run),
    )


def _draw(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    source = items.find(RUNS).study
    stored, scores = source.read(source.path())
    _, runs = regret.tables_of(stored, scores)
    table = frame.pivot(index="run", columns="metric", values="value")
    runs = [run for run in runs if run.federation in table.index]
    compared = [*(method for method in methods() if method.name in COMPARED), prior_method(table, runs)]
    parts = federated(runs, compared)
    total = summary(parts, compared)
    lines = {line.method: line for line in total.itertuples()}
    gain = _difference(parts, [method.name for method in compared])
    with style():
        figure = plt.figure(figsize=(7.2, 5.2), layout="constrained")
        ax = figure.subplots()
        y = np.arange(len(parts))
        for k, method in enumerate(compared):
            lost = [100 * part.regrets()[k] for part in parts]
            where = y + 0.27 - 0.18 * k
            ax.plot(
                lost, where, linestyle="none", marker=MARKERS[k], color=COLOURS[k], markersize=3.8, label=method.name
            )
        ax.axvline(0, color="0.5", lw=0.9, zorder=0)
        for line in y[:-1] + 0.5:
            ax.axhline(line, color="0.9", lw=0.6, zorder=0)
        ax.set_yticks(y, [FEDERATIONS[part.name].title for part in parts], fontsize=7)
        ax.set_ylim(len(parts) - 0.4, -0.6)
        ax.set_xlabel("regret, points of macro-F1")
        ax.legend(fontsize=7, loc="lower center", bbox_to_anchor=(0.35, 1.0), ncols=4)
    columns = {
        "method": list(lines),
        "cost, full runs": [f"{line.cost:.2f}" for line in lines.values()],
        "regret, points": [f"{100 * line.regret:.2f}" for line in lines.values()],
        "% of a random cut's": [
            f"{100 * line.ratio:.0f} % [{100 * line.ratio_low:.0f}, {100 * line.ratio_high:.0f}]"
            for line in lines.values()
        ],
    }  # fmt: skip
    pairs = {part.name: " or ".join(predicted(table, parts, part.name).nlargest(2).index) for part in parts}
    chosen = {
        "federation": [FEDERATIONS[part.name].title for part in parts],
        "raced": [pairs[part.name] for part in parts],
        "best cut": [part.best for part in parts],
    }
    caption = (
        f"{len(parts)} federations with {len(runs)} runs. A ridge regression over the other federations predicts two "
        f"of three arms from {table.shape[1]} descriptors. These two are raced to 0.6 of the rounds. Regret of each "
        "federation is in macro-F1 on held-out samples (mean over runs)."
    )
    low, high = (100 * bound for bound in gain[1:])
    finding = Finding(
        "a race of the prior's two arms loses at most 0.5 points more than the race of three",
        f"{100 * gain[0]:+.2f} points [{low:+.2f}, {high:+.2f}] at {lines[PRIOR].cost:.2f} instead of "
        f"{lines[RACE].cost:.2f} full runs",
        True if high < 0.5 else False if low > 0.5 else None,
    )  # fmt: skip
    text = "\n\n".join([markdown(columns), markdown(chosen), missing_runs(header)])
    return Drawing(figure, total, caption, (finding,), text)


def _difference(parts: Sequence[Federated], names: Sequence[str]) -> tuple[float, float, float]:
    """Mean over federations of the prior's regret minus the race's, and its interval."""
    a, b = names.index(PRIOR), names.index(RACE)
    return mean_interval([part.regrets()[a] - part.regrets()[b] for part in parts])


ITEM = items.register(
    Recipe(
        NAME,
        "A prior over the arms of a race, from what is known before training",
        configurations(confirming=False),
        seeds=1,
        budget="some minutes of one core",
        measure=_measure,
        draw=_draw,
    )
)
