"""Activities of 30 persons: UCI's recordings of a telephone's sensors, and the file that they are read from."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pandas as pd

from fl_core.data.registry import Location, dataset, find_file
from fl_core.data.sources import Source
from fl_core.data.values import Array, Integers
from fl_core.errors import UsageError, about
from fl_core.storage import check_size, write_atomically

FILE = "har.npz"
CHANNELS = (
    *("body_acc_x", "body_acc_y", "body_acc_z"),
    *("body_gyro_x", "body_gyro_y", "body_gyro_z"),
    *("total_acc_x", "total_acc_y", "total_acc_z"),
)
CLASSES = ("walking", "upstairs", "downstairs", "sitting", "standing", "laying")
STEPS = 128
"""Steps of a window of 2.56 s."""
MEANS = 4
"""Recorded steps whose mean is one step of a sample."""
SIDES = ("train", "test")
"""The two folders of the archive. Each person is in one of them."""


@dataset(
    "activity",
    clients=None,
    partition="natural",
    model="mlp",
    model_options={"sizes": [128, 64]},
    batch_size=32,
    rounds=20,
    lr=3e-3,
    note="chosen by validation samples",
)
def activity(data_root: Location | None) -> Source:
    """10,299 windows of a telephone's sensors, [9, 32]: six activities of 30 persons, who are the clients.

    Each of the 32 steps is the mean of four. Windows overlap by half, so a bout of one activity stays in one split.
    :func:`write_file` makes the file.

    Args:
        data_root: the folder with :data:`FILE`. None means that of the environment.

    Raises:
        UsageError: the file is missing, or has another form.
    """
    path = find_file(
        "activity",
        data_root,
        FILE,
        way="Write it from the archive's folder: fl_core.data.named.activity.write_file.",
    )
    from fl_core.data.files import read_arrays  # imports what reads images

    stored = read_arrays(path, ["x", "y", "person", "bout"])
    x, columns = stored["x"], [stored[key] for key in ("y", "person", "bout")]
    n = len(x) if x.ndim else 0
    has_form = x.dtype.kind == "f" and x.shape == (n, len(CHANNELS), STEPS)
    if not n or not has_form or not np.isfinite(x).all():
        got_shape = list(x.shape)
        raise UsageError(
            f"{path}: x must be finite floats [n, {len(CHANNELS)}, {STEPS}]; got {x.dtype} {got_shape}. "
            "Write the file again."
        )
    for key, values in zip(("y", "person", "bout"), columns, strict=True):
        if values.dtype.kind not in "iu" or values.shape != (n,):
            got_shape = list(values.shape)
            raise UsageError(
                f"{path}: {key} must be {n} integers; got {values.dtype} {got_shape}. Write the file again."
            )
    y, person, bout = (values.astype(np.int64) for values in columns)
    if y.min() < 0 or y.max() >= len(CLASSES):
        raise UsageError(
            f"{path}: y must be from 0 to {len(CLASSES) - 1}; got {y.min()} to {y.max()}. Write the file again."
        )
    persons, owner = np.unique(person, return_inverse=True)
    pairs = np.stack([owner, bout], axis=1)
    _, groups = np.unique(pairs, axis=0, return_inverse=True)
    means = x.reshape(n, len(CHANNELS), -1, MEANS).mean(axis=-1, dtype=np.float64)
    return Source(
        "activity",
        means.astype(np.float32),
        y,
        CLASSES,
        owner,
        tuple(f"person {number + 1:02d}" for number in persons),
        groups=groups.reshape(-1),
    )


# --- the file, from the archive -----------------------------------------------------------------------------------


def write_file(archive: Path | str, path: Path | str) -> None:
    """Write the archive's folder as one file, which :func:`activity` reads.

    The folder is ``UCI HAR Dataset``. The persons of both sides are sorted by number. A bout is a run of rows of one
    person and activity, where the second half of a row is the first half of the next.

    Args:
        archive: the folder with ``train`` and ``test``, each with ``Inertial Signals``.
        path: ``har.npz`` below the data root. An existing file is replaced.

    Raises:
        UsageError: a file is missing, or has another form.
    """
    archive, path = Path(archive), Path(path)
    x, y, subject = (
        np.concatenate(parts)
        for parts in zip(*(_side(archive, side) for side in SIDES), strict=True)
    )
    order = np.argsort(subject, kind="stable")
    x, y, subject = x[order], y[order], subject[order]
    bout, position = bouts(x, y, subject)
    _, person = np.unique(subject, return_inverse=True)
    buffer = io.BytesIO()
    np.savez_compressed(
        buffer,
        x=x,
        y=y,
        person=person,
        bout=bout,
        position=position,
        channels=np.array(CHANNELS),
        classes=np.array(CLASSES),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, buffer.getvalue())


def bouts(x: Array, y: Integers, person: Integers) -> tuple[Integers, Integers]:
    """Return each window's bout and its position in that bout, both int64 [n].

    A bout is a run of windows of one person and activity, each of which begins with the
    second half of the one before. Bouts and positions are counted from 0.

    Args:
        x: windows [n, channels, steps], in the order of recording.
        y: the activity of each window, [n].
        person: the person of each window, [n].

    >>> x = np.array([[[0, 1, 2, 3]], [[2, 3, 4, 5]], [[7, 7, 8, 9]]])
    >>> [marks.tolist() for marks in bouts(x, np.zeros(3), np.zeros(3))]
    [[0, 0, 1], [0, 1, 0]]
    """
    half_steps = x.shape[-1] // 2
    overlaps = (x[:-1, :, half_steps:] == x[1:, :, :half_steps]).all(axis=(1, 2))
    continues = overlaps & (y[1:] == y[:-1]) & (person[1:] == person[:-1])
    starts = np.concatenate([[True], ~continues])
    bout = np.cumsum(starts) - 1
    return bout, np.arange(len(x)) - np.flatnonzero(starts)[bout]


def _side(archive: Path, side: str) -> tuple[Array, Integers, Integers]:
    """Return windows, class indices and persons of one folder of the archive.

    Windows are float32 [n, channels, steps]. The others are int64 [n].

    Args:
        archive: the archive's folder.
        side: one of :data:`SIDES`.

    Raises:
        UsageError: a file is missing, is no table of numbers, or does not fit the
            others.
    """
    signals = [f"Inertial Signals/{channel}_{side}.txt" for channel in CHANNELS]
    names = [*signals, f"y_{side}.txt", f"subject_{side}.txt"]
    files = [archive / side / name for name in names]
    for file in files:
        if not file.is_file():
            member = file.relative_to(archive)
            raise UsageError(
                f"{archive} must have the archive's files; got no {member}. Unpack it again."
            )
    widths = [STEPS] * len(CHANNELS) + [1, 1]
    tables = [
        _table(*file_and_width) for file_and_width in zip(files, widths, strict=True)
    ]
    for file, table in zip(files, tables, strict=True):
        if len(table) != len(tables[0]):
            raise UsageError(
                f"{file} must have {len(tables[0])} rows, as {files[0].name}; got {len(table)}. Unpack it again."
            )
    *windows, y, subject = tables
    if not np.isin(y, range(1, len(CLASSES) + 1)).all():
        raise UsageError(
            f"{files[-2]} must have labels from 1 to {len(CLASSES)}; got {y.min():g} to {y.max():g}. Unpack it again."
        )
    x = np.stack(windows, axis=1).astype(np.float32)
    return x, y[:, 0].astype(np.int64) - 1, subject[:, 0].astype(np.int64)


def _table(file: Path, columns: int) -> Array:
    """Return a file of numbers with spaces between them, float64 [n, columns].

    Raises:
        UsageError: the file has another number of columns, or a cell is no finite
            number.
    """
    check_size(file, file.stat().st_size)
    requirement = f"{file} must have rows of {columns} finite numbers"
    with about(requirement, ValueError, way="Unpack it again."):
        values = pd.read_csv(file, sep=r"\s+", header=None).to_numpy(np.float64)
        if values.shape[1:] != (columns,) or not np.isfinite(values).all():
            got_shape = list(values.shape)
            raise ValueError(f"got shape {got_shape}, or gaps")
    return values
