"""Sampled Hessian traces: their means against dense blocks, their stated errors against repeats, other packages."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from diagnostics.curvature.formulas import draw_of
from diagnostics.curvature.trace import TraceResult, hessian_trace
from diagnostics.measure import diagnose
from fl_core.errors import UsageError
from fl_core.layers import Layer
from fl_core.training.losses import Loss, build
from tests.networks import Wired

CE, FOCAL = build("cross_entropy"), build("player_focal")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def pair(*shape: int, classes: int = 3, tokens: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(7)
    x = (
        torch.randint(tokens, shape, generator=g)
        if tokens
        else torch.randn(*shape, generator=g, dtype=torch.float64)
    )
    return x, torch.randint(classes, shape[:1], generator=g)


def mlp(activation: type[nn.Module] = nn.ReLU, classes: int = 3) -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, 6),
        activation(),
        nn.Linear(6, 5),
        activation(),
        nn.Linear(5, classes),
    ).double()


def images(activation: type[nn.Module] = nn.GELU) -> nn.Module:
    """A long output grid, then a short one; grouped; a normalisation between."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 2, padding=1),
        nn.GroupNorm(2, 4),
        activation(),
        nn.Conv2d(4, 4, 3, stride=2, groups=2),
        activation(),
        nn.Flatten(),
        nn.Linear(16, 3),
    ).double()


def tokens() -> nn.Module:
    """Embedding with a padding row, layer norm, products over few and over many tokens, softmax attention."""

    def run(m: Any, given: Tensor) -> Tensor:
        x = m.norm(m.embed(given))
        return m.head(F.gelu(m.wide((m.mix(x) @ x.mT).softmax(-1) @ x)).mean(1))

    parts = {
        "embed": nn.Embedding(5, 3, padding_idx=0),
        "norm": nn.LayerNorm(3),
        "mix": nn.Linear(3, 3),
    }
    return Wired(run, **parts, wide=nn.Linear(3, 8), head=nn.Linear(8, 3)).double()


def loose(model: nn.Module) -> list[Layer]:
    names = [name for name, _ in model.named_parameters()]
    owners = dict.fromkeys(name.rpartition(".")[0] for name in names)
    return [
        Layer(o, tuple(n for n in names if n.rpartition(".")[0] == o), output=o)
        for o in owners
    ]


def block(
    model: nn.Module,
    data: tuple[Tensor, Tensor],
    names: tuple[str, ...],
    loss: Loss = CE,
) -> Tensor:
    """The dense Hessian block of the mean loss in the named parameters together."""
    x, y = data
    own = {n: p.detach() for n, p in model.named_parameters()}
    flat = torch.cat([own[n].reshape(-1) for n in names])

    def of(vector: Tensor) -> Tensor:
        parts = vector.split([own[n].numel() for n in names])
        new = {
            n: part.reshape(own[n].shape) for n, part in zip(names, parts, strict=True)
        }
        return loss(functional_call(model, {**own, **new}, (x,)), y)

    return torch.autograd.functional.hessian(of, flat)


def measure(
    model: nn.Module, data: object, layers: list[Layer] | None = None, **how: object
) -> dict[str, TraceResult]:
    results = hessian_trace(
        model, data, layers or loose(model), **{"loss": CE, "batch": 4, **how}
    )  # type: ignore[arg-type]
    return {result.layer: result for result in results}


def repeats(
    model: nn.Module, data: object, times: int, **how: object
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    runs = [
        measure(model, data, seed=seed, batch=1000, estimator="fast", **how)
        for seed in range(times)
    ]
    return {
        name: (
            np.array([r[name].trace for r in runs]),
            np.array([r[name].stderr for r in runs]),
        )
        for name in runs[0]
    }


@pytest.mark.parametrize(
    ("loss", "probes"),
    [(CE, 1), (FOCAL, 2)],
    ids=["cross_entropy, 1", "player_focal, 2"],
)
def test_fast_is_unbiased_and_its_error_is_what_it_says(
    loss: Loss, probes: int
) -> None:
    model, data = mlp(classes=5), pair(150, 4, classes=5)
    with torch.no_grad():
        model.get_parameter("4.weight").mul_(
            4
        )  # some samples confidently wrong: the focal loss is indefinite there
    truth, times = measure(model, data, loss=loss), 60
    for name, (values, errors) in repeats(
        model, data, times, loss=loss, probes=probes
    ).items():
        if loss is FOCAL and name == "4":
            assert (
                np.ptp(values) < 1e-12
            )  # eigenvectors stay orthogonal through the last layer: nothing is left to chance
            continue
        exact = truth[name].trace
        spread = values.std(ddof=1)
        assert abs(values.mean() - exact) <= 4 * spread / math.sqrt(times) + 1e-12
        covered = np.mean(np.abs(values - exact) <= 1.96 * errors)
        if probes == 1:
            assert np.sqrt(np.mean(errors**2)) >= 0.95 * spread
            assert covered >= 0.95
        else:
            assert np.sqrt(np.mean(errors**2)) == pytest.approx(spread, rel=0.3)
            assert (
                0.95 - 4 * 0.0281 <= covered <= 1.0
            )  # 0.0281: the standard error of a share over 60 repeats


def test_fast_says_what_it_is() -> None:
    one, two = (
        measure(mlp(), pair(20, 4), estimator="fast", probes=p)["0"] for p in (None, 2)
    )
    assert (one.estimator, two.estimator) == (
        "rademacher(probes=1), bound",
        "rademacher(probes=2)",
    )
    assert one.note == two.note == "as asked"
    bent = measure(mlp(nn.GELU), pair(20, 4), estimator="fast")
    assert (
        bent["0"].estimator == "activation(probes=32)"
    )  # not the one probe of the fast estimate
    assert "Gelu" in bent["0"].note
    assert bent["4"].estimator == "rademacher(probes=1), bound"


def test_fast_is_exact_for_two_classes() -> None:
    x, y = pair(12, 4, classes=2)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2)).double()
    exact, fast = measure(model, (x, y)), measure(model, (x, y), estimator="fast")
    for name, result in fast.items():
        assert result.trace == pytest.approx(exact[name].trace, rel=1e-12)
        assert result.stderr == 0


SMOOTH: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, Tensor]]] = {
    "mlp": (lambda: mlp(nn.GELU), pair(9, 4)),
    "silu in place": (
        lambda: nn.Sequential(
            nn.Linear(4, 6), nn.SiLU(inplace=True), nn.Linear(6, 3)
        ).double(),
        pair(9, 4),
    ),
    "images": (images, pair(9, 2, 5, 5)),
    "tokens, many": (tokens, pair(9, 6, tokens=5)),
    "tokens, few": (tokens, pair(9, 2, tokens=5)),
}


@pytest.mark.parametrize("name", SMOOTH)
@pytest.mark.parametrize(
    "loss",
    [pytest.param(CE, marks=pytest.mark.slow), FOCAL],
    ids=["cross_entropy", "player_focal"],
)
def test_activation_against_dense_blocks(name: str, loss: Loss) -> None:
    build_model, data = SMOOTH[name]
    model = build_model()
    for layer in loose(model):
        result = measure(
            model, data, [layer], loss=loss, estimator="activation", probes=60, batch=5
        )[layer.name]
        assert result.estimator == "activation(probes=60)"
        truth = float(block(model, data, layer.parameters, loss).trace())
        assert abs(result.trace - truth) <= 4 * result.stderr
        assert result.stderr <= 0.3 * abs(truth) + 0.15


MODULES: dict[str, tuple[nn.Module, Tensor]] = {
    "linear": (nn.Linear(3, 2), torch.randn(3, 3)),
    "few tokens": (nn.Linear(4, 2), torch.randn(3, 2, 4)),
    "many tokens": (nn.Linear(2, 2), torch.randn(3, 2, 2, 2)),
    "long grid": (nn.Conv2d(1, 2, 2), torch.randn(3, 1, 4, 4)),
    "short grid": (nn.Conv2d(4, 4, 2, groups=2, stride=2), torch.randn(3, 4, 4, 4)),
    "layer norm": (nn.LayerNorm(3), torch.randn(3, 2, 3)),
    "group norm": (nn.GroupNorm(1, 2), torch.randn(3, 2, 3)),
    "batch norm": (nn.BatchNorm1d(2).eval(), torch.randn(3, 2, 3)),
}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize(
    "which",
    [("weight", "bias"), pytest.param(("weight",), marks=pytest.mark.slow), ("bias",)],
)
def test_draws_have_the_covariance_of_the_jacobian(
    name: str, which: tuple[str, ...]
) -> None:
    module, a = MODULES[name]
    module, a = module.double(), a.double()
    size = module(a)[0].numel()
    truth = torch.zeros(len(a), size, size, dtype=torch.float64)
    own = {k: p.detach() for k, p in module.named_parameters()}
    for n in range(len(a)):
        for k in which:
            jacobian = torch.autograd.functional.jacobian(
                lambda p, k=k, n=n: functional_call(
                    module, {**own, k: p}, (a[n : n + 1],)
                ).reshape(-1),
                own[k],
            ).reshape(size, -1)
            truth[n] += jacobian @ jacobian.T
    draw, generator = (
        draw_of(module, a, "weight" in which, "bias" in which),
        torch.Generator().manual_seed(1),
    )
    times = 1000
    u = torch.stack([draw(generator).reshape(len(a), size) for _ in range(times)])
    assert u.shape == (times, len(a), size)
    found = torch.einsum("tni,tnj->nij", u, u) / times
    error = (found - truth).abs() / truth.diagonal(dim1=1, dim2=2).amax().clamp_min(
        1e-9
    )
    assert float(error.max()) <= 6 * math.sqrt(2 / times)
    assert float((u.mean(0) ** 2).max()) <= 30 * float(truth.max()) / times


@pytest.mark.parametrize("estimator", ["activation", "hutchinson"])
def test_one_product_of_all_layers_has_the_error_that_it_states(estimator: str) -> None:
    model, data = mlp(nn.Tanh), pair(20, 4)
    model.get_parameter("4.weight").data.mul_(30)  # so that the layers' traces differ
    how: dict[str, Any] = {"estimator": estimator, "probes": 4}
    found = [measure(model, data, seed=seed, **how) for seed in range(60)]
    for layer in loose(model):
        truth = float(block(model, data, layer.parameters).trace())
        values = np.array([each[layer.name].trace for each in found])
        stated = np.sqrt(np.mean([each[layer.name].stderr ** 2 for each in found]))
        assert abs(values.mean() - truth) <= 4 * values.std() / math.sqrt(60)
        assert 0.7 <= stated / values.std() <= 1.4


def test_activation_where_samples_mix_has_no_value() -> None:
    model = nn.Sequential(
        nn.Linear(4, 5), nn.BatchNorm1d(5), nn.GELU(), nn.Linear(5, 3)
    ).double()
    results = measure(model, pair(8, 4), mode="train", estimator="activation")
    assert "batch normalisation" in results["0"].status
    assert results["1"].status == results["3"].status == "ok"
    auto = measure(model, pair(8, 4), mode="train")
    assert auto["0"].estimator == "hutchinson(probes=32)"
    assert auto["1"].estimator == "activation(probes=32)"
    assert measure(model, pair(8, 4))["0"].estimator == "activation(probes=32)"
    alone = measure(mlp(nn.GELU), pair(1, 4))["0"]
    assert alone.estimator == "hutchinson(probes=32)"
    assert "one sample" in alone.note


def test_rows_say_why_they_are_not_exact() -> None:
    x, y = pair(8, 4)
    frame = diagnose(
        mlp(nn.GELU).float(), (x.float(), y), "hessian_trace", progress=False
    ).frame
    said = dict(zip(frame["layer"], frame["estimator"], strict=True))
    assert said["0"].startswith("activation(probes=32); not exact: 0.weight: Gelu ")
    assert said["4"] == "exact"


def test_pyhessian_agrees() -> None:
    model, data = mlp(nn.Tanh), pair(10, 4)
    results = measure(model, data, backend="pyhessian", probes=60, batch=6)
    for layer in loose(model):
        result = results[layer.name]
        truth = float(block(model, data, layer.parameters).trace())
        assert result.estimator == "pyhessian(probes=60)"
        assert abs(result.trace - truth) <= 4 * result.stderr
        assert result.stderr > 0


def test_pyhessian_does_not_stop_early_on_a_negative_trace() -> None:
    """Its own rule would stop after two probes."""
    model = nn.Sequential(nn.Linear(1, 1), nn.Tanh(), nn.Linear(1, 2)).double()
    with torch.no_grad():
        for name, value in (
            ("0.weight", 1.0),
            ("0.bias", -0.5),
            ("2.weight", 0.0),
            ("2.bias", 0.0),
        ):
            model.get_parameter(name).fill_(value)
        model.get_parameter("2.weight")[0] = 1.0
    data = (
        torch.full((4, 1), 1.0, dtype=torch.float64),
        torch.ones(4, dtype=torch.int64),
    )
    layer = Layer("0", ("0.weight", "0.bias"))
    truth = float(block(model, data, layer.parameters).trace())
    assert truth < 0
    result = measure(model, data, [layer], backend="pyhessian", probes=400)["0"]
    assert abs(result.trace - truth) <= 4 * result.stderr
    assert 0 < result.stderr < 0.1 * abs(truth)


def test_what_pyhessian_cannot_do_is_refused() -> None:
    backend = "pyhessian"
    with pytest.raises(UsageError, match=r"mode .*'eval'"):
        measure(mlp(), pair(4, 4), backend=backend, mode="train")
    with pytest.raises(UsageError, match="weight-space"):
        measure(mlp(), pair(4, 4), backend=backend, estimator="exact")
    with pytest.raises(UsageError, match="mean 'pyhessian'"):
        measure(mlp(), pair(4, 4), backend="pyhesian")
    unused = nn.Sequential(mlp(), nn.Identity())
    unused[1].extra = nn.Linear(2, 2)
    results = measure(unused.double(), pair(4, 4), backend=backend, probes=2)
    assert results["1.extra"].status == "unused in the forward pass"
    assert results["0.0"].status == "ok"


def test_pyhessian_s_reference_cycle_is_broken() -> None:
    model, data = mlp().train(), pair(6, 4)
    model.get_parameter("0.bias").grad = torch.ones(6, dtype=torch.float64)

    def alive() -> int:
        return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())

    measure(model, data, backend="pyhessian", probes=2)
    gc.collect()
    before = alive()
    for _ in range(3):
        measure(model, data, backend="pyhessian", probes=2)
    gc.collect()
    assert alive() == before
    assert model.training
    assert model.get_parameter("0.bias").grad.tolist() == [1.0] * 6  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("own", "computed"),
    [(torch.float32, torch.float64), (torch.float64, torch.float32)],
    ids=str,
)
def test_batch_norm_is_measured_in_another_type_than_the_model_s(
    own: torch.dtype, computed: torch.dtype
) -> None:
    model = (
        nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.GELU(), nn.Linear(5, 3))
        .to(own)
        .eval()
    )
    model[1].running_mean.normal_()
    model[1].running_var.uniform_(0.5, 2)
    x, y = pair(9, 4)
    found = measure(model, (x.to(own), y), dtype=computed, probes=60)
    double = model.double()
    for layer in loose(double):
        truth = float(block(double, (x.to(own).double(), y), layer.parameters).trace())
        assert (
            abs(found[layer.name].trace - truth) <= 4 * found[layer.name].stderr + 1e-5
        )
        assert found[layer.name].status == "ok"
    assert found["1"].estimator == "activation(probes=60)"


@pytest.mark.parametrize("estimator", ["auto", "fast", "activation"])
def test_a_model_of_a_single_module(estimator: str) -> None:
    model, (x, y) = nn.Linear(4, 3), pair(9, 4)
    options = {
        "hessian_trace": {
            "estimator": estimator,
            **({"probes": 60} if estimator == "activation" else {}),
        }
    }
    frame = diagnose(
        model, (x.float(), y), "hessian_trace", options=options, progress=False
    ).frame
    row = frame[frame["variant"] == "per_parameter"].iloc[0]
    truth = float(
        block(model.double(), (x.float().double(), y), ("weight", "bias"))
        .diagonal()
        .mean()
    )
    begins = {
        "auto": "exact",
        "fast": "rademacher",
        "activation": "activation(probes=60)",
    }
    assert row.estimator.startswith(begins[estimator])
    assert abs(row.value - truth) <= 4 * row.stderr + 1e-5
