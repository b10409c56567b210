"""Origin, Probe and Match accuracy: what each trains, from where it starts, and what they say of a known mismatch."""

from __future__ import annotations

import copy
from typing import Any

import matplotlib as mpl
import pytest
import torch
from torch import Tensor, nn

from figures.fedpft import mismatch
from figures.fedpft.mismatch import (
    classifier_input,
    match_accuracy,
    origin_accuracy,
    probe_accuracy,
)
from fl_core.errors import UsageError
from fl_core.seeds import seed_of, torch_generator, torch_seeded

mpl.use("agg")
D, C = 6, 3


def data(n: int = 90, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Three classes along three directions."""
    g = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % C
    return 0.3 * torch.randn(n, D, generator=g) + 2.0 * nn.functional.one_hot(y, D), y


def wrong_head() -> nn.Linear:
    """Right but for the order of its classes."""
    head = nn.Linear(D, C)
    with torch.no_grad():
        head.weight.copy_(torch.eye(C, D).roll(1, 0))
        head.bias.zero_()
    return head


def reference(
    first: nn.Module,
    last: nn.Module,
    train: Any,
    lr: float,
    batch: int,
    epochs: int,
    seed: int,
) -> nn.Module:
    """Plain SGD with momentum, written out."""
    new, velocity = copy.deepcopy(first), {}
    for epoch in range(epochs):
        order = torch.randperm(
            len(train[1]), generator=torch_generator(seed, "probe", epoch)
        )
        for start in range(0, len(order), batch):
            some = order[start : start + batch]
            loss = nn.functional.cross_entropy(
                last(new(train[0][some])), train[1][some]
            )
            grads = torch.autograd.grad(loss, list(new.parameters()))
            with torch.no_grad():
                for k, (p, g) in enumerate(zip(new.parameters(), grads, strict=True)):
                    velocity[k] = 0.9 * velocity[k] + g if k in velocity else g
                    p -= lr * velocity[k]
    return new


def test_a_mismatched_classifier_is_wrong_as_it_is_and_right_after_a_map_or_when_new() -> (
    None
):
    train, test, head = data(), data(60, 1), wrong_head()
    before = copy.deepcopy(head.state_dict())
    assert origin_accuracy(*test, head) == 0.0
    assert probe_accuracy(train, test, C).accuracy == 1.0
    assert match_accuracy(train, test, head).accuracy == 1.0
    assert all(torch.equal(head.state_dict()[name], before[name]) for name in before)
    assert all(p.requires_grad and p.grad is None for p in head.parameters())


def test_training_is_sgd_with_momentum_in_a_drawn_order() -> None:
    train, test, head = data(50), data(60, 1), wrong_head()
    how = {"batch": 20, "epochs": 3, "seed": 4}
    with torch_seeded(seed_of(4, "probe", "init")):
        fresh = nn.Linear(D, C)
    expected = reference(fresh, nn.Identity(), train, 0.1, 20, 3, 4)
    found = probe_accuracy(train, test, C, **how)
    for a, b in zip(found.module.parameters(), expected.parameters(), strict=True):  # type: ignore[union-attr]
        torch.testing.assert_close(a, b)
    same = nn.Linear(D, D)
    nn.init.eye_(same.weight)
    nn.init.zeros_(same.bias)
    expected = reference(same, head, train, 0.01, 20, 3, 4)
    moved = match_accuracy(train, test, head, **how)
    for a, b in zip(moved.module.parameters(), expected.parameters(), strict=True):  # type: ignore[union-attr]
        torch.testing.assert_close(a, b)
    assert found.accuracy == found.right.double().mean()
    assert found.best >= found.accuracy


def model(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(D, 12),
        nn.BatchNorm1d(12),
        nn.ReLU(inplace=True),
        nn.Dropout(),
        nn.Linear(12, C),
    )


def test_every_client_gets_its_three_rows_and_the_mean_is_the_published_number() -> (
    None
):
    models = {"a": model(0), "b": model(1)}
    train, test = (
        {"a": data(60, 2), "b": data(50, 3)},
        {"a": data(30, 4), "b": data(40, 5)},
    )
    frame = mismatch.mismatch(models, train, test, epochs=30)
    assert frame[["client", "metric"]].to_records(index=False).tolist() == [
        (client, kind) for client in "ab" for kind in mismatch.KINDS
    ]
    assert set(frame["layer"]) == {"4"}
    assert set(frame["status"]) == {"ok"}
    value = frame.set_index(["client", "metric"])["value"]
    for client in "ab":
        net, (x, y) = models[client].eval(), test[client]
        assert (
            value[client, "origin_accuracy"] == (net(x).argmax(1) == y).double().mean()
        )
        fitted, tested = (
            classifier_input(net, "4", own[client]) for own in (train, test)
        )
        assert (
            value[client, "probe_accuracy"]
            == probe_accuracy(fitted, tested, C, epochs=30).accuracy
        )
        assert (
            value[client, "match_accuracy"]
            == match_accuracy(fitted, tested, net[4], epochs=30).accuracy
        )
    means = mismatch.summary(frame)
    assert means["probe_accuracy"] == pytest.approx(
        (value["a", "probe_accuracy"] + value["b", "probe_accuracy"]) / 2
    )
    assert frame.loc[
        frame["client"] == "b", ["n_train", "n_samples"]
    ].drop_duplicates().values.tolist() == [[50, 40]]
    with pytest.raises(UsageError, match=r"client .*'b'"):
        mismatch.mismatch(models, train, {"a": test["a"]})
