"""The user's own data by path: an .npz file, a .csv or .parquet table, texts, or a folder of images."""

from __future__ import annotations

import math
import tokenize
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from fl_core import storage
from fl_core.data import arrays, frames, image_folders, tables
from fl_core.data.arrays import Array
from fl_core.data.columns import PLAIN, STANDARD, DataFault, Reading, located
from fl_core.data.registry import SPECIAL, TokenShape
from fl_core.data.sources import LENGTH, Source, check_lengths, source_of_parts
from fl_core.errors import UsageError, check_known, listing
from fl_core.rows import CLASSIFICATION

OWNER_KEYS = ("client", "domain", "center")

_DAMAGED = (
    *(ValueError, OSError, EOFError, KeyError, RuntimeError, MemoryError),
    *(zipfile.BadZipFile, zlib.error),
    *(SyntaxError, tokenize.TokenError),  # of an array's header, written as Python
)
"""The errors of a damaged archive of arrays."""


def read(path: Path, reading: Reading = PLAIN) -> Source:
    """Read a dataset from a path, and check all of it before returning.

    * ``.npz``, never unpickled: ``x_train y_train x_test y_test``, or ``x y``. With ``x y`` one of ``client``,
      ``domain`` or ``center`` may name the natural clients. It holds text, or whole numbers with names in e.g.
      ``client_names``. False in ``is_train`` marks an official test set. Labels are whole numbers or words. Both forms
      may have ``classes``, the names of labels 0..C-1. Image arrays are uint8 [n, H, W], [n, H, W, 1] or [n, H, W, 3]
      and are scaled to 0..1. Float arrays are not scaled. Their channels come first, or are moved there from the end.
      Tables are [n, d].
    * A folder: ``client/class/*`` or ``class/*`` with .png, .jpg or .jpeg files. Names are sorted and other files
      ignored. Images are turned as their EXIF orientation says, and transparent ones are laid on white. All must have
      one size, unless ``image_size`` crops and scales them, and are scaled to 0..1. If every image is grey they have
      one channel, otherwise three.
    * ``.csv`` with a header: a label column of whole numbers or words, a column that names the client, and numbers.
      Without a ``client`` column there are no natural clients. With a ``text`` column the samples are these texts as
      token ids. Columns apart from text, label and client are then ignored.
    * ``.tsv``: the same. An Excel file is refused.
    * ``.parquet``: the same. An index without a name is ignored.
    * A folder of such tables, or their paths with commas between them. Each file is a client with the file's name.
    * ``.jsonl``: texts, with one object per line and the keys text, label and, optionally, client.

    For the task ``regression`` labels are any finite numbers, the targets of the model.

    Raises:
        UsageError: some content does not fit. The message names the file, array or column, and the first bad row.
    """
    _check_size(path)
    if frames.is_table(path) or path.suffix.lower() == ".jsonl":
        reading.check_unasked(f"{path} has no images", "image_size")
        return tables.read_or_report(path, reading)
    if path.is_dir():
        replace(reading, image_size=None).check_plain(str(path))
        reading.check_unasked(
            f"{path} is a folder, whose images are named by classes", "task"
        )
        return image_folders.read(path, reading.image_size)
    if path.suffix.lower() == ".npz":
        reading.check_plain(str(path))
        return read_npz(path, reading.may_be_missing, reading.task)
    raise _refuse_kind(path)


def _refuse_kind(path: Path) -> UsageError:
    kinds = "an .npz, .csv, .tsv, .parquet or .jsonl file, or a folder of images or of one table per client"
    return UsageError(f"{path}: a dataset must be {kinds}.")


def _check_size(path: Path) -> None:
    for file in frames.files_of(path) or [path]:
        if not file.is_dir():
            storage.check_size(file, file.stat().st_size)


def peek(path: Path, reading: Reading = PLAIN) -> tuple[tuple[int, ...], bool, str]:
    """Return the shape of a sample, whether there are natural clients, and the scaling, from names and headers alone.

    These do not show the number of token ids of a text.

    Raises:
        UsageError: the path is not one of the kinds that :func:`read` takes.
    """
    _check_size(path)
    scale = "none"
    if frames.is_table(path) or path.suffix.lower() == ".jsonl":
        try:
            header = list(frames.open_table(path, reading, whole=False).frame)
            taken = tables.roles_of(path, header, reading)
            features = tables.feature_columns(path, header, taken, reading)
        except DataFault:
            read(path, reading)  # names all faults at once
            raise
        shape: tuple[int, ...] = TokenShape((LENGTH,), len(SPECIAL))
        if features:
            shape, scale = (len(features),), STANDARD
        return shape, reading.client_column in header, scale
    if path.is_dir():
        return *image_folders.peek(path, reading.image_size), scale
    if path.suffix.lower() != ".npz":
        raise _refuse_kind(path)
    there = headers(path)
    key = "x" if "x" in there else "x_train"
    if key not in there:
        raise UsageError(
            f"{path} must have an array 'x' or 'x_train'; got {listing(there) or 'none'}."
        )
    shape, dtype = there[key]
    sides = shape[1:]
    owner = bool({*OWNER_KEYS} & {*there})
    if dtype == np.uint8 and len(sides) > 1:
        height, width, *channels = sides
        return (channels[0] if channels else 1, height, width), owner, scale
    with located(f"{path}, array {key!r}"):
        return arrays.channels_first(sides), owner, scale


def read_npz(path: Path, missing: bool = False, task: str = CLASSIFICATION) -> Source:
    """Read a dataset from an .npz file (see :func:`read`). With ``missing``, a table's features may be NaN.

    Raises:
        UsageError: not an .npz file, or arrays are missing, unknown, of unequal length, or have invalid content.
    """
    there = headers(path)
    split = "x_train" in there
    parts = ("_train", "_test") if split else ("",)
    needed = [f"{kind}{part}" for part in parts for kind in "xy"]
    owner_key = next((key for key in OWNER_KEYS if key in there), "client")
    aside = [] if split else ["is_train", owner_key]
    named = [f"{owner_key}_names"] if owner_key in there and not split else []
    for key in there:
        check_known(f"array in {path}", key, [*needed, *aside, *named, "classes"])
    for key in needed:
        if key not in there:
            raise UsageError(
                f"{path} must have arrays x y, or x_train y_train x_test y_test; "
                f"got no {key!r} among {listing(there) or 'none'}."
            )
    data = read_arrays(path, list(there))

    def names(key: str) -> tuple[str, ...] | None:
        with located(f"{path}, array {key!r}"):
            return arrays.texts(data[key]) if key in data else None

    pairs = {part[1:]: (data[f"x{part}"], data[f"y{part}"]) for part in parts}
    source, sizes = source_of_parts(pairs, str(path), names("classes"), missing, task)
    source = replace(source, indices=False, integers=False)
    if owner_key in data:
        called = names(f"{owner_key}_names")
        with located(f"{path}, array {owner_key!r}"):
            check_lengths(source, data[owner_key])
            owner, owner_names = arrays.owners(data[owner_key], called)
        source = replace(source, owner=owner, owner_names=owner_names)
    is_train = np.arange(len(source)) < sizes[0] if split else None
    if "is_train" in data:
        with located(f"{path}, array 'is_train'"):
            check_lengths(source, data["is_train"])
            is_train = arrays.flags(data["is_train"])
    return replace(source, is_train=is_train)


def read_arrays(path: Path, keys: Sequence[str]) -> dict[str, Array]:
    """Return arrays of an .npz file, never unpickled. Other arrays in it are ignored.

    Raises:
        UsageError: not such a file, no such array, or an array of Python objects.
    """
    there = headers(path)
    for key in keys:
        check_known(f"array in {path}", key, there)
    try:
        with np.load(path, allow_pickle=False) as file:
            return {key: file[key] for key in keys}
    except _DAMAGED as error:
        raise UsageError(
            f"{path} must hold plain numbers and text, not Python objects ({error}). Save it without them."
        ) from error


def headers(path: Path) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Return shape and type of each array of an .npz file, without reading the arrays.

    No array may claim more bytes than it has, and the file may not be far larger unpacked.

    Raises:
        UsageError: not such a file, or a false claim.
    """
    found, taken = {}, 0
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            for entry in entries:
                with archive.open(entry) as file:
                    first = np.lib.format.read_magic(file) == (1, 0)
                    shape, _, dtype = (
                        np.lib.format.read_array_header_1_0(file)
                        if first
                        else np.lib.format.read_array_header_2_0(file)
                    )
                found[entry.filename.removesuffix(".npy")] = shape, dtype
    except _DAMAGED as error:
        raise UsageError(
            f"{path} must be a readable .npz file of named arrays: {error}. Save it again with numpy.savez."
        ) from error
    if len(entries) > len(found):
        raise UsageError(
            f"{path} must have each array once; got one twice. Save it again with numpy.savez."
        )
    for entry, (key, (shape, dtype)) in zip(entries, found.items(), strict=True):
        claimed = math.prod(shape) * dtype.itemsize
        taken += max(entry.file_size, math.prod(shape) * _bytes_each(dtype, len(shape)))
        if not dtype.hasobject and claimed > entry.file_size:
            raise UsageError(
                f"{path}, array {key!r} must have the bytes that its header says, "
                f"{storage.format_bytes(claimed)} for {list(shape)} of {dtype}; "
                f"got {storage.format_bytes(entry.file_size)}."
            )
    storage.check_unpacked(path, path.stat().st_size, taken)
    return found


def _bytes_each(dtype: np.dtype, dimensions: int) -> int:
    """Return the bytes of memory that a value takes. Texts become Python's objects, and columns 64-bit numbers."""
    if dtype.kind in "USO":
        return max(dtype.itemsize, 64)
    return dtype.itemsize if dimensions > 2 else max(dtype.itemsize, 8)
