"""A site's end: a supernode of its own, whose tasks this process carries out, one after the other, as long as it lives.

The supernode is the only one that speaks with the outside and knows nothing of the data; this process speaks with that
supernode alone, over an encrypted connection within the machine that both can only have from each other.
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
from pathlib import Path
from typing import Any

from flwr.supercore.constant import TaskType

from fedlayers.remote.flower import environment, keys, wire
from fedlayers.remote.link import Answers
from fl_core.errors import UsageError, check_known

POLL = 0.3
"""Seconds between two questions to the own supernode, which itself asks its superlink every 3 s."""
LINGERS = 75.0
"""Seconds after which a superlink has forgotten a supernode that ended without a word."""


@dataclass(frozen=True)
class Connection:
    """How a site reaches its superlink: the table ``[connection]`` of its file.

    Attributes:
        superlink: host:port; ``ca``: the certificate of the authority; ``key``: the site's own key.
    """

    superlink: str
    ca: Path
    key: Path

    @classmethod
    def of(cls, table: Mapping[str, Any], folder: Path) -> Connection:
        """Of a file's table; paths are relative to its folder.

        Raises:
            UsageError: a key is unknown or missing, a file is missing, or the address is none.
        """
        fields = ("superlink", "ca", "key")
        for name in table:
            check_known("key of [connection]", name, fields)
        for name in fields:
            if not isinstance(table.get(name), str) or not table[name]:
                raise UsageError(f'[connection] needs {name} = "..."')
        files = {name: folder / str(table[name]) for name in ("ca", "key")}
        for name, file in files.items():
            if not file.is_file():
                raise UsageError(f"[connection] {name}: no file {file}")
        return cls(checked_address(str(table["superlink"])), files["ca"], files["key"])


def checked_address(place: str) -> str:
    """Return ``host:port``.

    >>> checked_address("server.example.org:8000")
    'server.example.org:8000'

    Raises:
        UsageError: it is something else.
    """
    host, _, port = place.rpartition(":")
    if not host or "/" in host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UsageError(f"superlink {place!r}: expected host:port, such as server.example.org:8000")
    return place


def check_reachable(place: str, ca: Path) -> None:
    """Shake hands with a superlink.

    Raises:
        UsageError: nobody listens there, or who does has no certificate of this authority for that name.
    """
    host, _, port = place.rpartition(":")
    try:
        context = ssl.create_default_context(cafile=str(ca))
    except (ssl.SSLError, OSError) as error:
        raise UsageError(f"{ca} is no certificate of an authority: {error}") from None
    try:
        with (
            socket.create_connection((host.strip("[]"), int(port)), timeout=10) as plain,
            context.wrap_socket(plain, server_hostname=host.strip("[]")),
        ):
            return
    except ssl.SSLCertVerificationError as error:
        raise UsageError(f"{place} is not the superlink of {ca}: {error.verify_message}") from None
    except OSError as error:
        raise UsageError(f"no superlink answers at {place}: {error.strerror or error}") from None


class Supernode:
    """The supernode of a site, as a child process.

    Attributes:
        address: of the interface at which its tasks are taken; ``secret``: with which.
    """

    def __init__(self, connection: Connection, home: Path) -> None:
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        for name in ("server.key", "server.crt", "secret"):
            (home / name).unlink(missing_ok=True)
        keys.certificate(home, ["127.0.0.1"], days=3650)
        self.secret = secrets.token_hex(32).encode()
        keys.private_file(home / "secret", self.secret)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.address = wire.Address(f"127.0.0.1:{port}", home / "server.crt")
        self.log = home / "supernode.log"
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
        """Whether the superlink has let it in."""
        return b"SuperNode ID:" in self.log.read_bytes()

    def ended(self) -> str | None:
        """Why it has ended; None while it runs."""
        if self.process.poll() is None:
            return None
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        said = [line for line in lines if re.search(r"error|fail|\[code", line, re.IGNORECASE)] or lines
        return re.sub(r"\x1b\[[0-9;]*m", "", said[-1]).strip() if said else f"exit code {self.process.returncode}"

    def close(self) -> None:
        """End it, and wait until it has."""
        assert self.process.stdin is not None
        self.process.stdin.close()  # it says goodbye to the superlink, and then ends
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def serve(answers: Answers, connection: Connection, home: Path, say: Callable[[str], None] = print) -> None:
    """Answer the server's requests until this process is ended; a supernode that ends is started again.

    Args:
        home: a folder of this site alone, for the supernode's files and log.
        say: gets a line when the site is connected, and when it no longer is.

    Raises:
        UsageError: the superlink cannot be reached or does not know this key.
    """
    check_reachable(connection.superlink, connection.ca)
    mark = home / "connected"  # where it was left behind, the superlink may hold the former connection for a minute
    patience = time.monotonic() + (LINGERS if mark.exists() else 0.0)
    while True:
        node = Supernode(connection, home)

        def connected() -> None:
            nonlocal patience
            patience = float("inf")
            mark.touch()
            say(f"site {answers.name} is connected to {connection.superlink} (Ctrl-C ends it)")

        try:
            reason = _attend(answers, node, connected)
        finally:
            node.close()
            if node.process.returncode >= 0:
                mark.unlink(missing_ok=True)
        if time.monotonic() > patience:
            raise UsageError(
                f"{connection.superlink} does not let site {answers.name!r} in: is the public part of {connection.key} "
                f"among the keys there? ({reason})"
            )
        say(f"site {answers.name} is not connected, and tries again: {reason}")
        time.sleep(3)


def _attend(answers: Answers, node: Supernode, connected: Callable[[], None]) -> str:
    """Carry out the supernode's tasks until it ends; why it has."""
    while not node.connected():
        if reason := node.ended():
            return reason
        time.sleep(POLL)
    connected()
    desk = wire.Desk(node.address, node.secret)
    try:
        while (reason := node.ended()) is None:
            try:
                task = desk.take(TaskType.CLIENT_APP)
            except wire.LOST:
                task = None  # it is about to end, or took the task back
            if task is None:
                time.sleep(POLL)
            else:
                carry_out(answers, task)
    finally:
        desk.close()
    return reason


def carry_out(answers: Answers, task: wire.Task) -> None:
    """Take a task's request, answer it and send the reply.

    What goes wrong on the way is left undone: without signs of life the supernode gives the task up after a minute and
    says so to the server, which asks again. A task that is reported as failed it would wait for without end.
    """
    try:
        for message in task.receive():
            try:
                request = wire.unpacked(message.content)
            except ValueError as error:
                reply = wire.failure(message, str(error))
            else:
                reply = wire.answer(message, answers.answer(request))
            task.send([reply])
        task.end()
    except wire.LOST:
        task.drop()
