"""The interface between a federation's protocol and its transport. Neither depends on the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Protocol


class SiteLink(Protocol):
    """The server's side of a transport.

    Requests are idempotent: a transport may deliver one twice, or send it again to a site that reconnects.

    Attributes:
        sites: names of the connected sites, in the federation's order.
    """

    sites: tuple[str, ...]

    def ask(
        self, requests: Mapping[str, bytes], timeout: float | None = None, grace: tuple[int, float] | None = None
    ) -> Iterator[tuple[str, bytes | None]]:
        """Send requests to sites, and yield (site, reply) as replies arrive, once per site.

        Args:
            requests: by the site's name.
            timeout: seconds until a missing reply is given as None. Without it the transport waits for ever, and sends
                a request again to a site that reconnects.
            grace: (replies, seconds): after this number of replies the other sites have these seconds. Sites that the
                transport knows to be disconnected are then not waited for.
        """

    def close(self) -> None:
        """Release the transport's resources. The sites keep running."""


class RequestHandler(Protocol):
    """A site's side of a transport. It receives requests.

    Attributes:
        name: the site's.
    """

    name: str

    def limit_memory(self) -> AbstractContextManager[None]:
        """Return the site's limit of memory, for the block that receives a request."""

    def answer(self, request: bytes) -> bytes:
        """Return the reply to a request. A bad request gets a refusal as its reply, never an exception."""
