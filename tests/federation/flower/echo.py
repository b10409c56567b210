"""A site that answers with what it was asked, after some seconds; its words are NAME PLACE KEYS HOME [SECONDS]."""

import sys
import time
from contextlib import nullcontext
from pathlib import Path

from fedlayers.remote import log
from fedlayers.remote.flower.site_process import Connection, serve


class Echo:
    """Answers after some seconds, and counts what it was asked."""

    def __init__(self, name: str, seconds: float) -> None:
        self.name, self.seconds = name, seconds

    def limit_memory(self):
        return nullcontext()

    def answer(self, request: bytes) -> bytes:
        print("asked", len(request), flush=True)
        time.sleep(self.seconds)
        return self.name.encode() + b":" + request


if __name__ == "__main__":
    name, place, keys, home, *seconds = sys.argv[1:]
    log.start()
    connection = Connection(place, Path(keys) / "ca.crt", Path(keys) / "key")
    serve(Echo(name, float(*seconds or (0,))), connection, Path(home))
