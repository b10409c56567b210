"""Traces against dense Hessian blocks in float64, and which layers are exact in each architecture."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader, TensorDataset

from diagnostics.curvature import exact as curvature_exact
from diagnostics.curvature.formulas import grams_of_patches, norms_of, patches_of
from diagnostics.curvature.trace import TraceResult, hessian_trace
from fl_core.errors import UsageError
from fl_core.layers import Layer, layers_of
from fl_core.training.losses import Loss, build
from tests.networks import Wired

CE = build("cross_entropy")
LOSSES = [
    CE,
    build("focal"),
    build("player_focal"),
    build("focal", gamma=0.5, alpha=[0.2, 1.0, 3.0]),
]


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


def conv_net(activation: type[nn.Module] = nn.ReLU, **options: object) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 3, 3),
        activation(**options),
        nn.MaxPool2d(2),
        nn.Conv2d(3, 4, 2),
        activation(**options),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(4, 5),
        activation(**options),
        nn.Linear(5, 3),
    )


def mlp(activation: nn.Module, inputs: int = 4) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, 5), activation, nn.Linear(5, 4), activation, nn.Linear(4, 3)
    )


class Residual(nn.Module):
    """Two convolutions with or without batch normalisation, a skip connection, global pooling, a head."""

    def __init__(self, norm: bool, inplace: bool = False) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 3, 3, padding=1)
        self.stem_norm = nn.BatchNorm2d(3) if norm else nn.Identity()
        self.conv = nn.Conv2d(3, 3, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(3) if norm else nn.Identity()
        self.relu = nn.ReLU(inplace=inplace)
        self.head = nn.Linear(3, 3)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean = torch.randn(3) * 0.2
                module.running_var = torch.rand(3) + 0.5
                nn.init.normal_(module.weight)
                nn.init.normal_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.stem_norm(self.stem(x)))
        x = self.relu(self.norm(self.conv(x)) + x)
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


def attention(fused: bool = False) -> Wired:
    def run(m: Any, tokens: Tensor) -> Tensor:
        x = m.embed(tokens)
        q, k, v = m.q(x), m.k(x), m.v(x)
        mixed = (
            F.scaled_dot_product_attention(q, k, v)
            if fused
            else (q @ k.mT / 2).softmax(-1) @ v
        )
        return m.head(F.relu(m.o(mixed)).mean(1))

    linear = {name: nn.Linear(4, 4) for name in "qkvo"}
    return Wired(
        run,
        **{
            "embed": nn.Embedding(6, 4),
            **linear,
            "unused": nn.LayerNorm(4),
            "head": nn.Linear(4, 3),
        },
    )


def tied(by: str) -> Wired:
    parts = {"first": nn.Linear(4, 4)} | (
        {} if by == "module" else {"middle": nn.Linear(4, 4)}
    )
    if by == "weight":
        parts["middle"].weight = parts["first"].weight

    def run(m: Any, x: Tensor) -> Tensor:
        if by == "parallel":
            return m.last(m.first(x).relu() + m.first(x.flip(1)).relu() + m.middle(x))
        return m.last(
            (m.first if by == "module" else m.middle)(m.first(x).relu()).relu()
        )

    return Wired(run, **parts, last=nn.Linear(4, 3))


def gated() -> Wired:
    """A product of two branches: linear in each layer alone, quadratic in the layer before both."""

    def run(m: Any, x: Tensor) -> Tensor:
        x = m.before(x).relu()
        return m.head(m.a(x) * m.b(x))

    return Wired(
        run,
        **{name: nn.Linear(4, 4) for name in ("before", "a", "b")},
        head=nn.Linear(4, 3),
    )


def mixing() -> Wired:
    """Centres its features over the batch: linear, but one sample's logits depend on the others."""
    centred = Wired(lambda m, x: x - x.mean(0))
    return Wired(
        lambda m, x: m.head(m.centred(m.body(x)).relu()),
        centred=centred,
        body=nn.Linear(4, 4),
        head=nn.Linear(4, 3),
    )


def time_first() -> Wired:
    """Works on [time, sample, feature]: the samples are not along the layer's first dimension."""
    run = lambda m, x: m.head(m.body(x.transpose(0, 1)).relu().mean(0))  # noqa: E731
    return Wired(run, body=nn.Linear(4, 4), head=nn.Linear(4, 3))


def recurrent() -> Wired:
    lstm = nn.LSTM(4, 3, batch_first=True)
    return Wired(
        lambda m, x: m.head(m.lstm(x)[0][:, -1]), lstm=lstm, head=nn.Linear(3, 3)
    )


def loose(model: nn.Module) -> tuple[Layer, ...]:
    """One layer for each module that owns parameters, in the model's own order."""
    names = [name for name, _ in model.named_parameters()]
    owners = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
    return tuple(
        Layer(
            owner,
            tuple(name for name in names if name.rpartition(".")[0] == owner),
            output=owner,
        )
        for owner in owners
    )


def inputs(*shape: int, tokens: int = 0, classes: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    x = (
        torch.randint(0, tokens, shape, generator=generator)
        if tokens
        else torch.randn(shape, generator=generator, dtype=torch.float64)
    )
    return x, torch.randint(0, classes, (len(x),), generator=generator)


def dense(
    model: nn.Module,
    data: tuple[Tensor, Tensor],
    layers: tuple[Layer, ...],
    loss: Loss = CE,
) -> list[float]:
    """Traces of dense Hessians, tensor by tensor, of the loss's own mean; the model in the mode it is in."""
    x, y = data
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    buffers = {name: b.detach().clone() for name, b in model.named_buffers()}

    def trace(name: str) -> float:
        size = parameters[name].numel()

        def of(tensor: Tensor) -> Tensor:
            return loss(
                functional_call(model, {**parameters, **buffers, name: tensor}, (x,)), y
            )

        with (
            torch.backends.mkldnn.flags(enabled=False, allow_tf32=None),
            sdpa_kernel(SDPBackend.MATH),
        ):
            matrix = torch.autograd.functional.hessian(of, parameters[name])
        return float(matrix.reshape(size, size).trace())

    return [sum(trace(name) for name in layer.parameters) for layer in layers]


def measure(
    model: nn.Module,
    data: tuple[Tensor, Tensor],
    layers: tuple[Layer, ...] | None = None,
    **options: object,
) -> dict[str, TraceResult]:
    options = {"loss": CE, "batch": 3, **options}
    results = hessian_trace(model, data, layers or loose(model), **options)  # type: ignore[arg-type]
    return {result.layer: result for result in results}


def check_exact(
    model: nn.Module,
    data: tuple[Tensor, Tensor],
    exact: set[str] | None = None,
    loss: Loss = CE,
    **options: object,
) -> None:
    """Exactly the layers in ``exact`` (None: all) are exact, to rounding; the others' intervals cover the truth."""
    layers = loose(model)
    results = measure(model, data, layers, loss=loss, **options)
    assert {name for name, r in results.items() if r.estimator == "exact"} == (
        exact or set(results)
    )
    model.train(options.get("mode") == "train")
    for layer, truth in zip(layers, dense(model, data, layers, loss), strict=True):
        result = results[layer.name]
        assert result.status == "ok"
        assert result.n_samples == len(data[1])
        if result.estimator == "exact":
            assert result.stderr == 0
            assert result.note == ""
            assert result.trace == pytest.approx(truth, rel=1e-10, abs=1e-14)
        else:
            assert result.note
            assert result.stderr > 0
            assert abs(result.trace - truth) <= 4 * result.stderr


IMAGES = (7, 1, 9, 9)
EXACT: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, Tensor]]] = {
    "cnn, maxpool": (conv_net, inputs(*IMAGES)),
    "cnn, in-place": (lambda: conv_net(inplace=True), inputs(*IMAGES)),
    "mlp, leaky": (lambda: mlp(nn.LeakyReLU(0.1)), inputs(7, 4)),
    "mlp, relu6": (lambda: mlp(nn.ReLU6()), inputs(7, 4)),
    "residual": (lambda: Residual(norm=False), inputs(7, 2, 4, 4)),
    "residual, in-place": (
        lambda: Residual(norm=False, inplace=True),
        inputs(7, 2, 4, 4),
    ),
    "residual, batch norm": (lambda: Residual(norm=True), inputs(7, 2, 4, 4)),
    "single layer": (lambda: nn.Sequential(nn.Linear(4, 3)), inputs(7, 4)),
    "embedding": (
        lambda: nn.Sequential(
            nn.Embedding(5, 4, padding_idx=0),
            Wired(lambda m, x: x.mean(1)),
            mlp(nn.ReLU()),
        ),
        inputs(7, 6, tokens=5),
    ),
    "prelu around": (
        lambda: nn.Sequential(
            nn.Linear(4, 3), Wired(lambda m, x: F.prelu(x, torch.tensor([0.2])))
        ),
        inputs(7, 4),
    ),
    "tokens, short": (
        lambda: nn.Sequential(
            nn.Linear(4, 6),
            nn.ReLU(),
            nn.Linear(6, 5),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(10, 3),
        ),
        inputs(7, 2, 4),
    ),
    "tokens, long": (
        lambda: nn.Sequential(
            nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.Flatten(), nn.Linear(40, 3)
        ),
        inputs(7, 4, 5, 2),
    ),
    "frozen norms": (
        lambda: nn.Sequential(
            nn.Linear(4, 6), nn.BatchNorm1d(6, affine=False), nn.ReLU(), nn.Linear(6, 3)
        ),
        inputs(7, 4),
    ),
    "two classes": (
        lambda: nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)),
        inputs(7, 4, classes=2),
    ),
}


@pytest.mark.parametrize("name", EXACT)
def test_exact_networks(name: str) -> None:
    build_model, data = EXACT[name]
    check_exact(build_model(), data, estimator="exact")


@pytest.mark.parametrize(
    "loss", LOSSES, ids=lambda loss: f"{loss.name}-{getattr(loss, 'gamma', '')}"
)
@pytest.mark.parametrize("name", ["mlp, leaky", "cnn, maxpool", "residual, batch norm"])
def test_every_loss(name: str, loss: Loss) -> None:
    build_model, (x, y) = EXACT[name]
    model = build_model().eval()
    with torch.no_grad():
        head = list(model.parameters())[-2:]
        gain = 2 / model(x).std()  # so that some samples are confidently wrong
        for parameter in head:
            parameter.mul_(gain)
        _, signs = curvature_exact.factors(loss, model(x), y)
    assert (signs < 0).any() == (loss is not CE)
    check_exact(model, (x, y), loss=loss)


CONVOLUTIONS = {
    "grouped": nn.Conv2d(4, 6, 3, groups=2, padding=1),
    "depth-wise": nn.Conv2d(4, 8, 2, groups=4),
    "strided": nn.Conv2d(4, 3, (3, 2), stride=(2, 3), padding=(1, 2)),
    "dilated": nn.Conv2d(4, 3, 2, dilation=(2, 3), bias=False),
    "same": nn.Conv2d(4, 3, (2, 3), padding="same", dilation=2),
    "circular": nn.Conv2d(4, 3, 3, padding=(1, 2), padding_mode="circular"),
    "reflect": nn.Conv2d(4, 3, 3, padding=1, padding_mode="reflect"),
    "pointwise": nn.Conv2d(4, 3, 1),
    "1d": nn.Conv1d(4, 3, 3, stride=2, padding=1, groups=1),
    "3d": nn.Conv3d(4, 2, 2, stride=(1, 2, 1)),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("large", [True, False])
def test_convolutions(name: str, large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not large:  # every intermediate is too large to keep
        monkeypatch.setattr("diagnostics.curvature.formulas.LARGEST", 40)
    conv = CONVOLUTIONS[name].double()
    side = {"1d": (9,), "3d": (3, 3, 3)}.get(name, (5, 6))
    x = torch.randn(5, 4, *side)
    width = conv(x).flatten(1).shape[1]
    model = nn.Sequential(conv, nn.ReLU(), nn.Flatten(), nn.Linear(width, 3))
    check_exact(model, (x, torch.tensor([0, 1, 2, 0, 1])))


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("pixels", [True, False])
def test_gram_matrices_of_patches(
    name: str, pixels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "diagnostics.curvature.formulas.ADD", -1e9 if pixels else 1e9
    )  # which way costs less
    conv = CONVOLUTIONS[name].double()
    a = torch.randn(
        5, 4, *{"1d": (9,), "3d": (3, 3, 3)}.get(name, (5, 6)), dtype=torch.float64
    )
    patches, grid = patches_of(conv, a)
    grams = grams_of_patches(conv, a, patches, grid)
    assert ("pixels" in grams.of.__qualname__) == pixels
    for rows in (slice(0, 5), slice(2, 4)):
        torch.testing.assert_close(grams.of(rows), patches(rows).mT @ patches(rows))


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 6),
    st.integers(1, 6),
    st.integers(1, 12),
    st.integers(1, 9),
    st.booleans(),
)
def test_token_formula_is_the_norm_of_the_gradient(
    n: int, i: int, o: int, t: int, passes: int, bias: bool
) -> None:
    module = nn.Linear(i, o, bias=bias).double()
    a, delta = (
        torch.randn(n, t, i, dtype=torch.float64),
        torch.randn(n, t, o, dtype=torch.float64),
    )
    norms = norms_of(module, a, passes)
    assert norms is not None
    squares = norms(delta)
    gradients = delta.mT @ a
    torch.testing.assert_close(squares["weight"], gradients.square().sum((1, 2)))
    torch.testing.assert_close(squares["bias"], delta.sum(1).square().sum(1))


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)
@pytest.mark.parametrize("scale", [0.1, 3.0, 60.0])
def test_factors_of_the_output_hessian(loss: Loss, scale: float) -> None:
    logits, y = torch.randn(6, 3) * scale, torch.tensor([0, 1, 2, 0, 1, 2])
    s, signs = curvature_exact.factors(loss, logits, y)
    truth = torch.stack(
        [
            torch.autograd.functional.hessian(lambda z, t=t: loss(z[None], t[None]), z)
            for z, t in zip(logits, y, strict=True)
        ]
    )
    rebuilt = torch.einsum("nkc,nkd,nk->ncd", s, s, signs)
    torch.testing.assert_close(rebuilt, truth, rtol=1e-10, atol=1e-14)
    assert (
        s.shape[1] <= 2
    )  # a loss of softmax does not feel a shift: one direction of three is free


VERDICTS: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, Tensor], set[str]]] = {
    "gelu": (lambda: mlp(nn.GELU()), inputs(7, 4), {"4"}),
    "tanh": (lambda: mlp(nn.Tanh()), inputs(7, 4), {"4"}),
    "silu": (lambda: mlp(nn.SiLU()), inputs(7, 4), {"4"}),
    "gelu cnn": (lambda: conv_net(nn.GELU), inputs(*IMAGES), {"9"}),
    "linear before layer norm": (
        lambda: nn.Sequential(
            nn.Linear(4, 5), nn.LayerNorm(5), nn.ReLU(), nn.Linear(5, 3)
        ),
        inputs(7, 4),
        {"1", "3"},
    ),
    "rms norm": (
        lambda: nn.Sequential(
            nn.Linear(4, 5), nn.RMSNorm(5), nn.ReLU(), nn.Linear(5, 3)
        ),
        inputs(7, 4),
        {"1", "3"},
    ),
    "group norm": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3),
            nn.GroupNorm(2, 4),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(196, 3),
        ),
        inputs(*IMAGES),
        {"1", "4"},
    ),
    "attention": (attention, inputs(7, 5, tokens=6), {"v", "o", "head"}),
    "fused attention": (
        lambda: attention(fused=True),
        inputs(7, 5, tokens=6),
        {"v", "o", "head"},
    ),
    "module used twice": (lambda: tied("module"), inputs(7, 4), {"last"}),
    "weight used twice": (lambda: tied("weight"), inputs(7, 4), {"middle", "last"}),
    "used twice in parallel": (
        lambda: tied("parallel"),
        inputs(7, 4),
        {"middle", "last"},
    ),
    "product of branches": (gated, inputs(7, 4), {"a", "b", "head"}),
    "time first": (time_first, inputs(7, 5, 4), {"head"}),
    "as many steps as samples": (time_first, inputs(4, 4, 4), {"head"}),
    "recurrent": (recurrent, inputs(7, 4, 4), {"head"}),
    "weight normalisation": (
        lambda: nn.Sequential(
            nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
            nn.ReLU(),
            nn.Linear(4, 3),
        ),
        inputs(7, 4),
        {"0", "2"},  # of the normalised module, only the bias
    ),
}


COUPLED = {  # what cannot be treated sample by sample at a module's output
    "module used twice": {"first"},
    "weight used twice": {"first"},
    "used twice in parallel": {"first"},
    "time first": {"body"},
    "as many steps as samples": {"body"},
    "recurrent": {"lstm"},
    "weight normalisation": {"0.parametrizations.weight"},
}


@pytest.mark.parametrize("name", VERDICTS)
def test_only_these_layers_are_exact(name: str) -> None:
    build_model, data, exact = VERDICTS[name]
    model = build_model()
    layers = loose(model)
    results = measure(model, data, layers, probes=24)
    for layer, truth in zip(layers, dense(model.eval(), data, layers), strict=True):
        result = results[layer.name]
        if layer.name == "unused":
            assert result.status == "unused in the forward pass"
        elif layer.name in exact:
            assert (result.estimator, result.note) == ("exact", "")
            assert result.trace == pytest.approx(truth, rel=1e-10, abs=1e-14)
        else:
            how = "hutchinson" if layer.name in COUPLED.get(name, ()) else "activation"
            assert result.estimator == f"{how}(probes=24)"
            assert result.note
            assert result.stderr > 0
            assert abs(result.trace - truth) <= 4 * result.stderr


def test_a_layer_that_mixes_the_samples_of_a_batch() -> None:
    model, data = mixing(), inputs(7, 4)
    check_exact(model, data, {"head"}, batch=7, probes=64)


def test_batch_norm_in_train_mode() -> None:
    """Layers before the last batch statistics are not exact; that normalisation's own weights and the head are."""
    check_exact(
        Residual(norm=True),
        inputs(6, 2, 4, 4),
        {"norm", "head"},
        batch=6,
        mode="train",
        probes=64,
    )


def test_train_mode_is_the_mean_over_batches() -> None:
    model, (x, y) = Residual(norm=True), inputs(6, 2, 4, 4)
    layers = loose(model)
    results = measure(model, (x, y), layers, batch=3, mode="train", probes=64)
    model.train()
    halves = [
        dense(model, (x[part], y[part]), layers) for part in (slice(0, 3), slice(3, 6))
    ]
    for layer, first, second in zip(layers, *halves, strict=True):
        result = results[layer.name]
        truth = (first + second) / 2
        assert abs(result.trace - truth) <= (
            4 * result.stderr if result.stderr else 1e-10 * abs(truth)
        )


def test_the_numerical_check_alone_refuses_what_is_not_linear(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def all_linear(logits: Tensor, parameters: dict[str, Tensor]) -> dict[str, str]:
        return dict.fromkeys(parameters, "")

    monkeypatch.setattr(curvature_exact, "verdicts", all_linear)
    for name in (
        "gelu",
        "linear before layer norm",
        "attention",
        "module used twice",
        "product of branches",
    ):
        build_model, data, exact = VERDICTS[name]
        model = build_model()
        layers = tuple(
            layer for layer in loose(model) if layer.name != "unused"
        )  # which only the graph can tell
        results = measure(model, data, layers, probes=2)
        assert {name for name, r in results.items() if r.estimator == "exact"} == exact
    check_exact(
        Residual(norm=True),
        inputs(6, 2, 4, 4),
        {"norm", "head"},
        batch=6,
        mode="train",
        probes=64,
    )


@pytest.mark.parametrize("name", VERDICTS)
def test_the_graph_alone_refuses_what_is_not_linear(name: str) -> None:
    build_model, (x, _), exact = VERDICTS[name]
    model = build_model()
    with sdpa_kernel(SDPBackend.MATH):
        verdicts = curvature_exact.verdicts(model(x), dict(model.named_parameters()))
    linear = {
        layer.name
        for layer in loose(model)
        if layer.parameters[0] in verdicts
        and not any(verdicts[name] for name in layer.parameters)
    }
    assert linear == exact | (
        {"body"} if build_model is time_first else set()
    )  # linear, but without a formula


def test_layers_of_blocks_and_batches_do_not_matter() -> None:
    model, (x, y) = Residual(norm=True), inputs(7, 2, 4, 4)
    layers = layers_of(model, x[:2], by="block")
    assert len(layers) == 3
    truth = dense(model.eval(), (x, y), layers)
    loader = DataLoader(TensorDataset(x, y), batch_size=2)
    for data, batch in (((x, y), 1), ((x, y), 100), (loader, 3)):
        results = measure(model, data, layers, batch=batch)  # type: ignore[arg-type]
        assert [r.trace for r in results.values()] == pytest.approx(truth, rel=1e-10)
        assert [r.layer for r in results.values()] == [layer.name for layer in layers]


def test_hutchinson_on_request() -> None:
    model, data = conv_net(), inputs(*IMAGES)
    exact = measure(model, data)
    drawn = measure(model, data, estimator="hutchinson", probes=200)
    few = measure(model, data, estimator="hutchinson", probes=20)
    for name, truth in exact.items():
        assert drawn[name].estimator == "hutchinson(probes=200)"
        assert abs(drawn[name].trace - truth.trace) <= 4 * drawn[name].stderr
        assert 0 < drawn[name].stderr < few[name].stderr


def test_the_seed_and_nothing_else_decides_the_probes() -> None:
    model, data = mlp(nn.Tanh()), inputs(7, 4)
    layers = loose(model)
    first = measure(model, data, layers)
    torch.manual_seed(99)
    again = measure(model, data, layers)
    assert again == first
    assert measure(model, data, layers, seed=1)["0"].trace != first["0"].trace


def test_float32_agrees_with_float64() -> None:
    model, (x, y) = conv_net(), inputs(*IMAGES)
    truth = measure(model, (x, y))
    model, x = model.float(), x.float()
    for name, result in measure(model, (x, y)).items():
        assert result.estimator == "exact"
        assert result.trace == pytest.approx(truth[name].trace, rel=1e-5)
    wide = measure(model, (x, y), dtype=torch.float64)
    layers = loose(model)
    reference = dense(model.double(), (x.double(), y), layers)
    assert [wide[layer.name].trace for layer in layers] == pytest.approx(
        reference, rel=1e-10
    )


def test_per_parameter() -> None:
    result = measure(mlp(nn.Tanh()), inputs(7, 4))["0"]
    assert result.n_params == 25
    assert result.per_parameter == result.trace / 25
    assert result.stderr_per_parameter == result.stderr / 25


def test_frozen_parameters_are_measured() -> None:
    model, data = conv_net(), inputs(*IMAGES)
    free = measure(model, data)
    model.requires_grad_(False)
    assert measure(model, data) == free
    assert not any(p.requires_grad for p in model.parameters())


def test_dropout_in_train_mode_is_seeded() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))
    first = measure(model, inputs(7, 4), mode="train")
    torch.randn(3)
    assert measure(model, inputs(7, 4), mode="train") == first
    assert first["0"].estimator == "exact"
    assert first["0"].trace != measure(model, inputs(7, 4))["0"].trace


def test_unused_layers_have_no_value() -> None:
    model = attention()
    result = measure(model, inputs(4, 5, tokens=6))["unused"]
    assert result.status == "unused in the forward pass"
    assert math.isnan(result.trace)
    assert math.isnan(result.stderr)
    assert result.n_params == 8
    empty = measure(model, inputs(4, 5, tokens=6), (Layer("nothing", ()),))["nothing"]
    assert empty.status == "no parameters"
    assert empty.n_samples == 4


def test_exact_where_there_is_no_exact_value() -> None:
    results = measure(mlp(nn.GELU()), inputs(7, 4), estimator="exact")
    assert results["4"].status == "ok"
    assert results["0"].status.startswith("no exact value: 0.weight: Gelu ")
    assert math.isnan(results["0"].trace)


@pytest.mark.parametrize("spoil", ["parameter", "activation"])
def test_a_loss_that_is_not_finite_names_the_layer(spoil: str) -> None:
    model, (x, y) = mlp(nn.ReLU()), inputs(7, 4)
    with torch.no_grad():
        if spoil == "parameter":
            model.get_parameter("2.bias")[0] = torch.nan
        else:
            model.get_parameter("2.weight").fill_(1e308)
    results = measure(model, (x.abs() * 100, y))
    expected = {
        "parameter": "the loss is not finite: parameter '2.bias' of layer '2' holds NaN or infinity",
        "activation": "the loss is not finite: the output of layer '2' holds NaN or infinity",
    }[spoil]
    assert {r.status for r in results.values()} == {expected}
    assert all(math.isnan(r.trace) and r.n_samples == 7 for r in results.values())


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad


def test_no_second_derivative_is_a_status() -> None:
    model = nn.Sequential(
        nn.Linear(4, 4), nn.Tanh(), Wired(lambda m, x: Once.apply(x)), nn.Linear(4, 3)
    )
    results = measure(model, inputs(7, 4))
    assert results["0"].status.startswith("no second derivative: ")
    assert math.isnan(results["0"].trace)
    assert results["3"].estimator == "exact"


BAD: dict[str, tuple[Callable[..., object], str]] = {
    "estimator": (lambda m, d, n: measure(m, d, n, estimator="exakt"), "mean 'exact'"),
    "mode": (lambda m, d, n: measure(m, d, n, mode="training"), "mean 'train'"),
    "probes": (lambda m, d, n: measure(m, d, n, probes=1), "at least 2"),
    "layer": (
        lambda m, d, n: measure(m, d, (Layer("0", ("0.wieght",)),)),
        "mean '0.weight'",
    ),
    "labels": (lambda m, d, n: measure(m, (d[0], d[1] + 1), n), "from 0 to 2"),
    "float labels": (
        lambda m, d, n: measure(m, (d[0], d[1].double()), n),
        "class indices",
    ),
    "no data": (lambda m, d, n: measure(m, (d[0][:0], d[1][:0]), n), "samples"),
    "logits": (
        lambda m, d, n: measure(nn.Sequential(*m, nn.Flatten(0)), d),
        r"logits \[n, C\]",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_requests(name: str) -> None:
    request, message = BAD[name]
    model, data = mlp(nn.ReLU()), inputs(7, 4)
    before = state(model)
    with pytest.raises(UsageError, match=message):
        request(model, data, loose(model))
    assert state(model) == before


def state(model: nn.Module) -> object:
    return (
        [
            (m.training, len(m._forward_hooks), len(m._forward_pre_hooks))
            for m in model.modules()
        ],
        [
            (
                id(p),
                p.requires_grad,
                p.tolist(),
                p.grad if p.grad is None else p.grad.tolist(),
            )
            for p in model.parameters()
        ],
        [(id(b), b.tolist()) for b in model.buffers()],
        torch.get_rng_state().tolist(),
        torch.is_grad_enabled(),
        torch.backends.cudnn.enabled,
        torch.backends.mkldnn.enabled,
    )


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("mode", ["eval", "train"])
def test_nothing_is_left_behind(mode: str, raises: bool) -> None:
    model, (x, y) = Residual(norm=True), inputs(6, 2, 4, 4)
    model.train()
    model.norm.eval()
    model.get_parameter("stem.bias").requires_grad_(False)
    CE(model(x), y).backward()
    before = state(model)
    if raises:
        broken = [(x[:3], y[:3]), (x[3:, :1], y[3:])]
        with pytest.raises(RuntimeError):
            measure(model, broken, mode=mode)  # type: ignore[arg-type]
    else:
        with torch.no_grad():  # gradients are taken all the same
            measure(model, (x, y), mode=mode, probes=2)
    assert state(model) == before


@pytest.mark.parametrize("activation", [nn.ReLU, nn.GELU])
def test_no_tensor_outlives_the_call(activation: type[nn.Module]) -> None:
    """Without the garbage collector's help: nothing sits in a reference cycle."""
    model, data = conv_net(activation), inputs(*IMAGES)
    layers = loose(model)

    def alive() -> int:
        return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())

    measure(model, data, layers, probes=2)
    gc.collect()
    gc.disable()
    try:
        before = alive()
        measure(model, data, layers, probes=2)
        assert alive() == before
    finally:
        gc.enable()


def test_a_layer_that_takes_samples_one_by_one() -> None:
    """Its first input has no batch dimension, though it is as long as the batch has samples."""
    model = Wired(
        lambda m, x: torch.stack([m.fc(sample) for sample in x]), fc=nn.Linear(4, 3)
    ).double()
    data = torch.randn(4, 4, dtype=torch.float64), torch.arange(4) % 3
    (result,) = measure(model, data, batch=4).values()
    (truth,) = dense(model, data, loose(model))
    assert result.trace == pytest.approx(truth, abs=4 * result.stderr + 1e-9)


def test_a_part_that_runs_without_gradients() -> None:
    model = Wired(
        lambda m, x: m.head(torch.no_grad()(m.body)(x)),
        body=nn.Linear(4, 4),
        head=nn.Linear(4, 3),
    )
    results = measure(model, inputs(7, 4))
    assert results["body"].status == "unused in the forward pass"
    assert results["head"].estimator == "exact"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(
    "name", ["cnn, maxpool", "residual, batch norm", "attention", "recurrent"]
)
def test_on_a_gpu(name: str) -> None:
    build_model, (x, y) = (*EXACT.get(name, ()), *VERDICTS.get(name, ()))[:2]
    model = build_model()
    truth = measure(model, (x, y), probes=4)
    found = measure(model.cuda(), (x.cuda(), y.cuda()), probes=4)
    assert {n: (r.estimator, r.status) for n, r in found.items()} == {
        n: (r.estimator, r.status) for n, r in truth.items()
    }
    for layer, result in found.items():
        if result.status == "ok":
            assert result.trace == pytest.approx(truth[layer].trace, rel=1e-9)
