"""A site that says when it trains, and waits before and after, so that a test can kill it there."""

import sys
import time
from pathlib import Path

from fedlayers.remote import log
from fedlayers.remote.codec import decode
from fedlayers.remote.flower.site_process import Connection, serve
from fedlayers.remote.site_config import SiteFile

WAIT = 3.0


class Slow:
    """Another site, slowly."""

    def __init__(self, site) -> None:
        self.site, self.name, self.limit_memory = site, site.name, site.limit_memory

    def answer(self, request: bytes) -> bytes:
        trains = decode(request).head["kind"] == "train"
        if trains:
            say("asked to train")
            time.sleep(WAIT)
            say("training")
        reply = self.site.answer(request)
        if trains:
            say("has trained")
            time.sleep(WAIT)
        return reply


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    log.start()
    found = SiteFile.read(sys.argv[1])
    connection = Connection.from_table(dict(found.connection), Path(sys.argv[1]).parent)
    serve(Slow(found.site()), connection, found.folder / "flower")
