"""What a model's author decided is respected: frozen tensors, running statistics, declared groups, unused layers."""

import copy
import re
from functools import partial

import pytest
import torch
from torch import nn

from diagnostics.measure import instruments
from fl_core import models
from fl_core.algorithms import Message, registry
from fl_core.models.building import statistics_of, tensors_of
from fl_core.run import runner
from tests.conftest import CONFIG, TOY, every_other, refuses
from tests.made import Wired


def net():
    """A convolution with its own running statistics, frozen layers, dropout in evaluation mode, and a classifier."""
    parts = {
        "conv": nn.Conv2d(1, 2, 3),
        "norm": nn.InstanceNorm2d(2, affine=True, track_running_stats=True),
    }
    still = nn.Sequential(
        nn.Linear(6, 6), nn.BatchNorm1d(6), nn.BatchNorm1d(6, affine=False)
    )
    half = nn.Sequential(nn.Linear(32, 6), nn.Linear(6, 6))
    parts |= {"frozen": half, "still": still.requires_grad_(False)}
    parts |= {"drop": nn.Dropout(0.9).eval(), "head": nn.Linear(6, 3)}
    half[0].weight.requires_grad_(False)
    network = Wired(run_net, **parts)
    network.layer_groups = ("frozen", "still")
    return network


def run_net(m, x):
    x = m.frozen(m.norm(m.conv(x)).relu().flatten(1)).relu()
    dropped = m.drop(m.still(x))
    assert torch.equal(dropped, m.drop(dropped)), "it stays in evaluation mode"
    return m.head(dropped)


@pytest.mark.parametrize(
    "algorithm",
    every_other([n for n, kind in registry().items() if not kind.needs_blocks], of=4),
)
def test_what_the_author_froze_stays_and_is_never_sent(algorithm, monkeypatch):
    sent, count = set(), Message.bytes.fget

    def note(message):
        sent.update(name for tree in message.trees.values() for name in tree)
        return count(message)

    monkeypatch.setattr(Message, "bytes", property(note))
    model = net()
    config = CONFIG.with_keys(
        algorithm=algorithm, weight_decay=0.1, momentum=0.9, rounds=2
    )
    engine = runner.run(config, data=TOY, model=model, instruments=instruments)
    before = model.state_dict()
    fixed = {n for n in before if n.startswith("still.")} | {"frozen.0.weight"}
    assert not [name for name in sent if name.endswith(tuple(fixed))]
    moved = set()
    for client in range(len(TOY.clients)):
        for tree in engine.models(client).values():
            changed = {
                n for n, t in tree.items() if not torch.equal(t, engine.initial[n])
            }
            assert not [name for name in changed if name.endswith(tuple(fixed))]
            moved |= changed
    assert moved


def moved(m, x, inside):
    z = m.body(x.flatten(1)).relu()
    if m.training:
        mean = (m.norm.running_mean + z.detach().mean(0)) / 2
        m.norm.running_mean = m.norm.running_mean.copy_(mean) if inside else mean
    return m.head(z - m.norm.running_mean)


@pytest.mark.parametrize("algorithm", ["fedavg", "apfl"])
def test_a_buffer_may_be_replaced_in_the_forward_pass(algorithm):
    parts = {"body": nn.Linear(36, 4), "norm": nn.BatchNorm1d(4)}
    model = Wired(None, **parts, head=nn.Linear(4, 3))
    models = []
    for inside in (True, False):
        model.run = partial(moved, inside=inside)
        config = CONFIG.with_keys(algorithm=algorithm)
        engine = runner.run(config, data=TOY, model=model)
        models.append(engine.models(0))
    torch.testing.assert_close(*models, rtol=0, atol=0)
    assert models[0]["global"]["norm.running_mean"].any()


def test_a_model_that_is_frozen_as_a_whole_is_noted():
    model = net().requires_grad_(False)
    with pytest.warns(UserWarning, match="all parameters .* are frozen"):
        runner.run(CONFIG.with_keys(rounds=1), data=TOY, model=model)


def test_the_configuration_of_an_own_model_trains_no_other_model():
    config = runner.assemble(CONFIG, data=TOY, model=net()).config
    with refuses("model 'own' must be given"):
        runner.assemble(config, data=TOY)


def grown(m, x):
    m.factor = getattr(m, "factor", 1) + m.training
    return x * m.factor


def skipped(m, x):
    m.f.bias.data.fill_(1)
    return x if m.training else m.f(x)


LAST = nn.Linear(36, 3)
OUTPUTS = {
    "logits": ([LAST], ""),
    "skipped": ([LAST, Wired(skipped, f=nn.Linear(3, 3))], ""),
    "softmax": ([LAST, nn.Softmax(1)], "sum to 1"),
    "sigmoid": ([LAST, nn.Sigmoid()], "logits"),
    "one sigmoid": ([nn.Linear(36, 1), nn.Sigmoid()], "logits"),
    "state": ([LAST, Wired(grown)], "in training mode with one seed"),
    "detached": (
        [nn.Linear(36, 6), Wired(lambda m, x: x.detach()), nn.Linear(6, 3)],
        r"no gradient reaches 1\.weight, 1\.bias",
    ),
}


def test_a_model_that_is_one_normalisation_keeps_its_statistics_by_name():
    norm = nn.BatchNorm1d(3)
    names = statistics_of(norm)
    assert names == tensors_of("", norm) - {"weight", "bias"}
    assert statistics_of(nn.Sequential(norm)) == {f"0.{name}" for name in names}


def test_outputs_are_counted_unless_the_module_cannot_be_copied():
    pair = Wired(lambda m, x: {"a": m.fc(x), "b": x}, fc=nn.Linear(3, 2))
    counts = [models.outputs_of(m, (3,)) for m in (nn.Linear(3, 2), pair, nn.GRU(2, 2))]
    assert counts == [2, 1, None]
    pair.draws = (k for k in ())
    with refuses(r"copy\.deepcopy"):
        models.outputs_of(pair, (3,))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("what", OUTPUTS)
def test_outputs_that_are_no_logits_are_noted(what, seed):
    parts, message = OUTPUTS[what]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Flatten(), *copy.deepcopy(parts))
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.reset_parameters()
    before = copy.deepcopy(model.state_dict())
    notes = models.output_notes(model, (1, 6, 6), "classification")
    torch.testing.assert_close(model.state_dict(), before)
    assert [bool(re.search(message, note)) for note in notes] == (
        [True] if message else []
    )
    others = [note for note in notes if "logits" not in note]
    model = copy.deepcopy(model)
    assert models.output_notes(model, (1, 6, 6), "regression") == others
    assert model.training
