"""Files that are written atomically, have a digest, are never reached through links, and have one writer."""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import io
import json
import os
import re
import stat
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, BinaryIO, TypeVar

from fl_core import limits
from fl_core.errors import BusyError, CorruptError, UsageError, damaged
from fl_core.storage.schema import check_stored

Parsed = TypeVar("Parsed")
_PLAIN = (
    os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
)  # does not wait for the other end of a pipe


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

    # --- reading ---

    def has(self, name: str) -> bool:
        """Return whether anything has this name, even a broken link."""
        return _mode(self._path(name)) is not None

    def is_own(self, name: str) -> bool:
        """Return whether a name is that of a regular file."""
        return stat.S_ISREG(_mode(self._path(name)) or 0)

    def names(self, folder: str = "") -> list[str]:
        """Return the sorted names in a folder below, or none if it does not exist."""
        path = self._path(f"{folder}/-").parent if folder else self.path
        return sorted(os.listdir(path)) if _mode(path) is not None else []

    def handle(self, name: str, flags: int = os.O_RDONLY) -> int:
        """Return a descriptor of a regular file. The caller has to close it.

        Raises:
            CorruptError: the file does not exist, and ``flags`` do not create it.
        """
        path = self._regular(name)
        try:
            return os.open(str(path), flags | _PLAIN, 0o666)
        except FileNotFoundError as error:
            raise CorruptError(f"{path} is missing") from error

    @contextmanager
    def open(self, name: str) -> Iterator[BinaryIO]:
        """Open an existing file for reading. Errors are as in :meth:`handle`."""
        with _named(self.path / name), os.fdopen(self.handle(name), "rb") as file:
            yield file

    def size(self, name: str) -> int:
        """Return the bytes of an existing file."""
        with self.open(name) as file:
            return os.fstat(file.fileno()).st_size

    def read(
        self, name: str, first: int | None = None, most: int | None = None
    ) -> bytes:
        """Read an existing file.

        Args:
            first: read only this many bytes, if there are as many.
            most: the largest allowed number of bytes. The default is the machine's memory.

        Raises:
            CorruptError: as of :meth:`handle`, or the file is larger. Then nothing is read.
        """
        with self.open(name) as file:
            size = os.fstat(file.fileno()).st_size
            wanted = size if first is None else min(first, size)
            limits.check_size(self.path / name, wanted, most, CorruptError)
            return file.read(wanted)

    def read_signed(self, name: str, *shapes: Any) -> dict[str, Any]:
        """Return the data of a file from :func:`sign`.

        Args:
            shapes: forms that it must have, each as :func:`fl_core.storage.schema.validate` takes it.

        Raises:
            CorruptError: the file is missing, any byte differs, or it has another form.
        """
        raw, path = self.read(name, most=limits.JSON_BYTES), self.path / name
        with damaged(path):  # no JSON, no UTF-8, nested too deeply, or a NaN
            data = limits.parsed_json(raw)
            sound = (
                isinstance(data, dict)
                and data.pop("sha256", None) is not None
                and raw == sign(data)
            )
        if not sound:
            raise CorruptError(
                f"{path} is damaged: its contents do not match its digest"
            )
        for form in shapes:
            check_stored(path, data, form)
        return data

    def read_checked(self, name: str, digest: str, n_bytes: int | None = None) -> bytes:
        """Return a file with a known SHA-256, and possibly a known number of bytes.

        Raises:
            CorruptError: the file is missing, or any byte differs.
        """
        if n_bytes is not None and self.size(name) != n_bytes:
            path, size = self.path / name, self.size(name)
            raise CorruptError(
                f"{path} is damaged: it has {size:,} bytes, recorded are {n_bytes:,}"
            )
        data = self.read(name)
        if sha(data) != digest:
            path = self.path / name
            raise CorruptError(
                f"{path} is damaged: its digest is {sha(data)[:12]}…, recorded is {digest[:12]}…"
            )
        return data

    def read_as(
        self, parse: Callable[[bytes], Parsed], name: str, digest: str
    ) -> Parsed:
        """Return the result of ``parse`` for a file with a known SHA-256.

        Raises:
            CorruptError: the file is missing, any byte differs, or ``parse`` raised a ValueError.
        """
        data = self.read_checked(name, digest)
        with damaged(self.path / name):
            return parse(data)

    # --- writing ---

    def write(self, name: str, data: bytes, lasting: bool = True) -> None:
        """Write a file so that a reader sees the old contents or the new, and a power cut keeps one of them.

        Args:
            lasting: whether the file's name is on the disk, too, when this returns. Otherwise :meth:`sync` its folder.
        """
        path = self._regular(name, make=True)
        part = f"{path}.{os.getpid()}.part"
        with _named(path):
            with suppress(FileNotFoundError):
                os.unlink(part)  # from an earlier process with this number
            try:
                handle = os.open(
                    part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _PLAIN, 0o666
                )
                with os.fdopen(handle, "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(part, path)
            except BaseException:
                with suppress(
                    OSError
                ):  # the first error is raised; leftovers are removed when the run is resumed
                    os.unlink(part)
                raise
            if lasting:
                _sync(path.parent)

    def append(self, name: str, data: bytes) -> None:
        """Append data to a file without waiting for the disk. A missing file is created."""
        handle = self.handle(name, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        with _named(self.path / name), os.fdopen(handle, "wb") as file:
            file.write(data)

    def remove(self, name: str) -> None:
        """Remove a file, or a link of that name, if it exists."""
        with suppress(FileNotFoundError):
            os.unlink(self._path(name))

    def sync(self, name: str) -> None:
        """Bring an appended file, or the names in a folder, to the disk, if it exists."""
        path = self._path(name)
        with suppress(FileNotFoundError), _named(path):
            _sync(path)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold an operating-system lock that ends with its process.

        Raises:
            BusyError: another process holds it.
            CorruptError: what is to be locked is no regular file.
        """
        handle = self.handle("lock", os.O_RDWR | os.O_CREAT)
        path = self.path / "lock"
        try:
            try:
                fcntl.flock(
                    handle, fcntl.LOCK_EX | fcntl.LOCK_NB
                )  # until the file is closed
            except BlockingIOError as error:
                holder = (
                    os.read(handle, 64).decode(errors="replace").strip() or "unknown"
                )
                raise BusyError(
                    f"{self.path} is being written by another process (pid {holder}). Wait until it ends."
                ) from error
            with _named(path):
                if (
                    os.fstat(handle).st_nlink == 1
                ):  # otherwise it is also a file elsewhere
                    os.ftruncate(handle, 0)
                    os.write(handle, f"{os.getpid()}\n".encode())
            yield
        finally:
            with _named(path):
                os.close(handle)

    # --- names ---

    def _path(self, name: str, make: bool = False) -> Path:
        """Return the path of a name, whose folders are no links. Missing ones can be made."""
        *folders, last = name.split("/")
        if {"", ".", ".."} & {*folders, last}:
            raise CorruptError(
                f"name of a file below {self.path} must be without empty parts, '.' and '..'; got {name!r}."
            )
        path = self.path
        for part in folders:
            path /= part
            mode = _mode(path)
            if mode is None and make:
                with suppress(FileExistsError):
                    os.mkdir(path)
            elif mode is not None and not stat.S_ISDIR(mode):
                raise _irregular(path, mode)
        return path / last

    def _regular(self, name: str, make: bool = False) -> Path:
        """Return the path of a name that nothing has, or a regular file."""
        path = self._path(name, make)
        mode = _mode(path)
        if mode is not None and not stat.S_ISREG(mode):
            raise _irregular(path, mode)
        return path


def _mode(path: Path) -> int | None:
    """Return the kind and rights of what has a path, a link's own if it is one; None if nothing has it."""
    try:
        return os.stat(path, follow_symlinks=False).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None


def _irregular(path: Path, mode: int) -> CorruptError:
    what = (
        "a symbolic link, which is not followed"
        if stat.S_ISLNK(mode)
        else "no regular file"
    )
    return CorruptError(f"{path} is {what}")


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
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


SUFFIX = ".gz"
"""What the name of a packed file ends with."""


def compress_bytes(data: bytes) -> bytes:
    """Return data packed by gzip. Equal data have equal bytes: no name and no time is stored.

    >>> unpack(io.BytesIO(compress_bytes(b"one line")), "rows.jsonl.gz").read()
    b'one line'
    """
    return gzip.compress(data, mtime=0)


def unpack(file: IO[bytes], path: Path | str) -> IO[bytes]:
    """Return the contents of an open file, as they are if the name does not end with :data:`SUFFIX`.

    Args:
        path: of the file, also for messages.

    Raises:
        CorruptError: when it is read: the file is damaged, or unpacks to far more bytes than such files do.
    """
    return (
        io.BufferedReader(_Unpacked(file, path)) if str(path).endswith(SUFFIX) else file
    )


def pack(folder: Folder, name: str, first: int | None = None) -> int:
    """Replace a file by a packed one, and return the number of freed bytes.

    Args:
        first: keep only this many bytes of it.
    """
    data = compress_bytes(folder.read(name, first))
    freed = folder.size(name) - len(data)
    folder.write(name + SUFFIX, data)
    folder.remove(name)
    return freed


def stored_name(folder: Folder, name: str) -> str:
    """Return a file's name as it is stored: with :data:`SUFFIX` if only the packed file is there."""
    return name + SUFFIX if folder.has(name + SUFFIX) and not folder.has(name) else name


@contextmanager
def open_packed(folder: Folder, name: str) -> Iterator[IO[bytes]]:
    """Open a file that may be packed, for reading. Errors are as in :meth:`Folder.open` and :func:`unpack`."""
    found = stored_name(folder, name)
    with folder.open(found) as file:
        yield unpack(file, folder.path / found)


class _Unpacked(io.RawIOBase):
    def __init__(self, file: IO[bytes], path: Path | str) -> None:
        self._path = path
        self._left = max(limits.UNPACKED, limits.RATIO * file.seek(0, io.SEEK_END))
        file.seek(0)
        self._file = gzip.GzipFile(fileobj=file)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        with damaged(self._path, EOFError, gzip.BadGzipFile, zlib.error):
            data = self._file.read(len(buffer))
        self._left -= len(data)
        if self._left < 0:
            raise CorruptError(
                f"{self._path} is damaged: it unpacks to more than {limits.RATIO} times its size"
            )
        buffer[: len(data)] = data
        return len(data)
