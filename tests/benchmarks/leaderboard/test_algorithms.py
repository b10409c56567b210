"""FedSelect and kNN-Per: their limits, their steps, and what their clients keep."""

import pytest
import torch

from benchmarks.leaderboard.algorithms import MASK, FedSelect, KNNPer, WithNeighbours
from fl_core import tree
from fl_core.algorithms import Message, Round, State, Update
from fl_core.run import runner
from tests.conftest import CONFIG, TOY, network, play, refuses

HARD = {
    "momentum": 0.9,
    "weight_decay": 0.05,
    "lr": 0.1,
    "rounds": 3,
    "participation": 0.5,
}


def built(kind, **options):
    config = CONFIG.with_keys(algorithm=kind, options=options)
    return runner.assemble(config, data=TOY, model=network("plain")).algorithm(None)


def test_options_are_refused():
    for kind, options, message in (
        (FedSelect, {"rate": 2}, "rate .*2"),
        (KNNPer, {"k": 0}, "k .*at least 1.*0"),
        (KNNPer, {"scale": 0}, "scale .*above 0"),
    ):
        with refuses(message):
            built(kind, **options)


@pytest.mark.parametrize("kind", ["drop", "norm", "unused"])
def test_fedselect_that_selects_nothing_is_fedavg(kind):
    found, wanted = (
        play(algorithm=name, options=options, model=kind, **HARD)
        for name, options in ((FedSelect, {"rate": 0}), ("fedavg", {}))
    )
    assert found.server() == wanted.server()
    assert found.evaluated() == wanted.evaluated()


@pytest.mark.parametrize("kind", ["drop", "plain"])
def test_fedselect_that_selects_everything_is_local(kind):
    everyone = HARD | {"participation": 1.0}
    found = play(
        algorithm=FedSelect, options={"rate": 1, "limit": 1}, model=kind, **everyone
    )
    assert (
        found.evaluated() == play(algorithm="local", model=kind, **everyone).evaluated()
    )


def test_fedselect_keeps_the_entries_that_changed_most():
    algorithm = built(FedSelect, rate=0.25, limit=0.3)
    change = torch.tensor([0.1, 0.5, 0.2, 0.9])
    assert algorithm.choose_personal(
        change, torch.zeros(4, dtype=torch.bool)
    ).tolist() == [False, False, False, True]
    assert not algorithm.choose_personal(
        change, torch.tensor([True, True, False, False])
    ).any()  # above the limit


def test_fedselects_mean_of_an_entry_is_over_the_clients_that_share_it():
    algorithm, name = built(FedSelect), "fc3.bias"
    server = State({"model": {name: torch.tensor([7.0, 7.0, 7.0])}})
    masks = torch.tensor([[False, True, True], [False, False, True]])
    values = torch.tensor([[1.0, 0.0, 0.0], [4.0, 5.0, 0.0]])
    updates = [
        Update(k, k + 1, Message({"model": {name: values[k]}, MASK: {name: masks[k]}})) for k in range(2)
    ]  # fmt: skip
    algorithm.aggregate(server, updates, Round(0))
    torch.testing.assert_close(
        server.trees["model"][name], torch.tensor([3.0, 5.0, 7.0])
    )


@pytest.mark.parametrize("kind", ["drop", "norm", "unused"])
def test_knn_pers_global_model_is_fedavgs_and_it_stores_each_clients_samples(
    kind,
):
    found, wanted = (
        play(algorithm=name, model=kind, **HARD) for name in (KNNPer, "fedavg")
    )
    ours, theirs = (
        {**p.checkpoints[-1].server.trees["model"]} for p in (found, wanted)
    )
    same = {n.removeprefix("body.").replace("head.", "fc2." if kind == "norm" else "fc3."): t for n, t in ours.items()
            if not n.startswith("memory.")}  # fmt: skip
    theirs = {n.removeprefix("used."): t for n, t in theirs.items()}
    assert {n.removeprefix("used."): tree.digest({"": t}) for n, t in same.items()} == {
        n: tree.digest({"": t}) for n, t in theirs.items()
    }
    stored = found.checkpoints[-1].models["personal"]
    sizes = {client.name: len(client.train) for client in TOY.clients}
    assert {
        name: int(each["memory.values"].sum()) for name, each in stored.items()
    } == sizes


def test_the_neighbours_prediction_is_that_of_a_dense_reference():
    torch.manual_seed(0)
    head = torch.nn.Linear(4, 3)
    model = WithNeighbours(
        torch.nn.Identity(), head, lam=0.3, k=5, scale=0.7, capacity=20
    ).eval()
    x = torch.randn(6, 4)
    assert torch.equal(model(x), head(x))  # nothing is stored
    keys, labels = torch.randn(12, 4), torch.randint(3, (12,))
    model.memory.keys[:12], model.memory.values[:12] = (
        keys,
        torch.nn.functional.one_hot(labels, 3).float(),
    )
    for row, found in zip(x.double(), model(x).exp(), strict=True):
        far = (keys.double() - row).square().sum(1).sqrt()
        near = far.argsort()[:5]
        shares = torch.zeros(3, dtype=torch.float64)
        for k in near:
            shares[labels[k]] += torch.exp(-far[k] / 0.7)
        wanted = 0.3 * shares / shares.sum() + 0.7 * head(row.float()).double().softmax(
            0
        )
        torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-6)
    model.lam = 0.0
    assert torch.equal(model(x), head(x))
