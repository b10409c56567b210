"""Folders of images: their image files, by client and class."""

from __future__ import annotations

from pathlib import Path

from fl_core.data import spelling
from fl_core.errors import UsageError

IMAGES = (".png", ".jpg", ".jpeg")
FORMATS = ("PNG", "JPEG")
"""The formats that these suffixes stand for, by Pillow's names. No other reader of Pillow may open a file."""
Listing = dict[str, dict[str, list[Path]]]


def images_below(path: Path) -> list[Path]:
    """Return all image files at any depth below a folder, except hidden ones, in the order of their paths."""
    folders = [
        path,
        *(entry for entry in sorted(path.rglob("[!.]*")) if entry.is_dir()),
    ]
    return sorted(file for folder in folders for file in _images(folder))


def list_images(path: Path) -> Listing:
    """Return image files by client and class. A folder without clients has one, called ''."""
    folders = _subfolders(path)
    flat = [folder for folder in folders if _images(folder)]
    deep = [
        folder
        for folder in folders
        if any(_images(inner) for inner in _subfolders(folder))
    ]
    if not flat and not deep:
        raise UsageError(
            f"{path} must have images in class/* or client/class/* ({', '.join(IMAGES)}); got none. Add some."
        )
    if flat and deep:
        raise UsageError(
            f"{path} must have one layout; got images in {flat[0].name!r}, and folders of them in {deep[0].name!r}."
        )
    for folder in folders:
        if folder not in flat and folder not in deep:
            raise UsageError(
                f"{folder} must have images of a {'class' if flat else 'client'}; got none. Add some."
            )
    if flat:
        return {"": _by_name(flat)}
    clients: Listing = {}
    for client in deep:
        classes = clients.setdefault(spelling.name(client.name), {})
        for name, images in _by_name(_subfolders(client)).items():
            classes[name] = [*classes.get(name, []), *images]
    return clients


def _by_name(folders: list[Path]) -> dict[str, list[Path]]:
    """Return the images of folders by name. Two Unicode forms of one name are one class."""
    found: dict[str, list[Path]] = {}
    for folder in folders:
        found.setdefault(spelling.name(folder.name), []).extend(_images(folder))
    return found


def holds_images(path: Path) -> bool:
    """Return whether the subfolders of a folder hold images, as classes or as clients with classes."""
    folders = _subfolders(path)
    return any(
        _images(inner) for folder in folders for inner in (folder, *_subfolders(folder))
    )


def _subfolders(path: Path) -> list[Path]:
    return sorted(
        entry
        for entry in path.iterdir()
        if entry.is_dir() and not entry.name.startswith(".")
    )


def _images(path: Path) -> list[Path]:
    return sorted(
        entry
        for entry in path.iterdir()
        if entry.is_file()
        and entry.suffix.lower() in IMAGES
        and not entry.name.startswith(".")
    )
