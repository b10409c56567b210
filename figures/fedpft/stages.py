"""FedPFT's Fig. 5: losses and accuracy by round, against two stages: first contrast, then classification.

Written before it was run. The paper's are on CIFAR-100, 1000 rounds a stage.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd

from diagnostics.plots.drawing import COLOURS, FAINT, MARKERS, style
from figures import items
from figures.differences import FEWEST, Difference, difference
from figures.fedpft import fitted
from figures.fedpft.fitted import OURS
from figures.items import Drawing, Finding, set_apart
from figures.page import missing_runs
from figures.recipe import Recipe, labels, mean_accuracy, trained
from fl_core import rows, runner

FEW = "12 of the paper's 1000 rounds, 10 of its 40 clients with 200 of its 500 images"
NAME = "fedpft.fig5"
TWO = "two_stage"
_EVERY: dict[str, Any] = {"eval_every": 1}
_FEDPFT = fitted.RUNS[OURS].with_keys(**_EVERY)
STAGE = int(_FEDPFT.federation.rounds or 0)
"""Rounds of each of the two stages, as many as FedPFT has in all; the paper has it so too."""


def _in_stages(stage: int) -> dict[str, Any]:
    return {
        "algorithm": TWO, "rounds": 2 * stage, "checkpoint_every": 2 * stage,
        "options": {"stage_rounds": stage, "watch": True},
    }  # fmt: skip


RUNS = {OURS: _FEDPFT, TWO: _FEDPFT.with_keys(**_in_stages(STAGE))}
_PAPER_STAGE = int(fitted.OF_PAPER["rounds"])
PAPER = {
    OURS: _FEDPFT.with_keys(**fitted.OF_PAPER | _EVERY),
    TWO: _FEDPFT.with_keys(**fitted.OF_PAPER | _EVERY | _in_stages(_PAPER_STAGE)),
}
CLASSIFY, CONTRAST, ACCURACY = "classify", "contrast", "accuracy"
SHOWN = {
    CONTRAST: "contrastive loss",
    CLASSIFY: "classification loss",
    ACCURACY: "accuracy %",
}


# --- measuring -------------------------------------------------------------------------------------------------


def _measure(task: runner.Task, run: str, folder: Path) -> pd.DataFrame:
    """The clients' mean accuracy by round, and of both losses the mean over a round's phases and clients."""
    _, frame = trained(task)
    named = labels(task)
    losses = frame[
        (frame["metric"] == "train_loss") & frame["variant"].str.contains("/", na=False)
    ]
    losses = losses.assign(kind=losses["variant"].str.rpartition("/")[2])
    lines = [
        rows.row(
            "train_loss",
            part["value"].mean(),
            variant=str(kind),
            round=int(done),
            split="train",
            **named,
        )
        for (done, kind), part in losses.groupby(["round", "kind"])
    ]
    return rows.frame([*mean_accuracy(frame, named), *lines])


# --- drawing ---------------------------------------------------------------------------------------------------


def curves(frame: pd.DataFrame) -> pd.DataFrame:
    """Return both losses and the personal models' accuracy by round.

    Lines are (run, quantity, round), columns seeds.
    """
    scored = (frame["metric"] == "accuracy") & (frame["model"] == "personal")
    kept = frame[scored | (frame["metric"] == "train_loss")]
    quantity = kept["variant"].where(kept["metric"] == "train_loss", ACCURACY)
    kept = kept.assign(quantity=quantity, round=kept["round"].astype(int))
    return kept.pivot_table(
        values="value", index=["run", "quantity", "round"], columns="seed"
    )


def _draw(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    values = curves(frame)
    runs, stage = [run for run in RUNS if run in set(frame["run"])], _stage(header)
    with style():
        figure = plt.figure(figsize=(8.2, 3.1), layout="constrained")
        axes = figure.subplots(1, len(SHOWN))
        for ax, (quantity, words) in zip(axes, SHOWN.items(), strict=True):
            for k, run in enumerate(runs):
                if (run, quantity) not in values.index.droplevel("round"):
                    continue
                own = values.loc[run, quantity]
                scale = 100 if quantity == ACCURACY else 1
                look: dict[str, Any] = {
                    "color": COLOURS[k],
                    "marker": MARKERS[k],
                    "markersize": 3,
                }
                ax.plot(
                    own.index.astype(float),
                    scale * own.mean(axis=1),
                    label=fitted.called(run),
                    **look,
                )
            if stage:
                ax.axvline(stage, color=FAINT, linestyle=":", linewidth=1, zorder=1)
            ax.set(xlabel="round", ylabel=words)
        handles, names = axes[-1].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside upper center", ncols=2, fontsize=7.5)
    table = (
        values.stack()
        .rename("value")
        .rename_axis(["run", "quantity", "round", "seed"])
        .reset_index()
    )
    caption = (
        "Training losses and test accuracy, as means over clients and seeds. The second stage begins at the dotted "
        "line. There the contrastive loss is evaluated and trains nothing. "
        f"{fitted.setting(header, ends(values))} Both stages have this number of rounds. "
        f"The paper shows its curves only in a picture.{missing_runs(header, runs)}"
    )
    return Drawing(
        figure,
        table,
        caption,
        set_apart(_findings(values, header), FEW if not items.at_paper(header) else ""),
    )


def _stage(header: Mapping[str, Any]) -> int | None:
    """The round after which the stored two-stage run began classification; None without such a run."""
    about = header["runs"].get(TWO)
    return int(about["config"]["options"]["stage_rounds"]) if about else None


def ends(values: pd.DataFrame) -> pd.DataFrame:
    """Accuracy after each run's last round, (run, accuracy) x seeds."""
    accuracy = values.xs(ACCURACY, level="quantity", drop_level=False)
    return accuracy.groupby("run", sort=False).tail(1).droplevel("round")


def _findings(values: pd.DataFrame, header: Mapping[str, Any]) -> list[Finding]:
    """Return the paper's claims on its Fig. 5, each after equally many rounds of a task (appendix E)."""
    final, stage = ends(values), _stage(header)
    learned = (
        values.drop(TWO, level="run", errors="ignore")
        if stage is None
        else values[_trains(values, stage)]
    )
    losses = learned.groupby(["run", "quantity"], sort=False).tail(1).droplevel("round")
    accuracy = difference(final, (OURS, ACCURACY), (TWO, ACCURACY))
    contrast, classify = (
        difference(losses, (OURS, kind), (TWO, kind)) for kind in (CONTRAST, CLASSIFY)
    )
    return [
        Finding(
            "FedPFT is more accurate than two stages",
            f"points more: {accuracy.text}",
            accuracy.above,
        ),
        Finding(
            "FedPFT's contrastive loss ends lower than that of the first stage",
            f"difference {_told(contrast)}",
            None if contrast.above is None else not contrast.above,
        ),
        Finding(
            "FedPFT's classification loss ends higher than that of the second stage: it overfits less",
            f"difference {_told(classify)}",
            classify.above,
        ),
    ]


def _trains(values: pd.DataFrame, stage: int) -> pd.Series:
    """Return whether a loss is of training: the contrastive one of the second stage is only looked at."""
    run, kind, done = (
        values.index.get_level_values(name) for name in ("run", "quantity", "round")
    )
    return pd.Series(
        ~((run == TWO) & (kind == CONTRAST) & (done > stage)), index=values.index
    )


def _told(gap: Difference) -> str:
    """A difference of losses with half its interval, and the verdict in brackets."""
    found = gap.interval
    return (
        f"{found.value:+.2f} ± {(found.high - found.low) / 2:.2f} ({gap.how or FEWEST})"
        if gap.pairs
        else "no pair"
    )


STUDY = items.register(Recipe(
    NAME, "FedPFT beside two stages: contrastive loss, classification loss and accuracy, CIFAR-10 (FedPFT, Fig. 5)",
    RUNS, seeds=3, measure=_measure, draw=_draw, paper=PAPER, paper_seeds=3,
    budget="some two hours of one core; a run takes 10 to 30 minutes",
))  # fmt: skip
