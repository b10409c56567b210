"""Errors of jobs that run on another machine."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from fl_core.data.root import local_root
from fl_core.errors import RunError, UsageError


@contextmanager
def remote_errors(is_away: bool = True) -> Iterator[None]:
    """Use this machine's data within the block, and add its name to errors.

    Raises:
        UsageError, RunError: instead of such errors, and of OSError, within the block.
    """
    if not is_away:
        yield
        return
    with local_root():
        try:
            yield
        except (UsageError, OSError) as error:
            kind = UsageError if isinstance(error, UsageError) else RunError
            raise kind(f"on node {socket.gethostname()}: {error}") from error
