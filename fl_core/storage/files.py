"""Files that are written atomically, have a digest, are never reached through links, and have one writer."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fl_core import limits
from fl_core.errors import BusyError, CorruptError, UsageError, damaged
from fl_core.storage.schema import check_stored, tensors

if TYPE_CHECKING:
    from torch import Tensor


def sha(data: bytes) -> str:
    """Return the SHA-256 in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def json_bytes(data: Mapping[str, Any]) -> bytes:
    """Return JSON in its stored form."""
    return json.dumps(data, indent=1, allow_nan=False).encode() + b"\n"


def sign(data: Mapping[str, Any]) -> bytes:
    """Return JSON with a digest of its other entries in the last entry."""
    return json_bytes({**data, "sha256": sha(json_bytes(data))})


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file and missing folders atomically: a reader sees the old contents or the new ones."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Folder(path.parent).write(path.name, data)


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write JSON atomically."""
    write_atomically(path, json_bytes(data))


def check_version(path: Path | str, found: object, wanted: str) -> bool:
    """Return whether a stored format is ``wanted``, such as ``"fedlayers.plan/2"``, and not of another kind.

    Raises:
        UsageError: another version of this package has written it. The message names the file and both formats.
    """
    kind, _, number = wanted.rpartition("/")
    match = re.fullmatch(rf"{re.escape(kind)}/([1-9][0-9]{{0,8}})", str(found))
    if match and int(match[1]) != int(number):
        newer = int(match[1]) > int(number)
        remedy = (
            "A newer fedlayers wrote it: update yours"
            if newer
            else "An older fedlayers wrote it: train again"
        )
        raise UsageError(
            f"{path} must have the format {wanted}; got {found}. {remedy}."
        )
    return bool(match)


def check_no_links(folder: Path) -> None:
    """Refuse a folder with a symbolic link anywhere below, through which runs would be read or written elsewhere.

    Raises:
        CorruptError: names the link.
    """
    for above, folders, names in os.walk(folder):
        for path in (os.path.join(above, name) for name in (*folders, *names)):
            if os.path.islink(path):
                raise CorruptError(
                    f"{path} is a symbolic link and is not followed. Remove it, or use another folder."
                )


class Folder:
    """The regular files below one directory, by relative name.

    The directory's own path may contain links. Links, pipes and devices below it are refused without waiting for them.

    Raises:
        CorruptError: from every method, if a name leads through a link, or to a pipe, a device or a folder.
        OSError: from every method, with the file's path: a full disk, no permission.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    def file(self, name: str) -> Path:
        """Return the path of a name that nothing has, or a regular file, in folders that are no links."""
        parts = name.split("/")
        if {"", ".", ".."} & {*parts}:
            raise CorruptError(
                f"name of a file below {self.path} must be without empty parts, '.' and '..'; got {name!r}."
            )
        path = self.path
        for place, part in enumerate(parts, 1):
            path /= part
            is_kind = stat.S_ISREG if place == len(parts) else stat.S_ISDIR
            with suppress(FileNotFoundError, NotADirectoryError):
                mode = os.stat(path, follow_symlinks=False).st_mode
                if stat.S_ISLNK(mode):
                    raise CorruptError(
                        f"{path} is a symbolic link, which is not followed"
                    )
                if not is_kind(mode):
                    raise CorruptError(f"{path} is no regular file")
        return path

    def has(self, name: str) -> bool:
        """Return whether a file has this name."""
        return self.file(name).exists()

    def names(self, folder: str = "") -> list[str]:
        """Return the sorted names in a folder below, or none if it does not exist."""
        path = self.file(f"{folder}/-").parent if folder else self.path
        return sorted(os.listdir(path)) if path.exists() else []

    def size(self, name: str) -> int:
        """Return the bytes of a file.

        Raises:
            CorruptError: it does not exist.
        """
        path = self.file(name)
        try:
            return os.stat(path).st_size
        except FileNotFoundError as error:
            raise CorruptError(f"{path} is missing") from error

    def read(self, name: str, most: int | None = None) -> bytes:
        """Read an existing file.

        Args:
            most: the largest allowed number of bytes. The default is the machine's memory.

        Raises:
            CorruptError: it does not exist, or is larger. Then nothing is read.
        """
        path = self.file(name)
        limits.check_size(path, self.size(name), most, CorruptError)
        with _named(path):
            return path.read_bytes()

    def read_signed(self, name: str, *shapes: Any) -> dict[str, Any]:
        """Return the data of a file from :func:`sign`.

        Args:
            shapes: forms that it must have, each as :func:`fl_core.storage.schema.check_stored` takes it.

        Raises:
            CorruptError: the file is missing, any byte differs, or it has another form.
        """
        raw, path = self.read(name, limits.JSON_BYTES), self.path / name
        with damaged(path):  # no JSON, no UTF-8, nested too deeply, or a NaN
            data = limits.parsed_json(raw)
            if not isinstance(data, dict) or not data.pop("sha256", None):
                raise ValueError("it has no digest")
            if raw != sign(data):
                raise ValueError("its contents do not match its digest")
        for form in shapes:
            check_stored(path, data, form)
        return data

    def read_checked(self, name: str, digest: str) -> bytes:
        """Return a file with a known SHA-256.

        Raises:
            CorruptError: the file is missing, or any byte differs.
        """
        data = self.read(name)
        if sha(data) != digest:
            raise CorruptError(
                f"{self.path / name} is damaged: its digest is {sha(data)[:12]}…, recorded is {digest[:12]}…"
            )
        return data

    def read_tensors(self, name: str, digest: str) -> dict[str, Tensor]:
        """Return the tensors of a file with a known SHA-256.

        Raises:
            CorruptError: the file is missing, any byte differs, or it is no sound file of tensors.
        """
        data = self.read_checked(name, digest)
        with damaged(self.path / name):
            return tensors(data)

    def write(self, name: str, data: bytes, lasting: bool = True) -> None:
        """Write a file so that a reader sees the old contents or the new, and a power cut keeps one of them.

        Args:
            lasting: whether the file's name is on the disk, too, when this returns. Otherwise :meth:`sync` its folder.
        """
        path = self.file(name)
        with _named(path):
            with suppress(FileExistsError):
                os.mkdir(path.parent)
            part = f"{path}.{os.getpid()}.part"
            with suppress(FileNotFoundError):
                os.unlink(part)  # from an earlier process with this number
            try:
                handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
                with os.fdopen(handle, "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(part, path)
            except BaseException:
                with suppress(OSError):  # a leftover is removed when the run is resumed
                    os.unlink(part)
                raise
            if lasting:
                _sync(path.parent)

    def append(self, name: str, data: bytes) -> None:
        """Append data to a file without waiting for the disk. A missing file is created."""
        path = self.file(name)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        with _named(path), os.fdopen(os.open(path, flags, 0o666), "wb") as file:
            file.write(data)

    def remove(self, name: str) -> None:
        """Remove a file, if it exists."""
        with suppress(FileNotFoundError):
            os.unlink(self.file(name))

    def sync(self, name: str) -> None:
        """Bring an appended file, or the names in a folder, to the disk, if it exists."""
        path = self.path / name
        with suppress(FileNotFoundError), _named(path):
            _sync(path)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold an operating-system lock that ends with its process.

        Raises:
            BusyError: another process holds it.
            CorruptError: what is to be locked is no regular file.
        """
        path = self.file("lock")
        with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "rb+") as file:
            try:
                with _named(path):
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                holder = file.read(64).decode(errors="replace").strip() or "unknown"
                raise BusyError(
                    f"{self.path} is being written by another process (pid {holder}). Wait until it ends."
                ) from error
            with _named(path):
                file.truncate()
                file.write(f"{os.getpid()}\n".encode())
                file.flush()
            yield  # the lock ends when the file is closed


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Let an error of the operating system name this path."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
