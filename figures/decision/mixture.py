"""Mixtures of the models of a race: one weight per arm for all clients, fitted on validation samples."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_core.errors import UsageError

Array = NDArray[np.float64]
GAP = 1e-6
"""Nats per sample by which fitted weights may lie below the best ones."""
MOST = 200_000
"""Steps of EM, at most. The gap is then at most log(arms) / steps."""


def fit_weights(logs: Any, weights: Any = None) -> Array:
    """Fit the weights of a mixture by EM to what its models give the true classes.

    The weights w maximise sum_n s_n log(sum_k w_k p_k(y_n | x_n)), which is concave. A step multiplies w_k by its
    derivative g_k = sum_n s_n p_k / sum_j w_j p_j (Dempster et al. 1977). No weights are better by more than
    max_k g_k - 1, so EM ends where that is at most :data:`GAP`.

    Args:
        logs: log-probabilities [K, n] that K models give the true classes of n samples.
        weights: of the samples, s [n], at least 0 with a positive sum; default all equal.

    Returns:
        The weights [K], at least 0 with sum 1.

    Raises:
        UsageError: no model, no sample, a NaN, or weights that do not fit.

    >>> fit_weights(np.log([[0.9, 0.8, 0.7], [0.1, 0.2, 0.3]])).round(3)
    array([1., 0.])
    """
    logs = np.asarray(logs, dtype=np.float64)
    if logs.ndim != 2 or not logs.size or np.isnan(logs).any():
        raise UsageError(f"log-probabilities must be numbers [models, samples]; got shape {logs.shape} or NaN.")
    given = np.ones(logs.shape[1]) if weights is None else np.asarray(weights, dtype=np.float64)
    if given.shape != logs.shape[1:] or not (given >= 0).all() or not given.sum() > 0:
        raise UsageError(f"sample weights must be {logs.shape[1]} numbers of at least 0; got {given}.")
    top = logs.max(axis=0)
    chances = np.exp(logs - np.where(np.isfinite(top), top, 0))[:, np.isfinite(top) & (given > 0)]
    counts = given[np.isfinite(top) & (given > 0)]  # a sample that every model excludes says nothing
    found = np.full(len(logs), 1 / len(logs))
    for _ in range(MOST if counts.size else 0):
        slopes = chances @ (counts / counts.sum() / (found @ chances))
        if slopes.max() - 1 <= GAP:
            break
        found = found * slopes
    return found / found.sum()


def mixed(logs: Any, weights: Any) -> Array:
    """Return the log-probabilities [n, C] of a mixture of models.

    Args:
        logs: of the models, [K, n, C]. weights: of the models, [K].

    >>> np.exp(mixed(np.log([[[0.9, 0.1]], [[0.5, 0.5]]]), [0.25, 0.75])).round(2)
    array([[0.6, 0.4]])
    """
    weights = np.asarray(weights, dtype=np.float64)
    used = weights > 0
    found: Array = np.logaddexp.reduce(np.asarray(logs)[used] + np.log(weights[used])[:, None, None], axis=0)
    return found
