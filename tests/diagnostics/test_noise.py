"""Per-sample gradient noise against a loop over single samples in float64, by every way of computing it."""

import copy

import pytest
import torch
from torch import nn

from diagnostics.gradients import COUPLED
from diagnostics.measurement import ClientModel
from fl_core.layers import layers_of
from fl_core.training import losses
from tests.diagnostics.calls import grad_noise
from tests.made import Wired

CE = losses.build("cross_entropy")
N, C = 11, 3


def conv_net():
    return nn.Sequential(
        nn.ReLU(inplace=True),  # on the input itself
        nn.Conv2d(1, 4, 3, padding=1, groups=1),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, 2, stride=2, groups=2),
        nn.GroupNorm(2, 4),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(16, 5),
        nn.LayerNorm(5),
        nn.GELU(),
        nn.Linear(5, C),
    )


def attending():
    """Tokens, an embedding used beside a tied output, attention with a formula for none of its own tensors."""

    def run(m, x):
        h = m.norm(m.table(x))
        h = h + m.attention(h, h, h, need_weights=False)[0]
        h = m.twice(torch.tanh(m.twice(h))).mean(1)
        return (
            m.head(h) + (h @ m.head.weight.T) ** 2
        )  # the weight is used outside its module too

    parts = {"table": nn.Embedding(7, 4, padding_idx=0), "norm": nn.LayerNorm(4)}
    parts["attention"] = nn.MultiheadAttention(4, 2, batch_first=True)
    return Wired(run, **parts, twice=nn.Linear(4, 4), head=nn.Linear(4, C))


def recurrent():
    lstm = nn.LSTM(4, 5, batch_first=True)
    return Wired(
        lambda m, x: m.head(m.lstm(x)[0][:, -1]), lstm=lstm, head=nn.Linear(5, C)
    )


def samples(kind, n=N):
    """Pictures, token ids or sequences, as a network takes them, with labels."""
    g = torch.Generator().manual_seed(1)
    shape = {conv_net: (1, 4, 4), attending: (5,), recurrent: (6, 4)}[kind]
    x = torch.randn(n, *shape, generator=g).double()
    if kind is attending:
        x = torch.randint(7, (n, 5), generator=g)
    return x, torch.randint(C, (n,), generator=g)


def built(kind):
    torch.manual_seed(0)
    model = kind().double()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
            nn.init.normal_(module.weight)
    return model


def reference(model, names, data, loss=CE):
    """Tr S of the gradients of single samples."""
    parameters = [model.eval().get_parameter(name) for name in names]
    vectors = []
    for x, y in zip(*data, strict=True):
        value = loss.per_sample(model(x[None].clone()), y[None]).sum()
        grads = torch.autograd.grad(
            value, parameters, materialize_grads=True, allow_unused=True
        )
        vectors.append(torch.cat([g.reshape(-1) for g in grads]))
    return float(torch.stack(vectors).var(0).sum())


def measured(model, data, layers=None, **how):
    """The rows of one client, by module if nothing else is asked for."""
    layers = layers or layers_of(model, data[0][:2], by="module")
    subject = ClientModel("a", model, data, len(data[0]))
    return grad_noise([subject], layers, **{"loss": CE, **how})


def by_layer(rows, variant="trace"):
    return {r["layer"]: r for r in rows if r["variant"] == variant}


@pytest.mark.parametrize("kind", [conv_net, attending, recurrent])
def test_noise_is_the_trace_of_the_covariance(kind):
    model, data = built(kind), samples(kind)
    layers, focal = (
        layers_of(model, data[0][:2], by="module"),
        losses.build("player_focal"),
    )
    for tensors, batch, loss in (
        ("weights", 1, CE),
        ("all", 4, focal),
        ("weights", 100, CE),
    ):
        how = {"tensors": tensors, "batch": batch, "loss": loss}
        rows = measured(model, data, **how)
        traces, share = by_layer(rows), by_layer(rows, "per_parameter")
        for layer in layers:
            row = traces[layer.name]
            names = layer.weights if tensors == "weights" else layer.parameters
            expected = reference(model, names, data, loss)
            assert row["status"] == "ok", layer.name
            assert row["value"] == pytest.approx(expected, rel=1e-8, abs=1e-14)
            assert share[layer.name]["value"] == row["value"] / row["n_params"]
            assert row["n_samples"] == N
            assert row["stderr"] == 0  # all samples are there


def test_the_estimator_says_how():
    model, data = built(attending), samples(attending)
    ways = {
        name: row["estimator"] for name, row in by_layer(measured(model, data)).items()
    }
    single = {name for name, way in ways.items() if way == "single"}
    assert single == {"attention", "twice", "head"}
    assert {ways[name] for name in ways.keys() - single} == {"ghost"}


def test_samples_that_have_no_gradients_of_their_own_or_no_noise():
    model, (x, y) = built(conv_net), samples(conv_net)
    rows = by_layer(measured(model, (x, y), mode="train"))
    assert rows["1"]["status"] == COUPLED  # before the batch normalisation
    assert {rows[name]["status"] for name in ("2", "4", "8", "11")} == {"ok"}
    same = measured(model, (x[:1].repeat(5, 1, 1, 1), y[:1].repeat(5)), batch=2)
    assert all(0 <= row["value"] < 1e-12 for row in same)
    one = {row["status"] for row in measured(model, (x[:1], y[:1]))}
    assert one == {"a covariance needs at least two samples"}


def test_small_gradients_of_half_precision_do_not_vanish():
    """A head of small weights makes the gradients of the layers before it small."""
    for dtype in (torch.float16, torch.bfloat16):
        (x, y), model = samples(conv_net, 64), built(conv_net)
        with torch.no_grad():
            model[11].weight.mul_(0.01)
        model, x = model.to(dtype), x.to(dtype)
        rows = by_layer(measured(model, (x, y), tensors="all"))
        assert {row["estimator"] for row in rows.values()} == {"ghost, all tensors"}
        exact = copy.deepcopy(model).double()
        for layer in layers_of(model, x[:2], by="module"):
            expected = reference(exact, layer.parameters, (x.double(), y))
            assert rows[layer.name]["value"] == pytest.approx(expected, rel=0.03)
