"""A new client joins a finished run: from its own samples to its own model, scored and exported."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from fl_core import exported_model, stored_models, tree
from fl_core.choices import JOIN_EPOCHS
from fl_core.data import Source, arrays, partitions, spelling, tables, targets
from fl_core.data.columns import TABLES
from fl_core.data.federated import ClientData, Split
from fl_core.data.inputs import Inputs
from fl_core.data.partitions import SPLITS
from fl_core.data.silos import check_lengths, pair_of
from fl_core.errors import UsageError, listing
from fl_core.model_description import describe_model
from fl_core.newcomer import Newcomer, train_newcomer
from fl_core.records import store
from fl_core.scores import CLASSIFICATION, REGRESSION
from fl_core.task import Task

NAME = "new"
"""The default name of a new client."""


def join(
    path: Path | str,
    new: Any,
    *,
    client: str = NAME,
    epochs: Sequence[int] = JOIN_EPOCHS,
    out: Path | str | None = None,
    data: Any = None,
    model: Any = None,
    allow_code: str | Collection[str] = (),
) -> Newcomer:
    """Give a new client a model of a run: the shared layers, and a few epochs on its own training samples.

    The run may still train. Then the newest checkpoint is used. Layers that are not shared start as in the run's
    initial model. Its samples are prepared as in the run, and split by the run's seed. Its validation samples choose
    among the numbers of epochs.

    >>> import fedlayers as fl
    >>> draw = np.random.default_rng(0)
    >>> wards = {ward: (draw.normal(size=(40, 5)), np.arange(40) % 2) for ward in ("north", "south", "west")}
    >>> west = wards.pop("west")
    >>> result = fl.run(data=wards, model="mlp", algorithm="fedper", rounds=2, out="runs/two", progress=False)
    >>> made = fl.join("runs/two", west, client="west", epochs=(0, 2), data=wards)
    >>> made.table.columns.tolist(), made.table.index.tolist()
    (['joined', 'joined_head', 'alone'], [0, 2])

    Args:
        path: the run's directory.
        new: the client's samples: the path of a table, a DataFrame, a pair (x, y), a Dataset, or a DataLoader. Of a
            table with several clients, the rows with the client's name are used.
        client: its name.
        epochs: numbers of own epochs to try.
        out: a new file for its model, as :func:`fl_core.exported_model.export` writes it; None keeps the model in
            memory.
        data, model, allow_code: the run's own, as of :func:`fl_core.runner.resume`.

    Raises:
        UsageError: the samples do not fit the run, or its algorithm has no common model.
        CorruptError: stored files are damaged.
    """
    target = None if out is None else Path(out)
    format = "" if target is None else exported_model.format_of(target, None)
    if target is not None:
        exported_model.check_free(target)
    found = store.Run(path)
    round = "last" if found.stopping_rule() is None else found.best_round(None)
    task, checkpoint, algorithm = stored_models.restore_run(found, round, data=data, model=model, allow_code=allow_code)
    task.check_joinable()
    samples = _client(task, new, client)
    made = train_newcomer(
        task.config,
        task.data,
        samples,
        task.model,
        checkpoint.server.trees["model"],
        tree.state_dict(task.model),
        algorithm.plan,
        epochs,
        round=checkpoint.round,
        run=found.path.name,
    )
    if target is not None:
        about = describe_model(found, task, made.model, made.best[0], client, checkpoint.round)
        exported_model.write(target, format, about, made.model, task, model=model, allow_code=allow_code)
    return made


def _labels(values: Iterable[Any], classes: Sequence[str]) -> np.ndarray:
    """Return labels as text, as the classes are named: 1.0 is the class 1."""
    words = [str(value).strip() for value in values]
    if not classes:
        return arrays.text_array(words)
    whole = [word not in classes and spelling.is_number(word) and float(word).is_integer() for word in words]
    return arrays.text_array([str(int(float(word))) if each else word for word, each in zip(words, whole, strict=True)])


def _own_rows(clients: Iterable[Any], name: str, where: str) -> slice | np.ndarray:
    """Return the new client's rows of a table: all, or the rows with its name if there are several clients.

    Raises:
        UsageError: the table has several clients, and none of this name.
    """
    named = [str(client) for client in clients]
    known = sorted({*named})
    if len(known) < 2:
        return slice(None)
    if name not in known:
        raise UsageError(f"{where} must be in the table; got clients {listing(known)}. Name one with --client.")
    return np.array([each == name for each in named])


def _client(task: Task, new: Any, name: str) -> ClientData:
    """Return a client's samples, prepared as in a task and split by its seed."""
    inputs, reading, data = Inputs.from_federation(task.data, task.config.reading), task.config.reading, task.data
    if data.task not in (CLASSIFICATION, REGRESSION):
        raise UsageError(f"join must have classes or numbers to predict; got task {data.task}. Use --leave-out-client.")
    label, where = reading.label_column, f"samples of {name}"
    if isinstance(new, (str, Path)) and Path(new).suffix.lower() in TABLES:
        header = tables.header_of(Path(new), reading)
        names = [column for column in (label, reading.client_column) if column in (label, *header)]
        columns, _ = tables.named_columns(Path(new), names, names, reading)
        own = _own_rows(columns.get(reading.client_column, ()), name, where)
        x, y = inputs.samples(new).x[own], _labels(columns[label], data.classes)[own]
    elif isinstance(new, pd.DataFrame):
        if label not in new.columns:
            raise UsageError(f"{where} must have the labels in column {label!r}; got {list(map(str, new.columns))}.")
        own = _own_rows(new.get(reading.client_column, ()), name, where)
        x, y = inputs.samples(new).x[own], _labels(new[label], data.classes)[own]
    else:
        raw, labels = pair_of(new, where)
        x = inputs.samples(np.asarray(raw)).x
        y = np.asarray(labels)
        y = _labels(y, data.classes) if all(map(spelling.is_number, data.classes)) else y
    declared = data.classes or None
    codes, _ = targets.answers(y, where, data.task, declared, whole=False)
    check_lengths(x, codes, where)
    source = Source(name, np.zeros((len(codes), 1), np.float32), codes, data.classes)
    drawn = partitions.make(source, "iid", clients=1, seed=task.config.seed)
    parts = next(iter(drawn.indices.values()))
    y_all = torch.from_numpy(codes)
    places = {split: torch.from_numpy(parts[split]) for split in SPLITS}
    splits = {split: Split(x[at].contiguous(), y_all[at]) for split, at in places.items()}
    if data.task != REGRESSION and not len(splits["train"]):
        raise UsageError(f"{where} must have a training sample; got {len(codes)} samples. Give more.")
    return ClientData(name, **splits)
