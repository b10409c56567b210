"""Bytes as Flower's messages: the common part of a server at its superlink and a site at its supernode.

Both are executors of Flower's tasks. They take a task, pull its messages, push messages, and send signs of life. A
small payload is one value. A large one is an array of bytes, which Flower moves in chunks of 5 MB. Nothing is ever
unpickled.
"""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import httpx
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.app.error import Error
from flwr.app.message import make_message, remove_content_from_message
from flwr.app.metadata import Metadata
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    PullAppMessagesRequest,
    PullTaskInputRequest,
    PushAppMessagesRequest,
    PushTaskOutputRequest,
    SendTaskHeartbeatRequest,
)
from flwr.supercore.constant import TaskType
from flwr.supercore.date import now
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_pull_object_fn_protobuf,
    make_push_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectPullError,
    ObjectPushError,
    inflate_object_from_contents,
    pull_objects,
    push_objects,
)
from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor, SuperExecAuthHttpInterceptor
from flwr.supercore.run import RunNotRunningException
from flwr.supercore.runtime import RuntimeHttpClient

LOST = (httpx.HTTPError, RunNotRunningException, ObjectPullError, ObjectPushError, OSError)
"""Errors after which a message may be lost: ask again, perhaps after reconnecting."""
HEARTBEAT = 10.0
"""Seconds between two signs of life of a task. Flower gives a task up after 60 s without."""
LIFETIME = 7 * 24 * 3600.0
"""Seconds after which a superlink forgets a message that nobody asked for."""
SMALL = 2**20
RECORD, BYTES, KIND = "fedlayers", "bytes", "query"
ACQUIRE = "/flwr.proto.Runtime/AcquireTask"


@dataclass(frozen=True)
class Address:
    """The address of a superlink or a supernode, and how to check its certificate. Without ``ca`` it is plain HTTP.

    >>> Address("127.0.0.1:9094").url
    'http://127.0.0.1:9094'
    """

    place: str
    ca: Path | None = None

    @property
    def url(self) -> str:
        return f"{'http' if self.ca is None else 'https'}://{self.place}"

    def verify(self) -> ssl.SSLContext | bool:
        """Return what httpx needs to check the certificate."""
        return ssl.create_default_context(cafile=str(self.ca)) if self.ca else False


class Task:
    """A task of Flower that this process carries out: its mailbox and its signs of life.

    Attributes:
        run: Flower's number of the run; ``node``: of this end.
    """

    def __init__(self, address: Address, token: str) -> None:
        self.client = RuntimeHttpClient(
            address.url, interceptors=[RuntimeTokenHttpInterceptor(token)], verify=address.verify(), timeout=60.0
        )
        given = self.client.PullTaskInput(PullTaskInputRequest())
        self.run, self.node = given.run.run_id, Node(node_id=given.context.node_id)
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
        objects, trees, heads = {}, [], []
        with no_object_id_recompute():
            for message in messages:
                message.metadata.__dict__["_message_id"] = message.object_id
                objects.update(get_all_nested_objects(message))
                trees.append(get_object_tree(message))
                heads.append(message_to_proto(remove_content_from_message(message)))
            stored = self.client.PushMessages(PushAppMessagesRequest(messages_list=heads, message_object_trees=trees))
            push = make_push_object_fn_protobuf(self.client.PushObject, self.node, self.run, stored.session_id)
            push_objects(objects, push, object_ids_to_push=set(stored.objects_to_push))
        return list(stored.message_ids)

    def receive(self, identifiers: Iterable[str] = ()) -> list[Message]:
        """Pull messages that have arrived: at a server replies to these messages, at a site the message of this task.

        Raises:
            LOST: nothing was taken, or not all of it.
        """
        found = self.client.PullMessages(PullAppMessagesRequest(message_ids=identifiers))
        pull = make_pull_object_fn_protobuf(self.client.PullObject, self.node, self.run)
        messages = []
        for tree in found.message_object_trees:
            contents = pull_objects(
                [part.object_id for part in iterate_object_tree(tree)], pull, initial_backoff=0.1, backoff_cap=1.0
            )
            self.client.ConfirmMessageReceived(
                ConfirmMessageReceivedRequest(node=self.node, run_id=self.run, message_object_id=tree.object_id)
            )
            message = cast(Message, inflate_object_from_contents(tree.object_id, contents))
            message.metadata.__dict__["_message_id"] = tree.object_id
            messages.append(message)
        return messages

    def message(self, payload: bytes, node: int) -> Message:
        """Return a message of this task to a node."""
        head = Metadata(
            run_id=self.run,
            message_id="",
            src_node_id=self.node.node_id,
            dst_node_id=node,
            reply_to_message_id="",
            group_id="",
            created_at=now().timestamp(),
            ttl=LIFETIME,
            message_type=KIND,
        )
        return make_message(metadata=head, content=packed(payload))

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

    def take(self, kind: TaskType) -> Task | None:
        """Return the oldest waiting task of this kind, if any.

        Raises:
            LOST: nobody answers, or the secret is different.
        """
        token = self.client.AcquireTask(AcquireTaskRequest(supported_task_types=[kind])).token
        return Task(self.address, token) if token else None

    def close(self) -> None:
        self.client.close()


def packed(payload: bytes) -> RecordDict:
    """Return bytes as Flower's record.

    >>> unpacked(packed(b"weights"))
    b'weights'
    """
    if len(payload) <= SMALL:  # three objects to move instead of five
        return RecordDict({RECORD: ConfigRecord({BYTES: payload})})
    return RecordDict({RECORD: ArrayRecord({BYTES: Array("uint8", (len(payload),), "bytes", payload)})})


def unpacked(content: RecordDict) -> bytes:
    """Return the bytes in a record of :func:`packed`.

    Raises:
        ValueError: the record was made otherwise.
    """
    record = content.get(RECORD)
    found = record.get(BYTES) if isinstance(record, ConfigRecord | ArrayRecord) else None
    payload = found.data if isinstance(found, Array) else found
    if not isinstance(payload, bytes):
        raise ValueError("a message that this package did not make")
    return payload


def answer(message: Message, payload: bytes) -> Message:
    """Return the reply to a message."""
    return Message(packed(payload), reply_to=message)


def failure(message: Message, reason: str) -> Message:
    """Return a reply that reports a failure. The server treats it as lost."""
    return Message(Error(code=2, reason=reason), reply_to=message)
