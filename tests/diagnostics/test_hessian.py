"""Traces against dense Hessian blocks in float64: which layers are exact, and what the others' errors are worth."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from diagnostics.curvature.model import curvature
from diagnostics.curvature.trace import hessian_trace
from diagnostics.measure import diagnose
from diagnostics.measurement import NoValue
from fl_core.layers import Layer, layers_of
from fl_core.training.losses import build
from tests.conftest import refuses
from tests.diagnostics.dense import CE, FOCAL, block, images, loose, mlp, pair, tokens
from tests.made import Wired


@pytest.fixture(autouse=True)
def _double():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


def conv_net(**options):
    return nn.Sequential(
        nn.Conv2d(1, 3, 3),
        nn.ReLU(**options),
        nn.MaxPool2d(2),
        nn.Conv2d(3, 4, 2),
        nn.ReLU(**options),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(4, 3),
    )


def residual(norm=nn.BatchNorm2d, inplace=False):
    """Two convolutions, each with a normalisation, a skip connection, global pooling, a head."""

    def run(m, x):
        x = m.relu(m.stem_norm(m.stem(x)))
        x = m.relu(m.norm(m.conv(x)) + x)
        return m.head(F.adaptive_avg_pool2d(x, 1).flatten(1))

    model = Wired(
        run,
        stem=nn.Conv2d(2, 3, 3, padding=1),
        stem_norm=norm(3),
        conv=nn.Conv2d(3, 3, 3, padding=1, bias=False),
        norm=norm(3),
        relu=nn.ReLU(inplace=inplace),
        head=nn.Linear(3, 3),
    )
    for module in (model.stem_norm, model.norm):
        for name, tensor in module.state_dict().items():
            if "tracked" not in name:
                tensor.uniform_(0.5, 2)
    return model


def attention(fused=False):
    def run(m, tokens):
        x = m.embed(tokens)
        q, k, v = m.q(x), m.k(x), m.v(x)
        if fused:
            mixed = F.scaled_dot_product_attention(q, k, v)
        else:
            mixed = (q @ k.mT / 2).softmax(-1) @ v
        return m.head(F.relu(m.o(mixed)).mean(1))

    parts = {"embed": nn.Embedding(6, 4), **{n: nn.Linear(4, 4) for n in "qkvo"}}
    return Wired(run, **parts, unused=nn.LayerNorm(4), head=nn.Linear(4, 3))


def wired(run, *names, tie=False):
    """Linear layers of four numbers by these names, and a head."""
    parts = {name: nn.Linear(4, 4) for name in names}
    if tie:
        parts[names[1]].weight = parts[names[0]].weight
    return Wired(run, **parts, head=nn.Linear(4, 3))


def gated():
    """A product of two branches: linear in each layer alone, quadratic in the layer before both."""

    def run(m, x):
        x = m.before(x).relu()
        return m.head(m.a(x) * m.b(x))

    return wired(run, "before", "a", "b")


def parallel(m, x):
    return m.head(m.first(x).relu() + m.first(x.flip(1)).relu() + m.second(x))


def time_first(m, x):
    """Work on [time, sample, feature]: the samples are not along the layer's first dimension."""
    return m.head(m.body(x.transpose(0, 1)).relu().mean(0))


def backwards():
    """Modules in another order than they are called, and a curved output."""
    parts = {"head": nn.Linear(64, 3), "conv": nn.Conv2d(2, 4, 2)}
    return Wired(lambda m, x: m.head(m.conv(x).flatten(1)).exp(), **parts)


def before_norm(norm):
    return nn.Sequential(nn.Linear(4, 5), norm, nn.ReLU(), nn.Linear(5, 3))


def measure(model, data, layers=None, **options):
    options = {"loss": CE, "batch": 3, **options}
    results = hessian_trace(model, data, layers or loose(model), **options)
    return {result.layer: result for result in results}


def traces(model, data, layers, *how):
    return [
        float(block(model, data, layer.parameters, *how).trace()) for layer in layers
    ]


def check(model, data, exact=None, coupled="", loss=CE, gauss_newton=False, **options):
    """Exactly these layers (None: all) are exact, to rounding; the others' intervals cover the truth."""
    layers = loose(model)
    options |= {"loss": loss, "gauss_newton": gauss_newton}
    results = measure(model, data, layers, probes=24, **options)
    truths = traces(model.eval(), data, layers, loss, gauss_newton)
    for layer, truth in zip(layers, truths, strict=True):
        result = results[layer.name]
        assert result.n_samples == len(data[1])
        assert result.n_params == sum(
            model.get_parameter(n).numel() for n in layer.parameters
        )
        if layer.name.startswith("unused"):
            assert result.status == "no gradient reaches the layer"
            continue
        assert result.status == "ok"
        if exact is None or layer.name in exact:
            assert (result.estimator, result.note, result.stderr) == ("exact", "", 0)
            assert result.trace == pytest.approx(truth, rel=1e-10, abs=1e-13)
        else:
            way = "hutchinson" if layer.name == coupled else "activation"
            assert result.estimator == f"{way}(probes=24)"
            assert result.note
            assert result.stderr > 0
            assert abs(result.trace - truth) <= 4 * result.stderr


IMAGES = (7, 1, 9, 9)
PLAIN = pair(7, 4)
EXACT = {
    "cnn, in-place": (lambda: conv_net(inplace=True), pair(*IMAGES)),
    "leaky": (lambda: mlp(nn.LeakyReLU), PLAIN),
    "residual, in-place": (lambda: residual(nn.Identity, True), pair(7, 2, 4, 4)),
    "residual, batch norm": (residual, pair(7, 2, 4, 4)),
    "embedding": (
        lambda: nn.Sequential(
            nn.Embedding(5, 4, padding_idx=0), Wired(lambda m, x: x.mean(1)), mlp()
        ),
        pair(7, 6, tokens=5),
    ),
    "prelu around": (
        lambda: nn.Sequential(
            nn.Linear(4, 3), Wired(lambda m, x: F.prelu(x, torch.tensor([0.2])))
        ),
        PLAIN,
    ),
    "tokens, short": (
        lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Flatten(), mlp()[2:]),
        pair(7, 1, 4),
    ),
    "tokens, long": (
        lambda: nn.Sequential(
            nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.Flatten(), nn.Linear(40, 3)
        ),
        pair(7, 4, 5, 2),
    ),
    "no gradients": (
        lambda: wired(lambda m, x: m.head(torch.no_grad()(m.unused)(x)), "unused"),
        PLAIN,
    ),
}
VERDICTS = {
    "gelu": (lambda: mlp(nn.GELU), PLAIN, {"4"}, ""),
    "silu in place": (lambda: mlp(lambda: nn.SiLU(inplace=True)), PLAIN, {"4"}, ""),
    "another order": (backwards, pair(9, 2, 5, 5), {}, ""),
    "images": (images, pair(9, 2, 5, 5), {"6"}, ""),
    "tokens": (tokens, pair(9, 2, tokens=5), {"head"}, ""),
    "layer norm": (lambda: before_norm(nn.LayerNorm(5)), PLAIN, {"1", "3"}, ""),
    "group norm": (lambda: images(nn.ReLU), pair(7, 2, 5, 5), {"1", "3", "6"}, ""),
    "attention": (attention, pair(7, 5, tokens=6), {"v", "o", "head"}, ""),
    "fused": (
        lambda: attention(fused=True),
        pair(7, 5, tokens=6),
        {"v", "o", "head"},
        "",
    ),
    "module used twice": (
        lambda: wired(
            lambda m, x: m.head(m.first(m.first(x).relu()).relu()),
            "first",
        ),
        PLAIN,
        {"head"},
        "first",
    ),
    "weight used twice": (
        lambda: wired(
            lambda m, x: m.head(m.second(m.first(x).relu()).relu()),
            *("first", "second"),
            tie=True,
        ),
        PLAIN,
        {"second", "head"},
        "first",
    ),
    "parallel": (
        lambda: wired(parallel, "first", "second"),
        PLAIN,
        {"second", "head"},
        "first",
    ),
    "product": (gated, PLAIN, {"a", "b", "head"}, ""),
    "time first": (
        lambda: wired(time_first, "body"),
        pair(7, 5, 4),
        {"head"},
        "body",
    ),
    "recurrent": (
        lambda: Wired(
            lambda m, x: m.head(m.lstm(x)[0][:, -1]),
            lstm=nn.LSTM(4, 3, batch_first=True),
            head=nn.Linear(3, 3),
        ),
        pair(7, 4, 4),
        {"head"},
        "lstm",
    ),
    "weight normalisation": (
        lambda: nn.Sequential(
            nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), mlp()[1:2], mlp()[0]
        ),
        PLAIN,
        {"0", "2"},  # of the normalised module, only the bias
        "0.parametrizations.weight",
    ),
}


@pytest.mark.parametrize("name", [*EXACT, *VERDICTS])
def test_only_these_layers_are_exact(name):
    build_model, data, *layers = (EXACT | VERDICTS)[name]
    check(build_model(), data, *layers)


@pytest.mark.parametrize("name", VERDICTS)
def test_gauss_newton_traces_are_exact_unless_samples_mix(name):
    build_model, data, _, coupled = VERDICTS[name]
    model = build_model()
    exact = {layer.name for layer in loose(model)} - {coupled}
    for loss in (CE, FOCAL):
        check(model, data, exact, coupled, loss, gauss_newton=True)


def test_gauss_newton_traces_of_many_outputs_are_estimated():
    check(mlp(nn.GELU, 40), pair(7, 4, classes=40), {}, gauss_newton=True)


def test_samples_that_a_batch_mixes_couple_the_layers_before():
    centred = Wired(lambda m, x: x - x.mean(0))
    mixing = wired(lambda m, x: m.head(m.centred(m.body(x)).relu()), "body")
    mixing.centred = centred
    for gauss_newton in (False, True):
        check(mixing, PLAIN, {"head"}, "body", CE, gauss_newton, batch=7)
    model, (x, y) = residual(), pair(6, 2, 4, 4)
    layers = loose(model)
    results = measure(model, (x, y), layers, mode="train", probes=64)
    exact = {name for name, result in results.items() if result.estimator == "exact"}
    assert exact == {"norm", "head"}
    model.train()
    halves = [traces(model, (x[k], y[k]), layers) for k in (slice(3), slice(3, 6))]
    for layer, truth in zip(layers, np.mean(halves, axis=0), strict=True):
        result = results[layer.name]
        room = 4 * result.stderr + 1e-10 * abs(truth)
        assert abs(result.trace - truth) <= room


def test_every_loss():
    weighted = build("focal", gamma=0.5, alpha=[0.2, 1.0, 3.0])
    losses = {CE: 0.1, build("focal"): 3.0, FOCAL: 2.0, weighted: 6.0}
    for loss, scale in losses.items():
        model, (x, y) = residual().eval(), pair(7, 2, 4, 4)
        with torch.no_grad():  # with a large scale some samples are confidently wrong
            gain = scale / model(x).std()
            for parameter in [*model.parameters()][-2:]:
                parameter.mul_(gain)
        check(model, (x, y), loss=loss)


CONVOLUTIONS = {
    "strided": nn.Conv2d(4, 3, (3, 2), stride=(2, 3), padding=(1, 2)),
    "dilated": nn.Conv2d(4, 3, 2, dilation=(2, 3), bias=False),
    "same": nn.Conv2d(4, 3, (2, 3), padding="same", dilation=2),
    "circular": nn.Conv2d(4, 3, 3, padding=(1, 2), padding_mode="circular"),
    "reflect": nn.Conv2d(4, 3, 3, padding=1, padding_mode="reflect"),
    "1d": nn.Conv1d(4, 3, 3, stride=2, padding=1, groups=1),
    "3d": nn.Conv3d(4, 2, 2, stride=(1, 2, 1)),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(name, monkeypatch):
    """Whether the intermediates are kept or are too large."""
    conv = CONVOLUTIONS[name].double()
    x = torch.randn(3, 4, *{"1d": (9,), "3d": (3, 3, 3)}.get(name, (5, 6)))
    width = conv(x).flatten(1).shape[1]
    model = nn.Sequential(conv, nn.ReLU(), nn.Flatten(), nn.Linear(width, 3))
    data, layer = (x, torch.arange(3)), loose(model)[0]
    (truth,) = traces(model, data, [layer])
    for largest in (1 << 25, 40):
        monkeypatch.setattr("diagnostics.curvature.model.LARGEST", largest)
        result = measure(model, data)[layer.name]
        assert result.estimator == "exact"
        assert result.trace == pytest.approx(truth, rel=1e-10)


def test_batches_loaders_blocks_and_types_change_no_trace():
    model, (x, y) = residual(), pair(7, 2, 4, 4)
    layers = layers_of(model, x[:2], by="block")
    truth = traces(model.eval(), (x, y), layers)
    loader = DataLoader(TensorDataset(x, y), batch_size=2)
    for data, batch in (((x, y), 1), ((x, y), 100), (loader, 3)):
        results = measure(model, data, layers, batch=batch)
        assert [r.trace for r in results.values()] == pytest.approx(truth, rel=1e-10)
        assert [*results] == [layer.name for layer in layers]
    model, data = model.float(), (x.float(), y)
    for dtype, rel in ((None, 1e-4), (torch.float64, 1e-6)):
        results = measure(model, data, layers, dtype=dtype).values()
        assert [r.trace for r in results] == pytest.approx(truth, rel=rel)


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return grad


def test_what_has_no_value_says_why():
    once = nn.Sequential(mlp(nn.Tanh)[:3], Wired(lambda m, x: Once.apply(x)), mlp()[4])
    once.insert(1, nn.Linear(5, 5))
    spoiled = mlp()
    with torch.no_grad():
        spoiled.get_parameter("2.bias")[0] = torch.nan
    lost = dict.fromkeys("024", "the loss is not finite")
    exact = {"0": "no exact value: 0.weight: Gelu ", "4": "ok"}
    for model, how, statuses in (
        (
            mlp(),
            {"layers": [Layer("none", ())]},
            {"none": "the layer has no parameters"},
        ),
        (mlp(nn.GELU), {"estimator": "exact"}, exact),
        (once, {}, {"0.0": "no second derivative: ", "3": "ok"}),
        (once, {"gauss_newton": True}, {"0.0": "ok", "3": "ok"}),
        (spoiled, {}, lost),
    ):
        results = measure(model, PLAIN, **how)
        for name, status in statuses.items():
            assert results[name].status.startswith(status)
            assert math.isnan(results[name].trace) == (status != "ok")
            assert results[name].n_samples == 7


@pytest.mark.parametrize("estimator", ["activation", "hutchinson"])
def test_one_product_of_all_layers_has_the_error_that_it_states(estimator):
    model, data = mlp(nn.Tanh), pair(20, 4)
    model.get_parameter("4.weight").data.mul_(30)  # so that the layers' traces differ
    how = {"batch": 4, "estimator": estimator, "probes": 4}
    runs = [measure(model, data, seed=seed, **how) for seed in range(20)]
    layers = loose(model)
    for layer, truth in zip(layers, traces(model, data, layers), strict=True):
        values, errors = np.array(
            [(run[layer.name].trace, run[layer.name].stderr) for run in runs]
        ).T
        assert abs(values.mean() - truth) <= 4 * values.std() / math.sqrt(len(runs))
        assert 0.7 <= np.sqrt(np.mean(errors**2)) / values.std() <= 1.4


def test_activation_where_samples_mix_has_no_value():
    model, data = before_norm(nn.BatchNorm1d(5)), pair(8, 4)
    model[2] = nn.GELU()
    by_activation = measure(model, data, mode="train", estimator="activation", batch=4)
    assert "batch normalisation" in by_activation["0"].status
    assert by_activation["1"].status == by_activation["3"].status == "ok"
    alone = measure(mlp(nn.GELU), pair(1, 4))["0"]
    assert alone.estimator == "hutchinson(probes=32)"
    assert "one sample" in alone.note


def test_pyhessian_agrees_and_does_not_stop_early_on_a_negative_trace():
    """Its own rule would stop after two probes."""
    bent = nn.Sequential(nn.Linear(1, 1), nn.Tanh(), nn.Linear(1, 2))
    with torch.no_grad():
        for parameter, value in zip(bent.parameters(), (1, -0.5, 0, 0), strict=True):
            parameter.fill_(value)
        bent[2].weight[0] = 1.0
    negative = torch.full((4, 1), 1.0), torch.ones(4, dtype=torch.int64)
    assert traces(bent, negative, loose(bent))[0] < 0
    for model, data in ((bent, negative), (mlp(nn.Tanh), pair(10, 4))):
        by_pyhessian = measure(model, data, backend="pyhessian", probes=100, batch=6)
        truths = traces(model, data, loose(model))
        for result, truth in zip(by_pyhessian.values(), truths, strict=True):
            assert result.estimator == "pyhessian(probes=100)"
            assert abs(result.trace - truth) <= 4 * result.stderr
            assert 0 < result.stderr < 1


def test_what_pyhessian_cannot_do_is_refused():
    for mode, how, words in (
        ("train", {}, "mode .*'eval'"),
        ("eval", {"estimator": "exact"}, "weight-space"),
    ):
        options = {"hessian_trace": {"backend": "pyhessian", **how}, "mode": mode}
        with refuses(words):
            diagnose(mlp(), pair(6, 4), "hessian_trace", options=options)


def test_a_product_with_the_hessian_is_autograds_or_has_no_value():
    w, v = torch.arange(1.0, 4).requires_grad_(), torch.tensor([1.0, -2.0, 0.5])
    (cubic,) = torch.autograd.grad((w**3).sum(), w, create_graph=True)
    (product,) = curvature([cubic], [v], [w])
    torch.testing.assert_close(product, 6 * w.detach() * v)
    assert curvature([None], [v], [w])[0].tolist() == [0, 0, 0]
    once = F.multi_margin_loss(w[None], torch.tensor([0]))
    (gradient,) = torch.autograd.grad(once, w, create_graph=True)
    with pytest.raises(NoValue, match=r"no second derivative: .*margin"):
        curvature([gradient], [v], [w])
