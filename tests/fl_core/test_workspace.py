"""The skeleton that trains: its memory format, and the plain loop as its reference."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fl_core import models, seeds, tree
from fl_core.algorithms import TaskInfo, find
from fl_core.data import Split
from fl_core.tokens import TokenShape
from fl_core.training.loop import train
from fl_core.training.losses import build
from fl_core.training.phases import Context, Phase, Training, batch_slices
from fl_core.training.workspace import Workspace, memory_format, pool_first
from fl_core.tree import Tree
from tests.networks import Wired

CE = build("cross_entropy")
TRAININGS = {
    "sgd": Training(epochs=2, batch_size=8, lr=0.05, weight_decay=0.01),
    "momentum": Training(epochs=2, batch_size=8, lr=0.05, momentum=0.9),
    "adamw": Training(
        epochs=2, batch_size=8, lr=0.01, optimizer="adamw", weight_decay=0.1
    ),
}


def colours(seed: int = 0) -> nn.Module:
    """Convolutions over 3 channels with pooling and batch normalisation, in float64.

    No bias comes before the normalisation: its gradient is 0, and AdamW would make steps of the rounding.
    """
    with seeds.torch_seeded(seed):
        parts = [
            nn.Conv2d(3, 6, 3, padding=1, bias=False),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]
        parts += [
            nn.Conv2d(6, 4, 3, bias=False),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(16, 3),
        ]
        return nn.Sequential(*parts).double()


def samples(n: int = 29, shape: tuple[int, ...] = (3, 8, 8)) -> Split:
    draws = torch.Generator().manual_seed(1)
    return Split(
        torch.randn(n, *shape, generator=draws).double(),
        torch.randint(3, (n,), generator=draws),
    )


def trained(
    model: nn.Module,
    training: Training,
    split: Split,
    memory: str | None = None,
    kept: Tree | None = None,
) -> tuple[Tree, Tree]:
    space = Workspace(model, memory=memory)
    start = tree.state_dict(model)
    algorithm = find("fedavg")(
        TaskInfo((), frozenset(), (len(split),), training.epochs, 0)
    )
    ctx = Context("fedavg", 0, 0, "a", len(split), CE, space.forward, start, split.y)
    phase = Phase("train", frozenset(start), training.epochs)
    return train(space, algorithm, phase, start, split, training, ctx, {}, kept)


def by_hand(model: nn.Module, training: Training, split: Split) -> Tree:
    """The same training as plainly as PyTorch allows."""
    model = copy.deepcopy(model).train()
    values = list(model.parameters())
    decay = training.weight_decay
    optimizer: torch.optim.Optimizer
    if training.optimizer == "sgd":
        optimizer = torch.optim.SGD(
            values, lr=training.lr, momentum=training.momentum, weight_decay=decay
        )
    else:
        optimizer = torch.optim.AdamW(values, lr=training.lr, weight_decay=decay)
    draws = seeds.torch_generator(0, "batches", 0, 0, "main")
    for _ in range(training.epochs):
        order = torch.randperm(len(split), generator=draws)
        for part in batch_slices(len(split), training.batch_size, whole=True):
            optimizer.zero_grad()
            CE(model(split.x[order[part]]), split.y[order[part]]).backward()
            optimizer.step()
    return tree.state_dict(model)


def assert_near(found: Tree, wanted: Tree, within: float = 1e-10) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(
            found[name],
            value,
            rtol=0,
            atol=within,
            msg=lambda text, n=name: f"{n}: {text}",
        )


@pytest.mark.parametrize("name", sorted(models.MODELS))
def test_a_model_with_a_convolution_has_its_channels_last(name: str) -> None:
    shape = {"heart_mlp": (10,), "text_transformer": TokenShape((9,), 30)}.get(
        name, (3, 32, 32)
    )
    model = models.build(name, shape, 3)
    wanted = (
        "contiguous"
        if name in ("heart_mlp", "mlp", "text_transformer")
        else "channels_last"
    )
    assert memory_format(model) == Workspace(model).memory == wanted


def test_a_workspace_leaves_the_model_it_was_made_from_alone() -> None:
    model = colours()
    before, strides = (
        tree.digest(tree.state_dict(model)),
        [p.stride() for p in model.parameters()],
    )
    space = Workspace(model)
    space.load(
        {
            name: torch.zeros_like(value)
            for name, value in tree.state_dict(model).items()
        }
    )
    assert tree.digest(tree.state_dict(model)) == before
    assert [p.stride() for p in model.parameters()] == strides
    inner = space.params["4.weight"]
    assert inner.is_contiguous(memory_format=torch.channels_last)
    assert not inner.is_contiguous()
    assert space.place(samples().x).is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("which", TRAININGS)
@pytest.mark.parametrize("memory", ["channels_last", "contiguous"])
def test_training_is_the_plain_loop(which: str, memory: str) -> None:
    model, split = colours(), samples()
    found, _ = trained(model, TRAININGS[which], split, memory)
    wanted = by_hand(model, TRAININGS[which], split)
    assert tree.distance(wanted, tree.state_dict(model)) > 0.1
    assert_near(found, wanted)


@pytest.mark.parametrize("which", ["momentum", "adamw"])
def test_what_leaves_is_contiguous_and_comes_back_as_it_was(which: str) -> None:
    training = replace(TRAININGS[which], keep_optimizer=True)
    results = []
    for memory in ("channels_last", "contiguous"):
        first, state = trained(colours(), training, samples(), memory)
        assert all(
            value.is_contiguous() for value in (*first.values(), *state.values())
        )
        again, _ = trained(colours(), training, samples(), memory, kept=state)
        fresh, _ = trained(colours(), training, samples(), memory)
        assert tree.distance(again, fresh) > 1e-3, "the state matters"
        results.append(again)
    assert_near(*results)


def looks() -> Wired:
    """A model that uses what lies between a ReLU and the pooling behind it."""

    def run(m: Any, x: Tensor) -> Tensor:
        y = m.body[1](m.body[0](x))
        return m.body[2:](y) + y.mean()

    parts = nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(27, 2)
    )
    return Wired(run, body=parts)


def _pooled(pool: nn.Module | None = None) -> nn.Sequential:
    return nn.Sequential(
        nn.Sequential(
            nn.Conv2d(1, 3, 3, padding=1),
            nn.ReLU(),
            pool or nn.MaxPool2d(3, 2, padding=1),
        ),
        nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.MaxPool2d(2, ceil_mode=True)
        ),
        nn.Flatten(),
        nn.LazyLinear(3),
    )


@pytest.mark.parametrize("memory", ["contiguous", "channels_last"])
def test_maxima_taken_first_leave_every_bit(memory: str) -> None:
    x = torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    x[0] = 0  # all elements of a window alike
    model = _pooled()
    model(x)
    with torch.no_grad():
        model[0][0].weight[
            0
        ].zero_()  # a channel that is the same everywhere, above 0, and one that is below
        model[0][0].weight[1].zero_()
        model[0][0].bias[:2] = torch.tensor([0.5, -0.5])
    found = []
    for swap in (False, True):
        own = copy.deepcopy(model)
        assert (pool_first(own) if swap else 0) == (2 if swap else 0)
        where = (
            torch.channels_last
            if memory == "channels_last"
            else torch.contiguous_format
        )
        given = x.to(memory_format=where).requires_grad_()
        own.to(memory_format=where)(given).square().sum().backward()
        found.append([given.grad, *(param.grad for param in own.parameters())])
        assert [name for name, _ in own.named_parameters()] == [
            name for name, _ in model.named_parameters()
        ]
    for a, b in zip(*found, strict=True):
        assert a is not None
        assert b is not None
        assert torch.equal(a, b)


def test_the_order_stays_where_somebody_may_look() -> None:
    hooked = _pooled()
    hooked[0][1].register_forward_hook(lambda *_: None)
    other = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.AvgPool2d(2))
    leaky = nn.Sequential(nn.Conv2d(1, 2, 3), nn.LeakyReLU(), nn.MaxPool2d(2))
    for model in (looks(), nn.Sequential(looks(), nn.ReLU()), hooked, other, leaky):
        assert pool_first(model) == 0
    model = _pooled()
    Workspace(model)
    assert isinstance(model[0][1], nn.ReLU)  # only the workspace's own copy is changed
