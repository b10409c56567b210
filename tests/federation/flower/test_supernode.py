"""What a site's supernode does with a message whose run ends while it is fetched."""

from __future__ import annotations

import pytest
from flwr.app.message import make_message
from flwr.app.metadata import Metadata
from flwr.common.constant import Status
from flwr.supercore.inflatable.inflatable_object import get_object_tree
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.run import Run, RunNotRunningException
from flwr.supernode import start_client_internal as flower
from flwr.supernode.nodestate.nodestate_factory import NodeStateFactory

from fedlayers.remote.flower import internals, wire

RUN = 7


@pytest.mark.parametrize("ends", ["while its parts are fetched", "before it is confirmed", "later"])
def test_a_message_whose_run_ends_is_given_to_nobody(ends, monkeypatch):
    monkeypatch.setattr(flower, "_pull_and_store_message", flower._pull_and_store_message)
    connected = []
    internals.watch_supernode(lambda: connected.append(1))
    state = NodeStateFactory(ObjectStoreFactory()).state()
    state.set_node_id(1)
    state.store_run(Run.create_empty(RUN))
    head = Metadata(RUN, "", 2, 1, "", "", 0.0, 3600.0, "query")
    message = make_message(metadata=head, content=wire.to_record(b"a request"))
    message.metadata.__dict__["_message_id"] = message.object_id
    parts = {each.object_id: each for each in flower.get_all_nested_objects(message).values()}

    def pull(run, part):
        if ends == "while its parts are fetched":
            raise RunNotRunningException
        return parts[part].deflate()

    def confirm(run, part):
        if ends == "before it is confirmed":
            raise RunNotRunningException

    found = flower._pull_and_store_message(
        state=state,
        object_store=state.object_store,
        node_config={},
        receive=lambda: (message, get_object_tree(message)),
        get_run=None,
        get_fab=None,
        pull_object=pull,
        confirm_message_received=confirm,
        trusted_entities=None,
    )
    assert connected
    waiting = state.get_messages_legacy(run_ids=[RUN], is_reply=False)
    to_do = [task for task in state.get_tasks() if task.status.status != Status.FINISHED]
    if ends == "later":
        assert (found, len(waiting), len(to_do)) == (RUN, 1, 1)
    else:
        assert (found, len(waiting), len(to_do)) == (None, 0, 0)
