"""Locks between processes that end with their process, also without ``fcntl``."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import ModuleType

from fl_core.errors import CorruptError

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # it is not on every operating system
    fcntl = None


@contextmanager
def exclusive(handle: int, path: Path) -> Iterator[None]:
    """Hold an exclusive lock on an open file, or by SQLite on its path where there is no ``fcntl``.

    Args:
        handle: of the file, open for writing.
        path: of another, empty file.

    Raises:
        BlockingIOError: another process holds it.
        CorruptError: the file for SQLite is no database.
    """
    if fcntl is not None:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until the file is closed
        yield
        return
    with closing(sqlite3.connect(path, timeout=0, isolation_level=None)) as held:
        try:
            held.execute("BEGIN EXCLUSIVE")
        except sqlite3.OperationalError as error:
            raise BlockingIOError(str(error)) from error
        except sqlite3.DatabaseError as error:
            raise CorruptError(f"{path} is damaged: {error}. Remove it while no process writes here.") from error
        yield
