"""Bytes as Flower's messages: the common part of a server at its superlink and a site at its supernode.

Both are executors of Flower's tasks. They take a task, exchange messages through Flower's Grid, and send signs of life.
A small payload is one value. A large one is an array of bytes, which Flower moves in chunks of 5 MB. Nothing is ever
unpickled.
"""

from __future__ import annotations

import hashlib
import hmac
import ssl
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, Metadata, RecordDict

from fedlayers.remote.flower import internals
from fedlayers.remote.flower.internals import (
    AcquireTaskRequest,
    ControlHttpClient,
    ObjectPushError,
    PullTaskInputRequest,
    PushTaskOutputRequest,
    RuntimeHttpClient,
    RuntimeTokenHttpInterceptor,
    SendTaskHeartbeatRequest,
    SuperExecAuthHttpInterceptor,
    now,
)

LOST = (httpx.HTTPError, ObjectPushError, OSError)
"""Errors after which a message may be lost: ask again, perhaps after reconnecting."""
SERVER, SITE = "flwr-serverapp", "flwr-clientapp"
"""Flower's kinds of tasks."""
ONLINE, UNREGISTERED = "online", "unregistered"
"""What Flower says of a supernode."""
HEARTBEAT = 10.0
"""Seconds between two signs of life of a task. Flower gives a task up after 60 s without."""
LIFETIME = 7 * 24 * 3600.0
"""Seconds after which a superlink forgets a message that nobody asked for."""
SMALL = 2**20
RECORD, BYTES, KIND = "fedlayers", "bytes", "query"
ACQUIRE = "/flwr.proto.Runtime/AcquireTask"


@dataclass(frozen=True)
class Address:
    """The address of a superlink or a supernode, and the certificate of its authority.

    >>> Address("127.0.0.1:9094", Path("ca.crt")).url
    'https://127.0.0.1:9094'
    """

    place: str
    ca: Path

    @property
    def url(self) -> str:
        return f"https://{self.place}"

    def verify(self) -> ssl.SSLContext:
        """Return what httpx needs to check the certificate."""
        return ssl.create_default_context(cafile=str(self.ca))


class Task:
    """A task of Flower that this process carries out: its mailbox and its signs of life.

    Attributes:
        run: Flower's number of the run; ``node``: of this end.
    """

    def __init__(self, address: Address, token: str) -> None:
        signed = RuntimeTokenHttpInterceptor(token)
        self.client = RuntimeHttpClient(address.url, interceptors=[signed], verify=address.verify(), timeout=60.0)
        given = self.client.PullTaskInput(PullTaskInputRequest())
        self.run, self.node = given.run.run_id, given.context.node_id
        self.grid = internals.grid(self.client, address.place, token, self.run, self.node)
        self._over = threading.Event()
        threading.Thread(target=self._live, name="signs of life", daemon=True).start()

    def _live(self) -> None:
        while not self._over.wait(HEARTBEAT):
            try:
                self.client.SendTaskHeartbeat(SendTaskHeartbeatRequest())
            except LOST:
                continue  # whoever sends or receives next meets the same error, and deals with it

    def send(self, messages: Sequence[Message]) -> list[str]:
        """Push messages with their contents. Return their identifiers.

        Raises:
            LOST: they may not have arrived.
        """
        sent = [str(each) for each in self.grid.push_messages(messages) if each]
        if len(sent) < len(messages):
            raise ConnectionError("Flower does not take a message")
        return sent

    def receive(self, identifiers: Iterable[str] = ()) -> list[Message]:
        """Pull messages that have arrived: at a server replies to these messages, at a site the message of this task.

        A message whose contents are lost comes with an error.

        Raises:
            LOST: nothing was taken, or not all of it.
        """
        return list(self.grid.pull_messages(list(identifiers)))

    def message(self, payload: bytes, node: int) -> Message:
        """Return a message of this task to a node."""
        head = Metadata(
            run_id=self.run,
            message_id="",
            src_node_id=self.node,
            dst_node_id=node,
            reply_to_message_id="",
            group_id="",
            created_at=now().timestamp(),
            ttl=LIFETIME,
            message_type=KIND,
        )
        return Message(content=to_record(payload), metadata=head)  # type: ignore[call-overload]

    def drop(self) -> None:
        """Stop the signs of life of a task that Flower no longer knows."""
        self._over.set()
        self.client.close()

    def end(self) -> None:
        """Tell Flower that the task is done, if it still listens."""
        if not self._over.is_set():
            self._over.set()
            with suppress(*LOST):  # it gives the task up by itself after a minute
                self.client.PushTaskOutput(PushTaskOutputRequest(sub_status="completed", details=""))
            self.drop()


class Desk:
    """The interface of a superlink or a supernode that gives out tasks to holders of its secret."""

    def __init__(self, address: Address, secret: bytes) -> None:
        signed = SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods={ACQUIRE})
        self.address = address
        self.client = RuntimeHttpClient(address.url, interceptors=[signed], verify=address.verify(), timeout=60.0)

    def take(self, kind: str) -> Task | None:
        """Return the oldest waiting task of this kind, if any.

        Raises:
            LOST: nobody answers, or the secret is different.
        """
        token = self.client.AcquireTask(AcquireTaskRequest(supported_task_types=[kind])).token
        return Task(self.address, token) if token else None

    def close(self) -> None:
        self.client.close()


WORD = "fedlayers-word"
"""The header with the word of a caller that may start runs."""


def guard_token(secret: bytes) -> str:
    """Return the word that the superlink's guard asks for. The secret itself is not sent."""
    return hmac.new(secret, b"fedlayers control", hashlib.sha256).hexdigest()


def control(address: Address, secret: bytes, verify: ssl.SSLContext | None = None) -> Any:
    """Return a client of the superlink's interface that starts runs and registers keys."""
    checked = address.verify() if verify is None else verify
    return ControlHttpClient(address.url, interceptors=[_Word(guard_token(secret))], verify=checked, timeout=60.0)


@dataclass(frozen=True)
class _Word:
    """An interceptor that sends the word to the superlink's guard."""

    word: str

    def intercept(self, context: Any, call_next: Any) -> Any:
        context.request.headers[WORD] = self.word
        return call_next(context)


def to_record(payload: bytes) -> RecordDict:
    """Return bytes as Flower's record.

    >>> from_record(to_record(b"weights"))
    b'weights'
    """
    if len(payload) <= SMALL:  # three objects to move instead of five
        return RecordDict({RECORD: ConfigRecord({BYTES: payload})})
    return RecordDict({RECORD: ArrayRecord({BYTES: Array("uint8", (len(payload),), "bytes", payload)})})


def from_record(content: RecordDict) -> bytes:
    """Return the bytes in a record of :func:`to_record`.

    Raises:
        ValueError: the record was made otherwise.
    """
    record = content.get(RECORD)
    found = record.get(BYTES) if isinstance(record, ConfigRecord | ArrayRecord) else None
    payload = found.data if isinstance(found, Array) else found
    if not isinstance(payload, bytes):
        raise ValueError("a message must be one of fedlayers; got another.")
    return payload


def take_bytes(message: Message) -> bytes:
    """Remove and return a message's bytes, so that only the caller holds them. Errors: see :func:`from_record`."""
    content, message.content = message.content, RecordDict()
    return from_record(content)


def answer(message: Message, payload: bytes) -> Message:
    """Return the reply to a message."""
    return Message(to_record(payload), reply_to=message)


def failure(message: Message, reason: str) -> Message:
    """Return a reply that reports a failure. The server treats it as lost."""
    return Message(Error(code=2, reason=reason), reply_to=message)
