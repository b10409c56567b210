"""pFedGate: what the gate scores, which blocks the budget keeps, what both learn; and pFedPT's frame."""

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn
from torch.func import functional_call

from fl_core.algorithms.personal_modules import Border
from fl_core.models.extended import Gate, Gated, SwitchableNorm
from tests.conftest import network
from tests.made import normal

SHAPE = (1, 6, 6)


def gated(target=0.5, split=5):
    torch.manual_seed(0)
    return Gated(network("norm"), SHAPE, target, split)


def images(*shape, seed=0):
    return normal(*shape, seed=seed).double()


@pytest.mark.parametrize("only", [0, 1, 2])
@pytest.mark.parametrize("training", [True, False])
def test_a_switchable_norm_is_instance_layer_or_batch_normalisation(only, training):
    norm, x = SwitchableNorm(3).double(), 2 * images(5, 3, 4, 6) + 1
    others = [
        nn.InstanceNorm2d(3, eps=norm.eps),
        nn.GroupNorm(1, 3, eps=norm.eps),
        nn.BatchNorm2d(3, eps=norm.eps),
    ]
    with torch.no_grad():
        for switch in (norm.means, norm.variances):
            switch.fill_(-1e9)
            switch[only] = 0
    reference = others[only].double()
    for module in (norm, reference):
        module.train()
        module(images(5, 3, 4, 6, seed=1))
        module.train(training)
    torch.testing.assert_close(norm(x), reference(x), rtol=0, atol=1e-10)
    if only == 2:
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            torch.testing.assert_close(getattr(norm, name), getattr(reference, name))


@pytest.mark.parametrize("shape", [(3, 4, 4), (7,)])
def test_a_gate_scores_blocks_for_a_batch(shape):
    gate, x = Gate(shape, 9).double(), images(12, *shape)
    scores = gate(x)
    inner = gate.linear(gate.inputs(x if len(shape) == 3 else x.flatten(1)).flatten(1))
    normalised = (inner - inner.mean(0)) / (
        inner.var(0, correction=0) + gate.scores.eps
    ).sqrt()
    torch.testing.assert_close(scores, normalised.sigmoid().mean(0))
    assert scores.shape == (9,)


@given(
    st.integers(0, 2**31),
    st.sampled_from([0.15, 0.3, 0.5, 0.8, 1.0]),
    st.sampled_from([2, 5, 8]),
)
def test_blocks_are_kept_greedily_within_the_budget(seed, target, split):
    model = gated(target=target, split=split)
    scores = np.random.default_rng(seed).random(len(model.sizes))
    kept_blocks = model.kept_blocks(scores)
    assert kept_blocks[model.first].all()
    if target == 1:
        assert kept_blocks.all()
        return
    for group in model.groups:
        budget = round((target - model.least) * model.sizes[group].sum())
        members = [k for k in np.flatnonzero(group) if not model.first[k]]
        spent = model.sizes[[k for k in members if kept_blocks[k]]].sum()
        assert spent <= budget
        ranked = sorted(members, key=lambda k: (-round(10 * float(scores[k])), k))
        left = budget
        for k in ranked:
            assert kept_blocks[k] == (model.sizes[k] <= left)
            left -= model.sizes[k] * kept_blocks[k]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("target", [0.5, 1.0])
def test_the_model_runs_with_scaled_weights(target, training):
    model, x = gated(target=target).double().train(training), images(8, *SHAPE)
    reference = gated(target=target).double().train(training)
    scores = reference.gate(x).clamp(min=min(0.2, target))
    kept_blocks = model.kept_blocks(scores.detach().numpy())
    adapted, at = {}, 0
    for name, parameter in reference.inner.named_parameters():
        pieces = []
        for piece in parameter.flatten().split(model.blocks[name][0]):
            pieces.append(piece * (scores[at] if kept_blocks[at] else 0))
            at += 1
        adapted[name] = torch.cat(pieces).view(parameter.shape)
    wanted = functional_call(reference.inner, adapted, (x,))
    torch.testing.assert_close(model(x), wanted)
    assert kept_blocks.all() == (target == 1)
    model(x).sum().backward()
    for learnt in (model.gate.linear.weight, model.inner.get_parameter("fc1.weight")):
        assert learnt.grad is not None
        assert learnt.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("shape", "width", "count"),
    [((3, 32, 32), 2, 720), ((1, 5, 8), 1, 22), ((2, 6, 6), 2, 64)],
)
def test_a_frame_is_added_at_the_border(shape, width, count):
    border = Border(shape, width)
    assert sum(p.numel() for p in border.parameters()) == count
    parts = {
        name: images(*p.shape, seed=k).float()
        for k, (name, p) in enumerate(border.named_parameters())
    }
    with torch.no_grad():
        for name, values in parts.items():
            border.get_parameter(name).copy_(values)
    _, height, breadth = shape
    wanted = torch.zeros(shape)
    wanted[:, :width] = parts["top"]
    wanted[:, height - width :] = parts["bottom"]
    wanted[:, width : height - width, :width] = parts["left"]
    wanted[:, width : height - width, breadth - width :] = parts["right"]
    x = images(3, *shape).float()
    assert torch.equal(border(x), x + wanted)
