"""The superlink: Flower's own application, with a guard before it, and the sites of the keys' folder registered.

Flower has three interfaces on one port. Those for supernodes and for executors check the caller. The third starts runs
and registers keys, and lets anybody in. The guard asks its callers for a word that only the server's secret gives, and
refuses all others.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import socket
from pathlib import Path
from typing import Any

import uvicorn
from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL, NOOP_ACCOUNT_NAME, NOOP_FLWR_AID
from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME, NodeStatus
from flwr.superlink.auth_plugin import NoOpControlAuthnPlugin
from flwr.superlink.cli.flower_superlink import SuperLinkLifespan
from flwr.superlink.config_loader import SuperLinkLifespanConfig
from flwr.superlink.main import create_app

from fedlayers.remote.flower import keys
from fl_core.errors import UsageError

LARGEST = 16 * 2**20
"""Maximum bytes of a request; payloads come in chunks of 5 MB."""
WORD = "fedlayers-word"
"""The header with the word of a caller that may start runs."""


def word(secret: bytes) -> str:
    """Return the word that the guard asks for. The secret itself is not sent."""
    return hmac.new(secret, b"fedlayers control", hashlib.sha256).hexdigest()


class Guard:
    """A filter before Flower, which lets through supernodes, executors and callers with the word.

    Flower itself checks supernodes and executors.
    """

    def __init__(self, app: Any, word: str) -> None:
        self.app, self.word = app, word.encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            headers = dict(scope["headers"])
            checked = scope["path"].startswith(("/v1/fleet/", "/v1/runtime/"))
            if not checked and not hmac.compare_digest(headers.get(WORD.encode(), b""), self.word):
                return await _refuse(send, 403)
            if not headers.get(b"content-length", b"").isdigit() or int(headers[b"content-length"]) > LARGEST:
                return await _refuse(send, 413)
        return await self.app(scope, receive, send)


async def _refuse(send: Any, status: int) -> None:
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def serve(folder: Path, host: str, port: int, database: Path | None) -> None:
    """Run the superlink until it is stopped.

    Args:
        folder: ``KEYS/server`` of :func:`fedlayers.remote.flower.keys.make`.
        database: stores messages and registrations; a restart with the same file resumes. Without it they are in
            memory.

    Raises:
        UsageError: keys are missing, or the port is taken.
    """
    need = {name: folder / name for name in ("ca.crt", "server.crt", "server.key", "secret")}
    for file in need.values():
        if not file.is_file():
            raise UsageError(f"{file} is missing: `fedlayers federation keys` makes it")
    sites = keys.registered(folder)
    listening = _bound(host, port)
    port = listening.getsockname()[1]
    os.umask(0o077)  # the database holds messages in transit
    logging.getLogger("flwr").setLevel(logging.WARNING)
    secret = need["secret"].read_bytes()
    config = SuperLinkLifespanConfig(
        control_address="",
        health_server_address=None,
        host=host,
        port=port,
        insecure=False,
        certificates=tuple(need[name].read_bytes() for name in ("ca.crt", "server.crt", "server.key")),  # type: ignore[arg-type]
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
    register(app.state.linkstate_factory.state(), sites)
    app.add_middleware(Guard, word=word(secret))
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
    print(f"superlink on https://{host}:{port} for sites {', '.join(sites)} (Ctrl-C ends it)", flush=True)
    server.run(sockets=[listening])


def register(state: Any, sites: dict[str, bytes]) -> None:
    """Register the sites of the keys' folder at the superlink, and no others.

    Raises:
        UsageError: a withdrawn key is back.
    """
    stored = [node for node in state.get_node_info() if node.status != NodeStatus.UNREGISTERED]
    for node in stored:
        if sites.get(node.name) != node.public_key:
            state.delete_node(node.owner_aid, node.node_id)
    known = {node.name for node in stored if sites.get(node.name) == node.public_key}
    for name, key in sites.items():
        if name not in known:
            try:
                state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, key, HEARTBEAT_DEFAULT_INTERVAL, name=name)
            except ValueError:
                raise UsageError(f"the key of site {name!r} was withdrawn or renamed: make a new one") from None


def _bound(host: str, port: int) -> socket.socket:
    if not 0 <= port < 65536:
        raise UsageError(f"--port must be from 1 to 65535, or 0 for a free one; got {port}.")
    try:
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listening = socket.socket(family)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(where)
        listening.listen(128)
    except OSError as error:
        raise UsageError(f"cannot listen on {host}:{port}: {error.strerror or error}; see --host and --port") from None
    return listening
