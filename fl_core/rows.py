"""The schema of rows, for runs and for diagnostics, its JSON-lines file, and the scores by name.

A file is a header line followed by one row per line. ``value`` is null exactly if ``status`` is not ``"ok"``. A value
that could not be computed is a row with the reason. It is never 0 and never left out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fl_core import storage
from fl_core.errors import (
    COUNT,
    NUMBER,
    CorruptError,
    MapOf,
    UsageError,
    check_known,
    check_stored,
    damaged,
    listing,
)
from fl_core.kinds import Kind, kind_of, wrong_kind
from fl_core.storage import check_version, write_atomically

if TYPE_CHECKING:
    import pandas as pd

SCHEMA = 1
COLUMNS: dict[str, str] = {
    "run": "name of the run directory or study, empty for a direct diagnosis",
    "algorithm": "registry name, empty for a direct diagnosis",
    "seed": "the run's seed",
    "round": "rounds completed when the value was taken; 0 = before the first aggregation",
    "model": "which model: global, local, personal (or a name such as personal@best_val)",
    "split": "train, validation, test, or probe",
    "client": "client name; empty for a combined value",
    "client_b": "the second client of a pair",
    "layer": "exact layer name; empty for a whole model",
    "metric": "registry name of the metric",
    "variant": "which definition of the metric; empty for its only one",
    "value": "the number; null where status is not ok",
    "stderr": "standard error of the value; 0 = exact; null = not known",
    "estimator": "how the value was obtained",
    "unit": "unit of the value; empty for a pure number",
    "n_params": "parameters that the value covers",
    "n_samples": "samples that the value was computed from",
    "n_train": "training samples of the client (its weight)",
    "status": "ok, or why there is no value",
}
_HEADER = {
    "seed?": (COUNT, None),
    "layers?": list,
    "metrics?": dict,
    "pairs?": (MapOf(str), None),
    "bytes?": MapOf(NUMBER),
    "absent?": [str],
    "loss?": str,
}
"""The form of the entries of a header that are read again."""
_INTEGERS = ("seed", "round", "n_params", "n_samples", "n_train")
_NUMBERS = ("value", "stderr")
_SIZED = (*_INTEGERS, *_NUMBERS)
_SIZES = frozenset((int, float, type(None)))
_TEXTS = _SIZES | {str, bool}

Row = dict[str, Any]


def row(metric: str, value: float | None, *, status: str = "ok", **columns: Any) -> Row:
    """Return one row of the schema. Omitted numbers are None, and omitted texts are empty.

    A value that is None or not finite needs a ``status`` that gives the reason.

    >>> row("weight_norm", 0.7, client="north", layer="fc1")["status"]
    'ok'
    >>> row("weight_norm", math.inf, status="the layer has no weights", client="north", layer="pool")["value"] is None
    True
    >>> row("loss", math.nan)
    Traceback (most recent call last):
        ...
    fl_core.errors.UsageError: loss: the value must be finite with status 'ok'; got nan. Give a status that says why.
    >>> row("loss", 1.0, status="diverged")
    Traceback (most recent call last):
        ...
    fl_core.errors.UsageError: loss: the value must be left out with status 'diverged'; got 1.0.
    >>> row("loss", 1.0, clientt="a")
    Traceback (most recent call last):
        ...
    KeyError: "columns must be in the schema of rows; got ['clientt']."

    Args:
        metric: name of the metric.
        value: the number. A number that is not finite is stored as None.
        status: ``ok``, or why there is no value.
        columns: further columns of :data:`COLUMNS`, by name. A ``stderr`` that is not
            finite is stored as None.

    Raises:
        KeyError: a column is not in the schema.
        UsageError: the value is missing or not finite although the status is ok, or finite with another status.
    """
    unknown_columns = set(columns) - set(COLUMNS)
    if unknown_columns:
        unknown_names = sorted(unknown_columns)
        raise KeyError(f"columns must be in the schema of rows; got {unknown_names}.")
    got_value = value
    if value is not None and not math.isfinite(value):
        value = None
    if value is None and status == "ok":
        raise UsageError(
            f"{metric}: the value must be finite with status 'ok'; got {got_value}. Give a status that says why."
        )
    if value is not None and status != "ok":
        raise UsageError(
            f"{metric}: the value must be left out with status {status!r}; got {value}."
        )
    if columns.get("stderr") is not None and not math.isfinite(columns["stderr"]):
        columns["stderr"] = None
    fields = {
        "metric": metric,
        "value": None if value is None else float(value),
        "status": status,
        **columns,
    }
    return {name: fields.get(name, None if name in _SIZED else "") for name in COLUMNS}


def dumps(record: dict[str, Any]) -> str:
    """Return a dictionary as one line of JSON, without a line end.

    Raises:
        ValueError: a number is NaN or infinite. JSON has no such numbers.
    """
    return json.dumps(record, allow_nan=False, separators=(",", ":"))


def frame(rows: Iterable[Row]) -> pd.DataFrame:
    """Return a tidy frame with every column of the schema.

    Missing numbers are NaN in ``value`` and ``stderr``. The columns of whole numbers
    are pandas' Int64, and have NA for missing numbers.
    """
    import pandas as pd  # here alone: who only checks or appends rows goes without

    rows = list(rows)
    table = pd.DataFrame(rows, columns=list(COLUMNS))
    for name in _NUMBERS:
        table[name] = pd.to_numeric(table[name])
    for name in _INTEGERS:
        # exact, without floats
        table[name] = pd.array([row.get(name) for row in rows], dtype="Int64")
    return table


def joined(frames: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Return the rows of several frames of :func:`frame` as one frame, in order.

    Raises:
        ValueError: no frame has a row.

    >>> one = frame([row("loss", 0.5, client="a")])
    >>> joined([one, one[:0], one])["value"].tolist()
    [0.5, 0.5]
    """
    import pandas as pd

    return pd.concat([frame for frame in frames if len(frame)], ignore_index=True)


def records(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Return each line of a table as a dictionary by column, with None for missing values."""
    rows: list[dict[str, Any]] = (
        table.astype(object).where(table.notna(), None).to_dict("records")
    )
    return rows


def write(path: Path, header: dict[str, Any], rows: Iterable[Row]) -> None:
    """Write a file of rows atomically: a reader sees the old file or the new one, never a part.

    Args:
        path: the file's path. Missing folders are made.
        header: entries of the header line. The schema is added to them.
        rows: the rows, from :func:`row`.

    Raises:
        ValueError: a number is NaN or infinite.
    """
    lines = [dumps({"schema": SCHEMA, **header}), *(dumps(record) for record in rows)]
    write_atomically(Path(path), ("\n".join(lines) + "\n").encode())


def read(
    path: Path, complete: int | None = None
) -> tuple[dict[str, Any], pd.DataFrame]:
    """Return the header of a file of rows, and the frame of its rows.

    Args:
        path: the file's path.
        complete: for a file that is being appended to, the bytes that must be valid. An
            incomplete last line after them is not read. None means that the whole file
            must be valid.

    Raises:
        UsageError: the file does not exist, is not a rows file, or has another version's schema.
        CorruptError: a line is damaged.
    """
    path = Path(path)
    header = read_header(path)
    data = storage.read_bytes(path)
    lines = []
    if complete is not None and len(data) > complete:
        data = data[: data.rfind(b"\n") + 1]
    for number, line in enumerate(data.splitlines()[1:], 2):
        with damaged(f"{path}, line {number}"):  # no JSON, or beyond the limits
            record = storage.parsed_json(line)
            if not _is_row(record):
                raise ValueError("it is no row of the schema")
        lines.append(record)
    return header, _frame(path, lines)


def check_rows(what: Path | str, lines: Iterable[Any]) -> pd.DataFrame:
    """Check rows from elsewhere, such as from another machine, and return their frame.

    Args:
        what: the file or sender of the rows, for errors.
        lines: the rows.

    Raises:
        CorruptError: a row has other columns or types than the schema, or a value that contradicts its status or is
            outside its score's range.
    """
    lines = list(lines)
    if not all(map(_is_row, lines)):
        raise CorruptError(f"{what} is damaged: a line is not a row")
    return _frame(what, lines)


def _frame(path: Path | str, lines: Iterable[Row]) -> pd.DataFrame:
    try:
        table = frame(lines)
    except (
        OverflowError,
        TypeError,
    ) as error:  # a number beyond 64 bits, or a fraction in place of a count
        raise CorruptError(
            f"{path} is damaged: a row does not fit the schema ({error})"
        ) from error
    _check_values(path, table)
    return table


def _check_values(path: Path | str, table: pd.DataFrame) -> None:
    """Refuse a value beyond its score's range or against its status, and infinite values or errors, or ones below 0.

    Raises:
        CorruptError: there is such a value. The message has the first.
    """
    value = table["value"]
    lowest, highest = (
        table["metric"].map({name: score.ends[k] for name, score in TABLE.items()})
        for k in (0, 1)
    )
    is_wrong = (
        (value.isna() == (table["status"] == "ok"))
        | (value.abs() == math.inf)
        | (table["stderr"] == math.inf)
        | (table["stderr"] < 0)
    )
    is_wrong |= (value < lowest - ROUNDING) | (value > highest + ROUNDING)
    if is_wrong.any():
        row = table[is_wrong].iloc[0]
        contents = f"the value {row['value']} with status {row['status']!r}"
        metric_name = row["metric"] or "metric"
        raise CorruptError(f"{path} is damaged: no {metric_name} has {contents}")


def read_header(path: Path) -> dict[str, Any]:
    """Return only the header of a file of rows.

    Raises:
        UsageError: the file does not exist, its first line is no header, or it has another version's schema.
        CorruptError: an entry of the header has another form.
    """
    path = Path(path)
    if not path.is_file():
        raise _refusal(path, "no file there")
    with storage.opened(path) as file:
        first_line = file.readline(storage.HEADER_BYTES)
    try:
        header = storage.parsed_json(first_line)
    except ValueError as error:  # no JSON, no UTF-8, or beyond the limits
        raise _refusal(path, "a first line that is no header") from error
    if not isinstance(header, dict) or "schema" not in header:
        raise _refusal(path, "a first line without a schema")
    if not check_version(
        path, f"fedlayers.rows/{header['schema']}", f"fedlayers.rows/{SCHEMA}"
    ):
        raise _refusal(path, f"schema {header['schema']!r}")
    check_stored(f"{path}, line 1", header, _HEADER)
    return header


def _refusal(path: Path, contents: str) -> UsageError:
    if kind_of(path) not in (Kind.DIAGNOSIS, Kind.FILE):
        is_named_path = path.exists() or path.name != "rows.jsonl"
        return wrong_kind(
            path if is_named_path else path.parent,
            "diagnosis",
            "a folder or file of fedlayers diagnose",
        )
    return UsageError(
        f"{path} must be a file of rows; got {contents}. Make one with fedlayers diagnose."
    )


def _is_row(record: object) -> bool:
    if (
        not isinstance(record, dict)
        or record.keys() != COLUMNS.keys()
        or not _TEXTS.issuperset(map(type, record.values()))
    ):
        return False
    return _SIZES.issuperset(map(type, map(record.__getitem__, _SIZED)))


CLASSIFICATION = "classification"
REGRESSION = "regression"
SURVIVAL = "survival"
MULTILABEL = "multilabel"
TASKS = (CLASSIFICATION, REGRESSION, SURVIVAL, MULTILABEL)
"""Kinds of task: predict one of several classes, a number, the order of events, or several labels of 0 and 1."""
POSITIONS = "labels at positions"
"""The task of a sequence or an image whose positions have a class each. Data from Python have it."""
OWN = "own loss"
"""The task of a loss from Python whose outputs or labels fit no other task. The loss is its only score."""


def task_of(dimensions: int, classes: Sequence[str]) -> str:
    """Return the task of targets with that number of dimensions and these names of classes or labels.

    Args:
        dimensions: the number of dimensions of all targets together: 1 for [n], 2 for
            [n, L].
        classes: names of classes, or of labels with two dimensions; empty for others.

    >>> task_of(1, ("no", "yes")), task_of(1, ()), task_of(2, ()), task_of(2, ("cough", "fever"))
    ('classification', 'regression', 'survival', 'multilabel')
    """
    if dimensions == 1:
        if classes:
            return CLASSIFICATION
        return REGRESSION
    if classes:
        return MULTILABEL
    return SURVIVAL


@dataclass(frozen=True)
class Score:
    """A kind of score: its name, its direction, its task and its range, without a value.

    :func:`fl_core.training.evaluate.scores` has the formulas.

    Attributes:
        label: its name in tables and pictures.
        higher_is_better: whether a higher value is better. Otherwise a lower one is.
        share: whether it is between 0 and 1 and shown in percent.
        task: the task that has the score: one of :data:`TASKS`, or :data:`POSITIONS`. Here
            :data:`OWN` means every task, as for the loss.
        missing: the reason in a row if the samples give no value. It is empty for a
            score that always has a value.
        range: its least and greatest value, if it is not a share.
    """

    label: str
    higher_is_better: bool
    share: bool
    task: str
    missing: str = ""
    range: tuple[float, float] = (-math.inf, math.inf)

    @property
    def ends(self) -> tuple[float, float]:
        """Return the least and the greatest value that the score can have."""
        if self.share:
            return (0.0, 1.0)
        return self.range


ROUNDING = 1e-6
"""How far beyond its range rounding may take a score."""
_ONE_CLASS = "the samples are all of one class"
_NO_POSITION = "no position of the samples counts"
_ONE_VALUE = "each label has one value only among the samples"

TABLE: dict[str, Score] = {
    "accuracy": Score("accuracy", True, True, CLASSIFICATION),
    "macro_f1": Score("macro-F1", True, True, CLASSIFICATION),
    "loss": Score("loss", False, False, OWN),
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
        (-math.inf, 1.0),
    ),
    "c_index": Score(
        "C-index",
        True,
        False,
        SURVIVAL,
        "no pair of samples can be compared",
        (0.0, 1.0),
    ),
    "position_accuracy": Score(
        "accuracy over positions", True, True, POSITIONS, _NO_POSITION
    ),
    "perplexity": Score(
        "perplexity", False, False, POSITIONS, _NO_POSITION, range=(1.0, math.inf)
    ),
    "mean_iou": Score("mean IoU", True, True, POSITIONS, _NO_POSITION),
    "macro_auroc": Score("macro-AUROC", True, True, MULTILABEL, _ONE_VALUE),
    "macro_auprc": Score("macro-AUPRC", True, True, MULTILABEL, _ONE_VALUE),
}

SCORES: dict[str, bool] = {
    name: score.higher_is_better for name, score in TABLE.items()
}
"""Every score, and whether higher is better."""

SELECTION = {
    CLASSIFICATION: ("macro_f1", "loss"),
    REGRESSION: ("loss",),
    SURVIVAL: ("c_index", "loss"),
    MULTILABEL: ("macro_auroc", "loss"),
    POSITIONS: ("loss",),
    OWN: ("loss",),
}
"""The scores that select a run's best round, and so its end, by task.

The round with the least sum of ranks is best. The first score decides ties.
"""


SHOWN = {
    CLASSIFICATION: ("macro_f1", "accuracy", "loss"),
    REGRESSION: ("r2", "mae", "loss"),
    SURVIVAL: ("c_index", "loss"),
    MULTILABEL: ("macro_auroc", "macro_auprc", "loss"),
    POSITIONS: ("position_accuracy", "mean_iou", "loss"),
    OWN: ("loss",),
}
"""The scores in a comparison's printed table by task, unless another score is asked for."""
MAIN = {task: names[0] for task, names in SHOWN.items()}
"""The score for ranking algorithms and judging races by task, next to the loss."""


OF_CLASS = ("auroc", "auprc")
"""Scores that with two classes belong to the positive one. Their rows name it as the variant."""


def scores_of(task: str) -> list[str]:
    """Return the names of the scores of a kind of task. The loss belongs to every task.

    >>> scores_of("survival")
    ['loss', 'c_index']
    """
    return [name for name, score in TABLE.items() if score.task in (OWN, task)]


def check_score(name: str, task: str) -> str:
    """Return a score's name if it belongs to that kind of task.

    Raises:
        UsageError: the score does not belong to it. The message names the score, the
            nearest, and the known ones.
    """
    return check_known(f"score of {task}", name, scores_of(task))


def main_score(there: Container[str]) -> str:
    """Return the main score of the task that has these scores; ``macro_f1`` if none of them is a main score.

    >>> main_score(["loss", "mse", "r2"])
    'r2'
    """
    return next(
        (score for score in MAIN.values() if score in there), MAIN[CLASSIFICATION]
    )


def selecting_scores(task: str, named: str | None = None) -> tuple[str, ...]:
    """Return the scores that select the best round of a kind of task, or only the named one if there is a name.

    >>> selecting_scores("regression"), selecting_scores("classification"), selecting_scores("survival", "loss")
    (('loss',), ('macro_f1', 'loss'), ('loss',))
    """
    if named:
        return (named,)
    return SELECTION[task]


def why_missing(name: str, value: float) -> str:
    """Return the status of a row for a score's value: ``ok``, or why it is not finite.

    A NaN has the score's own reason, if it has one. Any other value is called
    ``not finite``.

    >>> why_missing("auroc", 0.7), why_missing("auroc", float("nan")), why_missing("loss", float("inf"))
    ('ok', 'the samples are all of one class', 'not finite')
    """
    if math.isfinite(value):
        return "ok"
    reason = ""
    if name in TABLE and math.isnan(value):
        reason = TABLE[name].missing
    return reason or "not finite"


USED = ("personal", "global")
"""The models that a client may use at the end, in this order."""


def used_model(models: Container[str]) -> str:
    """Return which of its models a client uses: ``personal`` if it is among the names, else ``global``."""
    if USED[0] in models:
        return USED[0]
    return USED[1]


def without_score(table: pd.DataFrame) -> pd.Series:
    """Return whether each row lacks a score that its client's samples cannot give, bool [rows].

    Such a score, as AUROC of one class, is missing for every model and in every round. A value that is missing since
    a model diverged does not count.

    Args:
        table: rows of one or several runs, for all models and rounds.
    """
    keys = [table[name] for name in ("seed", "split", "client", "metric")]
    is_never_there = table["value"].isna().groupby(keys, dropna=False).transform("all")
    missing_reason = table["metric"].map(
        {name: score.missing for name, score in TABLE.items()}
    )
    return (
        is_never_there & (table["client"] != "") & (table["status"] == missing_reason)
    )


def client_mean(table: pd.DataFrame, lacking: pd.Series) -> float:
    """Return the mean of clients' values, weighted by training samples.

    It is NaN if all rows are left out, or if a value of the others is missing.

    Args:
        table: rows of one score, with ``n_train``.
        lacking: whether each row is left out (:func:`without_score`), with the index of the table.
    """
    from fl_core import statistics  # with pandas, which others go without

    table = table[~lacking[table.index]]
    if table.empty:
        return math.nan
    return statistics.combine(table["value"].astype(float), table["n_train"])


def left_out(lacking: pd.DataFrame) -> list[str]:
    """Return a line for each score and reason: the clients without a value, their seeds, and the reason.

    Args:
        lacking: the rows that :func:`without_score` marks. Without any, there are no
            lines.
    """
    lines = []
    for (name, reason), rows in lacking.groupby(["metric", "status"], sort=False):
        seeds = sorted(map(str, rows["seed"].unique()))
        with_seed = f"with seed{'s' * (len(seeds) > 1)} {listing(seeds)}"
        clients = listing(rows["client"].unique())
        label = label_of(str(name))
        lines.append(f"{label} leaves out {clients} {with_seed}: {reason}")
    return lines


def of_class(name: str, positive: str) -> str:
    """Return the suffix ``of CLASS`` for a score of the positive class; empty for other scores or without a class.

    >>> of_class("auroc", "died"), of_class("macro_f1", "died")
    (" of 'died'", '')
    """
    if positive and name in OF_CLASS:
        return f" of {positive!r}"
    return ""


def positive_in(rows: pd.DataFrame) -> str:
    """Return the class that rows of AUROC and AUPRC name as positive; empty for none or several."""
    classes = {
        str(name)
        for name in rows.loc[rows["metric"].isin(OF_CLASS), "variant"].unique()
    } - {""}
    if len(classes) == 1:
        return classes.pop()
    return ""


def label_of(name: str, positive: str = "") -> str:
    """Return a score's name for tables and pictures. A name that is no score has its underscores replaced by spaces.

    >>> label_of("balanced_accuracy"), label_of("auroc"), label_of("train_loss")
    ('balanced accuracy', 'AUROC', 'train loss')

    Args:
        positive: the positive class; ``auroc`` and ``auprc`` then end with `` of 'CLASS'``.
    """
    return (TABLE[name].label if name in TABLE else name.replace("_", " ")) + of_class(
        name, positive
    )


def in_column(name: str, value: float) -> str:
    """Return a score's value as text: a share in percent with one decimal, other values with three decimals.

    >>> in_column("macro_f1", 0.617), in_column("r2", -0.332)
    ('61.7', '-0.332')

    Raises:
        KeyError: the name is none of :data:`TABLE`.
    """
    if TABLE[name].share:
        return f"{100 * value:.1f}"
    return f"{value:.3f}"


def in_points(name: str, value: float) -> str:
    """Return a difference of a score's values as text: of a share in percentage points, else with three decimals.

    >>> in_points("macro_f1", 0.06), in_points("r2", 0.06)
    ('6.0 points', '0.060')

    Raises:
        KeyError: the name is none of :data:`TABLE`.
    """
    return in_column(name, value) + " points" * TABLE[name].share
