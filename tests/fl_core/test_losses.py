import math
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fl_core import config
from fl_core.rows import CLASSIFICATION
from fl_core.training import losses
from fl_core.training.border import FittedLoss
from tests.conftest import refuses

ALPHA = [0.13, 0.18, 0.22, 0.22, 0.25]
BUILT = [
    losses.build("cross_entropy"),
    losses.build("focal"),
    losses.build("focal", gamma=0.5, alpha=ALPHA),
    losses.build("player_focal"),
    losses.build("player_focal", gamma=1, alpha=ALPHA),
    losses.ClassWeighted(losses.build("cross_entropy"), tuple(ALPHA)),
    losses.ClassWeighted(losses.build("focal"), tuple(ALPHA)),
]
ONE_OUTPUT = {
    losses.build("bce"): lambda z, y: math.log(1 + math.exp(z if y == 0 else -z)),
    losses.build("mse"): lambda z, y: (z - y) ** 2,
    losses.build("mae"): lambda z, y: abs(z - y),
    losses.build("huber", delta=0.7): lambda z, y: (
        (z - y) ** 2 / 2 if abs(z - y) <= 0.7 else 0.7 * (abs(z - y) - 0.35)
    ),
    losses.ClassWeighted(losses.build("bce"), (0.4, 3.0)): lambda z, y: (
        (0.4, 3.0)[int(y)] * math.log1p(math.exp(z if y == 0 else -z))
    ),
}
each_loss = pytest.mark.parametrize("loss", BUILT, ids=str)


def batch(n=7, n_classes=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = 2.0 * torch.randn(n, n_classes, generator=generator, dtype=torch.float64)
    return logits, torch.randint(n_classes, (n,), generator=generator)


def naive(loss, logits, y):
    """Straight from the formulas, one sample and one class at a time, through the probabilities."""
    if isinstance(loss, losses.ClassWeighted):
        return torch.tensor(loss.weights, dtype=torch.float64)[y] * naive(
            loss.base, logits, y
        )
    result = []
    for z, label in zip(logits.numpy(), y.tolist(), strict=True):
        p = np.exp(z) / np.exp(z).sum()
        n_classes = len(p)
        ce = -math.log(p[label])
        if loss.name == "cross_entropy":
            result.append(ce)
            continue
        alpha = (
            loss.alpha if isinstance(loss.alpha, tuple) else (loss.alpha,) * n_classes
        )
        if loss.name == "focal":
            result.append(alpha[label] * (1 - p[label]) ** loss.gamma * ce)
            continue
        total = 0.0
        for j in range(n_classes):
            p_t = p[j] if j == label else 1 - p[j]
            a_t = alpha[j] if j == label else 1 - alpha[j]
            total += a_t * (1 - p_t) ** loss.gamma * ce
        result.append(10 * total / n_classes)
    return torch.tensor(result, dtype=torch.float64)


@each_loss
def test_equals_its_formula(loss):
    logits, y = batch()
    expected = naive(loss, logits, y)
    torch.testing.assert_close(
        loss.per_sample(logits, y), expected, rtol=1e-12, atol=1e-14
    )
    torch.testing.assert_close(loss(logits, y), expected.mean(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("loss", ONE_OUTPUT, ids=str)
def test_a_loss_of_one_output_equals_its_formula(loss):
    """Its value, type and derivative, and what it says of the logits of two classes."""
    z, labels = batch(n=40, n_classes=1)[0], batch(n=40, n_classes=2)[1]
    y = (
        labels
        if loss.task == CLASSIFICATION
        else batch(n=40, n_classes=1, seed=1)[0][:, 0].float()
    )
    formula = ONE_OUTPUT[loss]
    expected = torch.tensor(
        [formula(a, b) for a, b in zip(z[:, 0].tolist(), y.tolist(), strict=True)]
    ).double()
    torch.testing.assert_close(loss.per_sample(z, y), expected, rtol=1e-6, atol=1e-7)
    assert loss.per_sample(z.float(), y).dtype == torch.float32
    assert loss(z, y) == loss.per_sample(z, y).mean()
    assert torch.autograd.gradcheck(
        lambda outputs: loss.per_sample(outputs, y), z.clone().requires_grad_()
    )
    assert pickle.loads(pickle.dumps(loss)) == loss
    assert loss.outputs(2) == 1
    if loss.name == "bce":
        torch.testing.assert_close(
            F.cross_entropy(loss.logits(z), y, reduction="none"), loss.per_sample(z, y)
        )


@pytest.mark.parametrize("name", ["mse", "mae", "huber"])
@pytest.mark.parametrize("spread", [0.0, 250.0])
def test_no_constant_has_less_loss_than_the_base_rate(name, spread):
    """It has the least loss among all targets and a dense grid, in their unit, and for one target it is that."""
    loss = losses.build(name)
    y = torch.tensor(np.random.default_rng(0).exponential(3, 40) ** 2 - 5)
    if spread:
        y = y * spread + 1000
        loss = losses.Standardised(loss, float(y.mean()), spread)
    constant = loss.base_rate(y)
    assert (constant.dtype, constant.shape) == (torch.float64, (1,))
    own = loss.of_logits()
    grid = torch.cat([y, torch.linspace(float(y.min()), float(y.max()), 2001).double()])
    least = min(float(own(z.expand(40, 1), y)) for z in grid)
    assert float(own(constant.expand(40, 1), y)) <= least * (1 + 1e-9)
    assert float(loss.base_rate(y[:1])) == pytest.approx(float(y[0]))


SKEWED = torch.tensor(np.random.default_rng(1).exponential((1, 10, 300), (61, 3)))
SHARES = torch.tensor(np.random.default_rng(2).dirichlet((1, 2, 9), 61))
BEST_CONSTANTS = {
    "mse": (torch.nn.MSELoss(), SKEWED, SKEWED.mean(0)),
    "l1": (torch.nn.L1Loss(), SKEWED - 90, SKEWED.median(0).values - 90),
    "sum": (torch.nn.L1Loss(reduction="sum"), SKEWED, SKEWED.median(0).values),
    "kinks": (torch.nn.SmoothL1Loss(beta=0), SKEWED, SKEWED.median(0).values),
    "mae": (losses.build("mae"), SKEWED, SKEWED.median(0).values),
    "quantile": (
        lambda z, y: torch.maximum(0.9 * (y - z), 0.1 * (z - y)).mean(1),
        SKEWED,
        SKEWED.quantile(0.9, dim=0),
    ),
    "bce": (torch.nn.BCEWithLogitsLoss(), SHARES, SHARES.mean(0).logit()),
    "soft": (torch.nn.CrossEntropyLoss(), SHARES, SHARES.mean(0).log()),
    "log rates": (torch.nn.PoissonNLLLoss(), SKEWED, SKEWED.mean(0).log()),
    "rates": (torch.nn.PoissonNLLLoss(log_input=False), SKEWED, SKEWED.mean(0)),
}
"""Losses of three outputs, with targets [61, 3] and the outputs of least loss."""


@pytest.mark.parametrize("name", BEST_CONSTANTS)
def test_no_constant_has_less_of_a_fitted_loss_than_the_base_rate(name):
    base, y, best = BEST_CONSTANTS[name]
    loss = FittedLoss(base, (3,))
    constant = loss.base_rate(y)
    assert (constant.dtype, constant.shape) == (torch.float64, (3,))
    least = float(loss(best.expand(61, -1), y))
    excess = float(loss(constant.expand(61, -1), y)) - least
    assert excess <= 1e-7 * max(1, abs(least))


@pytest.mark.parametrize("log", [False, True])
def test_the_base_rate_of_divergence_is_the_smoothed_shares(log):
    """Its loss alone has no least value: it falls without end as outputs grow."""
    loss = FittedLoss(torch.nn.KLDivLoss(reduction="sum", log_target=log), (3,))
    constant = loss.base_rate(SHARES.log() if log else SHARES)
    expected = ((SHARES.sum(0) + 1) / (61 + 3)).log()
    torch.testing.assert_close(constant, expected)


@each_loss
def test_first_and_second_derivatives(loss):
    logits, y = batch(n=3)
    logits.requires_grad_()
    assert torch.autograd.gradcheck(lambda z: loss.per_sample(z, y), logits)
    assert torch.autograd.gradgradcheck(lambda z: loss.per_sample(z, y), logits)


@each_loss
@pytest.mark.parametrize("gap", [0.0, 20.0, 40.0, 90.0, 1e4])
@pytest.mark.parametrize("sure_of", ["label", "another"])
def test_derivatives_stay_finite_at_sure_predictions(loss, gap, sure_of):
    logits = torch.zeros(1, 5)
    logits[0, 2] = gap
    y = torch.tensor([2 if sure_of == "label" else 0])
    gradient = torch.func.grad(lambda z: loss(z[None], y))(logits[0])
    hessian = torch.func.hessian(lambda z: loss(z[None], y))(logits[0])
    assert torch.isfinite(gradient).all()
    assert torch.isfinite(hessian).all()
    exact = torch.func.grad(lambda z: loss(z[None], y))(logits[0].double())
    # torch's cross-entropy rounds p_y - 1; the focal losses keep their digits however small the gradient is
    scale = 1.0 if "cross_entropy" in loss.name else float(exact.abs().max())
    torch.testing.assert_close(
        gradient.double(), exact, rtol=1e-5, atol=1e-37 + 1e-5 * scale
    )


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("cros_entropy", {}, "'cross_entropy'"),
        ("cross_entropy", {"gamma": 2}, "options.*'gamma'"),
        ("focal", {"gamma": -1}, "^focal: gamma.*-1"),
        ("focal", {"gamma": math.inf}, "finite"),
        ("focal", {"alpha": [0.5, math.nan]}, "alpha.*nan"),
        ("player_focal", {"alpha": [0.5, 1.5]}, r"alpha.*1\.5"),
        ("player_focal", {"alpha": [0.5, 0.5], "n_classes": 3}, "3 classes.*2"),
        ("bce", {"n_classes": 3}, "3 classes.*'bce'"),
        ("bce", {"n_classes": 2, "task": "survival"}, "survival.*'bce'"),
        ("focal", {"n_classes": 0}, "mse.*'focal'"),
        ("mse", {"n_classes": 2}, "cross_entropy.*'mse'"),
        ("huber", {"delta": 0.0}, "^huber: delta.*above 0"),
        ("huber", {"delta": None}, "delta.*none"),
    ],
)
def test_bad_requests_are_named(name, options, says):
    data = {key: options.pop(key) for key in ("n_classes", "task") if key in options}
    with refuses(says):
        losses.build(name, **options).check(**data)


def test_every_loss_is_tested():
    tested = {
        loss.name
        for loss in (*BUILT, *ONE_OUTPUT)
        if not isinstance(loss, losses.ClassWeighted)
    }
    # those two have tests in test_survival_and_labels
    assert (
        tested | {"cox", "multilabel_bce"} == set(losses.LOSSES) == set(config.LOSSES)
    )


def test_class_weights_that_do_not_fit_are_named():
    for name, weights, n_classes, says in (
        ("cross_entropy", (1.0, 2.0), 3, "3 classes.*2"),
        ("cross_entropy", (1.0, 0.0), 2, r"class_weights.*0\.0"),
        ("mse", (1.0, 2.0), 0, "class_weights.*'mse'"),
    ):
        with refuses(says):
            losses.ClassWeighted(losses.build(name), weights).check(n_classes)


@pytest.mark.parametrize(
    "loss",
    [
        losses.build("bce"),
        losses.ClassWeighted(losses.build("bce"), (0.4, 3.0)),
        losses.ClassWeighted(losses.build("cross_entropy"), (0.4, 3.0)),
    ],
    ids=str,
)
def test_the_loss_of_logits_is_the_loss_of_outputs(loss):
    outputs = batch(n=9, n_classes=loss.outputs(2))[0]
    y = batch(n=9, n_classes=2)[1]
    torch.testing.assert_close(
        loss.of_logits().per_sample(loss.logits(outputs), y),
        loss.per_sample(outputs, y),
    )
