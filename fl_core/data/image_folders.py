"""Folders of images: their image files by client and class, and the pixels as a viewer shows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageOps

from fl_core import storage
from fl_core.data import arrays
from fl_core.data.column_table import Column, ColumnTable
from fl_core.data.columns import composed, located
from fl_core.data.sources import Source
from fl_core.errors import UsageError, spelled

IMAGES = (".png", ".jpg", ".jpeg")
FORMATS = ("PNG", "JPEG")
"""The formats that these suffixes stand for, by Pillow's names. No other reader of Pillow may open a file."""
_MODES = ("1", "L", "P", "RGB", "RGBA", "LA", "CMYK", "YCbCr")
_UNREADABLE = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)


def read(path: Path, size: int | None = None) -> Source:
    """Read a dataset from a folder of images (see :func:`fl_core.data.files.read`).

    Args:
        size: crop each image to a square at its centre, and scale it to this many pixels a side.

    Raises:
        UsageError: the layout differs, an image is unreadable or has another size, or a class has no images.
    """
    found = list_images(path)
    files, names = list(found["file"]), sorted(set(found["label"]))
    x, odd = pixels(files, where=path, side=size)
    with located(str(path)):
        y, classes = arrays.labels(found["label"].to_numpy(object), names)
    first = files[0].relative_to(path).as_posix()
    columns = [
        Column("image", "pixels in 0..1", x[0].size, example=first, odd=odd),
        Column("class folder", "label", example=classes[0]),
    ]
    source = Source(str(path), x, y, classes)
    if any(found["client"]):
        owner, clients = arrays.owners(found["client"].to_numpy(object))
        columns.insert(0, Column("client folder", "client", example=clients[0]))
        source = replace(source, owner=owner, owner_names=clients)
    return replace(source, table=ColumnTable(tuple(columns)))


def peek(path: Path, side: int | None) -> tuple[tuple[int, ...], bool]:
    """Return the shape of a folder's images and whether there are clients, from names and headers alone."""
    found = list_images(path)
    headers = [_header(file) for file in found["file"]]
    width, height = (side, side) if side else headers[0].size
    return (1 if _all_gray(headers) else 3, height, width), any(found["client"])


class _Header(NamedTuple):
    """What the header of an image file says: (width, height) as shown, mode, and what is done to show it."""

    size: tuple[int, int]
    mode: str
    turned: bool
    transparent: bool


def pixels(
    files: Sequence[Path],
    gray: bool | None = None,
    where: Path | None = None,
    side: int | None = None,
) -> tuple[NDArray[np.uint8], str]:
    """Read image files as uint8, [n, H, W] if all are grey, otherwise [n, H, W, 3], and say what was done to them.

    Args:
        gray: whether they must be grey. None means as they are. If false, grey ones get three equal channels.
        where: the folder named in an error about their size in memory. The default is that of the first.
        side: crop each image to a square at its centre, and scale it to this many pixels. None means that all must
            have one size.

    Raises:
        UsageError: an image is unreadable, differs in size from the first, or is not grey although it must be.
    """
    headers = [_header(file) for file in files]
    size = (side, side) if side else headers[0].size
    for file, header in zip(files, headers, strict=True):
        if not side and header.size != size:
            way = (
                f" Crop and scale them: {spelled(image_size=min(size))}."
                if where
                else ""
            )
            raise UsageError(
                f"{file}: all images must have one size; "
                f"got {header.size[0]}x{header.size[1]}, but {files[0]} is {size[0]}x{size[1]}.{way}"
            )
        if gray and not _all_gray([header]):
            raise UsageError(f"{file}: images must be gray; got one in colour.")
    mode = "L" if (_all_gray(headers) if gray is None else gray) else "RGB"
    packed = sum(file.stat().st_size for file in files)
    storage.check_unpacked(
        where or files[0].parent, packed, len(files) * size[0] * size[1] * len(mode)
    )
    x = np.empty(
        (len(files), size[1], size[0], *([] if mode == "L" else [3])), dtype=np.uint8
    )
    for row, file in enumerate(files):
        try:
            with Image.open(file, formats=FORMATS) as image:
                shown = _as_shown(image).convert(mode)
        except _UNREADABLE as error:
            raise _unreadable(file, error) from error
        if side:
            least = min(shown.size)
            left, top = ((full - least) // 2 for full in shown.size)
            shown = shown.crop((left, top, left + least, top + least)).resize(size)
        x[row] = np.asarray(shown)
    counts = {
        "turned by EXIF": sum(header.turned for header in headers),
        "transparent, laid on white": sum(header.transparent for header in headers),
        f"cropped and scaled to {side}x{side}": sum(
            header.size != size for header in headers
        ),
    }
    return x, ", ".join(f"{n:,} {what}" for what, n in counts.items() if n)


def _header(file: Path) -> _Header:
    """Return the header of an image file, without decoding pixels."""
    try:
        with Image.open(file, formats=FORMATS) as image:
            size, mode = image.size, image.mode
            deep = any(";16" in str(tile) for tile in image.tile)
            orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
            transparent = image.has_transparency_data
    except _UNREADABLE as error:
        raise _unreadable(file, error) from error
    if deep or mode not in _MODES:
        got = "16 bits" if deep else f"mode {mode}"
        raise UsageError(
            f"{file}: images must have at most 8 bits a channel; got {got}. Convert it to 8 bits first."
        )
    if orientation >= 5:  # a quarter turn
        size = size[::-1]
    return _Header(size, mode, orientation > 1, transparent)


def _unreadable(file: Path, error: BaseException) -> UsageError:
    return UsageError(f"{file} must be a readable image: {error}. Save it again.")


def _as_shown(image: Image.Image) -> Image.Image:
    """Return an image as a viewer shows it: turned by its EXIF orientation, and laid on white if it is transparent."""
    image = ImageOps.exif_transpose(image)
    if not image.has_transparency_data:
        return image
    image = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)


def _all_gray(headers: Sequence[_Header]) -> bool:
    """Return whether all images are grey."""
    return all(header.mode in ("1", "L") for header in headers)


# --- their files ----------------------------------------------------------------------------------------------


def images_below(path: Path) -> list[Path]:
    """Return all image files at any depth below a folder, except hidden ones, in the order of their paths."""
    return _images(path, "**/[!.]*")


def list_images(path: Path) -> pd.DataFrame:
    """Return image files with their client and label, sorted. Two Unicode forms of one name are one class.

    Without clients the client is an empty text.
    """
    flat, deep = _images(path, "[!.]*/[!.]*"), _images(path, "[!.]*/[!.]*/[!.]*")
    if bool(flat) == bool(deep):
        got = f"{flat[0]} and {deep[0]}" if flat else "none"
        raise UsageError(
            f"{path} must have one layout of images, class/* or client/class/* ({', '.join(IMAGES)}); got {got}."
        )
    kind, depth = ("class", 0) if flat else ("client", 1)
    used = {file.parents[depth] for file in flat or deep}
    for folder in sorted(path.glob("[!.]*")):
        if folder.is_dir() and folder not in used:
            raise UsageError(
                f"{folder} must have images of a {kind}; got none. Add some."
            )
    rows = [
        (
            "" if flat else composed(file.parts[-3]),
            composed(file.parts[-2]),
            file,
        )
        for file in flat or deep
    ]
    frame = pd.DataFrame(rows, columns=["client", "label", "file"])
    return frame.sort_values(["client", "label"], kind="stable")


def holds_images(path: Path) -> bool:
    """Return whether the subfolders of a folder hold images, as classes or as clients with classes."""
    return any(_images(path, form) for form in ("[!.]*/[!.]*", "[!.]*/[!.]*/[!.]*"))


def _images(path: Path, form: str) -> list[Path]:
    return sorted(
        file
        for file in path.glob(form)
        if file.suffix.lower() in IMAGES and file.is_file()
    )
