"""The skeleton that trains: its memory format, and the plain loop as its reference."""

import copy
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import nn

from fl_core import models, seeds, tree
from fl_core.algorithms import TaskInfo, find
from fl_core.data import Split
from fl_core.errors import NonFiniteError
from fl_core.seeds import torch_seeded
from fl_core.tokens import TokenShape
from fl_core.training import workspace
from fl_core.training.loop import train
from fl_core.training.losses import build
from fl_core.training.phases import Context, Phase, Training, batch_slices
from fl_core.training.workspace import Workspace, cut, memory_format, pool_first
from tests.networks import Wired

CE = build("cross_entropy")
TRAININGS = {
    "sgd": Training(epochs=2, batch_size=8, lr=0.05, weight_decay=0.01),
    "momentum": Training(epochs=2, batch_size=8, lr=0.05, momentum=0.9),
    "adamw": Training(
        epochs=2, batch_size=8, lr=0.01, optimizer="adamw", weight_decay=0.1
    ),
}


def colours(seed=0):
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
    return train(space, algorithm, phase, start, split, training, ctx, {}, kept)


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


def assert_near(found, wanted, within=1e-10):
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
def test_a_model_with_a_convolution_has_its_channels_last(name):
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


def test_a_workspace_leaves_the_model_it_was_made_from_alone():
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
def test_training_is_the_plain_loop(which, memory):
    model, split = colours(), samples()
    found, _ = trained(model, TRAININGS[which], memory)
    wanted = by_hand(model, TRAININGS[which], split)
    assert tree.distance(wanted, tree.state_dict(model)) > 0.1
    assert_near(found, wanted)


@pytest.mark.parametrize("which", ["momentum", "adamw"])
def test_what_leaves_is_contiguous_and_comes_back_as_it_was(which):
    training = replace(TRAININGS[which], keep_optimizer=True)
    results = []
    for memory in ("channels_last", "contiguous"):
        first, state = trained(colours(), training, memory)
        assert all(
            value.is_contiguous() for value in (*first.values(), *state.values())
        )
        again, _ = trained(colours(), training, memory, kept=state)
        fresh, _ = trained(colours(), training, memory)
        assert tree.distance(again, fresh) > 1e-3, "the state matters"
        results.append(again)
    assert_near(*results)


def looks():
    """A model that uses what lies between a ReLU and the pooling behind it."""

    def run(m, x):
        y = m.body[1](m.body[0](x))
        return m.body[2:](y) + y.mean()

    parts = nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(27, 2)
    )
    return Wired(run, body=parts)


def _pooled(pool=None):
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
def test_maxima_taken_first_leave_every_bit(memory):
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


def test_the_order_stays_where_somebody_may_look():
    hooked = _pooled()
    hooked[0][1].register_forward_hook(lambda *_: None)
    other = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.AvgPool2d(2))
    leaky = nn.Sequential(nn.Conv2d(1, 2, 3), nn.LeakyReLU(), nn.MaxPool2d(2))
    for model in (looks(), nn.Sequential(looks(), nn.ReLU()), hooked, other, leaky):
        assert pool_first(model) == 0
    model = _pooled()
    Workspace(model)
    assert isinstance(model[0][1], nn.ReLU)  # only the workspace's own copy is changed


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


@contextmanager
def counted(monkeypatch):
    """How many samples each pass through a first part had."""
    seen = []
    original = workspace.Cut.outputs

    def outputs(self, x):
        if len(x) > 1:  # one sample tells how many bytes all would have
            seen.append(len(x))
        return original(self, x)

    monkeypatch.setattr(workspace.Cut, "outputs", outputs)
    yield seen


TRAINED = [("6.",), ("4.",), ("2.",), ("4.", "6."), ("0.",), ("0.0", "6."), ("0.1",)]


@pytest.mark.parametrize("which", TRAININGS)
@pytest.mark.parametrize("tensors", TRAINED, ids="-".join)
def test_training_is_that_of_the_plain_path(which, tensors):
    start, names = tree.state_dict(network()), starting(network(), *tensors)
    kept, plain = (
        run(Workspace(network(), keep_frozen=keep), start, names, training=how)[0]
        for keep, how in ((True, TRAININGS[which]), (False, TRAININGS[which]))
    )
    assert tree.distance(tree.select(plain, names), tree.select(start, names)) > 1e-3
    assert_near(kept, plain)


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
        found, fresh = (
            run(where, starts[which], names, split, client=client)[0]
            for where in (space, Workspace(network()))
        )
        assert tree.digest(found) == tree.digest(fresh)


def test_what_is_not_finite_in_a_frozen_layer_is_still_met():
    start = tree.state_dict(network())
    start["0.0.weight"].view(-1)[0] = torch.nan
    messages = set()
    for keep in (True, False):
        space = Workspace(network(), keep_frozen=keep)
        with pytest.raises(NonFiniteError, match=r"step 1.*nan") as caught:
            run(space, start, starting(network(), "6."))
        messages.add(str(caught.value))
    assert len(messages) == 1


def test_frozen_layers_are_computed_once_for_all_epochs_and_while_they_stay(
    monkeypatch,
):
    with counted(monkeypatch) as seen:
        space, split, start = (
            Workspace(network()),
            samples(),
            tree.state_dict(network()),
        )
        head = starting(network(), "6.")
        after, _ = run(space, start, head, split)
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

    def forward(self, x):
        return x + torch.rand_like(x)


class Chained(nn.Sequential):
    """A sequential model under another name."""


class Detour(nn.Sequential):
    """A sequential model that is none."""

    def forward(self, x):
        return super().forward(x) + x


def frozen(*parts, kind=nn.Sequential):
    model = kind(*parts).requires_grad_(False).train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.eval()
    return model


def training_part(module):
    return module.requires_grad_(True)


def last(make):
    model = make()
    training_part(model[-1])
    return model


def lin():
    return nn.Linear(4, 4)


TWICE = nn.ReLU()


CUTS = {
    "before what trains": (lambda: last(lambda: frozen(lin(), nn.ReLU(), lin())), 2),
    "in the middle of a block": (
        lambda: last(lambda: frozen(nn.Sequential(lin(), nn.Tanh()), lin())),
        2,
    ),
    "a subclass": (lambda: last(lambda: frozen(lin(), lin(), kind=Chained)), 1),
    "the first trains": (lambda: training_part(frozen(lin(), lin())), None),
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
def test_where_a_model_is_cut(which):
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
def test_a_model_with_hooks_is_not_cut(where):
    model = last(lambda: frozen(lin(), nn.ReLU(), lin()))
    hooked = model[where[0]] if where else model
    handle = hooked.register_forward_hook(lambda *_: None)
    assert cut(model) is None
    handle.remove()
    assert cut(model) is not None
