"""The seam between a federation's protocol and what carries its bytes: neither knows anything of the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol


class SiteLink(Protocol):
    """The server's side of a transport.

    Requests are idempotent: a transport may deliver one twice, or send it again to a site that comes back.

    Attributes:
        sites: names of the sites that are connected, in the federation's order.
    """

    sites: tuple[str, ...]

    def ask(self, requests: Mapping[str, bytes], timeout: float | None = None) -> Iterator[tuple[str, bytes | None]]:
        """Send sites their requests and yield (site, reply) as replies come, each asked site once.

        Args:
            requests: by the site's name.
            timeout: seconds after which the reply of a site that has not answered is None; without it a transport waits
                for ever, and asks a site that comes back again with the same bytes.
        """

    def close(self) -> None:
        """Let go of what the transport holds; the sites go on without it."""


class RequestHandler(Protocol):
    """A site's side: what a transport hands requests to.

    Attributes:
        name: the site's.
    """

    name: str

    def answer(self, request: bytes) -> bytes:
        """The reply to a request; it never raises for a bad one, since a refusal is a reply."""
