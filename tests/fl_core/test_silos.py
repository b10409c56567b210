"""Tensors of silos become a federation, whole and in order, or are refused by name."""

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score
from torch import nn

from fl_core import models
from fl_core.config import RunConfig
from fl_core.data import from_clients
from fl_core.data.partitions import SPLITS
from fl_core.rounds.recorder import Recorder
from fl_core.run import runner
from fl_core.run.task import assemble
from tests.conftest import refuses


def silos(**sizes):
    """Every sample is told apart by its first number."""
    pairs, start = {}, 0
    for name, n in (sizes or {"north": 40, "south": 25}).items():
        x = torch.zeros(n, 2, 5)
        x[:, 0, 0] = torch.arange(start, start + n)
        pairs[name] = (x, 3 * (torch.arange(n) % 2) + 4)
        start += n
    return pairs


def test_every_sample_is_once_with_its_silo_and_its_label():
    pairs = silos()
    data = from_clients(pairs, name="pumps")
    assert (data.name, data.shape, data.classes) == ("pumps", (2, 5), ("4", "7"))
    assert [client.name for client in data.clients] == ["north", "south"]
    for client in data.clients:
        x, y = pairs[client.name]
        client_samples = torch.cat([client.split(split).x for split in SPLITS])
        order = client_samples[:, 0, 0].argsort()
        torch.testing.assert_close(client_samples[order], x, rtol=0, atol=0)
        labels = torch.cat([client.split(split).y for split in SPLITS])[order]
        assert torch.equal(labels, (y == 7).long())


def test_arrays_images_and_names_of_classes():
    images = {
        name: (np.full((30, 6, 6), k * 255, np.uint8), np.arange(30) % 2)
        for k, name in enumerate("ab")
    }
    data = from_clients(images, classes=("calm", "fault"))
    assert data.shape == (1, 6, 6)
    assert data.classes == ("calm", "fault")
    assert [float(client.train.x.mean()) for client in data.clients] == [0.0, 1.0]


def test_what_does_not_fit_is_named():
    north, hole = silos()["north"], silos()
    hole["south"][0][7, 1, 2] = float("nan")
    gap = np.array([0, None, 1], dtype=object)
    cases = [
        ({}, {}, "one client"),
        ([north], {}, "dictionary.*list"),
        ({"a": torch.zeros(3, 2)}, {}, "'a'.*pair"),
        ({" ": north}, {}, "empty"),
        ({"a": north, "\udce4": north}, {}, r"'\\udce4'"),
        ({"a": (np.zeros((3, 2)), gap)}, {}, "row 1.*None"),
        (
            {"a": north, "b": (north[0], [[0, 1]] * 40)},
            {},
            r"'b', y.*got \[2\].*argmax",
        ),
        (silos() | {"c": (torch.zeros(9, 3), torch.zeros(9))}, {}, r"'c'.*float32"),
        (hole, {}, r"'south', x, row 7.*\[1, 2\].*nan"),
        (silos(north=40, south=2), {}, "south"),
    ]
    for pairs, options, message in cases:
        with refuses(message):
            from_clients(pairs, **options)


def built(data, model, **keys):
    return assemble(RunConfig(rounds=1, **keys), data=data, model=model)


def test_labels_are_indices_for_a_module_of_the_users():
    labels = torch.tensor([0, 1, 3])[torch.arange(60) % 3]
    pairs = {
        "a": (torch.randn(60, 5), labels),
        "b": (torch.randn(60, 5), labels[:, None].numpy().astype(object)),
    }
    for data in (pairs, from_clients(pairs)):
        task = built(data, nn.Linear(5, 4))
        assert task.data.classes == ("0", "1", "2", "3")
        assert set(task.data.clients[1].train.y.tolist()) == {0, 1, 3}
        assert "no sample has class '2': macro-F1 leaves it out" in task.notes()
        assert task.data.absent == [2]
    assert any(
        "'heart', the default" in sentence
        for sentence in built(None, nn.Linear(10, 5)).said
    )
    with refuses(r"from 0 to 2.*got 3"):
        built(pairs, nn.Linear(5, 3))
    renumbered = built(pairs, "mlp")
    assert any(
        "labels 0, 1, 3 are the classes 0 to 2" in note for note in renumbered.notes()
    )


def test_a_class_without_a_sample_is_left_out_of_macro_f1():
    """The model predicts it for a fifth of the samples, which counts as wrong but makes no class."""
    x, y = torch.arange(60) % 5, torch.tensor([0, 1, 3])[torch.arange(60) % 3]
    always = nn.Sequential(nn.Embedding(5, 4), nn.Flatten())
    with torch.no_grad():
        always[0].weight.copy_(torch.eye(4)[[0, 1, 3, 2, 0]])
    engine = runner.run(
        RunConfig(algorithm="fedavg", rounds=1, lr=1e-9, optimizer="sgd"),
        data={"a": (x[:, None], y)},
        model=always,
        progress=False,
    )
    rows = engine.listener(Recorder).frame().query("metric == 'macro_f1'")
    test = engine.data.clients[0].test
    right = f1_score(
        test.y, always(test.x).argmax(1), labels=[0, 1, 3], average="macro"
    )
    assert right == pytest.approx(rows.query("split == 'test'")["value"].iloc[-1])


@pytest.mark.parametrize("count", [9, 2, 1])
def test_integers_are_token_ids_for_a_module_that_takes_them(count):
    ids, y = torch.randint(0, count, (60, 4)), torch.arange(60) % 2
    ids[0] = count - 1
    pairs = {"a": (ids, y), "b": (ids.numpy(), y)}
    embedding = nn.Sequential(nn.Embedding(count, 3), nn.Flatten(), nn.Linear(12, 2))
    task = built(pairs, lambda: embedding)
    assert task.data.clients[0].train.x.dtype == torch.int64
    assert models.example(task.data.shape).max() < count
    assert built(pairs, nn.Linear(4, 2)).data.clients[0].train.x.dtype == torch.float32
