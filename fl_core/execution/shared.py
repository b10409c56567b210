"""Bytes that processes have in common: in memory where the system has room for them, else in an unnamed file."""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
import warnings
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import IO, Any

import torch

from fl_core import limits
from fl_core.errors import RunError

MEMORY = Path("/dev/shm")
"""Where files are memory; a container gives it 64 MiB unless it is told otherwise."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM)


class Shared:
    """So many bytes, as a tensor that every process sees to which this object is sent.

    All of them are reserved at once: a process that wrote where nothing is left would be killed without a word. They
    end with the last process that has them, however it ends.

    Attributes:
        tensor: uint8 [n_bytes]; what one process writes there, all read.

    Warns:
        UserWarning: there is no room in :data:`MEMORY`, so that a file takes its place; results are the same.

    Raises:
        RunError: there is no room for that file either; names both places, and what to do.
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


def shared_copy(tensor: torch.Tensor) -> Shared:
    """A copy of a tensor in shared bytes, of which :func:`seen` makes a tensor again."""
    shared = Shared(tensor.nbytes)
    seen(shared, tensor.dtype, tensor.shape).copy_(tensor)
    return shared


def seen(shared: Shared, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    """Shared bytes as a tensor of this type and shape."""
    return shared.tensor.view(dtype).view(shape)


def _reserved(n_bytes: int) -> IO[bytes]:
    if MEMORY.is_dir():
        try:
            return _file(n_bytes, MEMORY)
        except OSError as error:
            reason = error.strerror
        warnings.warn(
            f"{MEMORY} has no room for {limits.sized(n_bytes)} that worker processes share ({reason}): files in "
            f"{tempfile.gettempdir()} take its place, which is slower; docker run --shm-size=1g, say, makes room",
            stacklevel=4,
        )
    try:
        return _file(n_bytes)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise RunError(
            f"no room for {limits.sized(n_bytes)} that worker processes share, neither in {MEMORY} nor in "
            f"{tempfile.gettempdir()} ({error.strerror}): make room in one of them, or use --workers 0"
        ) from error


def _file(n_bytes: int, folder: Path | None = None) -> IO[bytes]:
    file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  (it is open as long as the bytes are shared)
    try:
        os.posix_fallocate(file.fileno(), 0, n_bytes)
    except BaseException:
        file.close()
        raise
    return file
