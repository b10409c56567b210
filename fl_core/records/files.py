"""Files that are written whole or not at all, carry their digest, and are written by one process at a time."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load

from fl_core.errors import BusyError, CorruptError
from fl_core.tree import Tree


def sha(data: bytes) -> str:
    """SHA-256 in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def json_bytes(data: Mapping[str, Any]) -> bytes:
    """JSON as it is stored."""
    return json.dumps(data, indent=1, allow_nan=False).encode() + b"\n"


def signed(data: Mapping[str, Any]) -> bytes:
    """JSON with the digest of all the rest in its last entry."""
    return json_bytes({**data, "sha256": sha(json_bytes(data))})


def write_atomically(path: Path, data: bytes, lasting: bool = True) -> None:
    """Write a file so that a reader sees the old contents or the new, and a power cut keeps one of them.

    Args:
        lasting: whether the file's name, too, is on the disk when this returns; otherwise :func:`sync` its folder.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    with part.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    if lasting:
        sync(path.parent)


def sync(folder: Path) -> None:
    """Bring the names in a folder to the disk; nothing to do where there is no such folder."""
    if not folder.is_dir():
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write JSON atomically."""
    write_atomically(path, json_bytes(data))


def read(path: Path) -> bytes:
    """A file that must be there.

    Raises:
        CorruptError: it is missing.
    """
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise CorruptError(f"{path} is missing") from error


def read_signed(path: Path) -> dict[str, Any]:
    """What :func:`signed` was given.

    Raises:
        CorruptError: missing, or any byte differs.
    """
    raw = read(path)
    try:
        data = json.loads(raw)
        sound = isinstance(data, dict) and data.pop("sha256", None) is not None and raw == signed(data)
    except ValueError as error:  # no JSON, no UTF-8, or a NaN
        raise CorruptError(f"{path} is damaged: {error}") from error
    if not sound:
        raise CorruptError(f"{path} is damaged: its contents do not match its digest")
    return data


def read_checked(path: Path, digest: str) -> bytes:
    """A file whose SHA-256 is known.

    Raises:
        CorruptError: missing, or any byte differs.
    """
    data = read(path)
    if sha(data) != digest:
        raise CorruptError(f"{path} is damaged: its digest is {sha(data)[:12]}…, recorded is {digest[:12]}…")
    return data


def read_tensors(path: Path, digest: str) -> Tree:
    """The tensors of a safetensors file whose SHA-256 is known.

    Raises:
        CorruptError: missing, or any byte differs.
    """
    data = read_checked(path, digest)
    try:
        return load(data)
    except SafetensorError as error:
        raise CorruptError(f"{path} is damaged: {error}") from error


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """An operating-system lock that dies with its holder."""
    handle = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.read(handle, 64).decode(errors="replace").strip() or "unknown"
            raise BusyError(f"{path} is being written by another process (pid {holder})") from error
        os.ftruncate(handle, 0)
        os.write(handle, f"{os.getpid()}\n".encode())
        for part in (*path.glob("*.part"), *path.glob("*/*.part")):  # of a writer that was killed
            part.unlink()
        yield
    finally:
        os.close(handle)
