"""Recording leaves no trace, records what was there, and refuses what it cannot read."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from diagnostics.measurement import activations, batches
from fl_core.errors import UsageError
from tests.networks import Wired, snapshot, wired


@pytest.fixture
def net() -> Wired:
    torch.manual_seed(0)
    return wired()


X = torch.randn(6, 2, 5, generator=torch.Generator().manual_seed(1))
Y = torch.tensor([0, 1, 2, 0, 1, 2])


def test_activations_are_those_before_an_in_place_operation(net: Wired) -> None:
    net.eval()
    with activations(net, ["norm", "relu", "lstm", "head", ""]) as recorded:
        logits = net(X)
    expected = net.norm(net.conv(X))
    assert torch.equal(recorded["norm"], expected)
    assert (expected < 0).any()
    assert torch.equal(recorded["relu"], expected.relu())
    assert recorded["lstm"].shape == (6, 5, 4)
    assert torch.equal(recorded["head"], logits)
    assert torch.equal(recorded[""], logits)
    assert not any(tensor.requires_grad for tensor in recorded.values())


def test_every_forward_pass_starts_anew(net: Wired) -> None:
    net.eval()
    with activations(net, ["head", "unused"]) as recorded:
        net(X)
        net(2 * X)
    assert torch.equal(recorded["head"], net(2 * X))
    assert "unused" not in recorded


def test_repeated_calls(net: Wired) -> None:
    net.eval()
    before = snapshot(net)
    with pytest.raises(UsageError, match=r"'twice'.*once"), activations(net, ["twice"]):
        net(X)
    assert snapshot(net) == before
    with activations(net, ["twice", "head"], allow_repeats=True) as recorded:
        net(X)
    assert torch.equal(net.head(recorded["twice"]), recorded["head"])


def test_hooks_are_removed_after_errors(net: Wired) -> None:
    before = snapshot(net)
    with (
        pytest.raises(UsageError, match="mean 'head'"),
        activations(net, ["conv", "haed"]),
    ):
        pass
    with pytest.raises(RuntimeError), activations(net, ["conv", "head"]):
        net.eval()(torch.randn(1, 9, 9))
    net.train()
    torch.set_rng_state(torch.tensor(before[-1], dtype=torch.uint8))
    assert snapshot(net) == before


def test_an_output_without_a_tensor() -> None:
    model = Wired(lambda m, x: "nothing")
    with pytest.raises(UsageError, match="str"), activations(model, [""]):
        model(X)


@pytest.mark.parametrize("batch", [1, 4, 6, 100, None])
def test_batches_of_a_pair_cover_it_in_order(batch: int | None) -> None:
    parts = list(batches((X, Y), batch))
    assert torch.equal(torch.cat([x for x, _ in parts]), X)
    assert torch.equal(torch.cat([y for _, y in parts]), Y)
    assert max(len(y) for _, y in parts) == min(batch or 6, 6)


def test_batches_of_other_sources() -> None:
    class Split:
        x, y = X, Y

    loader = DataLoader(TensorDataset(X, Y), batch_size=4)
    for source in (loader, [(X[:4], Y[:4]), (X[4:], Y[4:])], Split(), [X, Y]):
        assert torch.equal(torch.cat([x for x, _ in batches(source, 5)]), X)
    assert [len(y) for _, y in batches(loader, 2)] == [4, 2]


NAN = torch.full_like(X, float("nan"))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ((X[:0], Y[:0]), "samples"),
        ((X, Y[:3]), "6 .*3"),
        ((NAN, Y), "data: the samples.*NaN"),
        ((X, NAN[:, 0, 0]), "data: the labels.*NaN"),
        ((X, [0, 1]), "pair"),
        ([(X, Y), (NAN, Y)], "batch 1 .*NaN"),
        ([(X, Y), (X[:0], Y[:0])], "batch 1 .*samples"),
        ([(X, Y), (X, Y, Y)], "batch 1 .*pair"),
        ([X, Y, Y], "batch 0 .*pair"),
        ([], "batch"),
        (iter([(X, Y)]), "once"),
        (3, "int"),
    ],
)
def test_batches_refuses(data: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        list(batches(data, 4))


def test_batch_size_must_be_positive() -> None:
    with pytest.raises(UsageError, match=r"batch.*0"):
        batches((X, Y), 0)
