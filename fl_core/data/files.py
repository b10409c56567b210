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

from fl_core import limits
from fl_core.data import arrays, frames, image_folders, tables, targets, text
from fl_core.data.arrays import Array
from fl_core.data.columns import CHOSEN, PLAIN, WRITTEN, DataFault, Reading
from fl_core.data.roles import by_name
from fl_core.data.sources import Source
from fl_core.errors import UsageError, check_known, listing
from fl_core.scores import CLASSIFICATION
from fl_core.tokens import SPECIAL, TokenShape

OWNER_KEYS = ("client", "domain", "center")

_SPLIT_FORM = ("x_train", "y_train", "x_test", "y_test")
_ONE_FORM = ("x", "y")
_NO_HEADER = (
    SyntaxError,
    tokenize.TokenError,
)  # of an array, whose header is written as Python
_NO_ZIP = (zipfile.BadZipFile, zlib.error)
_NPZ = (
    b"PK",
    np.lib.format.MAGIC_PREFIX,
)  # the first bytes of an archive, and of a single array
_DAMAGED = (
    ValueError,
    OSError,
    EOFError,
    KeyError,
    RuntimeError,
    MemoryError,
    *_NO_ZIP,
    *_NO_HEADER,
)


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
        check_plain(str(path), replace(reading, image_size=None))
        reading.check_unasked(
            f"{path} is a folder, whose images are named by classes", "task"
        )
        return image_folders.read(path, reading.image_size)
    if path.suffix.lower() == ".npz":
        check_plain(str(path), reading)
        return read_npz(path, reading.may_be_missing, reading.task)
    raise _refuse_kind(path)


def _refuse_kind(path: Path) -> UsageError:
    kinds = "an .npz, .csv, .tsv, .parquet or .jsonl file, or a folder of images or of one table per client"
    return UsageError(f"{path}: a dataset must be {kinds}.")


def _check_size(path: Path) -> None:
    for file in frames.files_of(path) or [path]:
        if not file.is_dir():
            limits.check_size(file, file.stat().st_size)


def check_plain(what: str, reading: Reading) -> None:
    """Check that no column, separator, encoding or size of images is named for data without a header or image files.

    Raises:
        UsageError: names the keys.
    """
    reading.check_unasked(
        f"{what} has no columns to name: only tables and .jsonl files have them",
        *CHOSEN,
    )
    reading.check_unasked(f"{what} is no text file", *WRITTEN)
    reading.check_unasked(f"{what} has no image files", "image_size")


def peek_shape(path: Path, reading: Reading = PLAIN) -> tuple[tuple[int, ...], bool]:
    """Return the shape of a sample and whether there are natural clients, from names and headers alone.

    These do not show the number of token ids of a text.

    Raises:
        UsageError: the path is not one of the kinds that :func:`read` takes.
    """
    _check_size(path)
    if frames.is_table(path) or path.suffix.lower() == ".jsonl":
        try:
            header = frames.open_table(path, reading).header
            features = tables.feature_columns(path, header, reading)
        except DataFault:
            read(path, reading)  # names all faults at once
            raise
        return _tokens() if features is None else (
            len(features),
        ), reading.client_column in header
    if path.is_dir():
        return image_folders.peek(path, reading.image_size)
    if path.suffix.lower() == ".npz":
        with _open_npz(path) as file:
            key = "x" if "x" in file.files else "x_train"
            owner = any(key in file.files for key in OWNER_KEYS)
        if key not in file.files:
            raise UsageError(
                f"{path} must have an array 'x' or 'x_train'; got {listing(file.files) or 'none'}."
            )
        shape, dtype = _npy_header(path, key)
        if dtype == np.uint8 and len(shape) > 2:
            return (shape[3] if len(shape) > 3 else 1, *shape[1:3]), owner
        return arrays.channels_first(shape[1:], f"{path}, array {key!r}"), owner
    raise _refuse_kind(path)


def read_npz(path: Path, missing: bool = False, task: str = CLASSIFICATION) -> Source:
    """Read a dataset from an .npz file (see :func:`read`). With ``missing``, a table's features may be NaN.

    Raises:
        UsageError: not an .npz file, or arrays are missing, unknown, of unequal length, or have invalid content.
    """
    with _open_npz(path) as file:
        known = (
            *_SPLIT_FORM,
            *_ONE_FORM,
            "is_train",
            "classes",
            *OWNER_KEYS,
            *(f"{key}_names" for key in OWNER_KEYS),
        )
        for key in file.files:
            if (
                key not in known
                and by_name("client_column", [key])
                and not {*OWNER_KEYS} & {*file.files}
            ):
                raise UsageError(
                    f"{path}: the array that names each sample's client must be 'client'; got {key!r}. Rename it."
                )
            check_known(f"array in {path}", key, known)
        data = _read_arrays(path, file, file.files)
    split = "x_train" in data
    for key in _SPLIT_FORM if split else _ONE_FORM:
        if key not in data:
            raise UsageError(
                f"{path} must have arrays {' '.join(_ONE_FORM)}, or {' '.join(_SPLIT_FORM)}; "
                f"got no {key!r} among {listing(data) or 'none'}."
            )
    for key in (*_ONE_FORM, "is_train", *OWNER_KEYS) if split else _SPLIT_FORM:
        if key in data:
            raise UsageError(
                f"{path}: array {key!r} must not be together with {'x_train' if split else 'x'!r}. Leave one out."
            )
    keys = [key for key in OWNER_KEYS if key in data]
    if len(keys) > 1:
        raise UsageError(
            f"{path}: only one array must name natural clients; got {' and '.join(keys)}. Keep one."
        )
    for key in OWNER_KEYS:
        if f"{key}_names" in data and key not in data:
            raise UsageError(
                f"{path}: array '{key}_names' must come with an array {key!r}. Add it."
            )
    sides = ("_train", "_test") if split else ("",)
    for side in sides:
        others = (f"y{side}",) if split else ("y", *keys, "is_train")
        for key in others:
            if key in data:
                _check_length(path, data, key, f"x{side}")
    parts = [
        arrays.features(data[f"x{side}"], f"{path}, array 'x{side}'", missing=missing)
        for side in sides
    ]
    forms = [f"{part.dtype} {list(part.shape[1:])}" for part in parts]
    if forms[0] != forms[-1]:
        raise UsageError(
            f"{path}: x_train and x_test must have the same type and shape of a sample; got {' and '.join(forms)}."
        )
    labels = [
        targets.words_or_numbers(data[f"y{side}"], f"{path}, array 'y{side}'", task)
        for side in sides
    ]
    where = f"{path}, array 'y{sides[0]}'"
    first = len(labels[0])

    def place(row: int) -> str:
        if row < first:
            return arrays.row_of_array(row)
        return f"y_test {arrays.row_of_array(row - first)}"

    y, found = targets.answers(
        np.concatenate(labels), where, task, _names(path, data, "classes"), place
    )
    owner, is_train = None, None
    owner_names: tuple[str, ...] = ()
    for key in keys:
        names = _names(path, data, f"{key}_names")
        owner, owner_names = arrays.owners(data[key], f"{path}, array {key!r}", names)
    if split:
        is_train = np.arange(len(y)) < first
    elif "is_train" in data:
        is_train = arrays.flags(data["is_train"], f"{path}, array 'is_train'")
    x = np.concatenate(parts)
    return Source(str(path), x, y, found, owner, owner_names, is_train)


def array_of(path: Path, key: str) -> Array:
    """Return one array of an .npz file, never unpickled. Other arrays in it are ignored.

    Raises:
        UsageError: not such a file, no such array, or an array of Python objects.
    """
    with _open_npz(path) as file:
        check_known(f"array in {path}", key, file.files)
        return _read_arrays(path, file, [key])[key]


def _read_arrays(
    path: Path, file: np.lib.npyio.NpzFile, keys: Sequence[str]
) -> dict[str, Array]:
    """Return arrays of an open .npz file after a check of the sizes that it claims."""
    _check_sizes(path)
    try:
        return {key: file[key] for key in keys}
    except _DAMAGED as error:
        raise UsageError(
            f"{path} must hold plain numbers and text, not Python objects ({error}). Save it without them."
        ) from error


def _open_npz(path: Path) -> np.lib.npyio.NpzFile:
    try:
        with path.open("rb") as opened:
            start = opened.read(6)
        if not start.startswith(_NPZ):  # numpy treats anything else as a pickle
            raise ValueError("no archive of arrays, as numpy.savez writes")
        file = np.load(path, allow_pickle=False)
    except _DAMAGED as error:
        raise UsageError(
            f"{path} must be a readable .npz file: {error}. Save it again with numpy.savez."
        ) from error
    if not isinstance(file, np.lib.npyio.NpzFile):
        raise UsageError(
            f"{path} must be an .npz file of named arrays; got a single array."
        )
    return file


def _check_sizes(path: Path) -> None:
    """Check the claimed sizes before unpacking.

    No header may claim more bytes than stored, and the file may not be far larger unpacked.

    Nothing that is unpacked later is longer than the archive's own list states.
    """
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
    taken = 0
    for entry in entries:
        key = entry.filename.removesuffix(".npy")
        shape, dtype = _npy_header(path, key)
        taken += max(entry.file_size, math.prod(shape) * _bytes_each(dtype, len(shape)))
        if not dtype.hasobject and math.prod(shape) * dtype.itemsize > entry.file_size:
            raise UsageError(
                f"{path}, array {key!r} must have the bytes that its header says, "
                f"{limits.format_bytes(math.prod(shape) * dtype.itemsize)} for {list(shape)} of {dtype}; "
                f"got {limits.format_bytes(entry.file_size)}."
            )
    limits.check_unpacked(path, path.stat().st_size, taken)


def _bytes_each(dtype: np.dtype, dimensions: int) -> int:
    """Return the bytes of memory that a value takes. Texts become Python's objects, and columns 64-bit numbers."""
    if dtype.kind in "USO":
        return max(dtype.itemsize, 64)
    return dtype.itemsize if dimensions > 2 else max(dtype.itemsize, 8)


def _npy_header(path: Path, key: str) -> tuple[tuple[int, ...], np.dtype]:
    """Return shape and type of one array of an .npz file, without reading it."""
    try:
        with zipfile.ZipFile(path) as archive, archive.open(f"{key}.npy") as file:
            first = np.lib.format.read_magic(file) == (1, 0)
            read_header = (
                np.lib.format.read_array_header_1_0
                if first
                else np.lib.format.read_array_header_2_0
            )
            shape, _, dtype = read_header(file)
    except _DAMAGED as error:
        raise UsageError(f"{path}, array {key!r} must be readable: {error}.") from error
    return shape, dtype


def _names(path: Path, data: dict[str, Array], key: str) -> tuple[str, ...] | None:
    return arrays.texts(data[key], f"{path}, array {key!r}") if key in data else None


def _check_length(path: Path, data: dict[str, Array], key: str, reference: str) -> None:
    lengths = [
        data[name].shape[0] if data[name].ndim else 0 for name in (reference, key)
    ]
    if lengths[0] != lengths[1]:
        raise UsageError(
            f"{path}: {reference} and {key} must have the same number of rows; got {lengths[0]} and {lengths[1]}."
        )


def _tokens() -> TokenShape:
    return TokenShape((text.LENGTH,), len(SPECIAL))
