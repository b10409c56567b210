"""The superlink's guard, the supernodes that it registers, and what a message carries; without processes."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress

import httpx
import pytest
import torch
from flwr.app import RecordDict
from flwr.common.constant import NOOP_ACCOUNT_NAME, NOOP_FLWR_AID
from flwr.server.superlink.linkstate import LinkStateFactory
from flwr.supercore.auth.typing import AccountInfo
from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME, NodeStatus
from flwr.supercore.error import FlowerError
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.superlink.federation import NoOpFederationManager
from flwr.superlink.servicer.control import control_handlers

from fedlayers.remote import keys
from fedlayers.remote.codec import Packet, decode, encode
from fedlayers.remote.flower import superlink, wire
from fl_core.errors import UsageError

WORD = wire.guard_token(b"secret")


def registered():
    """What the superlink sets once the sites' keys are registered."""
    event = threading.Event()
    event.set()
    return event


def status(path, **headers):
    """What the guard answers a request; 200: it has let it through."""
    answers = []

    async def inner(scope, receive, send):
        await send({"type": "http.response.start", "status": 200})

    async def send(message):
        answers.append(message)

    given = {"content-length": "3", **headers}
    scope = {"type": "http", "path": path, "headers": [(k.encode(), v.encode()) for k, v in given.items()]}
    asyncio.run(superlink.Guard(inner, WORD, registered())(scope, None, send))
    return answers[0]["status"]


@pytest.mark.parametrize("path", ["/v1/control/start-run", "/v1/control/register-node", "/docs", "/openapi.json", "/"])
def test_only_who_says_the_word_starts_runs_and_registers_keys(path):
    assert status(path) == 403
    assert status(path, **{wire.WORD: wire.guard_token(b"other")}) == 403
    assert status(path, **{wire.WORD: WORD}) == 200


@pytest.mark.parametrize("path", ["/v1/fleet/pull-messages", "/v1/runtime/acquire-task"])
def test_supernodes_and_executors_are_left_to_flower(path):
    assert status(path) == 200


@pytest.mark.parametrize("length", ["", "-1", "1e3", str(superlink.LARGEST + 1)])
def test_a_request_of_unknown_or_too_large_size_is_refused(length):
    assert status("/v1/fleet/push-object", **{"content-length": length}) == 413


def test_a_supernode_waits_until_the_keys_are_registered():
    ready, answered = threading.Event(), []

    async def inner(scope, receive, send):
        answered.append(ready.is_set())

    async def asked():
        scope = {"type": "http", "path": "/v1/fleet/activate-node", "headers": [(b"content-length", b"3")]}
        asyncio.get_running_loop().call_later(0.2, ready.set)
        await superlink.Guard(inner, WORD, ready)(scope, None, None)

    asyncio.run(asked())
    assert answered == [True]


class Control:
    """Flower's interface to register supernodes, without a connection."""

    def __init__(self, state):
        self.state = state

    def __getattr__(self, name):
        ask = {
            "ListNodes": control_handlers.list_nodes,
            "RegisterNode": control_handlers.register_node,
            "UnregisterNode": control_handlers.unregister_node,
        }[name]

        def asked(request):
            try:
                return ask(request, AccountInfo(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME), self.state)
            except FlowerError as error:
                raise httpx.HTTPStatusError(str(error), request=None, response=httpx.Response(409)) from error

        return asked


def test_the_superlinks_list_is_that_of_the_keys(tmp_path):
    store = ObjectStoreFactory(FLWR_IN_MEMORY_DB_NAME)
    state = LinkStateFactory(FLWR_IN_MEMORY_DB_NAME, NoOpFederationManager(), store).state()
    control = Control(state)

    def listed():
        return {node.name for node in state.get_node_info() if node.status != NodeStatus.UNREGISTERED}

    keys.make(tmp_path, ["localhost"], ["a", "b"])
    sites = keys.registered_sites(tmp_path / "server")
    for changes in (2, 0):  # a restart finds them there
        assert len(superlink.register(control, sites)) == changes
        assert listed() == {"a", "b"}
        assert len(state.get_node_info()) == 2
    assert len(superlink.register(control, {"a": sites["a"]})) == 1
    assert listed() == {"a"}
    with pytest.raises(UsageError, match=r"'b'.*withdrawn"):
        superlink.register(control, sites)
    keys.public_file(tmp_path / "server", "b").unlink()
    keys.make(tmp_path, [], ["c"])
    assert len(superlink.register(control, keys.registered_sites(tmp_path / "server"))) == 1
    assert listed() == {"a", "c"}
    for name in "ac":
        keys.public_file(tmp_path / "server", name).unlink()
    assert len(superlink.register(control, keys.registered_sites(tmp_path / "server", least=0))) == 2
    assert listed() == set()


@pytest.mark.parametrize("bad", ["south", "._north", "north copy", "north-old"])
def test_a_key_is_withdrawn_next_to_a_file_that_is_none(bad, tmp_path):
    """A broken file, one that another system left there, or a copy of a key."""
    store = ObjectStoreFactory(FLWR_IN_MEMORY_DB_NAME)
    state = LinkStateFactory(FLWR_IN_MEMORY_DB_NAME, NoOpFederationManager(), store).state()
    control, server = Control(state), tmp_path / "server"
    keys.make(tmp_path, ["localhost"], ["east", "north", "south"])
    superlink.register(control, keys.registered_sites(server))
    north = keys.public_file(server, "north")
    keys.public_file(server, bad).write_bytes(north.read_bytes() if bad.startswith("north") else b"ssh-")
    sites, faults = keys.readable_sites(server)
    with suppress(UsageError):  # the copy of a key
        assert superlink.register(control, sites) == []
    assert len(faults) == 1
    assert bad in faults[0] or "'north-old'" in faults[0]
    with pytest.raises(UsageError, match="must be"):
        keys.registered_sites(server)
    north.unlink()
    with suppress(UsageError):
        superlink.register(control, keys.readable_sites(server)[0])
    left = {node.name for node in state.get_node_info() if node.status != NodeStatus.UNREGISTERED}
    assert left == {"east", "south"}, "the broken file withdraws nobody"


@pytest.mark.parametrize("size", [0, 10, wire.SMALL, wire.SMALL + 1])
def test_bytes_come_out_as_they_went_in(size):
    payload = bytes(range(256)) * (size // 256) + bytes(size % 256)
    assert wire.from_record(wire.to_record(payload)) == payload


def test_the_same_large_tensors_for_two_sites_are_the_same_chunks_for_flower():
    trees = {"message/model": {"w": torch.randn(5 * 2**20)}}
    one, two = (wire.to_record(encode(Packet({"kind": "train", "seq": seq}, trees)))["fedlayers"] for seq in (7, 12345))
    chunks = [[name for name, _ in record["bytes"].slice_array()] for record in (one, two)]
    assert len(chunks[0]) > 3
    assert chunks[0][0] != chunks[1][0]
    assert chunks[0][1:] == chunks[1][1:]
    assert decode(wire.from_record(wire.to_record(encode(Packet({"kind": "train", "seq": 7}, trees))))).head["seq"] == 7


def test_what_somebody_else_sent_is_no_payload():
    with pytest.raises(ValueError, match="fedlayers"):
        wire.from_record(RecordDict())


def test_names_of_kept_optimisers_are_read_back():
    """As a site does that is started again: its states are packets, and ``#`` parts a tensor from its moment."""
    trees = {"model/train": {"fc.weight#exp_avg": torch.ones(2), "fc.weight#step": torch.ones(())}}
    assert set(decode(encode(Packet({"kind": "state"}, trees))).trees["model/train"]) == set(trees["model/train"])


def test_tensors_of_all_kinds_and_shapes_travel_as_they_are():
    kinds = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]
    trees = {str(kind): {f"{n}": torch.arange(n, dtype=torch.float32).to(kind) for n in (0, 1, 5)} for kind in kinds}
    shared = torch.arange(6.0).reshape(2, 3)
    trees["views"] = {"turned": shared.t(), "same": shared, "row": shared[1], "number": torch.tensor(2.5)}
    found = decode(encode(Packet({"kind": "done"}, trees))).trees
    assert found.keys() == trees.keys()
    for name, tree in trees.items():
        for key, tensor in tree.items():
            assert found[name][key].dtype == tensor.dtype
            assert torch.equal(found[name][key], tensor)
    found["views"]["same"][0, 0] = 7.0  # no memory is shared, also with what was sent
    assert (shared[0, 0], found["views"]["turned"][0, 0]) == (0.0, 0.0)
