"""Limits of memory: large files, packed files that unpack to far more, deep JSON, and large models.

>>> import json
>>> parsed_json('{"layers": ["fc1", "fc2"]}')
{'layers': ['fc1', 'fc2']}
>>> parsed_json("[" * 5000 + "]" * 5000)
Traceback (most recent call last):
ValueError: JSON that is nested more than 100 times
"""

from __future__ import annotations

import json
import os
import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from fl_core.errors import RunError, UsageError

JSON_BYTES = 2**30
"""Bytes of one file of JSON at most; the manifest of a checkpoint has about 200 for each client."""
LINE_BYTES = 2**26
"""Bytes of one line of a file of JSON lines at most."""
DEEPEST = 100
"""Lists and objects of JSON within each other at most."""
VALUES = 2**20
"""Values of one text of JSON at most, or one for every :data:`BYTES_EACH` of its bytes if that is more.

Each of them takes about 64 bytes of memory, however short it is written.
"""
BYTES_EACH = 4
_STRUCTURE = "[{,:"
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"?', re.DOTALL)
_NESTING = frozenset((dict, list))
_NESTED = f"JSON that is nested more than {DEEPEST} times"
UNPACKED = 2**28
"""Bytes that a packed file may unpack to, however small it is."""
RATIO = 100
"""Bytes beyond that to which one byte of a packed file may unpack: measured numbers and pictures do not reach 10."""


def memory() -> int:
    """Return the bytes of memory that this machine has, or a number beyond all if its system does not say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError):
        return sys.maxsize


def check_size(
    path: Path | str,
    n_bytes: int,
    most: int | None = None,
    fault: Callable[[str], Exception] = UsageError,
) -> None:
    """Refuse a file before it is read, if it has more bytes than ``most``, or than the machine has memory.

    Raises:
        fault: names the file, its size and the limit.
    """
    if n_bytes > (memory() if most is None else most):
        limit = (
            f"this machine's memory of {format_bytes(memory())}"
            if most is None
            else f"the {format_bytes(most)} of its kind"
        )
        raise fault(f"{path} must have at most {limit}; got {format_bytes(n_bytes)}.")


def read_text(path: Path, most: int | None = None) -> str:
    """Return the text of a regular file that a command names, as UTF-8 of at most ``most`` bytes.

    Raises:
        UsageError: the file is too large. UnicodeDecodeError: it is not UTF-8.
    """
    check_size(path, path.stat().st_size, most)
    return path.read_text(encoding="utf-8")


def read_toml(path: Path, most: int) -> dict[str, Any]:
    """Return the contents of a TOML file of at most ``most`` bytes.

    Raises:
        UsageError: the file is too large, or no TOML. The message names it.
    """
    try:
        return tomllib.loads(read_text(path, most))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(
            f"{path} must be TOML; got an error: {error}. Correct the file."
        ) from error


def check_unpacked(
    path: Path | str, packed: int, unpacked: int, most: int = UNPACKED
) -> None:
    """Refuse a packed file before it is unpacked, if that would take far more bytes than the file has.

    Args:
        most: bytes to which any file may unpack.

    Raises:
        UsageError: names the file, both sizes, and a way for data that are meant.
    """
    check_size(f"{path}, unpacked,", unpacked)
    if unpacked > max(most, RATIO * packed):
        raise UsageError(
            f"{path} must unpack to at most {RATIO} times its size; "
            f"got {format_bytes(unpacked)} from {format_bytes(packed)}. Store data that are meant without compression."
        )


def parsed_json(text: str | bytes) -> Any:
    """Parse a text of JSON.

    Raises:
        ValueError: no JSON, no UTF-8, more than :data:`VALUES` short values, or lists and objects nested more than
            :data:`DEEPEST` times.
    """
    text = text.decode() if isinstance(text, bytes) else text
    check_values(text)
    try:
        found = json.loads(text)
    except RecursionError as error:
        raise ValueError(_NESTED) from error
    level = [found] if type(found) in _NESTING else []
    for _ in range(DEEPEST):
        if not level:
            return found
        parts = [each.values() if isinstance(each, dict) else each for each in level]
        parts = [
            part for part in parts if not _NESTING.isdisjoint(map(type, part))
        ]  # rarely any of a line of rows
        level = [inner for part in parts for inner in part if type(inner) in _NESTING]
    if level:
        raise ValueError(_NESTED)
    return found


def check_values(text: str) -> None:
    """Refuse a text of JSON or TOML before it is parsed, if its values would take far more memory than the text.

    Raises:
        ValueError: says how many values it may have.
    """
    most = max(VALUES, len(text) // BYTES_EACH)
    if (
        sum(map(text.count, _STRUCTURE)) > most
        and sum(map(_STRING.sub("", text).count, _STRUCTURE)) > most
    ):
        raise ValueError(f"more than {most:,} values in {format_bytes(len(text))}")


def read_line(file: IO[bytes]) -> bytes:
    """The next line of a file of JSON lines; b"" at its end.

    Raises:
        ValueError: it is longer than :data:`LINE_BYTES`.
    """
    line = file.readline(LINE_BYTES + 1)
    if len(line) > LINE_BYTES:
        raise ValueError(f"a line of more than {format_bytes(LINE_BYTES)}")
    return line


def format_bytes(n_bytes: float) -> str:
    """Format a number of bytes.

    >>> format_bytes(5_440_000)
    '5.44 MB'
    """
    for unit in ("B", "kB", "MB", "GB"):
        if n_bytes < 1000:
            return f"{n_bytes:.3g} {unit}"
        n_bytes /= 1000
    return f"{n_bytes:.3g} TB"


def lacks_memory(error: BaseException | None) -> bool:
    """Return whether Python, NumPy or torch raised this because memory ended."""
    torchs = isinstance(error, RuntimeError) and not isinstance(error, RunError)
    return isinstance(error, MemoryError) or (torchs and "memory" in str(error))
