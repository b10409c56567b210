"""A site's end of the transport: a supernode, whose tasks this process carries out one after the other.

Only the supernode speaks with the outside, and it knows nothing of the data. This process speaks with that supernode
alone, over an encrypted connection within the machine. Its secret is known only to these two.
"""

from __future__ import annotations

import re
import secrets
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import httpx

from fedlayers.remote import keys, metrics
from fedlayers.remote.flower import environment, wire
from fedlayers.remote.flower.internals import SYSTEM_TIME_TOLERANCE, TIMESTAMP_TOLERANCE, now
from fedlayers.remote.flower.supernode import ONLINE
from fedlayers.remote.link import RequestHandler
from fedlayers.remote.log import LOG
from fl_core.errors import UsageError, check_known
from fl_core.limits import release_freed_memory

POLL = 0.3
"""Seconds between two requests to the own supernode, which itself asks its superlink every 3 s."""
LINGERS = 75.0
"""Seconds until a superlink forgets a supernode that ended without a goodbye."""


@dataclass(frozen=True)
class Connection:
    """The way to a superlink: the table ``[connection]`` of a site's file.

    Attributes:
        superlink: host:port; ``ca``: the certificate of the authority; ``key``: the site's own key.
    """

    superlink: str
    ca: Path
    key: Path

    @classmethod
    def from_table(cls, table: Mapping[str, Any], folder: Path) -> Connection:
        """Return the connection of a file's table. Paths are relative to the file's folder.

        Raises:
            UsageError: an unknown or missing key, a missing file, or an invalid address.
        """
        fields = ("superlink", "ca", "key")
        for name in table:
            check_known("key of [connection]", name, fields)
        for name in fields:
            if not isinstance(table.get(name), str) or not table[name]:
                raise UsageError(f'[connection] {name} must be text; got {table.get(name)!r}. Add {name} = "...".')
        files = {name: folder / str(table[name]) for name in ("ca", "key")}
        for name, file in files.items():
            if not file.is_file():
                raise UsageError(f"[connection] {name} must be a file; got {file}, which is missing. Correct the path.")
        return cls(check_address(str(table["superlink"])), files["ca"], files["key"])


def check_address(place: str) -> str:
    """Return ``host:port``.

    >>> check_address("server.example.org:8000")
    'server.example.org:8000'

    Raises:
        UsageError: it has another form.
    """
    host, _, port = place.rpartition(":")
    if not host or "/" in host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UsageError(f"superlink must be host:port; got {place!r}. Write it like server.example.org:8000.")
    return place


def check_reachable(place: str, ca: Path) -> float:
    """Shake hands with a superlink, through a proxy if the environment names one.

    Returns:
        The seconds by which this machine's clock is ahead of the superlink's; 0 if that does not say its time.

    Raises:
        UsageError: nobody listens there, or the certificate is not of this authority and name.
    """
    address = wire.Address(place, ca)
    try:
        context = address.verify()
    except OSError as error:
        raise UsageError(f"{ca} must be an authority's certificate; got: {error}. Copy the server's ca.crt.") from None
    try:
        with httpx.stream("GET", address.url, verify=context, timeout=10.0) as reply:
            pass  # its body is not read
    except httpx.HTTPError as error:
        untrusted = error.__cause__ and error.__cause__.__context__
        if isinstance(untrusted, ssl.SSLCertVerificationError):
            why = f"{untrusted.verify_message}. Copy the server's ca.crt, or check the address"
            raise UsageError(f"{place} must be the superlink of {ca}; got {why}. Check superlink and ca.") from None
        raise UsageError(f"no superlink answers at {place}: {error}. Start it, or check the address.") from None
    try:
        passed = now() - parsedate_to_datetime(reply.headers.get("date", "")) - reply.elapsed / 2
    except (ValueError, TypeError, OverflowError):  # missing, unreadable, or without a zone
        return 0.0
    return passed.total_seconds() - 0.5  # the time comes in whole seconds, rounded down


def clock_error(ahead: float) -> str:
    """Describe a clock that is too far off for Flower; empty if it is not.

    >>> clock_error(60.2), clock_error(-60.2)
    ("this machine's clock is 60 s ahead of the superlink's", '')
    """
    if -TIMESTAMP_TOLERANCE < ahead < SYSTEM_TIME_TOLERANCE - 1:  # the superlink's time has whole seconds
        return ""
    return f"this machine's clock is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} the superlink's"


class Supernode:
    """The supernode of a site, as a child process.

    Attributes:
        address: of the interface that gives out its tasks; ``secret``: for that interface.
    """

    def __init__(self, connection: Connection, home: Path) -> None:
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        for name in ("server.key", "server.crt", "secret", ONLINE):
            (home / name).unlink(missing_ok=True)
        keys.certificate(home, ["127.0.0.1"], days=3650)
        self.secret = secrets.token_hex(32).encode()
        keys.private_file(home / "secret", self.secret)
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        self.address = wire.Address(f"127.0.0.1:{port}", home / "server.crt")
        self.log, self.online = home / "supernode.log", home / ONLINE
        here = {
            "--superlink": connection.superlink,
            "--root-certificates": connection.ca,
            "--auth-supernode-private-key": connection.key,
            "--isolation": "process",
            "--host": "127.0.0.1",
            "--port": port,
            "--ssl-certfile": home / "server.crt",
            "--ssl-keyfile": home / "server.key",
            "--ssl-ca-certfile": home / "server.crt",
            "--superexec-auth-secret-file": home / "secret",
        }
        flags = [str(word) for pair in here.items() for word in pair]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "fedlayers.remote.flower.supernode", *flags],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environment(home),
                start_new_session=True,  # Ctrl-C is for the site, which ends it
            )

    def connected(self) -> bool:
        """True if the superlink has let it in."""
        return self.online.exists() and self.online.read_text() == str(self.process.pid)  # not one that is ending

    def ended(self) -> str | None:
        """Return why it has ended; None while it runs."""
        if self.process.poll() is None:
            return None
        return reason_of(self.log.read_text(errors="replace")) or f"exit code {self.process.returncode}"

    def close(self) -> None:
        """End it, and wait until it has ended."""
        assert self.process.stdin is not None
        self.process.stdin.close()  # it says goodbye to the superlink, and then ends
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def reason_of(log: str) -> str:
    """Return why a supernode has ended, in Flower's words; empty if its log gives no reason.

    >>> reason_of("ERROR : Exit Code: 305\\nNo connection.\\n[code: 2004] Failed.\\n\\nSee <...>\\nINFO: down")
    'No connection. [code: 2004] Failed.'
    """
    plain = re.sub(r"\x1b\[[0-9;]*m", "", log)
    if exits := re.search(r"Exit Code: \d+\n(.+?)(\n\s*\n|\Z)", plain, re.DOTALL):
        return " ".join(exits[1].split())
    lines = [line.strip() for line in plain.splitlines() if line.strip()]
    said = [line for line in lines if re.search(r"error|fail", line, re.IGNORECASE)]
    said = said or [line for line in lines if "SuperNode" in line] or lines
    return re.sub(r"^[A-Z]+ *: *", "", said[-1]) if said else ""


def serve(answers: RequestHandler, connection: Connection, home: Path) -> None:
    """Answer the server's requests until this process ends. A supernode that ends is started again.

    Args:
        home: a folder of this site alone, for the supernode's files and log.

    Raises:
        UsageError: the superlink cannot be reached or does not know this key.
    """
    check_reachable(connection.superlink, connection.ca)
    for line in keys.expiry_warnings(connection.ca.parent):
        LOG.warning(line)
    mark = home / "connected"  # where it was left behind, the superlink may hold the former connection for a minute
    patience = time.monotonic() + (LINGERS if mark.exists() else 0.0)
    while True:
        node = Supernode(connection, home)

        def connected() -> None:
            nonlocal patience
            patience = float("inf")
            mark.touch()
            metrics.set_number("sites_connected", 1)
            LOG.info(f"site {answers.name} is connected to {connection.superlink} (Ctrl-C ends it)")

        try:
            reason = _attend(answers, node, connected)
        finally:
            node.close()
            metrics.set_number("sites_connected", 0)
            if node.process.returncode >= 0:
                mark.unlink(missing_ok=True)
        clock = _clock(connection)
        if time.monotonic() > patience:
            why = clock or f"register the public part of {connection.key} there"
            raise UsageError(f"{connection.superlink} refuses site {answers.name!r}: {why}. Flower says: {reason}")
        reason = clock or reason
        LOG.warning(f"site {answers.name} is not connected, and tries again: {reason}")
        time.sleep(3)


def _clock(connection: Connection) -> str:
    """Describe an error of this machine's clock; empty if it is right, or if the superlink does not answer."""
    try:
        return clock_error(check_reachable(connection.superlink, connection.ca))
    except UsageError:
        return ""


def _attend(answers: RequestHandler, node: Supernode, connected: Callable[[], None]) -> str:
    """Carry out the supernode's tasks until it ends. Return why it ended."""
    while not node.connected():
        if reason := node.ended():
            return reason
        time.sleep(POLL)
    connected()
    desk = wire.Desk(node.address, node.secret)
    try:
        while (reason := node.ended()) is None:
            try:
                task = desk.take(wire.SITE)
            except wire.LOST:
                task = None  # it is about to end, or took the task back
            if task is None:
                time.sleep(POLL)
            else:
                carry_out(answers, task)
                release_freed_memory()
    finally:
        desk.close()
    return reason


def carry_out(answers: RequestHandler, task: wire.Task) -> None:
    """Take a task's request, answer it and send the reply.

    If that fails, nothing is reported. Without signs of life the supernode gives the task up after a minute and
    notifies the server. The server asks again. For a task reported as failed it would wait for ever.
    """
    try:
        with answers.limit_memory():
            received = task.receive()
        release_freed_memory()  # Flower's chunks of 5 MB would stay in the process's heap
        for message in received:
            if message.has_error():
                return task.drop()
            try:
                request = [wire.take_bytes(message)]
            except ValueError as error:
                reply = wire.failure(message, str(error))
            else:
                reply = wire.answer(message, answers.answer(request.pop()))  # the site alone holds the request
            task.send([reply])
        task.end()
    except wire.LOST:
        task.drop()
    except Exception as error:  # too large for the site, or of Flower, on a message that no check foresees
        LOG.warning(f"a request cannot be received: {type(error).__name__}: {error}")
        task.drop()
