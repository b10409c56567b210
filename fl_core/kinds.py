"""Kinds of paths that a user names, such as a run or a table, and the commands that take them."""

from __future__ import annotations

import os
from enum import Enum
from itertools import islice
from pathlib import Path

from fl_core.errors import UsageError, listing, nearest

DATA = (".csv", ".tsv", ".parquet", ".npz", ".jsonl")
"""The suffixes of files of samples."""
LOOKED_AT = 200
"""Entries of a folder, at most, among which runs are sought."""


class Kind(Enum):
    """A kind of path. Its value is what messages call it."""

    NOTHING = "nothing there"
    RUN = "a run"
    RUNS = "a folder of runs"
    DECISION = "a decision"
    DIAGNOSIS = "a diagnosis"
    MODELS = "exported models"
    PLAN = "a plan"
    SAMPLES = "samples"
    FILE = "a file"
    FOLDER = "a folder"


NEXT = {
    Kind.NOTHING: "Correct the path. fedlayers runs FOLDER lists the runs in a folder.",
    Kind.RUN: "A run has scores and models: fedlayers plot {path}, or fedlayers diagnose {path}.",
    Kind.RUNS: "Name one of its runs: {inside}.",
    Kind.DECISION: "Export its models: fedlayers export {path} --out {path}_models. Its runs are below {path}/arms.",
    Kind.DIAGNOSIS: "It goes to fedlayers select {path}, or fedlayers plot {path}.",
    Kind.MODELS: "Predict with them: fedlayers predict {path} --data TABLE.",
    Kind.PLAN: "Train with it: fedlayers run --algorithm fedper --plan {path}.",
    Kind.SAMPLES: "Check it: fedlayers check {path}. Then train on it: fedlayers run {path}.",
    Kind.FILE: "Name another path.",
    Kind.FOLDER: "Name another path. fedlayers runs {path} lists the runs in it.",
}
"""Advice on a path of each kind in a wrong place, such as a command that takes it.

The texts have places for the path, and for the runs inside a folder.
"""
TOWARDS = {
    (
        "diagnosis",
        Kind.RUN,
    ): "Measure it first: fedlayers diagnose {path} --out diagnosis.",
    (
        "diagnosis",
        Kind.SAMPLES,
    ): "Train and measure first: fedlayers diagnose --dataset {path}.",
    (
        "exported model",
        Kind.RUN,
    ): "Export it first: fedlayers export {path} --out model.safetensors.",
    (
        "exported model",
        Kind.DECISION,
    ): "Export its models first: fedlayers export {path} --out {path}_models.",
    (
        "exported model",
        Kind.SAMPLES,
    ): "Name the models first: fedlayers predict MODELS --data {path}.",
    ("table", Kind.RUN): "It was trained already: fedlayers plot {path}.",
    ("data", Kind.RUN): "It was trained already: fedlayers plot {path}.",
}
"""Advice by what is needed and the kind of the path that was named. It takes precedence over :data:`NEXT`."""


def kind_of(path: Path | str) -> Kind:
    """Return the kind of a path, by its name and the names of files in it or next to it.

    No file is opened.

    >>> kind_of("nowhere").value
    'nothing there'
    """
    path = Path(path)
    if not path.exists():
        return Kind.NOTHING
    if path.is_file():
        if path.name == "rows.jsonl":
            return Kind.DIAGNOSIS
        if path.suffix.lower() in DATA:
            return Kind.SAMPLES
        if path.with_name(f"{path.name}.json").is_file():
            return Kind.MODELS
        if path.name == "plan.json":
            return Kind.PLAN
        return Kind.FILE
    if (path / "config.json").is_file():
        return Kind.RUN
    if (path / "choice.json").is_file():
        return Kind.DECISION
    if (path / "rows.jsonl").is_file():
        return Kind.DIAGNOSIS
    if any(path.glob("*.safetensors.json")):
        return Kind.MODELS
    if runs_in(path):
        return Kind.RUNS
    tables = (file for file in path.glob("*") if file.suffix.lower() in DATA)
    if any(tables):
        return Kind.SAMPLES
    return Kind.FOLDER


def runs_in(path: Path) -> list[str]:
    """Return the sorted paths of the runs directly in a folder, among at most :data:`LOOKED_AT` of its entries."""
    entries = sorted(islice(path.glob("*"), LOOKED_AT))
    return [str(folder) for folder in entries if (folder / "config.json").is_file()]


CORRECT = "Correct its path."


def near_path(path: Path | str) -> str:
    """Return the advice on a path that does not exist: the nearest name in the last folder that exists.

    A file of that name with the suffix ``.safetensors`` is nearest. Without a near name
    it is :data:`CORRECT`.
    """
    path = Path(path)
    folder = next(ancestor for ancestor in (path, *path.parents) if ancestor.is_dir())
    missing_part, *deeper_parts = path.relative_to(folder).parts
    names = [name for name in os.listdir(folder) if name != missing_part]
    nearest_name = nearest(missing_part, names)
    if f"{missing_part}.safetensors" in names:
        nearest_name = f"{missing_part}.safetensors"
    if not nearest_name:
        return CORRECT
    nearest_file = str(folder.joinpath(nearest_name, *deeper_parts))
    return f"Did you mean {nearest_file!r}?"


def wrong_kind(path: Path | str, needed: str, rule: str) -> UsageError:
    """Return the error for a path of another kind than is needed. It names both kinds, and a command for the path.

    >>> print(wrong_kind("nowhere", "run", "a directory with a config.json"))
    run must be a directory with a config.json; got 'nowhere', nothing there. Correct the path. ...

    Args:
        path: the path that was named.
        needed: the kind of path: ``run``, ``diagnosis``, ``exported model``, ``table`` or ``data``.
        rule: what the path must be, in words.
    """
    kind = kind_of(path)
    advice = TOWARDS.get((needed, kind), NEXT[kind])
    run_names = ""
    if kind is Kind.RUNS:
        run_names = listing(runs_in(Path(path)), 3)
    advice = advice.format(path=path, inside=run_names)
    if kind is Kind.NOTHING and (near_advice := near_path(path)) != CORRECT:
        advice = near_advice
    return UsageError(
        f"{needed} must be {rule}; got {str(path)!r}, {kind.value}. {advice}"
    )
