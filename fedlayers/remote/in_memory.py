"""The transport within one process. Requests and replies are encoded as bytes all the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fedlayers.remote.link import RequestHandler


class InMemoryTransport:
    """A link to sites in this process, for tests and first trials.

    Attributes:
        sent, received: bytes so far, by site.
    """

    def __init__(self, sites: Mapping[str, RequestHandler]) -> None:
        self.sites = tuple(sites)
        self.sent, self.received = dict.fromkeys(sites, 0), dict.fromkeys(sites, 0)
        self._sites = dict(sites)

    def ask(
        self, requests: Mapping[str, bytes], timeout: float | None = None, grace: tuple[int, float] | None = None
    ) -> Iterator[tuple[str, bytes | None]]:
        """Yield the sites' replies one after the other. No reply is ever late."""
        for site, request in requests.items():
            reply = self._sites[site].answer(bytes(request))
            self.sent[site] += len(request)
            self.received[site] += len(reply)
            yield site, bytes(reply)

    def close(self) -> None:
        """Do nothing: there is nothing to release."""
