"""The user's own data by path: an .npz file, a .csv or .parquet table, texts, or a folder of images."""

from __future__ import annotations

import math
import tokenize
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fl_core import limits
from fl_core.data import arrays, client_tables, tables, text
from fl_core.data.arrays import Array
from fl_core.data.columns import CHOSEN, PLAIN, WRITTEN, Reading
from fl_core.data.roles import by_name
from fl_core.data.sources import Source
from fl_core.errors import UsageError, check_known, listing
from fl_core.scores import CLASSIFICATION
from fl_core.tokens import SPECIAL, TokenShape

OWNER_KEYS = ("client", "domain", "center")
IMAGES = (".png", ".jpg", ".jpeg")

_SPLIT_FORM = ("x_train", "y_train", "x_test", "y_test")
_ONE_FORM = ("x", "y")
_MODES = ("1", "L", "P", "RGB", "RGBA", "LA", "CMYK", "YCbCr")
_NO_HEADER = (SyntaxError, tokenize.TokenError)  # of an array, which is written as Python
_NO_ZIP = (zipfile.BadZipFile, zlib.error)
_NPZ = (b"PK", np.lib.format.MAGIC_PREFIX)  # how an archive begins, and a single array
_DAMAGED = (ValueError, OSError, EOFError, KeyError, RuntimeError, MemoryError, *_NO_ZIP, *_NO_HEADER)
_UNREADABLE = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)
_Listing = dict[str, dict[str, list[Path]]]


def read(path: Path, reading: Reading = PLAIN) -> Source:
    """Read a dataset from a path, and check all of it before returning.

    * ``.npz``, never unpickled: ``x_train y_train x_test y_test``; or ``x y`` with, optionally, one of ``client``,
      ``domain``, ``center`` (natural clients: text, or whole numbers with names in e.g. ``client_names``) and
      ``is_train`` (false = official test set). Labels are whole numbers or words; either form may have ``classes``,
      the names of labels 0..C-1. Image arrays are uint8 [n, H, W], [n, H, W, 1] or [n, H, W, 3] and are scaled to
      0..1; floats are taken as they are, channels first, or turned if these are last; tables are [n, d].
    * a folder: ``client/class/*`` or ``class/*`` with .png, .jpg or .jpeg files, names sorted, other files passed
      over. All images must have one size; they are gray when every one is, otherwise RGB, scaled to 0..1.
    * ``.csv`` with a header: a label column of whole numbers or words, a column that names the client, all others
      numbers. Without a ``client`` column there are no natural clients. With a ``text`` column the samples are these
      texts as token ids, and what is beside text, label and client is passed over.
    * ``.tsv`` and ``.xlsx``, the same; of the latter the first sheet.
    * ``.parquet``, the same; an index without a name is passed over.
    * a folder of such tables, or their paths with commas between: each file is a client, which has the file's name.
    * ``.jsonl``, texts: an object a line with the keys text, label and, optionally, client.

    For the task ``regression`` labels are any finite numbers, which a model is to predict.

    Raises:
        UsageError: anything that does not fit, by file, array or column, and first bad row.
    """
    _check_size(path)
    if client_tables.is_table(path):
        return tables.read_table(path, reading)
    if path.is_dir() or path.suffix.lower() == ".npz":
        check_plain(str(path), reading)
        if path.is_dir():
            reading.check_unasked(f"{path} is a folder, whose images are named by classes", "task")
            return read_folder(path)
        return read_npz(path, reading.missing, reading.task, reading.classes)
    _check_kind(path)
    return tables.read_jsonl(path, reading)


def _check_size(path: Path) -> None:
    for file in client_tables.files_of(path) or [path]:
        if not file.is_dir():
            limits.check_size(file, file.stat().st_size)


def check_plain(what: str, reading: Reading) -> None:
    """Refuse names of columns, a separator or an encoding for data that are no table with a header.

    Raises:
        UsageError: names the keys.
    """
    reading.check_unasked(f"{what} has no columns to name, which are for .csv, .parquet and .jsonl files", *CHOSEN)
    reading.check_unasked(f"{what} is no text file", *WRITTEN)


def glance(path: Path, reading: Reading = PLAIN) -> tuple[tuple[int, ...], bool]:
    """Shape of a sample and whether natural clients are named, read from names and headers alone.

    The number of token ids of a text is not known from there.

    Raises:
        UsageError: the path is not one of the kinds that :func:`read` takes.
    """
    _check_size(path)
    if client_tables.is_table(path):
        header = tables.header_of(path, reading)
        features = tables.feature_columns(path, header, reading)
        return _tokens() if features is None else (len(features),), reading.client_column in header
    if path.is_dir():
        images_of = _list_folder(path)
        images = [file for classes in images_of.values() for files in classes.values() for file in files]
        width, height = _image_header(images[0])[0]
        return (1 if _gray(map(_image_header, images)) else 3, height, width), "" not in images_of
    if path.suffix.lower() == ".npz":
        with _open_npz(path) as file:
            key = "x" if "x" in file.files else "x_train"
            owner = any(key in file.files for key in OWNER_KEYS)
        if key not in file.files:
            raise UsageError(f"{path}: no array 'x' or 'x_train'; it has {listing(file.files) or 'none'}")
        shape, dtype = _npy_header(path, key)
        if dtype == np.uint8 and len(shape) > 2:
            return _image_shape(shape[1:]), owner
        return arrays.channels_first(shape[1:], f"{path}, array {key!r}"), owner
    _check_kind(path)
    return _tokens(), tables.names_clients(path, reading)


def read_npz(
    path: Path, missing: bool = False, task: str = CLASSIFICATION, classes: Sequence[str] | None = None
) -> Source:
    """Read a dataset from an .npz file (see :func:`read`); with ``missing``, a table's features may be NaN.

    Args:
        classes: all that there are, if the file is a silo's and may lack some; in place of the file's own.

    Raises:
        UsageError: not an .npz file, arrays that are missing, unknown, of unequal length, or of bad content.
    """
    with _open_npz(path) as file:
        known = (*_SPLIT_FORM, *_ONE_FORM, "is_train", "classes", *OWNER_KEYS, *(f"{key}_names" for key in OWNER_KEYS))
        for key in file.files:
            if key not in known and by_name("client_column", [key]) and not {*OWNER_KEYS} & {*file.files}:
                raise UsageError(
                    f"{path}: the array that names each sample's client must be 'client'; got {key!r}. Rename it."
                )
            check_known(f"array in {path}", key, known)
        _check_sizes(path)
        try:
            data: dict[str, Array] = {key: file[key] for key in file.files}
        except _DAMAGED as error:
            raise UsageError(f"{path}: {error}; store plain numbers and text, not Python objects") from error
    split = "x_train" in data
    for key in _SPLIT_FORM if split else _ONE_FORM:
        if key not in data:
            raise UsageError(
                f"{path}: no array {key!r}; needed are {' '.join(_ONE_FORM)}, or {' '.join(_SPLIT_FORM)}; "
                f"it has {listing(data) or 'none'}"
            )
    if split:
        _refuse(path, data, ("x", "y", "is_train", *OWNER_KEYS), "x_train")
        return _split_npz(path, data, missing, task)
    _refuse(path, data, _SPLIT_FORM, "x")
    keys = [key for key in OWNER_KEYS if key in data]
    if len(keys) > 1:
        raise UsageError(f"{path}: {' and '.join(keys)} both name natural clients; keep one")
    for key in ("y", *keys, "is_train"):
        if key in data:
            _check_length(path, data, key, "x")
    for key in OWNER_KEYS:
        if f"{key}_names" in data and key not in data:
            raise UsageError(f"{path}: array '{key}_names' without an array {key!r}")
    x = arrays.features(data["x"], f"{path}, array 'x'", missing=missing)
    names_of = classes or _names(path, data, "classes")
    y, found = arrays.answers(data["y"], f"{path}, array 'y'", task, names_of, whole=classes is None)
    owner, is_train = None, None
    owner_names: tuple[str, ...] = ()
    for key in keys:
        names = _names(path, data, f"{key}_names")
        owner, owner_names = arrays.owners(data[key], f"{path}, array {key!r}", names)
    if "is_train" in data:
        is_train = arrays.flags(data["is_train"], f"{path}, array 'is_train'")
    return Source(str(path), x, y, found, owner, owner_names, is_train)


def _split_npz(path: Path, data: dict[str, Array], missing: bool, task: str) -> Source:
    sides = [arrays.features(data[key], f"{path}, array {key!r}", missing=missing) for key in ("x_train", "x_test")]
    for key in ("train", "test"):
        _check_length(path, data, f"y_{key}", f"x_{key}")
    if sides[0].shape[1:] != sides[1].shape[1:] or sides[0].dtype != sides[1].dtype:
        raise UsageError(
            f"{path}: x_train is {data['x_train'].dtype} {list(sides[0].shape)}, "
            f"but x_test is {data['x_test'].dtype} {list(sides[1].shape)}"
        )
    names = _names(path, data, "classes")
    train, test = (arrays.words_or_numbers(data[key], f"{path}, array {key!r}", task) for key in ("y_train", "y_test"))
    n_train = len(train)

    def place(row: int) -> str:
        return arrays.row_of_array(row) if row < n_train else f"y_test {arrays.row_of_array(row - n_train)}"

    y, classes = arrays.answers(np.concatenate([train, test]), f"{path}, array 'y_train'", task, names, place)
    is_train = np.arange(len(y)) < n_train
    return Source(name=str(path), x=np.concatenate(sides), y=y, classes=classes, is_train=is_train)


def read_folder(path: Path) -> Source:
    """Read a dataset from a folder of images (see :func:`read`).

    Raises:
        UsageError: no such layout, an image that cannot be read or has another size, or a class without images.
    """
    images_of = _list_folder(path)
    clients = sorted(images_of)
    classes = sorted({name for by_class in images_of.values() for name in by_class})
    files = [
        (file, classes.index(name), owner)
        for owner, client in enumerate(clients)
        for name in sorted(images_of[client])
        for file in images_of[client][name]
    ]
    x = pixels([file for file, _, _ in files], where=path)
    y, names = arrays.labels(np.array([label for _, label, _ in files]), str(path), classes)
    if clients == [""]:
        return Source(name=str(path), x=x, y=y, classes=names)
    owner = np.array([owner for _, _, owner in files])
    return Source(name=str(path), x=x, y=y, classes=names, owner=owner, owner_names=tuple(clients))


def pixels(files: Sequence[Path], gray: bool | None = None, where: Path | None = None) -> NDArray[np.uint8]:
    """Image files of one size as uint8 [n, H, W] if all are gray, otherwise [n, H, W, 3].

    Args:
        gray: whether they must be gray; None = as they are. If not, gray ones get three equal channels.
        where: the folder that a refusal for their size in memory names; default that of the first.

    Raises:
        UsageError: an image that cannot be read, has another size than the first, or is not gray where it must be.
    """
    headers = [_image_header(file) for file in files]
    size = headers[0][0]
    for file, (other, mode) in zip(files, headers, strict=True):
        if other != size:
            raise UsageError(f"{file} is {other[0]}x{other[1]}; {files[0]} is {size[0]}x{size[1]}: one size is needed")
        if gray and not _gray([(other, mode)]):
            raise UsageError(f"{file} is in colour; gray images are needed")
    mode = "L" if (_gray(headers) if gray is None else gray) else "RGB"
    packed = sum(file.stat().st_size for file in files)
    limits.check_unpacked(where or files[0].parent, packed, len(files) * size[0] * size[1] * len(mode))
    x = np.empty((len(files), size[1], size[0], *([] if mode == "L" else [3])), dtype=np.uint8)
    for row, file in enumerate(files):
        try:
            with Image.open(file) as image:
                x[row] = np.asarray(image.convert(mode))
        except _UNREADABLE as error:
            raise UsageError(f"{file}: {error}") from error
    return x


def images_below(path: Path) -> list[Path]:
    """All image files in a folder and in those within it, but hidden ones, in the order of their paths."""
    folders = [path, *(entry for entry in sorted(path.rglob("[!.]*")) if entry.is_dir())]
    return sorted(file for folder in folders for file in _images(folder))


def array_of(path: Path, key: str) -> Array:
    """One array of an .npz file, never unpickled; other arrays in it are passed over.

    Raises:
        UsageError: not such a file, no such array, or one of Python objects.
    """
    with _open_npz(path) as file:
        check_known(f"array in {path}", key, file.files)
        _check_sizes(path)
        try:
            return file[key]
        except _DAMAGED as error:
            raise UsageError(f"{path}: {error}; store plain numbers and text, not Python objects") from error


def _list_folder(path: Path) -> _Listing:
    """Image files by client and class; a folder without clients has one, called ''."""
    folders = _subfolders(path)
    flat = [folder for folder in folders if _images(folder)]
    deep = [folder for folder in folders if any(_images(inner) for inner in _subfolders(folder))]
    if not flat and not deep:
        raise UsageError(f"{path}: no images in class/* or client/class/* ({', '.join(IMAGES)})")
    if flat and deep:
        raise UsageError(
            f"{path}: {flat[0].name!r} holds images, {deep[0].name!r} holds folders of them; use one layout"
        )
    for folder in folders:
        if folder not in flat and folder not in deep:
            raise UsageError(f"{folder}: a {'class' if flat else 'client'} without images")
    if flat:
        return {"": {folder.name: _images(folder) for folder in flat}}
    return {client.name: {inner.name: _images(inner) for inner in _subfolders(client)} for client in deep}


def holds_images(path: Path) -> bool:
    """Return whether the subfolders of a folder hold images, as classes or as clients with classes."""
    folders = _subfolders(path)
    return any(_images(inner) for folder in folders for inner in (folder, *_subfolders(folder)))


def _subfolders(path: Path) -> list[Path]:
    return sorted(entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _images(path: Path) -> list[Path]:
    return sorted(
        entry
        for entry in path.iterdir()
        if entry.is_file() and entry.suffix.lower() in IMAGES and not entry.name.startswith(".")
    )


def _image_header(file: Path) -> tuple[tuple[int, int], str]:
    """Size and mode of an image file, ((width, height), mode), without decoding pixels."""
    try:
        with Image.open(file) as image:
            size, mode = image.size, image.mode
    except _UNREADABLE as error:
        raise UsageError(f"{file}: {error}") from error
    if mode not in _MODES:
        raise UsageError(f"{file}: mode {mode} has more than 8 bits a channel; convert it to 8 bits first")
    return size, mode


def _gray(headers: Iterable[tuple[tuple[int, int], str]]) -> bool:
    """Whether all images are grey."""
    return all(mode in ("1", "L") for _, mode in headers)


def _image_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (shape[2] if len(shape) > 2 else 1, *shape[:2])


def _open_npz(path: Path) -> np.lib.npyio.NpzFile:
    try:
        with path.open("rb") as opened:
            start = opened.read(6)
        if not start.startswith(_NPZ):  # numpy takes anything else for a pickle, and says how to load one
            raise ValueError("it is no archive of arrays, which numpy.savez writes")
        file = np.load(path, allow_pickle=False)
    except _DAMAGED as error:
        raise UsageError(f"{path} is not a readable .npz file: {error}") from error
    if not isinstance(file, np.lib.npyio.NpzFile):
        raise UsageError(f"{path} holds a single array; an .npz file of named arrays is needed")
    return file


def _check_sizes(path: Path) -> None:
    """Refuse, before anything is unpacked, arrays of far more bytes than the file has, or than their headers say.

    Nothing that is unpacked later is longer than the archive's own list says.
    """
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
    limits.check_unpacked(path, path.stat().st_size, sum(entry.file_size for entry in entries))
    for entry in entries:
        key = entry.filename.removesuffix(".npy")
        shape, dtype = _npy_header(path, key)
        if not dtype.hasobject and math.prod(shape) * dtype.itemsize > entry.file_size:
            raise UsageError(
                f"{path}, array {key!r} is not readable: its header says {list(shape)} numbers of {dtype}, "
                f"{limits.sized(math.prod(shape) * dtype.itemsize)}, and it has {limits.sized(entry.file_size)}"
            )


def _npy_header(path: Path, key: str) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and type of one array of an .npz file, without reading it."""
    try:
        with zipfile.ZipFile(path) as archive, archive.open(f"{key}.npy") as file:
            first = np.lib.format.read_magic(file) == (1, 0)
            read_header = np.lib.format.read_array_header_1_0 if first else np.lib.format.read_array_header_2_0
            shape, _, dtype = read_header(file)
    except _DAMAGED as error:
        raise UsageError(f"{path}, array {key!r} is not readable: {error}") from error
    return shape, dtype


def _names(path: Path, data: dict[str, Array], key: str) -> tuple[str, ...] | None:
    return arrays.texts(data[key], f"{path}, array {key!r}") if key in data else None


def _refuse(path: Path, data: dict[str, Array], keys: tuple[str, ...], beside: str) -> None:
    for key in keys:
        if key in data:
            raise UsageError(f"{path}: array {key!r} does not go with {beside!r}")


def _check_length(path: Path, data: dict[str, Array], key: str, reference: str) -> None:
    lengths = [data[name].shape[0] if data[name].ndim else 0 for name in (reference, key)]
    if lengths[0] != lengths[1]:
        raise UsageError(f"{path}: {reference} has {lengths[0]} rows, but {key} has {lengths[1]}")


def _check_kind(path: Path) -> None:
    if path.suffix.lower() != ".jsonl":
        kinds = "an .npz, .csv, .tsv, .xlsx, .parquet or .jsonl file, a folder of images, or of a table for each client"
        raise UsageError(f"cannot read {path}: a dataset is {kinds}")


def _tokens() -> TokenShape:
    return TokenShape((text.LENGTH,), len(SPECIAL))
