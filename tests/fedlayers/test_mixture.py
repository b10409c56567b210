"""Mixtures of models: EM against a dense reference, the limits of one model, and the mixture of a race."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from scipy import optimize

from fedlayers.studies.mixture import GAP, fit_weights, mixture_log_probabilities
from fl_core.errors import UsageError


def drawn(seed: int, models: int, samples: int = 60):
    rng = np.random.default_rng(seed)
    return np.log(rng.beta(2, 1, (models, samples))), rng.uniform(0.2, 3, samples)


def objective(weights, logs, counts) -> float:
    return float(np.average(np.log(weights @ np.exp(logs)), weights=counts))


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 5))
def test_no_direction_of_the_simplex_improves_the_fitted_weights(seed, models):
    logs, counts = drawn(seed, models)
    found = fit_weights(logs, counts)
    assert found.sum() == pytest.approx(1)
    assert (found >= 0).all()
    slopes = np.exp(logs) @ (counts / counts.sum() / (found @ np.exp(logs)))
    assert slopes.max() <= 1 + 2 * GAP  # concave, so this bounds the gap to the best weights
    other = np.random.default_rng(seed + 1).dirichlet(np.ones(models), 50)
    assert max(objective(each, logs, counts) for each in other) <= objective(found, logs, counts) + GAP


def test_em_finds_what_a_dense_solver_finds():
    logs, counts = drawn(3, 3)
    reference = optimize.minimize(
        lambda w: -objective(w, logs, counts), np.full(3, 1 / 3), bounds=[(0, 1)] * 3, method="SLSQP",
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1}, options={"ftol": 1e-14, "maxiter": 1000},
    )  # fmt: skip
    assert objective(fit_weights(logs, counts), logs, counts) == pytest.approx(-reference.fun, abs=GAP)


def test_a_weight_counts_as_repeated_samples():
    logs, _ = drawn(4, 3, 20)
    counts = np.arange(1, 21)
    np.testing.assert_allclose(fit_weights(logs, counts), fit_weights(np.repeat(logs, counts, axis=1)), atol=1e-6)


def test_one_model_s_mixture_is_that_model_also_far_from_probability_one():
    logs = np.log(np.random.default_rng(0).dirichlet(np.ones(4), (3, 7))) - 900
    assert np.array_equal(mixture_log_probabilities(logs[:1], fit_weights(logs[:1, :, 0])), logs[0])
    assert np.array_equal(mixture_log_probabilities(logs, [0, 1, 0]), logs[1])
    assert fit_weights(logs[:, :, 0]).sum() == pytest.approx(1)


def test_mixed_probabilities_are_weighted_means():
    probabilities = np.random.default_rng(1).dirichlet(np.ones(4), (3, 7))
    weights = np.array([0.2, 0.3, 0.5])
    expected = np.tensordot(weights, probabilities, axes=1)
    np.testing.assert_allclose(np.exp(mixture_log_probabilities(np.log(probabilities), weights)), expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("logs", "weights"),
    [
        (np.zeros((0, 3)), None),
        (np.full((2, 3), np.nan), None),
        (np.zeros((2, 3)), [1, 2]),
        (np.zeros((2, 3)), [0] * 3),
    ],
)
def test_what_cannot_be_fitted_is_refused(logs, weights):
    with pytest.raises(UsageError, match="must be"):
        fit_weights(logs, weights)
