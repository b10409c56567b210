"""A site's supernode: Flower's own program in a process of its own, which ends when its site does."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

PATIENCE = 8.0
"""Seconds that it has to say goodbye to its superlink."""


def _end_with_parent() -> None:
    sys.stdin.buffer.read()  # the parent holds the other end and never writes
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(PATIENCE)
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    from flwr.supernode.cli import flower_supernode

    flower_supernode()
