"""Files that are stored packed by gzip, and read in bounded memory."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from fl_core import limits
from fl_core.errors import CorruptError, damaged
from fl_core.storage.files import Folder

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
