"""Layers that stay as they are are computed once, wherever that is certain to change nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fl_core import tree
from fl_core.algorithms import TaskInfo
from fl_core.algorithms.averaging import FedAvg
from fl_core.data import Split
from fl_core.errors import NonFiniteError
from fl_core.layers import layers_of
from fl_core.seeds import torch_seeded
from fl_core.training import workspace
from fl_core.training.loop import train
from fl_core.training.losses import build
from fl_core.training.phases import Context, Phase, Training
from fl_core.training.workspace import Workspace, cut
from fl_core.tree import Tree

CE = build("cross_entropy")
TRAININGS = {
    "sgd": Training(epochs=2, batch_size=8, lr=0.05, weight_decay=0.01),
    "momentum": Training(epochs=2, batch_size=8, lr=0.05, momentum=0.9),
    "adamw": Training(
        epochs=2, batch_size=8, lr=0.01, optimizer="adamw", weight_decay=0.1
    ),
}


def network(seed: int = 0, drop: float = 0.3) -> nn.Sequential:
    """Conv (0.0), batch normalisation (0.1), linear (2), linear (4), dropout, linear (6); float64."""
    with torch_seeded(seed):
        block = nn.Sequential(
            nn.Conv2d(3, 4, 3, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        parts = [
            block,
            nn.Flatten(),
            nn.Linear(36, 8),
            nn.ReLU(),
            nn.Linear(8, 8),
            nn.Dropout(drop),
            nn.Linear(8, 3),
        ]
        model = nn.Sequential(*parts).double()
    model[0][1].running_mean.add_(0.5)
    return model


def samples(n: int = 29, seed: int = 1) -> Split:
    draws = torch.Generator().manual_seed(seed)
    return Split(
        torch.randn(n, 3, 8, 8, generator=draws).double(),
        torch.randint(3, (n,), generator=draws),
    )


def starting(model: nn.Module, *prefixes: str) -> frozenset[str]:
    return frozenset(
        name for name in tree.named_tensors(model) if name.startswith(prefixes)
    )


def run(
    space: Workspace,
    start: Tree,
    names: frozenset[str],
    split: Split,
    training: Training = TRAININGS["sgd"],
    kind: type[FedAvg] = FedAvg,
    client: int = 0,
) -> Tree:
    layers = layers_of(network(), samples().x[:2])
    algorithm = kind(TaskInfo(layers, frozenset(), (len(split),), training.epochs, 0))
    ctx = Context(
        "fedavg", 0, client, "a", len(split), CE, space.forward, start, split.y
    )
    return train(
        space,
        algorithm,
        Phase("p", names, training.epochs),
        start,
        split,
        training,
        ctx,
        {},
    )[0]


def both(
    start: Tree, names: frozenset[str], split: Split, **options: Any
) -> tuple[Tree, Tree]:
    spaces = [Workspace(network(), keep_frozen=keep) for keep in (True, False)]
    kept, plain = (run(space, start, names, split, **options) for space in spaces)
    return kept, plain


def assert_near(found: Tree, wanted: Tree) -> None:
    for name, value in wanted.items():
        torch.testing.assert_close(
            found[name],
            value,
            rtol=0,
            atol=1e-10,
            msg=lambda text, n=name: f"{n}: {text}",
        )


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many samples each pass through a first part had."""
    seen: list[int] = []
    original = workspace.Cut.outputs

    def outputs(self: workspace.Cut, x: Tensor) -> Tensor:
        if len(x) > 1:  # one sample tells how many bytes all would have
            seen.append(len(x))
        return original(self, x)

    monkeypatch.setattr(workspace.Cut, "outputs", outputs)
    yield seen


TRAINED = [("6.",), ("4.",), ("2.",), ("4.", "6."), ("0.",), ("0.0", "6."), ("0.1",)]


@pytest.mark.parametrize("which", TRAININGS)
@pytest.mark.parametrize("trained", TRAINED, ids="-".join)
def test_training_is_that_of_the_plain_path(
    which: str, trained: tuple[str, ...]
) -> None:
    start = tree.state_dict(network())
    names = starting(network(), *trained)
    kept, plain = both(start, names, samples(), training=TRAININGS[which])
    assert tree.distance(tree.select(plain, names), tree.select(start, names)) > 1e-3
    assert_near(kept, plain)


def test_clients_tensors_and_samples_are_not_mixed_up() -> None:
    """One workspace, as the clients of several rounds use it: every result is that of a fresh one."""
    space = Workspace(network())
    head, splits = starting(network(), "6."), [samples(29, seed=1), samples(29, seed=2)]
    starts = [tree.state_dict(network(seed)) for seed in (0, 1)]
    jobs = [
        (k, s, n)
        for s in (0, 1, 0)
        for k in (0, 1)
        for n in (head, starting(network(), "4.", "6."), head)
    ]
    for client, which, names in [
        *jobs,
        (0, 0, starting(network(), "2.")),
        (1, 1, starting(network(), "0.")),
    ]:
        found = run(space, starts[which], names, splits[client], client=client)
        fresh = run(
            Workspace(network()), starts[which], names, splits[client], client=client
        )
        assert tree.digest(found) == tree.digest(fresh)
    other = run(space, starts[0], head, splits[1], client=0)
    assert tree.digest(other) == tree.digest(
        run(Workspace(network()), starts[0], head, splits[1], client=0)
    )


def test_what_is_not_finite_in_a_frozen_layer_is_still_met() -> None:
    start = tree.state_dict(network())
    start["0.0.weight"].view(-1)[0] = torch.nan
    messages = []
    for keep in (True, False):
        with pytest.raises(NonFiniteError, match=r"step 1.*nan") as caught:
            run(
                Workspace(network(), keep_frozen=keep),
                start,
                starting(network(), "6."),
                samples(),
            )
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def test_frozen_layers_are_computed_once_for_all_epochs_and_while_they_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with counted(monkeypatch) as seen:
        space, split, start = (
            Workspace(network()),
            samples(),
            tree.state_dict(network()),
        )
        head = starting(network(), "6.")
        after = run(space, start, head, split)
        assert seen == [29], "once for two epochs"
        run(space, after, head, split)
        assert seen == [29], "the head moved, what lies before it did not"
        run(space, tree.state_dict(network(1)), head, split)
        assert seen == [29, 29]
        run(space, start, starting(network(), "0."), split)
        run(Workspace(network(), keep_frozen=False), start, head, split)
        assert seen == [29, 29]


class Noise(nn.Module):
    """Of a type that nobody knows."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)


class Chained(nn.Sequential):
    """A sequential model under another name."""


class Detour(nn.Sequential):
    """A sequential model that is none."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x


def frozen(
    *parts: nn.Module, kind: type[nn.Sequential] = nn.Sequential
) -> nn.Sequential:
    model = kind(*parts).requires_grad_(False).train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.eval()
    return model


def trained(module: nn.Module) -> nn.Module:
    return module.requires_grad_(True)


def last(make: Callable[[], nn.Sequential]) -> nn.Sequential:
    model = make()
    trained(model[-1])
    return model


def lin() -> nn.Linear:
    return nn.Linear(4, 4)


TWICE = nn.ReLU()
CUTS: dict[str, tuple[Callable[[], nn.Module], int | None]] = {
    "before what trains": (lambda: last(lambda: frozen(lin(), nn.ReLU(), lin())), 2),
    "in the middle of a block": (
        lambda: last(lambda: frozen(nn.Sequential(lin(), nn.Tanh()), lin())),
        2,
    ),
    "a subclass": (lambda: last(lambda: frozen(lin(), lin(), kind=Chained)), 1),
    "the first trains": (lambda: trained(frozen(lin(), lin())), None),
    "nothing trains": (lambda: frozen(lin(), nn.ReLU()), 2),
    "no weights before": (
        lambda: last(lambda: frozen(nn.Flatten(), nn.ReLU(), lin())),
        None,
    ),
    "dropout": (lambda: last(lambda: frozen(lin(), nn.Dropout(0.5), lin(), lin())), 1),
    "statistics in evaluation": (
        lambda: last(lambda: frozen(lin(), nn.BatchNorm1d(4), lin())),
        2,
    ),
    "no statistics": (
        lambda: last(
            lambda: frozen(lin(), nn.BatchNorm1d(4, track_running_stats=False), lin())
        ),
        1,
    ),
    "an unknown type": (lambda: last(lambda: frozen(lin(), Noise(), lin())), 1),
    "a module twice": (
        lambda: last(lambda: frozen(lin(), TWICE, lin(), TWICE, lin())),
        4,
    ),
    "no chain": (lambda: last(lambda: frozen(lin(), lin(), kind=Detour)), None),
    "a chain inside no chain": (
        lambda: last(lambda: frozen(lin(), frozen(lin(), lin(), kind=Detour), lin())),
        1,
    ),
    "no sequential model": (lambda: frozen(lin(), lin())[0], None),
}


@pytest.mark.parametrize("which", CUTS)
def test_where_a_model_is_cut(which: str) -> None:
    make, length = CUTS[which]
    model = make()
    found = cut(model)
    assert (None if found is None else len(found.first)) == length
    if found is not None:
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
        for seed in (1, 2):
            torch.manual_seed(seed)
            whole = model(x)
            torch.manual_seed(seed)
            torch.testing.assert_close(found.logits(found.outputs(x)), whole)


@pytest.mark.parametrize("where", [(), (0,), (2,)])
def test_a_model_with_hooks_is_not_cut(where: tuple[int, ...]) -> None:
    model = last(lambda: frozen(lin(), nn.ReLU(), lin()))
    hooked = model[where[0]] if where else model
    handle = hooked.register_forward_hook(lambda *_: None)
    assert cut(model) is None
    handle.remove()
    assert cut(model) is not None
