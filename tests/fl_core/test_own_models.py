"""What a model's author decided is respected: frozen tensors, running statistics, declared groups, unused layers."""

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from diagnostics.measure import instruments
from fl_core import models, runner
from fl_core.errors import UsageError
from tests.conftest import CONFIG, TOY
from tests.networks import Wired


def net():
    """A convolution with its own running statistics, a frozen layer, and a classifier."""
    parts = {
        "conv": nn.Conv2d(1, 2, 3),
        "norm": nn.InstanceNorm2d(2, affine=True, track_running_stats=True),
    }
    parts |= {"frozen": nn.Linear(32, 6), "head": nn.Linear(6, 3)}
    parts["frozen"].weight.requires_grad_(False)
    return Wired(
        lambda m, x: m.head(m.frozen(m.norm(m.conv(x)).relu().flatten(1)).relu()),
        **parts,
    )


@pytest.mark.parametrize(
    "algorithm", ["fedavg", "fedprox", "ditto", "fedrep", "fedper"]
)
def test_what_the_author_froze_stays_frozen(algorithm):
    model = net()
    config = CONFIG.with_keys(
        algorithm=algorithm, optimizer="sgd", weight_decay=0.1, momentum=0.9
    )
    engine = runner.run(
        config, data=TOY, model=model, instruments=instruments, progress=False
    )
    for client in range(len(TOY.clients)):
        for tree in engine.models(client).values():
            assert torch.equal(tree["frozen.weight"], model.frozen.weight)
            assert not torch.equal(tree["head.weight"], model.head.weight)


def test_a_model_that_has_no_copy_is_refused():
    model = net()
    model.open = open(__file__)  # noqa: SIM115
    with model.open, pytest.raises(UsageError, match=r"copy\.deepcopy copies"):
        runner.assemble(CONFIG, data=TOY, model=model)


def test_a_model_that_is_frozen_as_a_whole_is_noted():
    model = net().requires_grad_(False)
    with pytest.warns(UserWarning, match="all parameters .* are frozen"):
        runner.run(CONFIG.with_keys(rounds=1), data=TOY, model=model, progress=False)


def test_the_configuration_of_an_own_model_trains_no_other_model():
    asked = runner.assemble(CONFIG, data=TOY, model=net()).config
    with pytest.raises(UsageError, match="model 'own' must be given"):
        runner.assemble(asked, data=TOY)


OUTPUTS = {
    "logits": ([nn.Linear(36, 3)], ""),
    "softmax": ([nn.Linear(36, 3), nn.Softmax(1)], "sum to 1"),
    "sigmoid": (
        [nn.Linear(36, 3), nn.Sigmoid()],
        r"lie in \[0, 1\]: the loss takes logits",
    ),
    "one sigmoid": (
        [nn.Linear(36, 1), nn.Sigmoid()],
        r"lie in \[0, 1\]: the loss takes logits",
    ),
    "dropout": (
        [nn.Linear(36, 3), Wired(lambda m, x: F.dropout(x))],
        "two passes of the model in evaluation mode differ",
    ),
}


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
    notes = models.output_notes(model, (1, 6, 6), "classification")
    assert [bool(re.search(message, note)) for note in notes] == (
        [True] if message else []
    )
    assert models.output_notes(model, (1, 6, 6), "regression") == (
        notes if what == "dropout" else []
    )
    assert model.training
