"""The user's own data by path: an .npz file, a .csv or .parquet table, texts, or a folder of images."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageFile, ImageOps

from fl_core import formats, storage
from fl_core.data import arrays
from fl_core.data.columns import Column, ColumnTable
from fl_core.data.faults import located
from fl_core.data.names import Names, composed
from fl_core.data.reading import IMAGES, PLAIN, Reading, images_in
from fl_core.data.sources import Source, check_lengths, source_of_parts
from fl_core.data.table import prepare, read as tables
from fl_core.data.values import Array, is_marked, refuse_where, texts_of
from fl_core.errors import UsageError, about, check_known, listing, spelled, warn
from fl_core.kinds import Kind, kind_of, wrong_kind
from fl_core.rows import CLASSIFICATION

OWNER_KEYS = ("client", "domain", "center")
TEXT_COPIES = 2
"""Copies of an array of texts in memory while its words are found."""
OWNED = "each sample must have a client"
FILL = "Fill it, or write whole numbers and their names in an array client_names."


def read(path: Path, reading: Reading = PLAIN) -> Source:
    """Read a dataset from a path, and check all of it before returning.

    * ``.npz``, never unpickled: ``x_train y_train x_test y_test``, or ``x y``. With ``x y`` one of ``client``,
      ``domain`` or ``center`` may name the natural clients. It holds text, or whole numbers with names in e.g.
      ``client_names``. A text that marks a missing value, such as NA, is refused, as in a table. False in
      ``is_train`` marks an official test set. Labels are whole numbers or words. Both forms
      may have ``classes``, the names of labels 0..C-1. Image arrays are uint8 [n, H, W], [n, H, W, 1] or [n, H, W, 3]
      and are scaled to 0..1. Float arrays are not scaled. Their channels come first, or are moved there from the end.
      Tables are [n, d].
    * A folder: ``client/class/*`` or ``class/*`` with images
      (:data:`fl_core.data.reading.IMAGES`). Names are sorted. Other files are named in
      a warning, and folders named train, val and test are splits. Images are turned as
      their EXIF orientation says, and transparent ones are laid on white. All must have
      one size, unless ``image_size`` crops and scales them, and are scaled to 0..1. If
      every file is stored in grey they have one channel, otherwise three. A channel of
      alpha does not count, and a palette of greys is grey.
    * ``.csv`` with a header: a label column of whole numbers or words, a column that
      names the client, and features, numbers or words. Without a ``client`` column
      there are no natural clients. With a ``text`` column the samples are these texts
      as token ids. Columns of features are then ignored.
    * ``.tsv``: the same. An Excel file is refused.
    * ``.parquet``: the same. An index without a name is ignored.
    * A folder of at most 1,000 such tables, or their paths with commas between them. Each file is a client with the
      file's name.
    * ``.jsonl``: the same, with one object per line, such as the keys text, label and,
      optionally, client.

    For other tasks than classification labels are numbers
    (:func:`fl_core.data.arrays.answers`).

    Args:
        path: the file or folder, or several tables with commas between their paths.
        reading: the names of columns and other settings. Those that have no meaning for
            the data must have their defaults.

    Raises:
        UsageError: the path is none of these, a setting has no meaning for it, or some
            content does not fit. The message names the file, array or column, and the
            first bad row.
    """
    for file in tables.files_of(path) or [path]:
        if not file.is_dir():
            storage.check_regular(file)
    if tables.is_table(path):
        reading.check_unasked(f"{path} has no images", "image_size")
        return prepare.read_table(path, reading)
    if path.is_dir():
        replace(reading, image_size=None).check_plain(str(path))
        reading.check_unasked(
            f"{path} is a folder, whose images are named by classes", "task"
        )
        return read_images(path, reading.image_size)
    if path.suffix.lower() == ".npz":
        reading.check_plain(str(path))
        return read_npz(path, reading.may_be_missing, reading.task)
    raise UsageError(
        f"{path}: a dataset must be an .npz, .csv, .tsv, .parquet or .jsonl file, or a folder of images or of one "
        f"table per client. {tables.UNPACK}"
    )


def read_npz(path: Path, missing: bool = False, task: str = CLASSIFICATION) -> Source:
    """Read a dataset from an .npz file (see :func:`read`).

    Args:
        missing: whether a table's features may be NaN.
        task: one of :data:`fl_core.rows.TASKS`, which says what the labels are.

    Raises:
        UsageError: the path is no .npz file, or arrays are missing, unknown, of unequal length or invalid.
    """
    headers_of = headers(path)
    has_sides = "x_train" in headers_of
    suffixes = ("_train", "_test") if has_sides else ("",)
    needed_keys: list[str] = []
    for suffix in suffixes:
        needed_keys += [f"x{suffix}", f"y{suffix}"]
    owner_key = next((key for key in OWNER_KEYS if key in headers_of), "client")
    side_keys = [] if has_sides else ["is_train", owner_key]
    name_keys = (
        [f"{owner_key}_names"] if owner_key in headers_of and not has_sides else []
    )
    for key in headers_of:
        check_known(
            f"array in {path}", key, [*needed_keys, *side_keys, *name_keys, "classes"]
        )
    for key in needed_keys:
        if key not in headers_of:
            got_text = listing(headers_of) or "none"
            raise UsageError(
                f"{path} must have arrays x y, or x_train y_train x_test y_test; "
                f"got no {key!r} among {got_text}."
            )
    data = read_arrays(path, list(headers_of))

    def names(key: str) -> Names | None:
        values = data.get(key)
        if values is None:
            return None
        if values.dtype.kind != "U":
            raise UsageError(
                f"{path}, array {key!r}: names must be text; got {values.dtype}."
            )
        class_names = tuple(composed(str(value)) for value in values.flat)
        if not all(map(str.strip, class_names)) or len(set(class_names)) < len(
            class_names
        ):
            got_text = listing(map(repr, class_names))
            raise UsageError(
                f"{path}, array {key!r}: names must be distinct and not empty; got {got_text}."
            )
        return class_names

    samples_by_side = {
        suffix[1:]: (data[f"x{suffix}"], data[f"y{suffix}"]) for suffix in suffixes
    }
    source, sizes = source_of_parts(
        samples_by_side, str(path), names("classes"), missing, task
    )
    source = replace(source, indices=False, integers=False)
    if owner_key in data:
        client_names = names(f"{owner_key}_names")
        with located(f"{path}, array {owner_key!r}"):
            check_lengths(source, data[owner_key])
            if arrays.is_text(data[owner_key]):
                cells = texts_of(data[owner_key])
                refuse_where(is_marked(cells), cells, OWNED, FILL)
            owner, owner_names = arrays.owners(data[owner_key], client_names)
        source = replace(source, owner=owner, owner_names=owner_names)
    is_train = None
    if has_sides:
        is_train = np.arange(len(source)) < sizes[0]
    if "is_train" in data:
        with located(f"{path}, array 'is_train'"):
            check_lengths(source, data["is_train"])
            flags = arrays.whole_numbers(data["is_train"])
            refuse_where(~np.isin(flags, (0, 1)), flags, "values must be 0 or 1")
            if flags.min() == flags.max():
                first_flag = bool(flags[0])
                raise UsageError(
                    f"{path}, array 'is_train': there must be training and test samples; got only {first_flag}."
                )
            is_train = flags.astype(bool)
    return replace(source, is_train=is_train)


def read_arrays(path: Path, keys: Sequence[str]) -> dict[str, Array]:
    """Return arrays of an .npz file, never unpickled. Other arrays in it are ignored.

    Raises:
        UsageError: the path is no such file, it lacks one of the arrays, or one has Python objects.
    """
    headers_of = headers(path)
    for key in keys:
        check_known(f"array in {path}", key, headers_of)
    requirement, advice = (
        f"{path} must hold plain numbers and text",
        "Save no Python objects.",
    )
    with (
        about(requirement, storage.DAMAGED, way=advice),
        storage.opened(path) as stream,
        np.load(stream, allow_pickle=False) as file,
    ):
        arrays_by_key = {key: file[key] for key in keys}
        for key, array in arrays_by_key.items():
            if array.dtype.kind == "U":
                check_signs(key, array)
        return arrays_by_key


def check_signs(key: str, array: Array) -> None:
    """Refuse an array of text with a code that stands for no character of Unicode.

    Args:
        key: the array's name, for the message.

    Raises:
        ValueError: there is such a code. The message names the array.
    """
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    codes = np.ascontiguousarray(native).reshape(-1).view(np.uint32)
    for part in np.array_split(codes, 1 + len(codes) // 2**20):  # little memory
        wrong = (part > sys.maxunicode) | ((part >= 0xD800) & (part < 0xE000))
        if wrong.any():
            raise ValueError(f"array {key!r} has a sign of number {part[wrong][0]:,}")


def headers(path: Path) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Return shape and type of each array of an .npz file, without reading the arrays.

    Raises:
        UsageError: the path is no such file, it has an array twice, an array claims
            more bytes than it has, texts take too many, or the file is far larger
            unpacked.
    """
    shapes, n_bytes = {}, 0
    readable_file = about(
        f"{path} must be a readable .npz file of named arrays",
        storage.DAMAGED,
        way="Save it again with numpy.savez.",
    )
    with readable_file, storage.open_zip(path) as archive:
        entries = archive.infolist()
        for entry in entries:
            with archive.open(entry) as file:
                array_format = np.lib.format
                is_version_1 = array_format.read_magic(file) == (1, 0)
                read_header = array_format.read_array_header_2_0
                if is_version_1:
                    read_header = array_format.read_array_header_1_0
                shape, _, dtype = read_header(file)
            shapes[entry.filename.removesuffix(".npy")] = shape, dtype
    if len(entries) > len(shapes):
        raise UsageError(
            f"{path} must have each array once; got one twice. Save it again with numpy.savez."
        )
    for entry, (key, (shape, dtype)) in zip(entries, shapes.items(), strict=True):
        claimed_bytes = math.prod(shape) * dtype.itemsize
        if (
            dtype.kind in "US"
            and claimed_bytes > storage.most_unpacked() // TEXT_COPIES
        ):
            texts_size = storage.format_bytes(claimed_bytes)
            most_size = storage.format_bytes(storage.most_unpacked() // TEXT_COPIES)
            allowed = 1.06 * TEXT_COPIES * claimed_bytes
            raise UsageError(
                f"{path}, array {key!r}: texts must take at most {most_size}, all as long as the longest; "
                f"got {texts_size}. Write them in a table, or allow it: "
                f"{storage.UNPACKED_VARIABLE}={allowed:.1e}."
            )
        least_bytes = 0
        if dtype.kind in "USO":
            least_bytes = 64  # texts become Python's objects
        elif len(shape) < 3:
            least_bytes = 8  # and columns 64-bit numbers
        size = math.prod(shape) * max(dtype.itemsize, least_bytes)
        n_bytes += max(entry.file_size, size)
        if not dtype.hasobject and claimed_bytes > entry.file_size:
            claimed_size = storage.format_bytes(claimed_bytes)
            claimed_shape = list(shape)
            packed_size = storage.format_bytes(entry.file_size)
            raise UsageError(
                f"{path}, array {key!r} must have the bytes that its header says, "
                f"{claimed_size} for {claimed_shape} of {dtype}; "
                f"got {packed_size}."
            )
    storage.check_unpacked(path, path.stat().st_size, n_bytes)
    return shapes


# --- folders of images -----------------------------------------------------------------------------------------

FORMATS = ("PNG", "JPEG", "BMP", "TIFF", "WEBP", "GIF")
"""The formats of images by Pillow's names. No other reader of Pillow may open a file."""
_MODES = ("1", "L", "P", "RGB", "RGBA", "LA", "CMYK", "YCbCr")
_UNREADABLE = (
    *storage.DAMAGED,
    ArithmeticError,
    AssertionError,
    Image.DecompressionBombError,
)
_TURNS, _QUARTERS = (2, 3, 4, 5, 6, 7, 8), (5, 6, 7, 8)
"""EXIF's orientations that turn or mirror an image, and those among them by a quarter turn."""


def read_images(path: Path, size: int | None = None) -> Source:
    """Read a dataset from a folder of images, in a layout of :func:`list_images`.

    The last of several splits is the official test set. A single one, train, gives none.

    Args:
        path: the folder.
        size: crop each image to a square at its centre, and scale it to this many
            pixels a side. None means that all images must have one size.

    Raises:
        UsageError: the layout differs, there are fewer than two classes, or an image is
            unreadable or has another size.
    """
    image_table = list_images(path)
    files = list(image_table["file"])
    names = sorted(set(image_table["label"]))
    x, oddities = pixels(files, where=path, side=size)
    with located(str(path)):
        y, classes = arrays.labels(image_table["label"].to_numpy(object), names)
    first_file = files[0].relative_to(path).as_posix()
    columns = [
        Column("image", "pixels in 0..1", x[0].size, example=first_file, odd=oddities),
        Column("class folder", "label", example=classes[0]),
    ]
    source = Source(str(path), x, y, classes)
    if any(image_table["client"]):
        owner, clients = arrays.owners(image_table["client"].to_numpy(object))
        columns.insert(0, Column("client folder", "client", example=clients[0]))
        source = replace(source, owner=owner, owner_names=clients)
    if any(image_table["split"]):
        split_names = {file.parents[1].name.lower() for file in files}
        splits = sorted(split_names, key=SPLIT_FOLDERS.index)
        division = "It is divided into training, validation and test"
        if len(splits) > 1:
            is_train = (image_table["split"] != "test").to_numpy()
            source = replace(source, is_train=is_train)
            division = "The last one is the test set, and the others are divided into training and validation"
        warn(
            f"{path}: folders named {listing(splits)} are splits and no "
            f"clients. {division}"
        )
    tables.warn_of_others(path, {*files})
    return replace(source, table=ColumnTable(tuple(columns)))


SPLIT_FOLDERS = (
    *("train", "training", "dev", "val", "valid", "validation", "validate"),
    *("holdout", "eval", "test", "testing"),
)
"""Names of folders that are splits, in their order. Of several that exist the last
is the test set."""


class _Header(NamedTuple):
    """The header of an image file.

    Attributes:
        size: (width, height) of the image as it is shown.
        gray: whether the image is stored in grey (:func:`_is_gray`).
        turned: whether EXIF data turn or mirror the image.
        transparent: whether it has an alpha channel or a transparent colour.
        animated: whether it has several frames.
    """

    size: tuple[int, int]
    gray: bool
    turned: bool
    transparent: bool
    animated: bool


def pixels(
    files: Sequence[Path],
    gray: bool | None = None,
    where: Path | None = None,
    side: int | None = None,
) -> tuple[NDArray[np.uint8], str]:
    """Read image files as uint8, and return them with a text on what was done to them.

    Args:
        files: the image files, at least one.
        gray: whether the images must be stored in grey (:func:`_is_gray`). None means
            as they are. If false, grey ones get three equal channels.
        where: the folder named in an error about their size in memory. None means the
            folder of the first file. Given, an error about their width and height
            proposes ``image_size``.
        side: crop each image to a square at its centre, and scale it to this many
            pixels a side. None means that all must have one size.

    Returns:
        The images, [n, H, W] if all are grey and ``gray`` is not false, otherwise
        [n, H, W, 3]; and the text, such as ``3 turned by EXIF``, or an empty one.

    Raises:
        UsageError: an image is unreadable, differs in size from the first, is not grey
            although it must be, or would take far more memory than its file has bytes.
    """
    headers = [_header(file) for file in files]
    size = (side, side) if side else headers[0].size
    for file, header in zip(files, headers, strict=True):
        if not side and header.size != size:
            advice = ""
            if where:
                advice = f" Crop and scale them: {spelled(image_size=min(size))}."
            raise UsageError(
                f"{file}: all images must have one size; "
                f"got {header.size[0]}x{header.size[1]}, but {files[0]} is {size[0]}x{size[1]}.{advice}"
            )
        if gray and not header.gray:
            raise UsageError(f"{file}: images must be gray; got one in colour.")
    if gray is None:
        gray = all(header.gray for header in headers)
    mode = "RGB"
    if gray:
        mode = "L"
    sizes = [header.size for header in headers]
    formats.check_images(where or files[0].parent, files, sizes, size, len(mode))
    channels = [3] if mode == "RGB" else []
    x = np.empty((len(files), *size[::-1], *channels), dtype=np.uint8)
    for row, file in enumerate(files):
        with _decoded(file) as image:
            shown_image = ImageOps.exif_transpose(image)  # as a viewer shows it
            if shown_image.has_transparency_data:
                shown_image, white_image = (
                    shown_image.convert("RGBA"),
                    Image.new("RGBA", shown_image.size, "white"),
                )
                shown_image = Image.alpha_composite(white_image, shown_image)
            shown_image = shown_image.convert(mode)
        if side:
            square_side = min(shown_image.size)
            left, top = ((full - square_side) // 2 for full in shown_image.size)
            shown_image = shown_image.crop(
                (left, top, left + square_side, top + square_side)
            ).resize(size)
        x[row] = np.asarray(shown_image)
    treatment_counts = {
        "turned by EXIF": sum(header.turned for header in headers),
        "transparent, laid on white": sum(header.transparent for header in headers),
        f"cropped and scaled to {side}x{side}": sum(
            header.size != size for header in headers
        ),
        "animated, of which the first frame": sum(
            header.animated for header in headers
        ),
    }
    treatments = ", ".join(
        f"{n:,} {treatment}" for treatment, n in treatment_counts.items() if n
    )
    return x, treatments


def _header(file: Path) -> _Header:
    """Return the header of an image file, without decoding pixels.

    Raises:
        UsageError: the file is unreadable, has too many scans, or has more than 8 bits
            a channel.
    """
    with _decoded(file) as image:
        if image.format in ("JPEG", "MPO"):
            formats.check_scans(storage.read_bytes(file))
        size, mode = image.size, image.mode
        has_16_bits = any(";16" in str(tile) for tile in image.tile)
        orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
        gray, transparent = _is_gray(image), image.has_transparency_data
        animated = getattr(image, "is_animated", False)
    if has_16_bits or mode not in _MODES:
        got_text = "16 bits" if has_16_bits else f"mode {mode}"
        raise UsageError(
            f"{file}: images must have at most 8 bits a channel; got {got_text}. Convert it to 8 bits first."
        )
    if orientation in _QUARTERS:
        size = size[::-1]
    return _Header(size, gray, orientation in _TURNS, transparent, animated)


@contextmanager
def _decoded(file: Path) -> Iterator[ImageFile.ImageFile]:
    requirement = f"{file} must be a readable image"
    with (
        storage.opened(file) as stream,
        about(requirement, _UNREADABLE, way="Save it again."),
        Image.open(stream, formats=FORMATS) as image,
    ):
        yield image


def _is_gray(image: Image.Image) -> bool:
    """Return whether an image is stored in grey, without decoding pixels.

    It has one channel of grey, with or without alpha, or a palette whose entries are
    all grey. Three channels are colour, also if they are equal everywhere.
    """
    if image.mode != "P" or image.palette is None:
        return image.mode in ("1", "L", "LA")
    raw_mode, content = image.palette.getdata()
    swatch = Image.new("P", (1, 1))
    swatch.putpalette(content, raw_mode)
    entries = np.array(swatch.getpalette("RGB")).reshape(-1, 3)
    return bool((entries == entries[:, :1]).all())


# --- their files ----------------------------------------------------------------------------------------------


def list_images(path: Path) -> pd.DataFrame:
    """Return image files in a frame with the columns ``client``, ``label``, ``file`` and ``split``.

    Rows are sorted by client and label. Two Unicode forms of one name are one class.
    Without clients the client is an empty text. If all folders of clients are named as
    splits, among them train, they are splits and no clients. The split is then
    ``train`` or ``test``, and otherwise an empty text.

    Raises:
        UsageError: the folder has no images, or another layout than ``class/*`` or
            ``client/class/*``; or some folders are named as splits
            (:data:`SPLIT_FOLDERS`) where classes or clients are expected.
    """
    class_files = images_in(path, "[!.]*/[!.]*")
    client_files = images_in(path, "[!.]*/[!.]*/[!.]*")
    if bool(class_files) == bool(client_files):
        got_text = "none"
        if class_files:
            got_text = f"{class_files[0]} and {client_files[0]}"
        elif kind_of(path) not in (Kind.FOLDER, Kind.SAMPLES):
            raise wrong_kind(path, "data", "a file, or a folder of tables or images")
        image_types = ", ".join(IMAGES)
        raise UsageError(
            f"{path} must have tables, or one layout of images, class/* or client/class/* ({image_types}); "
            f"got {got_text}. {tables.UNPACK}"
        )
    rows = [
        (
            "" if class_files else composed(file.parts[-3]),
            composed(file.parts[-2]),
            file,
        )
        for file in class_files or client_files
    ]
    frame = pd.DataFrame(rows, columns=["client", "label", "file"]).assign(split="")
    lower_names = {
        folder_name.lower()
        for folder_name in frame["label" if class_files else "client"]
    }
    splits = lower_names & {*SPLIT_FOLDERS}
    is_split = splits == lower_names and bool(lower_names & {"train", "training"})
    if splits and is_split == bool(class_files):
        folder_names = listing(sorted(lower_names))
        raise UsageError(
            f"{path} must have folders of classes, within clients or within splits such as train and test; "
            f"got {folder_names}. Sort the images into classes, or rename what is no split."
        )
    if is_split:
        test_folder = max(lower_names, key=SPLIT_FOLDERS.index)
        is_test = frame["client"].str.lower() == test_folder
        frame["split"] = np.where(is_test & (len(lower_names) > 1), "test", "train")
        frame["client"] = ""
    return frame.sort_values(["client", "label"], kind="stable")
