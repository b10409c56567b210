"""The server's requests to sites, how long it waits for replies, and what left the sites."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from uuid import uuid4

from fedlayers.remote import metrics, packet_forms, protocol
from fedlayers.remote.codec import Packet, PacketError, decode, encode
from fedlayers.remote.link import SiteLink
from fedlayers.remote.log import LOG
from fl_core.bounds import ABOVE_0, at_least, check_fields
from fl_core.errors import CorruptError, NonFiniteError, RunError, UsageError, about, listing
from fl_core.records.writing import Writer
from fl_core.rows import dumps, parsed, row
from fl_core.storage.files import Folder

if TYPE_CHECKING:
    import pandas as pd

GRANTED = ("hello", "told", "counted", "joined", "done", "measured", "summed")
ASK_AGAIN = 10.0
"""Seconds until a site is asked again whose owner has to allow the request."""
LEFT = "left.jsonl"
"""The file of a federation's run directory with the bytes that left each site."""


class RefusedError(UsageError):
    """A site's refusal of a request, with its name and reason."""


@dataclass
class TrafficCounter:
    """A count of the bytes and replies that left each site, by kind of reply.

    >>> tally = TrafficCounter()
    >>> tally.add("north", "train", 7960)
    >>> tally.bytes["north", "train"], tally.replies["north", "train"]
    (7960, 1)
    >>> tally.by_site()
    {'north': 7960}
    """

    bytes: Counter[tuple[str, str]] = field(default_factory=Counter)
    replies: Counter[tuple[str, str]] = field(default_factory=Counter)

    def add(self, site: str, kind: str, n_bytes: int) -> None:
        """Count one reply."""
        self.bytes[site, kind] += n_bytes
        self.replies[site, kind] += 1

    def by_site(self) -> dict[str, int]:
        """Return the bytes of all kinds together, by site."""
        found = Counter[str]()
        for (site, _), n_bytes in self.bytes.items():
            found[site] += n_bytes
        return dict(found)

    def write(self, writer: Writer, done: int) -> None:
        """Append the traffic since the last call to :data:`LEFT`, as rows.

        They are stored apart from the run's rows, since a resumed run has more traffic than an uninterrupted one.
        """
        columns: dict[str, Any] = {"run": writer.path.name, "round": done, "unit": "byte"}
        lines = [
            row("bytes_left", n, client=site, variant=kind, n_samples=self.replies[site, kind], **columns)
            for (site, kind), n in sorted(self.bytes.items())
        ]
        writer.folder.append(LEFT, "".join(dumps(line) + "\n" for line in lines).encode())
        self.bytes.clear()
        self.replies.clear()


Seconds = Annotated[float, ABOVE_0]


@dataclass(frozen=True)
class TimeoutPolicy:
    """A limit on how long to wait for clients.

    >>> TimeoutPolicy(min_replies=0, timeout=60.0)
    Traceback (most recent call last):
        ...
    fl_core.errors.UsageError: min_replies must be at least 1; got 0. Leave it out for the default.

    Attributes:
        min_replies: minimum number of replies to wait for, whatever the time.
        timeout: seconds until the server continues without the others; None = wait for all, for ever.
        grace: seconds that the others have after ``min_replies``; None = until the timeout.
        start: seconds until every site must have answered the questions before the first exchange; None = for ever.
    """

    min_replies: Annotated[int, at_least(1)] = 1
    timeout: Seconds | None = None
    grace: Seconds | None = None
    start: Seconds | None = None

    def __post_init__(self) -> None:
        check_fields(self, way="Leave it out for the default.")


class RpcClient:
    """The server's requests to sites and their replies. All traffic passes here.

    Attributes:
        session: of this process, so that a reply to an earlier process is recognised.
        tally: what left the sites. timeouts: how long to wait for sites.
    """

    def __init__(self, link: SiteLink, timeouts: TimeoutPolicy | None = None) -> None:
        self.timeouts = timeouts or TimeoutPolicy()
        self.link, self.tally, self.session = link, TrafficCounter(), uuid4().hex
        self._seq = 0

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.link.sites)

    def ask(
        self,
        packets: Mapping[str, Packet],
        most: int | None = None,
        timeout: float | None = None,
        grace: tuple[int, float] | None = None,
    ) -> Iterator[tuple[str, Packet | None]]:
        """Yield (site, reply) as replies arrive; None if a site does not answer in time.

        A site whose owner has to allow the request is asked again until it does.

        Args:
            most: maximum bytes of a reply. timeout: seconds; None = wait for ever.
            grace: number of replies, and seconds for the others after these.

        Raises:
            RefusedError: a site refuses. NonFiniteError, RunError: its work failed.
            PacketError: a site sent an invalid reply.
        """
        end = math.inf if timeout is None else time.monotonic() + timeout
        left, told = dict(packets), False
        while left:
            waiting: dict[str, Packet] = {}
            for site, packet in self._ask(left, most, timeout, grace):
                if packet is not None and packet.head["kind"] == "waiting" and time.monotonic() < end:
                    waiting[site] = left[site]
                    if not told:
                        LOG.info(f"site {site} waits: {str(packet.head.get('reason'))[:200]}")
                else:
                    yield site, None if packet is not None and packet.head["kind"] == "waiting" else packet
            left, told = waiting, True
            if left:
                time.sleep(max(0.0, min(ASK_AGAIN, end - time.monotonic())))
            if time.monotonic() >= end:
                yield from dict.fromkeys(left).items()
                return
            timeout = None if timeout is None else end - time.monotonic()

    def _ask(
        self, packets: Mapping[str, Packet], most: int | None, timeout: float | None, grace: tuple[int, float] | None
    ) -> Iterator[tuple[str, Packet | None]]:
        kinds = {site: packet.head["kind"] for site, packet in packets.items()}
        stamps, asked = {}, {}
        for site, packet in packets.items():
            self._seq += 1
            stamps[site] = {"session": self.session, "seq": self._seq}
            asked[site] = encode(Packet({**packet.head, **stamps[site]}, packet.trees))
            metrics.add("sent_bytes_total", len(asked[site]), site)
        for site, data in self.link.ask(asked, timeout, grace):
            if site not in stamps:  # not asked, or answered already
                continue
            if data is None:
                del stamps[site]
                yield site, None
                continue
            self.tally.add(site, kinds[site], len(data))
            metrics.add("received_bytes_total", len(data), site)
            packet = self._read(site, data, most)
            stamp = {key: packet.head.pop(key, None) for key in packet_forms.STAMP}
            unread = packet.head["kind"] not in GRANTED and stamp == dict.fromkeys(packet_forms.STAMP)
            if stamp != stamps[site] and not unread:  # a site that cannot read a request has no stamp of it
                continue  # an answer to an earlier request
            del stamps[site]
            if packet.head["kind"] == "waiting" and kinds[site] in (
                "hello",
                *packet_forms.WORK,
                *packet_forms.SUM_FORMS,
            ):
                raise PacketError(f"the reply of site {site!r} to {kinds[site]} must be an answer; got 'waiting'.")
            check_granted(site, packet)
            yield site, packet
        if stamps:
            raise RunError(f"the link ended without a reply of {listing(sorted(stamps))}. Resume the run.")

    def _read(self, site: str, data: bytes, most: int | None) -> Packet:
        with about(f"the reply of site {site!r}", PacketError):
            packet = decode(data, most)
            if packet.head["kind"] not in (*GRANTED, "refused", "failed", "waiting"):
                raise PacketError(f"its kind must be one of {', '.join(GRANTED)}; got {packet.head['kind'][:40]!r}.")
            if packet.head["kind"] in GRANTED:
                protocol.stamp_of(Packet(dict(packet.head)))
        return packet


def check_granted(site: str, packet: Packet) -> None:
    """Raise the error in a site's reply, if any.

    Raises:
        RefusedError, NonFiniteError, RunError: as the site reports.
    """
    kind, reason = packet.head["kind"], str(packet.head.get("reason", ""))[:2000]
    if kind == "refused":
        raise RefusedError(f"site {site!r} refuses: {reason}")
    if kind == "failed":
        raise (NonFiniteError if packet.head.get("nonfinite") is True else RunError)(f"site {site!r}: {reason}")


def traffic_by_site(*paths: Path | str) -> pd.DataFrame:
    """Return the bytes that left each site in some runs together: sites x kinds of reply, and totals.

    Raises:
        UsageError: a run is not a federation's.
        CorruptError: its list is damaged.
    """
    import pandas as pd

    parts = []
    for path in paths:
        folder = Folder(path)
        if not folder.has(LEFT):
            raise UsageError(
                f"{path} must be a federation's run that has saved a round; got no {LEFT}. Name another directory."
            )
        parts.append(parsed(folder.path / LEFT, folder.read(LEFT)))
    frame = pd.concat(parts).rename(columns={"variant": "reply"})
    if not frame["value"].between(0, 2**53).all():
        raise CorruptError(f"{LEFT} of {paths[0]} is damaged: a number of bytes is below 0 or above 2^53")
    table = frame.pivot_table(index="client", columns="reply", values="value", aggfunc="sum", fill_value=0, sort=False)
    return table.assign(all=table.sum(axis=1)).astype(int)
