"""How long a server waits for sites in one exchange, with messages that are only played."""

from __future__ import annotations

import time
from types import SimpleNamespace

import httpx
import pytest

from fedlayers.remote.flower import server, wire
from fedlayers.remote.flower.server import FlowerLink


class Link(FlowerLink):
    """Sites a and b answer at once. Site c never does, and is connected or not."""

    def __init__(self, connected):
        self.connected = connected
        self._task = SimpleNamespace(
            message=lambda request, node: node, send=lambda nodes: nodes, receive=self._replies
        )

    def _nodes(self):
        status = {"a": wire.ONLINE, "b": wire.ONLINE, "c": wire.ONLINE if self.connected else "offline"}
        return {
            name: SimpleNamespace(status=status[name], node_id=name, last_activated_at="1", name=name)
            for name in status
        }

    def _replies(self, identifiers):
        for name in set(identifiers) - {"c"}:
            head = SimpleNamespace(reply_to_message_id=name)
            yield SimpleNamespace(metadata=head, has_error=lambda: False, content=wire.to_record(b"done"))


@pytest.mark.parametrize(
    ("connected", "timeout", "grace", "least", "most"),
    [
        (True, None, (2, 1.0), 1.0, 1.9),  # the others have this time once enough have replied
        (False, None, (2, 60.0), 0.0, 0.9),  # who is not connected is not waited for
        (True, 0.5, (2, 60.0), 0.5, 1.4),  # the limit of the exchange holds as well
        (False, 0.5, None, 0.5, 1.4),
        (False, 0.5, (3, 60.0), 0.5, 1.4),  # not enough replies
    ],
)
def test_a_site_that_does_not_answer_costs_its_grace(connected, timeout, grace, least, most):
    start = time.monotonic()
    found = dict(Link(connected).ask(dict.fromkeys("abc", b"train"), timeout, grace))
    assert found == {"a": b"done", "b": b"done", "c": None}
    assert least <= time.monotonic() - start < most


def test_the_start_waits_for_a_superlink_that_starts_again_and_for_a_key_that_comes_back(monkeypatch):
    link, whole = Link(True), Link(True)._nodes()
    seen = iter([httpx.ConnectError("down"), {name: whole[name] for name in "ab"}, whole])

    def nodes():
        found = next(seen)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(server, "LOOK", 0.0)
    monkeypatch.setattr(link, "_nodes", nodes)
    assert link._gather(("a", "b", "c"), None, None) == ("a", "b", "c")
