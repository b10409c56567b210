"""A second witness: PFLlib with the same split and initial weights, compared round by round.

Every batch is all of a client's samples, so their order changes nothing. Two computations of the same algorithm then
agree in every score of every client.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd

from diagnostics.plots.drawing import COLOURS, style
from figures import items, names, pfllib
from figures.differences import last_evaluations, settled
from figures.items import Drawing, Finding, Item
from figures.page import markdown, means, missing_runs, seeds_in_words
from figures.pfedla import overlap
from figures.recipe import PLAIN_SGD, labels, tested, trained, where
from figures.scheduling import runs as scheduling
from figures.verdicts import LEVEL, MARGIN, judged
from fl_core import rows, runner
from fl_core.config import RunConfig

NAME = "algorithms.witness"
SCORE = "accuracy"
OURS, THEIRS, REPAIRED = "here", "PFLlib", "PFLlib, put right"
SIDES = (OURS, THEIRS, REPAIRED)
ABSENT = f"absent: no checkout of PFLlib ({pfllib.VARIABLE})"
ROUNDS = 20

BASE = RunConfig(
    dataset="mnist", max_samples=20_000, partition="fedpft_dirichlet", alpha=0.3, clients=8, samples_per_client=200,
    model="mlp", rounds=ROUNDS, epochs=5, batch_size=200, lr=0.05, **PLAIN_SGD, eval_every=1, checkpoint_every=ROUNDS,
)  # fmt: skip
SAME: dict[str, dict[str, Any]] = {
    "fedavg": {}, "fedper": {}, "fedrep": {}, "ditto": {}, "scaffold": {},
    "fedala": {"share": 1.0, "first": 11, "threshold": 0.0},  # PFLlib tests for convergence after its 11th pass
}  # fmt: skip
"""What both compute alike, with what each is given beyond its defaults."""
DEPARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "fedbabu": (
        "PFLlib fine-tunes each client's last local model. The paper and this project fine-tune the averaged body.",
        {"finetune_epochs": 5, "finetune_at": tuple(range(1, ROUNDS))},
    ),
    "feddyn": (
        "PFLlib's penalty is alpha / 2 times the distance to the received model. The paper's has its square.",
        {"alpha": 0.1},
    ),
    "fedcac": (
        "PFLlib's first merge puts the initial model in the place of critical parameters. The paper has the mean of "
        "the client and similar clients there.",
        {
            "critical": 0.25
        },  # at the default, half, counts of parameters and weights near 0 are treated in unlike ways
    ),
    "pfedme": (
        "PFLlib's personal parameters are the model's own tensors. The received global tensors replace them before the "
        "test. The model that PFLlib calls personalised is thus the global one.",
        {"decay": 0.001},
    ),
}
"""Where PFLlib departs from a paper: in what, and options of the run."""


def recipes() -> dict[str, RunConfig]:
    """A run of every algorithm that both have."""
    options = {**SAME, **{name: given for name, (_, given) in DEPARTS.items()}}
    return {
        name: BASE.with_keys(algorithm=name, options=given)
        for name, given in options.items()
    }


def _measure(task: runner.Task, run: str, folder: Path) -> pd.DataFrame:
    """Record every client's test accuracy after every round, here and by PFLlib, as it is and put right."""
    _, frame = trained(task)
    accuracy = tested(frame)
    ours = accuracy[
        accuracy["model"]
        == ("personal" if (accuracy["model"] == "personal").any() else "global")
    ]
    sizes = dict(zip(ours["client"], ours["n_samples"], strict=True))
    named = {**labels(task), "split": "test"}
    lines = [
        rows.row(SCORE, line.value, variant=OURS, client=line.client, round=int(line.round), **named,
                 n_samples=sizes[line.client])
        for line in ours.itertuples()
    ]  # fmt: skip
    system = pfllib.checkout()
    for side in (THEIRS, REPAIRED) if run in DEPARTS else (THEIRS,):
        if system is None:
            lines.append(rows.row(SCORE, None, variant=side, status=ABSENT, **named))
            continue
        lines += [
            rows.row(
                SCORE,
                value,
                variant=side,
                client=client,
                round=done,
                n_samples=sizes[client],
                **named,
            )
            for done, client, value in pfllib.scores(task, system, side == REPAIRED)
        ]
    return rows.frame(lines)


# --- drawing ---------------------------------------------------------------------------------------------------


def side(frame: pd.DataFrame, run: str, which: str) -> pd.DataFrame:
    """One side's scores of a run, (seed, round) x clients; empty if it was absent."""
    own = where(frame, run=run, variant=which, status="ok")
    return own.astype({"seed": int, "round": int}).pivot(
        index=["seed", "round"], columns="client", values="value"
    )


def largest_difference(frame: pd.DataFrame, run: str, which: str) -> float:
    """The largest difference of a side's scores to ours, over seeds, rounds and clients; NaN if it was absent."""
    ours, other = side(frame, run, OURS), side(frame, run, which)
    both = ours.index.intersection(other.index)
    return (
        float((ours.loc[both] - other.loc[both]).abs().max(axis=None))
        if len(both)
        else float("nan")
    )


def alike_until(frame: pd.DataFrame, run: str, which: str) -> int:
    """The last round up to which a side has all of our scores; -1 if the first ones differ, or it was absent."""
    gaps = (
        (side(frame, run, OURS) - side(frame, run, which))
        .dropna(how="all")
        .abs()
        .max(axis=1)
    )
    by_round = gaps.groupby("round").max()
    parted = by_round.index[by_round >= TOLERANCE]
    return (
        int(parted[0]) - 1
        if len(parted)
        else int(by_round.index.max())
        if len(by_round)
        else -1
    )


def _draw(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    runs = [*SAME, *DEPARTS]
    with style():
        figure = plt.figure(figsize=(8.4, 5.4), layout="constrained")
        grid = figure.subplots(2, 5, sharex=True, sharey=True)
        for ax, run in zip(grid.flat, runs, strict=False):
            for which, look in zip(SIDES, LOOKS, strict=True):
                scores = side(frame, run, which)
                if len(scores):
                    curve = 100 * scores.mean(axis=1).groupby("round").mean()
                    ax.plot(curve.index, curve, label=which, **look)
            ax.set_title(names.title(run))
        for ax in grid[:, 0]:
            ax.set_ylabel("test accuracy, %")
        for ax in grid[-1]:
            ax.set_xlabel("round")
        for spare in grid.flat[len(runs) :]:
            spare.remove()
        handles, shown = grid.flat[len(runs) - 1].get_legend_handles_labels()
        figure.legend(handles, shown, loc="outside upper center", ncols=len(SIDES))
    pairs = [
        (run, which)
        for run in runs
        for which in ((THEIRS, REPAIRED) if run in DEPARTS else (THEIRS,))
    ]
    table = pd.DataFrame(pairs, columns=["run", "beside"])
    table["scores"] = [side(frame, *pair).size for pair in pairs]
    table["largest_difference"] = [largest_difference(frame, *pair) for pair in pairs]
    table["alike_until"] = [alike_until(frame, *pair) for pair in pairs]
    config = next(iter(header["runs"].values()))["config"]
    caption = (
        "Mean test accuracy of the clients by round here and in PFLlib. Both have the same split and initial weights. "
        "From FedBABU on PFLlib departs from the papers, and is also shown with the departure corrected. "
        f"MNIST: {config['clients']} clients with {config['samples_per_client']} training samples each by "
        f"Dirichlet({config['alpha']:g}). An MLP trains for {config['rounds']} rounds of {config['epochs']} steps on "
        f"all of a client's samples with lr {config['lr']:g} and {seeds_in_words(header['seeds'])}."
    )
    cells = {
        "algorithm": [names.title(run) for run in table["run"]],
        "beside": list(table["beside"]),
        "scores compared": [str(count) for count in table["scores"]],
        "largest difference, points": [
            "absent" if pd.isna(value) else f"{100 * value:.2f}"
            for value in table["largest_difference"]
        ],
        "no difference up to round": [
            "–" if last < 0 else str(last) for last in table["alike_until"]
        ],
    }
    departures = "\n".join(
        f"- **{names.title(run)}.** {text}" for run, (text, _) in DEPARTS.items()
    )
    rounding = (
        "Some scores differ only after several rounds. Rounding is the likely reason. SCAFFOLD's variates multiply it "
        "from round to round and FedCAC's thresholds depend on it. This was not tested."
    )
    text = f"{markdown(cells)}\n\n{rounding}\n\nWhere PFLlib departs from the papers:\n\n{departures}"
    return Drawing(figure, table, caption, tuple(_findings(frame)), text)


LOOKS = (
    {"color": COLOURS[0], "linewidth": 3.2, "alpha": 0.5},
    {"color": COLOURS[1], "linewidth": 1.2},
    {"color": COLOURS[2], "linewidth": 1.2, "linestyle": "--"},
)
"""Of ours a broad line, so that one that agrees is seen upon it."""


def _findings(frame: pd.DataFrame) -> list[Finding]:
    found = []
    for run in SAME:
        gap = largest_difference(frame, run, THEIRS)
        found.append(
            Finding(
                f"{names.title(run)}: PFLlib has every client's score of every round",
                _said(gap, alike_until(frame, run, THEIRS)),
                None if pd.isna(gap) else gap < TOLERANCE,
            )
        )
    for run in DEPARTS:
        as_it_is, repaired = (
            largest_difference(frame, run, THEIRS),
            largest_difference(frame, run, REPAIRED),
        )
        absent = pd.isna(as_it_is) or pd.isna(repaired)
        found.append(
            Finding(
                f"{names.title(run)}: PFLlib has other scores and with its departure corrected ours",
                f"{_said(as_it_is)}. Corrected: {_said(repaired, alike_until(frame, run, REPAIRED))}",
                None if absent else as_it_is >= TOLERANCE > repaired,
            )
        )
    return found


TOLERANCE = 0.001
"""A difference of accuracy below it is none: a client's one sample more is at least ten times as much."""


def _said(gap: float, until: int = -1) -> str:
    equal = (
        f" (not at all up to round {until})" if gap >= TOLERANCE and until >= 0 else ""
    )
    return (
        "absent"
        if pd.isna(gap)
        else f"differs by at most {100 * gap:.2f} points{equal}"
    )


items.register(Item(
    NAME, "A second witness: PFLlib and this project", recipes(), seeds=1,
    budget="some minutes of one core, with a checkout of PFLlib", measure=_measure, draw=_draw,
))  # fmt: skip


# --- in the papers' settings -----------------------------------------------------------------------------------

PAPERS = {
    "scheduling_fedavg": scheduling.RUNS["cifar10.fedavg"],
    "scheduling_fedper": scheduling.RUNS["cifar10.fedper"],
    "pfedla_fedavg": overlap.RUNS["fedavg"],
}
"""Runs of the papers' studies on CIFAR-10 with plain SGD, which alone PFLlib has."""


def _draw_papers(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    scores, gaps = {}, {}
    for run in filter(header["had"].get, PAPERS):
        ours, theirs = (
            side(frame, run, which).mean(axis=1).unstack("seed")
            for which in (OURS, THEIRS)
        )
        both = {OURS: ours, THEIRS: theirs.reindex(ours.index)}
        gaps[run] = settled(pd.concat(both), THEIRS, OURS)
        scores[run] = last_evaluations(pd.concat(both))
    cells = {"run": list(gaps)}
    cells |= {
        f"{which} %": [means(scores[run], [which])[0] for run in gaps]
        for which in (OURS, THEIRS)
    }
    cells["seeds"] = [str(gap.pairs) for gap in gaps.values()]
    caption = (
        "Mean test accuracy of the clients in settings of the papers, by the last three evaluations. Both sides have "
        "the same split and initial weights. PFLlib draws batches and clients in its own order, and drops batches that "
        f"are not full.{missing_runs(header)}"
    )
    found = judged(gaps, LEVEL).finding(
        f"PFLlib and this project are level within {100 * MARGIN:g} point",
        "PFLlib's points more: ",
    )
    return Drawing(None, pd.DataFrame(cells), caption, (found,), markdown(cells))


items.register(Item(
    "algorithms.pfllib", "PFLlib next to this project in settings of the papers", PAPERS, seeds=5, measure=_measure,
    draw=_draw_papers, partial=True, budget="an hour of one core, with a checkout of PFLlib",
))  # fmt: skip
