"""Recording leaves no trace, records what was there, and refuses what it cannot read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from diagnostics.capture import activations, batches, set_mode, untouched
from fl_core.errors import UsageError
from tests.networks import Wired


def wired() -> Wired:
    """Batch norm, dropout, an in-place ReLU after a convolution, an LSTM, a layer used twice and one never used."""

    def run(m: Any, x: Tensor) -> Tensor:
        x = m.drop(m.relu(m.norm(m.conv(x))))
        return m.head(m.twice(m.twice(m.lstm(x.transpose(1, 2))[0][:, -1])))

    parts = {"conv": nn.Conv1d(2, 3, 3, padding=1), "norm": nn.BatchNorm1d(3), "relu": nn.ReLU(inplace=True)}
    parts |= {"drop": nn.Dropout(0.5), "lstm": nn.LSTM(3, 4, batch_first=True), "twice": nn.Linear(4, 4)}
    return Wired(run, **parts, unused=nn.Linear(4, 4), head=nn.Linear(4, 3))


@pytest.fixture
def net() -> Wired:
    torch.manual_seed(0)
    return wired()


X = torch.randn(6, 2, 5, generator=torch.Generator().manual_seed(1))
Y = torch.tensor([0, 1, 2, 0, 1, 2])


def snapshot(model: nn.Module) -> list[object]:
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)) for m in model.modules()]
    return [
        [m.training for m in model.modules()],
        [(p.requires_grad, None if p.grad is None else p.grad.tolist(), id(p.grad)) for p in model.parameters()],
        [(id(b), b.tolist()) for b in model.buffers()],
        hooks,
        torch.get_rng_state().tolist(),
    ]


def disturb(model: Wired) -> None:
    model.eval()
    model.drop.train()
    model.norm.train()
    model.conv.weight.requires_grad_(False)
    model.head.register_forward_hook(lambda m, i, o: None)
    model.head.register_forward_pre_hook(lambda m, i: None)
    model(X).sum().backward()
    model.norm.running_mean = torch.full((3,), 7.0)
    torch.randn(3)


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("with_grads", [False, True])
def test_untouched_restores_everything(net: Wired, raises: bool, with_grads: bool) -> None:
    net.conv.eval()
    net.head.bias.requires_grad_(False)
    kept = net.relu.register_forward_hook(lambda m, i, o: None)
    if with_grads:
        net(X).sum().backward()
    before = snapshot(net)
    try:
        with untouched(net):
            disturb(net)
            assert snapshot(net) != before
            if raises:
                raise ArithmeticError
    except ArithmeticError:
        assert raises
    assert snapshot(net) == before
    kept.remove()
    assert not net.relu._forward_hooks


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_set_mode(net: Wired, mode: str) -> None:
    net.train(mode == "eval")
    net.drop.eval()
    before = snapshot(net)
    with set_mode(net, mode):
        assert all(module.training == (mode == "train") for module in net.modules())
        net(X)
    assert snapshot(net) == before
    with pytest.raises(UsageError, match="mean 'eval'"), set_mode(net, "evl"):
        pass


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
    with pytest.raises(UsageError, match="mean 'head'"), activations(net, ["conv", "haed"]):
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
        ((X[:0], Y[:0]), "no samples"),
        ((X, Y[:3]), "6 .*3"),
        ((NAN, Y), "data: the samples.*NaN"),
        ((X, NAN[:, 0, 0]), "data: the labels.*NaN"),
        ((X, [0, 1]), "pair"),
        ([(X, Y), (NAN, Y)], "batch 1 .*NaN"),
        ([(X, Y), (X[:0], Y[:0])], "batch 1 .*no samples"),
        ([(X, Y), (X, Y, Y)], "batch 1 .*pair"),
        ([X, Y, Y], "batch 0 .*pair"),
        ([], "no batches"),
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
