"""The folder of the named datasets' files, and the opening of these files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path

import numpy as np

from fl_core.data import arrays, targets
from fl_core.data.columns import located
from fl_core.data.files import read_npz
from fl_core.data.registry import ROOT_VARIABLE, Location
from fl_core.data.sources import Source
from fl_core.errors import RunError, UsageError, check_known, listing

_ELSEWHERE = ContextVar("elsewhere", default=False)


@contextmanager
def local_root() -> Iterator[None]:
    """Let this machine's ``FEDLAYERS_DATA_ROOT`` replace data roots that do not exist here.

    This is for configurations of another machine, whose folders need not exist here.
    """
    token = _ELSEWHERE.set(True)
    try:
        yield
    finally:
        _ELSEWHERE.reset(token)


def find_root(name: str, data_root: Location | None, files: str) -> Path:
    """Return the data root. It must be an existing folder.

    Args:
        name: of the dataset that needs it, for messages.
        files: its files below the data root, for messages.

    Raises:
        UsageError: no data root is given, or it does not exist.
    """
    root = data_root or os.environ.get(ROOT_VARIABLE)
    if root and _ELSEWHERE.get() and not Path(root).is_dir():
        root = os.environ.get(ROOT_VARIABLE, root)
    if not root:
        raise UsageError(
            f"{name} must have a data root, with {files}; got none. "
            f"Pass data_root (--data-root) or set {ROOT_VARIABLE}."
        )
    if not Path(root).is_dir():
        raise UsageError(
            f"{name}: the data root must be a folder, with {files}; got {root}."
        )
    return Path(root)


def find_file(name: str, data_root: Location | None, file: str) -> Path:
    """Return the file of a dataset that cannot be downloaded automatically, below the data root.

    Raises:
        UsageError: it does not exist, or there is no data root.
    """
    path = find_root(name, data_root, file) / file
    if not path.is_file():
        raise UsageError(
            _missing(name, path.parent, file, "It cannot be downloaded automatically.")
        )
    return path


def open_packed(name: str, data_root: Location | None) -> Source:
    """Open a dataset stored as ``NAME.npz`` below the data root.

    Raises:
        UsageError: it does not exist, or does not fit.
    """
    return read_npz(find_file(name, data_root, f"{name}.npz"))


def from_torchvision(
    name: str, kind: str, folder: str, data_root: Location | None, download: bool
) -> Source:
    """Open the training set of a torchvision dataset below the data root, or of ``NAME.npz`` there.

    The official test side is never used: every client is tested on its own distribution.

    Args:
        kind: its class in ``torchvision.datasets``. folder: torchvision's folder for its files.
        download: let torchvision fetch them if they are missing.

    Raises:
        UsageError: the files are missing or damaged. RunError: a download failed.
    """
    layouts = f"{folder}/ (torchvision's layout) or {name}.npz"
    root = find_root(name, data_root, layouts)
    packed_file = root / f"{name}.npz"
    present = (root / folder).is_dir()
    if not present and packed_file.is_file():
        return training_side(read_npz(packed_file))
    if not present and not download:
        raise UsageError(
            _missing(name, root, layouts, "Load with download=True to fetch it.")
        )
    return _read_torchvision(name, kind, root, folder, download)


def _read_torchvision(
    name: str, kind: str, root: Path, folder: str, download: bool
) -> Source:
    import torchvision

    options = {"split": "byclass"} if kind == "EMNIST" else {}
    try:
        images = getattr(torchvision.datasets, kind)(
            root, train=True, download=download, **options
        )
    except (OSError, RuntimeError, ValueError, AssertionError) as error:
        what = f"{name} must have whole files in {root / folder}: {error}."
        if download:
            raise RunError(
                f"{what} Check the network, or copy the files there."
            ) from error
        raise UsageError(
            f"{what} Remove the folder, or load with download=True."
        ) from error
    x = np.asarray(images.data)
    if kind == "EMNIST":
        x = np.ascontiguousarray(
            x.transpose(0, 2, 1)
        )  # stored with rows and columns exchanged
    with located(str(root / folder)):
        y, _ = targets.labels(np.asarray(images.targets), images.classes)
        x = arrays.features(x)
    return Source(name, x, y, tuple(images.classes), shuffled=True)


def training_side(source: Source) -> Source:
    """Return the training samples of a source with an official test set."""
    if source.is_train is None:
        return source
    return replace(source.take(np.flatnonzero(source.is_train)), is_train=None)


def only_classes(source: Source, names: tuple[str, ...]) -> Source:
    """Return the samples of the named classes, numbered in the order of ``names``.

    Raises:
        UsageError: the source lacks a class.
    """
    for name in names:
        check_known(f"class of {source.name}", name, source.classes)
    new = np.full(len(source.classes), -1, dtype=np.int64)
    new[[source.classes.index(name) for name in names]] = np.arange(len(names))
    kept = source.take(np.flatnonzero(new[source.y] >= 0))
    return replace(kept, y=new[kept.y], classes=names)


def _missing(name: str, root: Path, files: str, way: str) -> str:
    present = sorted(entry.name for entry in root.iterdir())
    return f"{name} must have {files} below {root}; got {listing(present) or 'no files'}. {way}"
