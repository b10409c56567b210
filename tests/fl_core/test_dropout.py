"""Lost replies: whose are lost, and what every algorithm does without them."""

import pytest
import torch
from hypothesis import given, strategies as st

from diagnostics.measure import instruments
from fl_core import tree
from fl_core.algorithms import registry
from fl_core.plan import LayerPlan
from fl_core.rounds.clients import is_lost
from fl_core.rounds.recorder import CHANCE, REPLY_LOST
from fl_core.rounds.steering import Instruments
from tests.conftest import TOY, every_other, play

ALL = sorted(registry())
DECIDING = [name for name in ALL if name.startswith("playerfl")]
EVERYONE = range(len(TOY.clients))
TRACE = ((1, 1), *((2, client) for client in EVERYONE), (3, 0), (3, 2))


@given(
    st.integers(0, 2**32),
    st.integers(0, 1000),
    st.sets(st.integers(0, 50)),
    st.floats(0, 0.99),
    st.floats(0, 0.99),
)
def test_a_clients_fate_is_its_own_and_a_higher_rate_loses_more(
    seed, index, sampled, rate, other
):
    low, high = sorted((rate, other))
    for client in sampled:
        if is_lost(seed, index, client, low):
            assert is_lost(seed, index, client, high)


@pytest.mark.parametrize("name", every_other(ALL, of=3))
def test_without_replies_nothing_moves_with_some_the_others_go_on_and_both_are_recorded(
    name,
):
    """Round 1 lacks one reply, round 2 all, round 3 two: the server and whoever is lost keep what they had."""
    played = play(
        algorithm=name, model="norm", trace=TRACE, keep_optimizer=True, momentum=0.9
    )
    states, rows = played.everything(), played.rows
    fresh = played.engine.clients.start("b")
    before = {kind: tree.digest(entries) for kind, entries in fresh.trees.items()} | {
        "meta": fresh.meta
    }
    assert states[0]["clients"]["b"] == before
    assert states[1]["server"] == states[0]["server"]
    assert states[1]["clients"] == states[0]["clients"]
    assert (
        states[2]["server"] != states[1]["server"]
        or registry()[name].travels == "nothing"
    )
    for client in "abcd":
        moved = states[2]["clients"][client] != states[1]["clients"][client]
        assert moved == (client in "bd"), (
            "who replies moves: its optimiser's state, at the least"
        )
    lost = [row for row in rows if row["metric"] == REPLY_LOST]
    missing = [(row["round"], row["client"]) for row in lost]
    assert missing == [(rnd, "abcd"[client]) for rnd, client in TRACE]
    assert all(row["value"] == 1 and row["variant"] == CHANCE for row in lost)

    def of(metric):
        chosen = (
            row
            for row in rows
            if row["metric"] == metric and row["variant"] != "finish"
        )
        return {(row["round"], row["client"]) for row in chosen}

    for cost in ("bytes_down", "steps", "flops"):
        assert of(cost) == {(rnd, client) for rnd in (1, 2, 3) for client in "abcd"}, (
            "it was sent to, and trained"
        )
    for news in ("bytes_up", "train_loss"):
        assert of(news) == of("steps") - set(missing), "nothing of it arrived"


@pytest.mark.parametrize("name", DECIDING)
def test_a_decision_waits_for_the_first_reply(name):
    """As late as it comes, it is made of those who replied, and the first aggregation is partial all the same."""
    seen = []

    def decide(layers, measured, **options):
        seen.extend(measurement["client"] for measurement in measured)
        return LayerPlan(tuple(layers), ("fc1", "fc2"))

    observers = instruments().observers
    nobody = tuple((1, client) for client in EVERYONE)
    played = play(
        algorithm=name, trace=(*nobody, (2, 3)), borrowed=Instruments(observers, decide)
    )
    assert seen == [0, 1, 2]
    assert ["plan" in checkpoint.server.meta for checkpoint in played.checkpoints] == [
        0,
        1,
        1,
    ]
    first, _, last = (
        checkpoint.server.trees["model"] for checkpoint in played.checkpoints
    )
    head = played.engine.algorithm.plan.head_tensors
    assert head
    assert all(torch.equal(first[name], last[name]) for name in head)
