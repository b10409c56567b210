"""What differs on another machine than the one that asked for a work."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from fl_core.data.root import elsewhere
from fl_core.errors import RunError, UsageError


@contextmanager
def remote_errors(is_away: bool = True) -> Iterator[None]:
    """Within the block data are this machine's, and what is missing on it is told with its name.

    Raises:
        UsageError, RunError: in place of those, and of OSError, within.
    """
    if not is_away:
        yield
        return
    with elsewhere():
        try:
            yield
        except (UsageError, OSError) as error:
            kind = UsageError if isinstance(error, UsageError) else RunError
            raise kind(f"on node {socket.gethostname()}: {error}") from error
