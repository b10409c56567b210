"""The round loop: who takes part, what is recorded, what is refused."""

import math

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn
from torch.nn import functional

from fl_core import rows, seeds, tree
from fl_core.algorithms import Message, base, registry
from fl_core.algorithms.averaging import FedAvg
from fl_core.errors import NonFiniteError
from fl_core.plan import LayerPlan
from fl_core.rounds.engine import sampled_clients
from fl_core.rounds.steering import Instruments
from fl_core.rows import CLASSIFICATION, SHOWN
from tests.conftest import SIZES, TOY, every_other, network, play
from tests.made import Wired

ALL = sorted(registry())
CLIENTS = [client.name for client in TOY.clients]


@given(
    st.integers(0, 2**40), st.integers(0, 50), st.integers(1, 60), st.floats(0.001, 1.0)
)
def test_a_round_samples_that_fraction_of_distinct_clients(
    seed, index, count, fraction
):
    clients = sampled_clients(seed, index, count, fraction)
    assert list(clients) == sorted(set(clients))
    assert all(0 <= client < count for client in clients)
    assert len(clients) == max(1, math.floor(fraction * count + 1e-9))
    assert clients == sampled_clients(seed, index, count, fraction)


@pytest.mark.parametrize("name", every_other(ALL, 2, of=3))
def test_every_round_is_recorded(name):
    """And all algorithms train the same clients in the same rounds."""
    played = play(algorithm=name, rounds=3, eval_every=2, participation=0.5)
    sampled = [sampled_clients(0, k, len(CLIENTS), 0.5) for k in range(3)]
    wanted = [sorted(CLIENTS[client] for client in numbers) for numbers in sampled]
    assert [sorted(c.models["local"]) for c in played.checkpoints] == wanted
    steps = played.values("steps", variant="")
    trained = {(k + 1, name) for k, names in enumerate(wanted) for name in names}
    assert {key for key, value in steps.items() if value} == trained
    table = rows.frame(played.rows)
    # a client with samples of one class has no area under a curve
    whole = table[~table.metric.isin(["auroc", "auprc"])]
    assert (whole.status == "ok").all()
    assert whole.value.notna().all()
    assert (set(table.algorithm), set(table.seed)) == ({name}, {0})
    evaluated = played.engine.algorithm.evaluates
    headline = "personal" if name in TUNED | BOTH else evaluated
    scores = table[table.metric == "accuracy"]
    also = {"global"} if name in ("fedrod", "apfl") else set()
    assert set(scores.model) == {"local", evaluated, headline} | also
    tested = scores[(scores.model == headline) & (scores.split == "test")]
    clients = tested.groupby("round").client.apply(set).to_dict()
    every = [3] if name in TUNED else [0, 2, 3]
    assert clients == {done: set(CLIENTS) for done in every}
    local = scores[scores.model == "local"]
    for split in ("validation", "test"):
        assert set(local[local.split == split]["round"]) == {2, 3}
    key = ["round", "model", "split", "client", "client_b", "layer", "metric"]
    assert not table.duplicated([*key, "variant"]).any()


def test_training_loss_is_the_mean_over_samples_in_the_order_of_the_batches():
    """Against a loop of its own: unequal batches weigh by their samples, each at the weights before its step."""
    played = play(algorithm="fedavg", rounds=1, epochs=2, lr=0.3)
    losses = played.values("train_loss")
    for k, client in enumerate(TOY.clients):
        model, draws, total = (
            network("plain"),
            seeds.torch_generator(0, "batches", 0, k, "main"),
            0.0,
        )
        for _ in range(2):
            order = torch.randperm(len(client.train), generator=draws)
            for part in order.split(8):
                loss = functional.cross_entropy(
                    model(client.train.x[part]), client.train.y[part]
                )
                model.zero_grad()
                loss.backward()
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter -= 0.3 * parameter.grad
                total += loss.item() * len(part)
        assert losses[1, client.name] == pytest.approx(
            total / (2 * len(client.train)), rel=1e-4
        )


def extreme():
    """Finite logits so far apart that their cross-entropy is not."""
    far = torch.tensor([2e38, -2e38, 0.0])
    return Wired(lambda m, x: 0 * m.fc(x.flatten(1)) + far, fc=nn.Linear(36, 3))


def test_a_score_that_is_not_finite_is_a_row_without_a_value():
    played = play(algorithm="fedavg", model=extreme(), epochs=0, rounds=1)
    scored = [
        row
        for row in played.rows
        if row["split"] == "test" and row["metric"] in SHOWN[CLASSIFICATION]
    ]
    assert {(row["metric"], row["value"] is None, row["status"]) for row in scored} == {
        ("accuracy", False, "ok"),
        ("macro_f1", False, "ok"),
        ("loss", True, "not finite"),
    }


def test_observers_may_be_the_users_own():
    """They see each step of the first epoch. The decision gets what they report."""
    seen = []

    class Noting:
        def __init__(self, layers):
            self.steps = 0

        def update(self, params, grads):
            self.steps += 1

        def result(self):
            return {"layers": ["fc1", "fc2", "fc3"], "importance": [self.steps] * 3}

    def decide(layers, measured, **how):
        seen.extend(
            (measurement["client"], measurement["weight"], measurement["importance"][0])
            for measurement in measured
        )
        assert how["names"] == CLIENTS
        return LayerPlan(tuple(layers), ("fc2",))

    borrowed = Instruments({"federation_sensitivity": Noting}, decide)
    played = play(algorithm="playerfl", borrowed=borrowed, epochs=2)
    steps = [math.ceil(n / 8) for n in TOY.weights]
    assert seen == list(zip(range(len(CLIENTS)), TOY.weights, steps, strict=True))
    plan = played.engine.algorithm.plan
    assert plan.shared == ("fc2",)
    assert plan.why.checkpoint == tree.digest(played.engine.initial)


@pytest.mark.parametrize(
    "name", ["fedavg", "fedper", "fedrep", "fedbabu", "ditto", "local", "playerfl"]
)
def test_a_learning_rate_without_measure_ends_in_an_error_that_says_where(
    name,
):
    with pytest.raises(NonFiniteError) as caught:
        play(algorithm=name, lr=1e30)
    assert str(caught.value).startswith(f"{name}, round 1, client 'a', phase ")
    assert "layer 'fc" in str(caught.value)


def test_a_model_whose_scores_overflow_is_named_too():
    """One step whose weights are finite and whose logits are not: found when the model is scored."""
    where = r"^fedavg, round 1, client 'a', .*local.*validation"
    with pytest.raises(NonFiniteError, match=where):
        play(algorithm="fedavg", lr=1e30, batch_size=1000, rounds=1)


class Overflowing(FedAvg):
    """FedAvg whose server breaks one entry in the second round."""

    name = "overflowing"

    def aggregate(self, server, updates, rnd):
        super().aggregate(server, updates, rnd)
        if rnd.index == 1:
            server.trees["model"]["fc2.bias"][3] = math.inf


class Greedy(FedAvg):
    """FedAvg that writes into whatever it is handed."""

    name = "greedy"

    def loss(self, params, batch, ctx):
        with torch.no_grad():
            for value in ctx.reference.values():
                value.fill_(7.0)
        return super().loss(params, batch, ctx)

    def server_message(self, server, client, rnd):
        return Message({"model": server.trees["model"]})

    def aggregate(self, server, updates, rnd):
        def spoiled():
            for update in updates:
                yield update
                for value in update.message.trees["model"].values():
                    value.fill_(0)

        super().aggregate(server, spoiled(), rnd)


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    registry()
    for kind in (Overflowing, Greedy):
        monkeypatch.setitem(base.ALGORITHMS._members, kind.name, kind)


def test_an_aggregate_that_is_not_finite_is_named():
    where = r"^overflowing, round 2, server, .*'fc2\.bias' \(layer 'fc2'\) of 'model'"
    with pytest.raises(NonFiniteError, match=where):
        play(algorithm="overflowing")


def test_what_crosses_is_cloned():
    """Writing into a received tree reaches neither the sender nor anyone else."""
    assert play(algorithm="greedy").server() == play(algorithm="fedavg").server()


@pytest.mark.parametrize("name", ["fedavg", "pfedme", "per_fedavg"])
def test_clients_count_by_their_training_samples_or_all_the_same(name):
    """The server is the mean of the local models, in which a client with more samples has more weight, or none has."""
    models = {}
    for weights, shares in (("samples", TOY.weights), ("uniform", (1,) * len(CLIENTS))):
        played = play(algorithm=name, rounds=1, client_weights=weights)
        local = played.checkpoints[0].models["local"]
        models[weights] = played.checkpoints[0].server.trees["model"]
        for key, value in models[weights].items():
            by_hand = sum(
                n * local[client][key]
                for client, n in zip(CLIENTS, shares, strict=True)
            ) / sum(shares)
            torch.testing.assert_close(value, by_hand)
    assert len(set(TOY.weights)) == len(SIZES), (
        "the federation of these tests is uneven"
    )
    assert tree.distance(models["samples"], models["uniform"]) > 1e-4


TUNED = {"fedbabu", "local_adaptation", "vanilla", "anti"}


BOTH = {"ditto", "pfedsd", "per_fedavg", "pfedme", "fedrod"}
