"""Trees: means against brute force in float64, digests that see every bit, borders that share no memory."""

from __future__ import annotations

import functools
import math
import operator

import numpy as np
import pytest
import torch
from torch import nn

from fl_core import tree
from fl_core.tree import preserve_state, set_mode
from tests.conftest import refuses
from tests.made import normal, snapshot, wired


def random_tree(seed, shape=(3, 5), dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator).to(dtype)
        for name in ("a.weight", "b.weight")
    }


def network():
    """Batch norm (with its integer counter), a tied weight, a buffer that is not kept."""
    net = nn.ModuleDict(
        {
            "embedding": nn.Embedding(5, 4),
            "norm": nn.BatchNorm1d(4),
            "out": nn.Linear(4, 5),
        }
    )
    net.out.weight = net.embedding.weight
    net.register_buffer("scratch", torch.zeros(2), persistent=False)
    net.register_buffer("mask", torch.tensor([True, False]))
    return net


def test_of_holds_each_tensor_once_and_copies():
    net = network()
    state = tree.state_dict(net)
    norm = {f"norm.{name}" for name in net.norm.state_dict()}
    assert set(state) == {"embedding.weight", "out.bias", "mask"} | norm
    theirs = {tensor.data_ptr() for tensor in tree.named_tensors(net).values()}
    assert theirs.isdisjoint(tensor.data_ptr() for tensor in state.values())
    assert not any(tensor.requires_grad for tensor in state.values())


def test_load_is_strict_and_does_nothing_when_it_refuses():
    net = network()
    before = tree.digest(tree.state_dict(net))
    full = {
        name: tensor + 1 if tensor.is_floating_point() else tensor
        for name, tensor in tree.state_dict(net).items()
    }
    lacking = {name: tensor for name, tensor in full.items() if name != "out.bias"}
    with refuses(r"model: out\.bias"):
        tree.load(net, lacking)
    with refuses("weights: extra"):
        tree.load(net, {**full, "extra": torch.zeros(1)})
    with refuses(r"'out\.bias'.*\(5,\).*\(1,\)"):
        tree.load(net, {**full, "out.bias": torch.zeros(1)})
    assert tree.digest(tree.state_dict(net)) == before


def test_clone_shares_nothing_and_is_contiguous():
    original = {
        "a": torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last),
        "b": torch.randn(3, 2).T,
    }
    copy = tree.clone(original)
    assert all(tensor.is_contiguous() for tensor in copy.values())
    assert tree.digest(copy) == tree.digest(original)
    theirs = {tensor.data_ptr() for tensor in original.values() if tensor.numel()}
    assert theirs.isdisjoint(tensor.data_ptr() for tensor in copy.values())


@pytest.mark.parametrize("function", [tree.subtract, tree.distance, tree.check_same])
def test_trees_of_different_models(function):
    with refuses(r"one: fc1; .*other: fc10"):
        function({"fc1": torch.zeros(1)}, {"fc10": torch.zeros(1)})
    with refuses(r"'fc1'.*\(1,\).*\(1, 1\)"):
        function({"fc1": torch.zeros(1)}, {"fc1": torch.zeros(1, 1)})


BASE = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([[3]])}


@pytest.mark.parametrize(
    "other",
    [
        {**BASE, "a": torch.tensor([1.0, 2.0 + 3e-7])},
        {**BASE, "a": torch.tensor([-1.0, 2.0])},
        {**BASE, "a": torch.tensor([[1.0], [2.0]])},
        {**BASE, "a": torch.tensor([1.0, 2.0], dtype=torch.float64)},
        {**BASE, "b": torch.tensor([[4]])},
        {**BASE, "c": torch.zeros(0)},
    ],
)
def test_digest_sees_every_difference(other):
    assert tree.digest(other) != tree.digest(BASE)


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.int64, torch.bfloat16, torch.float64]
)
def test_digest_is_of_contents_not_of_layout_or_order(dtype):
    values = torch.arange(12).reshape(3, 4).to(dtype)
    a = {"x": values, "y": torch.zeros((), dtype=dtype)}
    b = {"y": torch.zeros((), dtype=dtype), "x": values.T.contiguous().T}
    assert tree.digest(a) == tree.digest(b)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64]
)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_number_that_is_not_finite_is_found_wherever_it_is(bad, dtype):
    for size in (1, 7, 64, 1003):
        clean = torch.linspace(-3, 3, size).to(dtype)
        assert tree.is_finite(clean)
        for at in {0, size // 3, size - 1}:
            assert not tree.is_finite(clean.index_fill(0, torch.tensor(at), bad))
    assert not tree.is_finite(torch.full((3, 4), bad, dtype=dtype).t())


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64]
)
def test_adding_in_place_has_the_bits_of_the_plain_formula(dtype):
    """Every term rounds once as a product, and once as it is added."""
    trees = [
        {
            **random_tree(k, (5, 4), dtype),
            "none": torch.zeros(0),
            "one": torch.tensor(0.1 * k),
        }
        for k in range(19)
    ]
    del trees[8]["b.weight"], trees[9]["b.weight"]
    weights = [0.3 * k + 0.7 for k in range(19)]
    mean = tree.mean(trees, weights)
    for name in trees[0]:
        total, among = None, [k for k in range(19) if name in trees[k]]
        for start in range(0, 19, tree.GROUP):
            terms = [
                trees[k][name].double() * weights[k]
                for k in among
                if start <= k < start + tree.GROUP
            ]
            group = functools.reduce(torch.add, terms)
            total = group if total is None else total + group
        wanted = (
            total / functools.reduce(operator.add, (weights[k] for k in among))
        ).to(trees[0][name].dtype)
        assert tree.digest({name: mean[name]}) == tree.digest({name: wanted})


@pytest.mark.parametrize("weight", [0, -1.0, math.nan, math.inf])
def test_weights_must_be_positive(weight):
    with refuses("weight"):
        tree.mean([random_tree(0)], [weight])


def test_inner_products_and_other_distances_are_numpys():
    a, b = random_tree(1, (4, 3)), random_tree(2, (4, 3))
    one, two = (
        np.concatenate([t[n].double().numpy().ravel() for n in sorted(t)])
        for t in (a, b)
    )
    assert tree.dot(a, b) == pytest.approx(one @ two, rel=1e-12)
    assert tree.cosine(a, b) == pytest.approx(
        one @ two / np.linalg.norm(one) / np.linalg.norm(two), rel=1e-12
    )
    assert tree.distance(a, b) == pytest.approx(np.linalg.norm(one - two), rel=1e-6)
    assert tree.cosine(a, {name: torch.zeros_like(t) for name, t in a.items()}) == 0
    counted = [{**entries, "n": torch.tensor(3)} for entries in (a, b)]
    assert tree.subtract(*counted).keys() == a.keys()
    with refuses("names"):
        tree.dot(a, {"w": torch.zeros(2)})


@pytest.mark.parametrize("measure", [tree.dot, tree.cosine, tree.distance])
def test_sums_over_a_tree_do_not_depend_on_the_order_of_its_keys(measure):
    trees = [{f"t{k}": normal(50, seed=s + k) for k in range(9)} for s in (0, 50)]
    turned = [dict(reversed(entries.items())) for entries in trees]
    assert measure(*trees) == measure(*turned)


X = normal(6, 2, 5, seed=1)


@pytest.fixture
def net():
    torch.manual_seed(0)
    return wired()


def disturb(model):
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
def test_untouched_restores_everything(net, raises, with_grads):
    net.conv.eval()
    net.head.bias.requires_grad_(False)
    hook = net.relu.register_forward_hook(lambda m, i, o: None)
    if with_grads:
        net(X).sum().backward()
    before = snapshot(net)
    try:
        with preserve_state(net):
            disturb(net)
            assert snapshot(net) != before
            if raises:
                raise ArithmeticError
    except ArithmeticError:
        assert raises
    assert snapshot(net) == before
    hook.remove()
    assert not net.relu._forward_hooks


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_set_mode(net, mode):
    net.train(mode == "eval")
    net.drop.eval()
    before = snapshot(net)
    with set_mode(net, mode):
        assert all(module.training == (mode == "train") for module in net.modules())
        net(X)
    assert snapshot(net) == before
    with refuses("'eval'"), set_mode(net, "evl"):
        pass


@pytest.mark.parametrize(
    ("count", "named"), [(1, "a"), (4, "a, b, c, d"), (5, "a, b, c, d and 1 more")]
)
def test_names_outside_a_tree_are_named_four_at_most(count, named):
    weights = {"w": torch.zeros(1), "v": torch.ones(1)}
    assert tree.select(weights, ["v"]) == {"v": weights["v"]}
    with refuses(rf"such as w; got {named}\."):
        tree.select(weights, "abcde"[:count])
