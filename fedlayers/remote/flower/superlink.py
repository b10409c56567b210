"""The superlink: Flower's own application, with a guard before it, and the sites of the keys' folder registered.

Flower has three interfaces on one port. Those for supernodes and for executors check the caller. The third starts runs
and registers keys, and lets anybody in. The guard asks its callers for a word that only the server's secret gives, and
refuses all others.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import socket
import ssl
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from fedlayers.remote import keys, log, metrics
from fedlayers.remote.flower import wire
from fedlayers.remote.flower.internals import (
    FLWR_IN_MEMORY_DB_NAME,
    ListNodesRequest,
    NoOpControlAuthnPlugin,
    RegisterNodeRequest,
    SuperLinkLifespan,
    SuperLinkLifespanConfig,
    UnregisterNodeRequest,
    create_app,
)
from fedlayers.remote.log import LOG
from fl_core.errors import UsageError

LARGEST = 16 * 2**20
"""Maximum bytes of a request; payloads come in chunks of 5 MB."""
DAY = 24 * 3600.0
LOOK = 3.0
"""Seconds between two looks at the folder of keys."""


class Guard:
    """A filter before Flower. It accepts supernodes, executors and callers with the token.

    Flower itself checks supernodes and executors. Supernodes wait until the keys of the folder are registered.
    """

    def __init__(self, app: Any, word: str, registered: threading.Event) -> None:
        self.app, self.word, self.registered = app, word.encode(), registered

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            headers = dict(scope["headers"])
            checked = scope["path"].startswith(("/v1/fleet/", "/v1/runtime/"))
            if not checked and not hmac.compare_digest(headers.get(wire.WORD.encode(), b""), self.word):
                return await _refuse(send, 403)
            if not headers.get(b"content-length", b"").isdigit() or int(headers[b"content-length"]) > LARGEST:
                return await _refuse(send, 413)
            while scope["path"].startswith("/v1/fleet/") and not self.registered.is_set():
                await asyncio.sleep(0.1)
        return await self.app(scope, receive, send)


async def _refuse(send: Any, status: int) -> None:
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def serve(folder: Path, host: str, port: int, database: Path | None) -> None:
    """Run the superlink until it is stopped.

    Args:
        folder: ``KEYS/server`` of :func:`fedlayers.remote.keys.make`.
        database: stores messages and registrations; a restart with the same file resumes. Without it they are in
            memory.

    Raises:
        UsageError: keys are missing, or the port is taken.
    """
    need = {name: folder / name for name in ("ca.crt", "server.crt", "server.key", "secret")}
    for file in need.values():
        if not file.is_file():
            raise UsageError(f"{file} is missing. Make it with `fedlayers federation keys`.")
    sites = keys.registered_sites(folder)
    listening = _listen(host, port)
    port = listening.getsockname()[1]
    os.umask(0o077)  # the database holds messages in transit
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = "*"  # it calls itself alone
    logging.getLogger("flwr").setLevel(logging.WARNING)
    secret = need["secret"].read_bytes()
    config = SuperLinkLifespanConfig(
        control_address="",
        health_server_address=None,
        host=host,
        port=port,
        insecure=False,
        certificates=tuple(need[name].read_bytes() for name in ("ca.crt", "server.crt", "server.key")),
        superexec_auth_secret=secret,
        authn_plugin=NoOpControlAuthnPlugin(),
        event_log_plugin=None,
        fleet_event_log_plugin=None,
        enable_event_log=False,
        artifact_provider=None,
        enable_supernode_auth=True,
        fleet_api_type="grpc-rere",
        fleet_api_address=None,
        simulation=False,
        ssl_ca_certfile=str(need["ca.crt"]),
        ssl_certfile=str(need["server.crt"]),
        ssl_keyfile=str(need["server.key"]),
        database=FLWR_IN_MEMORY_DB_NAME if database is None else str(database),
        isolation="process",
        runtime_dependency_install=False,
    )
    app = create_app(config, SuperLinkLifespan)
    registered = threading.Event()
    app.add_middleware(Guard, word=wire.guard_token(secret), registered=registered)
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            ssl_certfile=str(need["server.crt"]),
            ssl_keyfile=str(need["server.key"]),
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=2,
        )
    )
    here = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    trusted = ssl.create_default_context(cafile=str(need["ca.crt"]))
    trusted.check_hostname = False  # sites know this machine by another name
    control = wire.control(wire.Address(f"{here}:{port}", need["ca.crt"]), secret, trusted)
    failed: list[UsageError] = []

    def keep_registered() -> None:
        told, warned = list[str](), -DAY
        while not server.started:
            time.sleep(0.05)
        while not server.should_exit:
            if time.monotonic() - warned >= DAY:
                warned = time.monotonic()
                for line in keys.expiry_warnings(folder):
                    LOG.warning(line)
            found, faults = keys.readable_sites(folder)
            try:
                changes = register(control, found)
            except (UsageError, httpx.HTTPError) as error:
                if not registered.is_set() and isinstance(error, UsageError):
                    failed.append(error)
                    server.should_exit = True
                faults.append(str(error))
            else:
                if not registered.is_set():
                    registered.set()
                    changes = [f"superlink on https://{host}:{port} for sites {', '.join(sites)} (Ctrl-C ends it)"]
                for line in changes:
                    LOG.info(line)
            if not server.should_exit:
                told = log.warn_new(faults, told)
            time.sleep(LOOK)

    threading.Thread(target=keep_registered, name="keys", daemon=True).start()
    server.run(sockets=[listening])
    if failed:
        raise failed[0]


def register(control: Any, sites: dict[str, bytes]) -> list[str]:
    """Register the sites of the keys' folder at the superlink, and no others. Return what has changed.

    A site whose file is invalid (b"") stays as it is: a withdrawn key cannot return, and the file may be half written.

    Raises:
        UsageError: a withdrawn key is back.
    """
    nodes = [node for node in control.ListNodes(ListNodesRequest()).nodes_info if node.status != wire.UNREGISTERED]
    metrics.set_number("sites_connected", sum(node.status == wire.ONLINE for node in nodes))
    gone = [node for node in nodes if sites.get(node.name) not in (node.public_key, b"")]
    for node in gone:
        control.UnregisterNode(UnregisterNodeRequest(node_id=node.node_id))
    new = [name for name in sites if sites[name] and name not in {each.name for each in nodes if each not in gone}]
    for name in new:
        try:
            control.RegisterNode(RegisterNodeRequest(public_key=sites[name], name=name))
        except httpx.HTTPStatusError as error:
            if error.response.status_code >= 500:
                raise
            raise UsageError(f"the key of site {name!r} was withdrawn or renamed. Make a new one.") from None
    return [f"site {node.name!r} may no longer join" for node in gone] + [f"site {name!r} may join" for name in new]


def _listen(host: str, port: int) -> socket.socket:
    if not 0 <= port < 65536:
        raise UsageError(f"--port must be 0 to 65535; got {port}. Use 0 for a free one.")
    try:
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()  # :: also takes IPv4
        return socket.create_server(where[:2], family=family, backlog=128, dualstack_ipv6=both)
    except OSError as error:
        why = error.strerror or error
        raise UsageError(f"{host}:{port} cannot be listened on: {why}. Choose another --host or --port.") from None
