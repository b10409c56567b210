"""The names of Flower that its documentation does not promise. All are imported here, each with its reason.

Flower documents ``ServerApp`` and ``ClientApp``. It loads both from a bundle of code that the server ships, in a new
process for each run or message. A site must not run code of the server, and keeps its data in a lasting process. A
server must resume. So both ends take their tasks from Flower as its own executors do, and their messages through the
documented interface ``Grid``. Messages, records and errors come from the documented ``flwr.app``.

``tests/federation/flower/test_internals.py`` checks that this list is complete and that each name works.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

NAMES = {
    # both ends
    "HttpGrid": ("flwr.superlink.grid", "the only Grid that reaches a superlink or a supernode"),
    "Run": ("flwr.supercore.run", "a Grid needs one to know its run"),
    "RuntimeHttpClient": ("flwr.supercore.runtime", "takes a task, keeps it and ends it; a Grid cannot"),
    "RuntimeTokenHttpInterceptor": ("flwr.supercore.interceptors", "proves who has taken the task"),
    "SuperExecAuthHttpInterceptor": ("flwr.supercore.interceptors", "signs the request for a task with the secret"),
    "AcquireTaskRequest": ("flwr.proto.runtime_pb2", "asks for a task"),
    "PullTaskInputRequest": ("flwr.proto.runtime_pb2", "starts the task; the reply names its run and node"),
    "SendTaskHeartbeatRequest": ("flwr.proto.runtime_pb2", "keeps the task while a site trains for hours"),
    "PushTaskOutputRequest": ("flwr.proto.runtime_pb2", "ends the task"),
    "ObjectPushError": ("flwr.supercore.inflatable.inflatable_utils", "a Grid raises it for a message that is lost"),
    "now": ("flwr.supercore.date", "the clock with which Flower dates requests"),
    # the server
    "ControlHttpClient": ("flwr.supercore.control", "what `flwr run` and `flwr supernode` use; with the guard's word"),
    "StartRunRequest": ("flwr.proto.control_pb2", "starts a run, as `flwr run` does"),
    "ListNodesRequest": ("flwr.proto.control_pb2", "lists sites by name, as `flwr supernode list` does not"),
    "build_fab_from_files": ("flwr.cli.build", "what `flwr build` uses; makes the empty bundle without a folder"),
    # the superlink
    "RegisterNodeRequest": ("flwr.proto.control_pb2", "what `flwr supernode register` sends"),
    "UnregisterNodeRequest": ("flwr.proto.control_pb2", "what `flwr supernode unregister` sends"),
    "SuperLinkLifespan": ("flwr.superlink.cli.flower_superlink", "create_app needs it"),
    "SuperLinkLifespanConfig": ("flwr.superlink.config_loader", "create_app needs it"),
    "create_app": ("flwr.superlink.main", "the application, before which the guard stands; the command has no guard"),
    "NoOpControlAuthnPlugin": ("flwr.superlink.auth_plugin", "create_app needs it; the guard checks callers instead"),
    "FLWR_IN_MEMORY_DB_NAME": ("flwr.supercore.constant", "the database of --memory"),
    # the site
    "flower_supernode": (
        "flwr.supernode.cli",
        "the command `flower-supernode`, in a process that ends with its parent",
    ),
    "start_client_internal": ("flwr.supernode", "watch_supernode repairs a fault in it, and learns of the connection"),
    "ObjectPullError": ("flwr.supercore.inflatable.inflatable_utils", "watch_supernode needs it"),
    "RunNotRunningException": ("flwr.supercore.run", "watch_supernode needs it"),
    "SYSTEM_TIME_TOLERANCE": ("flwr.common.constant", "how far a clock may be ahead"),
    "TIMESTAMP_TOLERANCE": ("flwr.common.constant", "how far a clock may be behind"),
}
"""Where each name stands in Flower, and why it is needed."""


def __getattr__(name: str) -> Any:
    """Import a name when it is first used, since no end needs all of them."""
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = NAMES[name][0]
    if name == "start_client_internal":  # a module
        return import_module(f"{module}.{name}")
    return getattr(import_module(module), name)


def watch_supernode(connected: Callable[[], object]) -> None:
    """Patch Flower to report that a supernode is connected, and to drop a message whose run ends while it is fetched.

    A supernode asks for messages only when its superlink has let it in. Otherwise it reports that in its log alone.

    Flower keeps a message of a run that is over without its contents, and hands it to the site. The site's failure then
    becomes the reply to the next message. The true reply waits for another message, perhaps for ever.
    """
    flower, lost, over = map(__getattr__, ("start_client_internal", "ObjectPullError", "RunNotRunningException"))

    def failing(ask: Callable[[int, str], Any]) -> Callable[[int, str], Any]:
        def asked(run: int, part: str) -> Any:
            try:
                return ask(run, part)
            except over:
                raise lost(part, "its run is over") from None

        return asked

    store = flower._pull_and_store_message

    def stored(*, pull_object: Any, confirm_message_received: Any, **rest: Any) -> int | None:
        connected()
        done = store(
            pull_object=failing(pull_object), confirm_message_received=failing(confirm_message_received), **rest
        )
        return None if done is None else int(done)

    flower._pull_and_store_message = stored  # called with names alone


def grid(client: Any, address: str, token: str, run: int, node: int) -> Any:
    """Return Flower's Grid for a task that this process has taken.

    It uses the client given. A client of its own would repeat a failed request for ever.
    """
    pull = client.PullObject

    def patient(request: Any) -> Any:
        """Ask again soon for a part that is on its way. A Grid alone would wait for seconds."""
        for wait in (0.1, 0.2, 0.4, 0.8, 0.0):
            found = pull(request)
            if found.object_available or not found.object_found:
                break
            time.sleep(wait)
        return found

    client.PullObject = patient
    made = __getattr__("HttpGrid")(address, token=token)
    made._client, made.node.node_id = client, node
    made.set_run(__getattr__("Run").create_empty(run))
    return made
