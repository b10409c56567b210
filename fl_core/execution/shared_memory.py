"""Bytes shared between processes, in memory if the system has room for them, otherwise in an unnamed file."""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import IO, Any

import torch

from fl_core import limits
from fl_core.errors import RunError, warn

MEMORY = Path("/dev/shm")
"""A folder whose files are in memory. Containers limit it to 64 MiB by default."""
_CHUNK = 2**20
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM)


class SharedBlock:
    """A block of ``n_bytes`` as a tensor that is visible in every process that receives this object.

    All bytes are reserved at once, since the system kills a process that writes without space. They end with the last
    process that has them, however it ends.

    Attributes:
        tensor: uint8 [n_bytes]. All processes read what one of them writes.

    Warns: UserWarning: :data:`MEMORY` has no room, so a file is used. Results are the same.

    Raises:
        RunError: the file has no room either. The message names both places and a way out.
    """

    def __init__(self, n_bytes: int) -> None:
        self._map(_reserved(max(n_bytes, 1)), n_bytes)

    def _map(self, file: IO[bytes], n_bytes: int) -> None:
        self._file, self._n_bytes = file, n_bytes
        mapped = mmap.mmap(file.fileno(), max(n_bytes, 1))
        self.tensor = torch.frombuffer(mapped, dtype=torch.uint8)[:n_bytes]

    def __getstate__(self) -> dict[str, Any]:
        return {"handle": DupFd(self._file.fileno()), "n_bytes": self._n_bytes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._map(os.fdopen(state["handle"].detach(), "r+b"), state["n_bytes"])


def shared_copy(tensor: torch.Tensor) -> SharedBlock:
    """Copy a tensor to shared bytes. :func:`as_tensor` turns them into a tensor again."""
    shared = SharedBlock(tensor.nbytes)
    as_tensor(shared, tensor.dtype, tensor.shape).copy_(tensor)
    return shared


def as_tensor(
    shared: SharedBlock, dtype: torch.dtype, shape: torch.Size
) -> torch.Tensor:
    """Return shared bytes as a tensor of this type and shape."""
    return shared.tensor.view(dtype).view(shape)


def _reserved(n_bytes: int) -> IO[bytes]:
    if MEMORY.is_dir():
        try:
            return _file(n_bytes, MEMORY)
        except OSError as error:
            reason = error.strerror
        warn(
            f"{MEMORY} has no room for {limits.format_bytes(n_bytes)} that worker processes share ({reason}): files in "
            f"{tempfile.gettempdir()} take its place, which is slower; docker run --shm-size=1g, say, makes room"
        )
    try:
        return _file(n_bytes)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise RunError(
            f"there is no room for {limits.format_bytes(n_bytes)} that worker processes share, neither in {MEMORY} "
            f"nor in {tempfile.gettempdir()} ({error.strerror}). Make room in one of them, or use --workers 0."
        ) from error


def _file(n_bytes: int, folder: Path | None = None) -> IO[bytes]:
    file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  (it is open as long as the bytes are shared)
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, n_bytes)
        else:  # as on macOS: written bytes are reserved
            for start in range(0, n_bytes, _CHUNK):
                file.write(bytes(min(_CHUNK, n_bytes - start)))
            file.flush()
    except BaseException:
        file.close()
        raise
    return file
