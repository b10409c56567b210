"""The server's end of the transport: requests to sites through a superlink, repeated until they are answered."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import httpx

from fedlayers.remote import metrics
from fedlayers.remote.flower import wire
from fedlayers.remote.flower.internals import ListNodesRequest, StartRunRequest, build_fab_from_files
from fedlayers.remote.flower.site_process import check_address, check_reachable, clock_error
from fedlayers.remote.log import LOG
from fl_core.errors import RunError, UsageError, check_known, listing

POLL = 0.3
"""Seconds between two requests for replies."""
LOOK = 2.0
"""Seconds between two checks of the connected sites."""
BUNDLE = b"""
[project]
name = "fedlayers"
version = "1.0.0"
[tool.flwr.app]
publisher = "fedlayers"
[tool.flwr.app.components]
serverapp = "nothing:app"
clientapp = "nothing:app"
"""
"""The application that Flower requires and ships. It has no code, since both ends run their own."""


class Superlink:
    """A server's connection to its superlink.

    Args:
        superlink: host:port; ``keys``: ``KEYS/server``, or a folder with its ``ca.crt`` and ``secret``.

    Raises:
        UsageError: it cannot be reached, or has another secret.
    """

    def __init__(self, superlink: str, keys: Path) -> None:
        for name in ("ca.crt", "secret"):
            if not (keys / name).is_file():
                raise UsageError(
                    f"{keys / name} is missing. Name the `server` folder that `fedlayers federation keys` made."
                )
        self._ahead = check_reachable(check_address(superlink), keys / "ca.crt")
        secret = (keys / "secret").read_bytes()
        address = wire.Address(superlink, keys / "ca.crt")
        self._control, self._desk = wire.control(address, secret), wire.Desk(address, secret)
        try:
            self._nodes()
        except httpx.HTTPStatusError as error:
            self.close()
            code = error.response.status_code
            raise UsageError(
                f"{superlink} refuses the secret in {keys} ({code}). Copy the secret of the superlink."
            ) from None

    def connected(self) -> dict[str, str]:
        """Return since when each site is connected, by name; empty for one that is not."""
        found = sorted(self._nodes().items())
        return {name: node.last_activated_at if node.status == wire.ONLINE else "" for name, node in found}

    def close(self) -> None:
        """Release the connection."""
        self._desk.close()
        self._control.close()

    def _nodes(self) -> dict[str, Any]:
        """Return the sites that the superlink knows, by name."""
        found = self._control.ListNodes(ListNodesRequest()).nodes_info
        metrics.set_number("sites_connected", sum(node.status == wire.ONLINE for node in found))
        return {node.name: node for node in found if node.status != wire.UNREGISTERED}


class FlowerLink(Superlink):
    """A :class:`fedlayers.remote.link.SiteLink` over a superlink.

    If the superlink or a site disappears and comes back, unanswered requests are sent again.

    Args:
        superlink: host:port; ``keys``: ``KEYS/server``, or a folder with its ``ca.crt`` and ``secret``.
        sites: their names in the federation's order; by default all that the superlink knows, sorted.
        least, timeout: start with at least this many sites after this many seconds; by default wait for all.

    Raises:
        UsageError: the superlink cannot be reached, has another secret or clock, or does not know a site.
        RunError: too few sites came in time.
    """

    def __init__(
        self,
        superlink: str,
        keys: Path,
        sites: Sequence[str] = (),
        least: int | None = None,
        timeout: float | None = None,
    ) -> None:
        self._task: wire.Task | None = None
        super().__init__(superlink, keys)
        known = self._nodes()
        for name in sites:
            check_known("site", name, known)
        self.sites = self._gather(tuple(sites) or tuple(sorted(known)), least, timeout)
        try:
            self._begin()
        except httpx.HTTPStatusError as error:
            self.close()
            raise UsageError(f"{superlink} refuses this server: {clock_error(self._ahead) or error}") from None

    def ask(
        self, requests: Mapping[str, bytes], timeout: float | None = None, grace: tuple[int, float] | None = None
    ) -> Iterator[tuple[str, bytes | None]]:
        """See :class:`fedlayers.remote.link.SiteLink`."""
        end = None if timeout is None else time.monotonic() + timeout
        waiting, sent, looked = dict(requests), _Sent(), -LOOK
        nodes: dict[str, Any] = {}
        reached: set[str] = set()
        quorum = math.inf
        while waiting:
            try:
                if time.monotonic() - looked >= LOOK:
                    nodes, looked = self._nodes(), time.monotonic()
                    sent.forget_gone(nodes)
                answered = self._exchange(waiting, sent, nodes)
            except wire.LOST as error:
                sent, looked, answered = _Sent(), -LOOK, {}
                self._recover(error, end)
            for site, reply in answered.items():
                del waiting[site]
                yield site, reply
            reached |= {site for site in waiting if sent.to(site)}
            now = time.monotonic()
            if grace is not None and len(requests) - len(waiting) >= grace[0]:
                quorum = min(quorum, now + grace[1] if reached & waiting.keys() else now)
            if now >= (quorum if end is None else min(end, quorum)):
                for site in waiting:
                    yield site, None
                return
            if waiting and not answered:
                time.sleep(POLL)

    def close(self) -> None:
        """See :class:`fedlayers.remote.link.SiteLink`."""
        if self._task is not None:
            self._task.end()
        super().close()

    def _exchange(self, waiting: Mapping[str, bytes], sent: _Sent, nodes: Mapping[str, Any]) -> dict[str, bytes]:
        """Send new requests to connected sites, and take the replies that have arrived."""
        assert self._task is not None
        for site, request in waiting.items():
            node = nodes.get(site)
            if not sent.to(site) and node is not None and node.status == wire.ONLINE:
                (identifier,) = self._task.send([self._task.message(request, node.node_id)])
                sent[identifier] = site, node.last_activated_at
        answered = {}
        for message in self._task.receive(sent) if sent else ():
            site, _ = sent.pop(message.metadata.reply_to_message_id, ("", ""))
            if site in waiting and not message.has_error():  # an error: asked again at the next look
                try:
                    answered[site] = wire.from_record(message.content)
                except ValueError:
                    continue
        return answered

    def _begin(self) -> None:
        """Start a run of Flower and take its task. From then on this process is its server."""
        asked = StartRunRequest()
        asked.fab.content = _bundle()
        asked.fab.hash_str = hashlib.sha256(_bundle()).hexdigest()
        started = self._control.StartRun(asked)
        if not started.run_id:
            raise RunError("the superlink did not start a run. See its log.")
        for _ in range(int(30 / POLL)):
            self._task = self._desk.take(wire.SERVER)
            if self._task is not None:
                return
            time.sleep(POLL)
        raise RunError("the superlink started a run, but assigned it to no server within 30 s. See its log.")

    def _recover(self, error: BaseException, end: float | None) -> None:
        """Wait until the superlink is back, and continue with a new run of Flower."""
        if isinstance(error, httpx.HTTPStatusError) and error.response.status_code in (400, 404, 413, 422):
            raise RunError(f"the superlink refuses a message: {error.response.text[:300] or error}") from error
        LOG.warning(f"the superlink does not answer ({type(error).__name__}); asking again until it does")
        while end is None or time.monotonic() < end:
            try:
                if self._task is not None:
                    self._task.drop()
                self._begin()
                break
            except (*wire.LOST, RunError):
                time.sleep(2)

    def _gather(self, wanted: tuple[str, ...], least: int | None, timeout: float | None) -> tuple[str, ...]:
        end, told = time.monotonic() + (timeout or 0.0), ""
        while True:
            try:
                nodes = self._nodes()
            except (httpx.TransportError, OSError):  # the superlink starts again
                nodes = {}
            here = tuple(name for name in wanted if name in nodes and nodes[name].status == wire.ONLINE)
            if len(here) == len(wanted):
                return here
            missing = f"waiting for {listing([name for name in wanted if name not in here])}"
            if timeout is not None and time.monotonic() >= end:
                if least is not None and len(here) >= least:
                    return here
                self.close()
                raise RunError(
                    f"at least {least or len(wanted)} sites must connect within {timeout:g} s; got {len(here)} of "
                    f"{len(wanted)}. Start the others, or wait longer (--start-timeout)."
                )
            if missing != told:
                LOG.info(told := missing)
            time.sleep(LOOK)


class _Sent(dict[str, tuple[str, str]]):
    """The messages in transit by identifier: to which site, and since when that site was connected."""

    def to(self, site: str) -> bool:
        return any(name == site for name, _ in self.values())

    def forget_gone(self, nodes: Mapping[str, Any]) -> None:
        """Forget messages to supernodes that have reconnected since. Their contents are lost."""
        for identifier, (site, since) in list(self.items()):
            if site not in nodes or nodes[site].last_activated_at != since:
                del self[identifier]


@cache
def _bundle() -> bytes:
    return bytes(build_fab_from_files({"pyproject.toml": BUNDLE})[0])
