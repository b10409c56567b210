"""pFedGate: what the gate scores, which blocks the budget keeps, what both learn; and pFedPT's frame."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn
from torch.func import functional_call

from fl_core import runner, tree
from fl_core.algorithms import Round, find
from fl_core.algorithms.base import configurations
from fl_core.algorithms.personal_modules import Border
from fl_core.client_runner import TrainRequest
from fl_core.errors import UsageError
from fl_core.models.extended import Gate, Gated, SwitchableNorm
from tests.conftest import CONFIG, TOY, client_runner_of, network, play

SHAPE = (1, 6, 6)


def gated(kind="norm", target=0.5, split=5, batch=128):
    torch.manual_seed(0)
    return Gated(network(kind), SHAPE, target, split, batch)


def images(n, *shape, seed=0):
    return torch.randn(
        n, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


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
    found = gate(x)
    inner = gate.linear(gate.inputs(x if len(shape) == 3 else x.flatten(1)).flatten(1))
    normalised = (inner - inner.mean(0)) / (
        inner.var(0, correction=0) + gate.scores.eps
    ).sqrt()
    torch.testing.assert_close(found, normalised.sigmoid().mean(0))
    assert found.shape == (9,)


@given(
    st.integers(0, 2**31),
    st.sampled_from([0.15, 0.3, 0.5, 0.8, 1.0]),
    st.sampled_from([2, 5, 8]),
)
def test_blocks_are_kept_greedily_within_the_budget(seed, target, split):
    model = gated(target=target, split=split)
    scores = np.random.default_rng(seed).random(len(model.sizes))
    kept = model.kept_blocks(scores)
    assert kept[model.first].all()
    if target == 1:
        assert kept.all()
        return
    for group in model.groups:
        budget = round((target - model.least) * model.sizes[group].sum())
        members = [k for k in np.flatnonzero(group) if not model.first[k]]
        spent = model.sizes[[k for k in members if kept[k]]].sum()
        assert spent <= budget
        ranked = sorted(members, key=lambda k: (-round(10 * float(scores[k])), k))
        left = budget
        for k in ranked:
            assert kept[k] == (model.sizes[k] <= left)
            left -= model.sizes[k] * kept[k]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("target", [0.5, 1.0])
def test_the_model_runs_with_scaled_weights(target, training):
    model, x = gated(target=target).double().train(training), images(8, *SHAPE)
    reference = gated(target=target).double().train(training)
    scores = reference.gate(x).clamp(min=min(0.2, target))
    kept = model.kept_blocks(scores.detach().numpy())
    adapted, at = {}, 0
    for name, parameter in reference.inner.named_parameters():
        pieces = []
        for piece in parameter.flatten().split(model.blocks[name][0]):
            pieces.append(piece * (scores[at] if kept[at] else 0))
            at += 1
        adapted[name] = torch.cat(pieces).view(parameter.shape)
    wanted = functional_call(reference.inner, adapted, (x,))
    torch.testing.assert_close(model(x), wanted)
    assert kept.all() == (target == 1)
    model(x).sum().backward()
    for learnt in (model.gate.linear.weight, model.inner.get_parameter("fc1.weight")):
        assert learnt.grad is not None
        assert learnt.grad.abs().sum() > 0


def first_steps(count, **options):
    """What moves in each of a client's first steps: "gate", "inner" or both."""
    task = runner.assemble(
        CONFIG.with_keys(algorithm="pfedgate", options=options, lr=0.1),
        data=TOY,
        model=network("norm"),
    )
    client_runner, algorithm = client_runner_of(task), task.algorithm(None)
    client_runner.algorithm = algorithm
    start = tree.state_dict(task.model)
    rnd = Round(0, "train", (1,))
    found, before = [], start
    for steps in range(1, count + 1):
        phase = replace(algorithm.phases(rnd, 1)[0], steps=steps)
        algorithm.phases = lambda *_, phase=phase: (phase,)
        job = TrainRequest(
            1,
            rnd,
            algorithm.server_message(algorithm.server_state(start), 1, rnd).clone(),
            state=algorithm.client_state(start, 1),
        )
        after = client_runner.run(replace(job, keep=True)).models["local"]
        names = [
            name
            for name in task.task_info.parameters
            if not torch.equal(after[name], before[name])
        ]
        found.append({name.partition(".")[0] for name in names})
        before = after
    return found


def test_the_gate_and_the_model_learn_together_or_by_turns():
    assert first_steps(3) == [{"gate", "inner"}] * 3
    assert first_steps(4, bi_level=True) == [{"gate"}, {"inner"}, {"gate"}, {"inner"}]
    assert first_steps(2, gate_lr=0.0) == [{"inner"}] * 2


def test_gradients_are_cut_apart():
    """One step of plain descent moves each of the two parts by the rate times the clip at most."""
    for clip in (1e-3, 1e9):
        played = play(
            algorithm="pfedgate",
            options={"clip": clip},
            rounds=1,
            batch_size=64,
            lr=0.5,
        )
        start = tree.state_dict(played.task.model)
        local = played.checkpoints[0].models["local"]["a"]
        for part in ("gate.", "inner."):
            names = [n for n in played.task.task_info.parameters if n.startswith(part)]
            moved = tree.distance(tree.select(local, names), tree.select(start, names))
            assert (moved == pytest.approx(0.5e-3, rel=1e-2)) == (clip < 1)


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


def test_frames_are_trained_first_and_stay_with_their_clients():
    played = play(
        algorithm="pfedpt",
        model="norm",
        participation=0.5,
        momentum=0.9,
        weight_decay=0.05,
    )
    start = tree.state_dict(played.task.model)
    algorithm = played.engine.algorithm
    prompt, train = algorithm.phases(Round(0), 0)
    assert (prompt.epochs, prompt.lr, prompt.momentum, prompt.weight_decay) == (
        5,
        1.0,
        0.5,
        0.0,
    )
    assert prompt.train == {
        f"border.{side}" for side in ("top", "bottom", "left", "right")
    }
    assert train.train == played.task.task_info.tensors - prompt.train
    first = torch.cat(
        [
            t.flatten()
            for c in range(4)
            for t in algorithm.client_state(start, c).trees["model"].values()
        ]
    )
    assert len(first.unique()) == 4 * 32
    assert float(first.std()) == pytest.approx(1, abs=0.25)
    size = 4 * sum(
        t.numel()
        for n, t in tree.state_dict(network("norm")).items()
        if t.is_floating_point()
    )
    assert (
        set(played.values("bytes_down").values())
        == set(played.values("bytes_up").values())
        == {size}
    )
    for checkpoint in played.checkpoints:
        for name in prompt.train:
            assert torch.equal(checkpoint.server.trees["model"][name], start[name])
        for name, own in checkpoint.models["local"].items():
            kept = checkpoint.clients[name].trees["model"]
            assert all(torch.equal(own[side], kept[side]) for side in prompt.train)


@pytest.mark.parametrize(
    ("shape", "pad", "message"),
    [
        ((10,), 2, r"pfedpt.*images.*\(10,\)"),
        ((1, 6, 9), 3, "6 x 9.*pad=3"),
        ((1, 6, 6), 0, "pad=0"),
    ],
)
def test_what_cannot_be_framed_is_refused(shape, pad, message):
    kind = find("pfedpt")
    with pytest.raises(UsageError, match=message):
        kind.wrap_model(
            nn.Flatten(),
            configurations(kind, {"pad": pad})[0],
            shape=shape,
            n_classes=2,
            seed=0,
        )
