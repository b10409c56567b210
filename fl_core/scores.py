"""The scores of a model's predictions by name: labels, the better direction, and the kind of task."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fl_core.errors import check_known

if TYPE_CHECKING:
    import pandas as pd

CLASSIFICATION, REGRESSION, SURVIVAL, MULTILABEL = (
    "classification",
    "regression",
    "survival",
    "multilabel",
)
TASKS = (CLASSIFICATION, REGRESSION, SURVIVAL, MULTILABEL)
"""Kinds of task: predict one of several classes, a number, the order of events, or several labels of 0 and 1."""


def task_of(dimensions: int, classes: Sequence[str]) -> str:
    """Return the task of targets with that number of dimensions and these names of classes or labels.

    >>> task_of(1, ("no", "yes")), task_of(1, ()), task_of(2, ()), task_of(2, ("cough", "fever"))
    ('classification', 'regression', 'survival', 'multilabel')
    """
    if dimensions == 1:
        return CLASSIFICATION if classes else REGRESSION
    return MULTILABEL if classes else SURVIVAL


@dataclass(frozen=True)
class Score:
    """One score of a model on the samples of a split. :func:`fl_core.training.evaluate.scores` has the formulas.

    Attributes:
        label: its name in tables and pictures.
        higher_is_better: otherwise lower is.
        share: whether it is between 0 and 1 and shown in percent.
        task: of :data:`TASKS`, or "" for all.
        missing: the reason if it has no value.
        chance: its value for predictions that ignore the samples; NaN if it depends on the classes.
        range: its least and greatest value, if it is not a share.
    """

    label: str
    higher_is_better: bool
    share: bool
    task: str
    missing: str = ""
    chance: float = math.nan
    range: tuple[float, float] = (-math.inf, math.inf)

    @property
    def ends(self) -> tuple[float, float]:
        """The least and the greatest value that it can have."""
        return (0.0, 1.0) if self.share else self.range


ROUNDING = 1e-6
"""How far beyond its range rounding may take a score."""
_ONE_CLASS = "the samples are all of one class"
_ONE_VALUE = "each label has one value only among the samples"

TABLE: dict[str, Score] = {
    "accuracy": Score("accuracy", True, True, CLASSIFICATION),
    "macro_f1": Score("macro-F1", True, True, CLASSIFICATION),
    "loss": Score("loss", False, False, ""),
    "auroc": Score("AUROC", True, True, CLASSIFICATION, _ONE_CLASS),
    "auprc": Score("AUPRC", True, True, CLASSIFICATION, _ONE_CLASS),
    "balanced_accuracy": Score("balanced accuracy", True, True, CLASSIFICATION),
    "ece": Score("ECE", False, True, CLASSIFICATION),
    "mse": Score("MSE", False, False, REGRESSION, range=(0.0, math.inf)),
    "mae": Score("MAE", False, False, REGRESSION, range=(0.0, math.inf)),
    "r2": Score(
        "R2",
        True,
        False,
        REGRESSION,
        "the targets do not vary among the samples",
        0.0,
        (-math.inf, 1.0),
    ),
    "c_index": Score(
        "C-index",
        True,
        False,
        SURVIVAL,
        "no pair of samples can be compared",
        0.5,
        (0.0, 1.0),
    ),
    "macro_auroc": Score("macro-AUROC", True, True, MULTILABEL, _ONE_VALUE, 0.5),
    "macro_auprc": Score("macro-AUPRC", True, True, MULTILABEL, _ONE_VALUE),
}

SCORES: dict[str, bool] = {
    name: score.higher_is_better for name, score in TABLE.items()
}
"""Every score, and whether higher is better."""

MAIN = {
    CLASSIFICATION: "macro_f1",
    REGRESSION: "r2",
    SURVIVAL: "c_index",
    MULTILABEL: "macro_auroc",
}
"""The score for ranking algorithms and judging races, next to the loss."""

SELECTION = {
    CLASSIFICATION: ("macro_f1", "loss"),
    REGRESSION: ("loss",),
    SURVIVAL: ("c_index", "loss"),
    MULTILABEL: ("macro_auroc", "loss"),
}
"""The scores that select a run's best round, and so its end: the least sum of ranks, ties by the first."""


SHOWN = {
    CLASSIFICATION: ("macro_f1", "accuracy", "loss"),
    REGRESSION: ("r2", "mae", "loss"),
    SURVIVAL: ("c_index", "loss"),
    MULTILABEL: ("macro_auroc", "macro_auprc", "loss"),
}
"""The scores in a comparison's printed table, unless another is asked for."""


OF_CLASS = ("auroc", "auprc")
"""Scores that with two classes belong to the positive one. Their rows name it as the variant."""


def scores_of(task: str) -> list[str]:
    """Return the names of the scores of a kind of task.

    >>> scores_of("survival")
    ['loss', 'c_index']
    """
    return [name for name, score in TABLE.items() if score.task in ("", task)]


def check_score(name: str, task: str) -> str:
    """Return a score's name if it belongs to that kind of task.

    Raises:
        UsageError: it does not. The message names it, the nearest, and the known ones.
    """
    return check_known(f"score of {task}", name, scores_of(task))


def main_score(there: Container[str]) -> str:
    """Return the main score of the task with these scores.

    >>> main_score(["loss", "mse", "r2"])
    'r2'
    """
    return next(
        (MAIN[task] for task in TASKS if MAIN[task] in there), MAIN[CLASSIFICATION]
    )


def selecting_scores(task: str, named: str | None = None) -> tuple[str, ...]:
    """Return the scores that select in a kind of task, or the one that is named.

    >>> selecting_scores("regression"), selecting_scores("classification"), selecting_scores("survival", "loss")
    (('loss',), ('macro_f1', 'loss'), ('loss',))
    """
    return (named,) if named else SELECTION[task]


def why_missing(name: str, value: float) -> str:
    """Return the status of a row for a score's value: ``ok``, or why it is not finite.

    >>> why_missing("auroc", 0.7), why_missing("auroc", float("nan")), why_missing("loss", float("inf"))
    ('ok', 'the samples are all of one class', 'not finite')
    """
    if math.isfinite(value):
        return "ok"
    known = TABLE[name].missing if name in TABLE and math.isnan(value) else ""
    return known or "not finite"


def of_class(name: str, positive: str) -> str:
    """Return the suffix of a score's name if it is that of the positive class; empty for other scores.

    >>> of_class("auroc", "died"), of_class("macro_f1", "died")
    (" of 'died'", '')
    """
    return f" of {positive!r}" if positive and name in OF_CLASS else ""


def positive_in(rows: pd.DataFrame) -> str:
    """Return the class that the rows name as positive; empty for none or several."""
    found = {
        str(name)
        for name in rows.loc[rows["metric"].isin(OF_CLASS), "variant"].unique()
    } - {""}
    return found.pop() if len(found) == 1 else ""


def label_of(name: str, positive: str = "") -> str:
    """Return a score's name in tables and pictures. Other names are their own labels.

    >>> label_of("balanced_accuracy"), label_of("auroc"), label_of("train_loss")
    ('balanced accuracy', 'AUROC', 'train loss')
    """
    return (TABLE[name].label if name in TABLE else name.replace("_", " ")) + of_class(
        name, positive
    )


def column_of(name: str) -> str:
    """Return the column's name for a score's values from :func:`in_column`."""
    return f"{label_of(name)} %" if TABLE[name].share else label_of(name)


def in_column(name: str, value: float) -> str:
    """Return a score's value for a column: in percent if it is a share, otherwise unchanged.

    >>> in_column("macro_f1", 0.617), in_column("r2", -0.332)
    ('61.7', '-0.332')
    """
    return f"{100 * value:.1f}" if TABLE[name].share else f"{value:.3f}"


def in_points(name: str, value: float) -> str:
    """Return a difference of a score's values: in percentage points if it is a share, otherwise unchanged.

    >>> in_points("macro_f1", 0.06), in_points("r2", 0.06)
    ('6.0 points', '0.060')
    """
    return in_column(name, value) + " points" * TABLE[name].share
