"""A site's supernode: Flower's own program in its own process. It ends with its site."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

from fedlayers.remote.flower import internals

ONLINE = "online"
"""The file in its home with the number of the process that its superlink has let in."""
PATIENCE = 8.0
"""Seconds that it has to say goodbye to its superlink."""


def _end_with_parent() -> None:
    """Wait for the end of the parent. The parent holds the other end of this pipe and never writes.

    It is read without Python's buffer. The buffer's lock would make the interpreter abort when Flower exits by itself.
    """
    while os.read(sys.stdin.fileno(), 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(PATIENCE)
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    online = Path(os.environ["FLWR_HOME"]) / ONLINE
    internals.watch_supernode(lambda: online.write_text(str(os.getpid())))
    internals.flower_supernode()
