"""A site's supernode: Flower's own program in a process of its own, which ends when its site does."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

PATIENCE = 8.0
"""Seconds that it has to say goodbye to its superlink."""


def _end_with_parent() -> None:
    """Wait for the end of the parent, which holds the other end of this pipe and never writes.

    It is read without Python's buffer. The buffer's lock would make the interpreter abort when Flower exits by itself.
    """
    while os.read(sys.stdin.fileno(), 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(PATIENCE)
    os._exit(1)


def forget_what_is_over() -> None:
    """Patch Flower to drop a message whose run ends while its parts are fetched.

    Flower 1.41 keeps such a message without its contents and hands it to the site. The site's failure then becomes the
    reply to the next message. The true reply waits for another message, perhaps for ever.
    """
    from flwr.supercore.inflatable.inflatable_utils import ObjectPullError
    from flwr.supercore.run import RunNotRunningException
    from flwr.supernode import start_client_internal as flower

    def failing(ask: Callable[[int, str], Any]) -> Callable[[int, str], Any]:
        def asked(run: int, part: str) -> Any:
            try:
                return ask(run, part)
            except RunNotRunningException:
                raise ObjectPullError(part, "its run is over") from None

        return asked

    store = flower._pull_and_store_message

    def stored(*, pull_object: Any, confirm_message_received: Any, **rest: Any) -> int | None:
        return store(
            pull_object=failing(pull_object), confirm_message_received=failing(confirm_message_received), **rest
        )

    flower._pull_and_store_message = stored  # type: ignore[assignment]  # called with names alone


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    forget_what_is_over()
    from flwr.supernode.cli import flower_supernode

    flower_supernode()
