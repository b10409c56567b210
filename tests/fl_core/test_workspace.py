"""The skeleton that trains: its memory format, and the plain loop as its reference."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from fl_core import models, seeds, tree
from fl_core.algorithms import TaskInfo, find
from fl_core.data import Split
from fl_core.seeds import torch_seeded
from fl_core.training import workspace
from fl_core.training.loop import batch_slices
from fl_core.training.losses import build
from fl_core.training.phases import Context, Phase, Training
from fl_core.training.workspace import Workspace, cut, memory_format
from tests.made import Wired, normal, trained_by

CE = build("cross_entropy")
TRAININGS = {
    "sgd": Training(epochs=2, batch_size=8, lr=0.05, weight_decay=0.01),
    "momentum": Training(epochs=2, batch_size=8, lr=0.05, momentum=0.9),
    "adamw": Training(
        epochs=2, batch_size=8, lr=0.01, optimizer="adamw", weight_decay=0.1
    ),
}


def samples(n=29, seed=1):
    draws = torch.Generator().manual_seed(seed)
    return Split(
        torch.randn(n, 3, 8, 8, generator=draws).double(),
        torch.randint(3, (n,), generator=draws),
    )


def run(
    space,
    start,
    names=None,
    split=None,
    training=TRAININGS["sgd"],
    client=0,
    kept=None,
):
    """Train the named tensors, or all, in a workspace."""
    split, names = split or samples(), names or frozenset(start)
    problem = TaskInfo((), frozenset(), (len(split),), training.epochs, 0)
    algorithm, phase = find("fedavg")(problem), Phase("p", names, training.epochs)
    about = ("fedavg", 0, client, "a", len(split), CE, space.forward, start, split.y)
    ctx = Context(*about)
    return trained_by(algorithm, space, phase, start, split, training, ctx, {}, kept)


def trained(model, training, memory, kept=None):
    space, start = Workspace(model, memory=memory), tree.state_dict(model)
    return run(space, start, training=training, kept=kept)


def by_hand(model, training, split):
    """The same training as plainly as PyTorch allows."""
    model = copy.deepcopy(model).train()
    values = list(model.parameters())
    decay = training.weight_decay

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


def assert_near(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["fmnist_cnn", "mlp"])
def test_a_model_with_a_convolution_has_its_channels_last(name):
    model = models.build(name, (3, 32, 32), 3)
    wanted = "contiguous" if name == "mlp" else "channels_last"
    assert memory_format(model) == Workspace(model).memory == wanted


def test_a_workspace_leaves_the_model_it_was_made_from_alone():
    model = network(drop=0.0)
    before, strides = tree.state_dict(model), [p.stride() for p in model.parameters()]
    space = Workspace(model)
    space.load({name: torch.zeros_like(value) for name, value in before.items()})
    assert tree.digest(tree.state_dict(model)) == tree.digest(before)
    assert [p.stride() for p in model.parameters()] == strides
    inner = space.params["0.0.weight"]
    assert inner.is_contiguous(memory_format=torch.channels_last)
    assert not inner.is_contiguous()
    assert space.place(samples().x).is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("which", TRAININGS)
@pytest.mark.parametrize("memory", ["channels_last", "contiguous"])
def test_training_is_the_plain_loop(which, memory):
    model, split = network(drop=0.0), samples()
    state, _ = trained(model, TRAININGS[which], memory)
    wanted = by_hand(model, TRAININGS[which], split)
    assert tree.distance(wanted, tree.state_dict(model)) > 0.1
    assert_near(state, wanted)


@pytest.mark.parametrize("which", ["momentum", "adamw"])
def test_what_leaves_is_contiguous_and_comes_back_as_it_was(which):
    training = replace(TRAININGS[which], keep_optimizer=True)
    results = []
    for memory in ("channels_last", "contiguous"):
        first, state = trained(network(drop=0.0), training, memory)
        assert all(
            value.is_contiguous() for value in (*first.values(), *state.values())
        )
        again, _ = trained(network(drop=0.0), training, memory, kept=state)
        fresh, _ = trained(network(drop=0.0), training, memory)
        assert tree.distance(again, fresh) > 1e-3, "the state matters"
        results.append(again)
    assert_near(*results)


# --- layers that stay as they are, which are computed once --------------------


def network(seed=0, drop=0.3):
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


def starting(model, *prefixes):
    return frozenset(
        name for name in tree.named_tensors(model) if name.startswith(prefixes)
    )


TRAINED = [("6.",), ("4.",), ("2.",), ("4.", "6."), ("0.",), ("0.0", "6."), ("0.1",)]


@pytest.mark.parametrize("which", TRAININGS)
@pytest.mark.parametrize("tensors", TRAINED, ids="-".join)
def test_training_is_that_of_the_plain_path(which, tensors, monkeypatch):
    start, names = tree.state_dict(network()), starting(network(), *tensors)
    how = TRAININGS[which]
    plain_state = run(Workspace(network()), start, names, training=how)[0]
    monkeypatch.setattr(workspace, "cut", lambda model: None)
    plain = run(Workspace(network()), start, names, training=how)[0]
    assert tree.distance(tree.select(plain, names), tree.select(start, names)) > 1e-3
    assert_near(plain_state, plain)


def test_clients_tensors_and_samples_are_not_mixed_up():
    """One workspace, as the clients of several rounds use it: every result is that of a fresh one."""
    space = Workspace(network())
    head, splits = starting(network(), "6."), [samples(seed=1), samples(seed=2)]
    starts = [tree.state_dict(network(seed)) for seed in (0, 1)]
    jobs = [
        (client, splits[client], which, names)
        for which in (0, 1, 0)
        for client in (0, 1)
        for names in (head, starting(network(), "4.", "6."), head)
    ]
    jobs += [
        (0, splits[0], 0, starting(network(), "2.")),
        (1, splits[1], 1, starting(network(), "0.")),
        (0, splits[1], 0, head),
    ]
    for client, split, which, names in jobs:
        shared_space, fresh = (
            run(where, starts[which], names, split, client=client)[0]
            for where in (space, Workspace(network()))
        )
        assert tree.digest(shared_space) == tree.digest(fresh)


def test_frozen_layers_are_computed_once_for_all_epochs_and_while_they_stay(
    monkeypatch,
):
    seen, original = [], workspace.in_chunks

    def outputs(first, x):
        if len(x) > 1:  # one sample tells how many bytes all would have
            seen.append(len(x))
        return original(first, x)

    monkeypatch.setattr(workspace, "in_chunks", outputs)
    space, start = Workspace(network()), tree.state_dict(network())
    head, split = starting(network(), "6."), samples()
    after, _ = run(space, start, head, split)
    assert seen == [29], "once for two epochs"
    run(space, after, head, split)
    assert seen == [29], "the head moved, what lies before it did not"
    run(space, tree.state_dict(network(1)), head, split)
    assert seen == [29, 29]
    run(space, start, starting(network(), "0."), split)
    assert seen == [29, 29]


class Detour(nn.Sequential):
    """A sequential model that is none."""

    def forward(self, x):
        return super().forward(x) + x


RELU = nn.ReLU()
CUTS = {
    "layers": ([nn.Linear(4, 4), nn.ReLU()], 2),
    "a block": ([nn.Sequential(nn.Linear(4, 4), nn.Tanh())], 2),
    "no weights": ([nn.Flatten(), nn.ReLU()], None),
    "dropout": ([nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4)], 1),
    "statistics in evaluation": ([nn.Linear(4, 4), nn.BatchNorm1d(4)], 2),
    "an unknown type": (
        [nn.Linear(4, 4), Wired(lambda m, x: x + torch.rand_like(x))],
        1,
    ),
    "a module twice": ([nn.Linear(4, 4), RELU, nn.Linear(4, 4), RELU], 4),
    "no chain": ([Detour(nn.Linear(4, 4))], None),
    "no chain behind one": ([nn.Linear(4, 4), Detour(nn.Linear(4, 4))], 1),
}
"""Frozen parts before a layer that trains, and how many of them are computed once."""


@pytest.mark.parametrize("which", CUTS)
def test_where_a_model_is_cut(which):
    parts, length = CUTS[which]
    model = nn.Sequential(*parts).requires_grad_(False).train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.eval()
    model.append(nn.Linear(4, 4))
    halves = cut(model)
    assert (None if halves is None else len(halves[0])) == length
    if halves is not None:
        x = normal(5, 4)
        outputs = []
        for run in (model, nn.Sequential(*halves)):
            torch.manual_seed(1)
            outputs.append(run(x))
        torch.testing.assert_close(*outputs)
        model[0].register_forward_hook(lambda *_: None)
        assert cut(model) is None
