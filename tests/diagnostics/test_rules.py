"""The bootstrap of decisions against every resample written out."""

import math
from collections import Counter
from itertools import product

import numpy as np
from scipy.stats import binom, norm

from diagnostics.curve import curve_of, stability
from diagnostics.select import RULES, sensitivity_ratio
from examples.rules.knee import knee
from fl_core.layers import Layer
from fl_core.rows import frame, row

LAYERS = tuple(
    Layer(name, (f"{name}.weight",), (), name) for name in ("l1", "l2", "l3", "l4")
)
N = 4000


def curve(clients, stderr=None, weights=None):
    lines = [
        row(
            "m",
            v,
            client=c,
            layer=layer.name,
            n_train=(weights or {}).get(c, 1),
            stderr=(stderr or {}).get(c),
        )
        for c, values in clients.items()
        for layer, v in zip(LAYERS, values, strict=True)
    ]
    return curve_of(LAYERS, frame(lines), "m")


def pair_curve(pairs):
    lines = [
        row("m", 1 - v, client=a, client_b=b, layer=layer.name)
        for (a, b), values in pairs.items()
        for layer, v in zip(LAYERS, values, strict=True)
    ]
    return curve_of(LAYERS, frame(lines), "m")


def likely(share, probability):
    """Whether a share of N draws may come of this probability (within one in a million)."""
    low, high = binom.interval(1 - 1e-6, N, probability)
    return low <= round(share * N) <= high


def shares(clients, decide):
    """Probability of each decision over all equally likely draws of the clients."""
    decisions = Counter(decide(draw) for draw in product(clients, repeat=len(clients)))
    return {
        cut: count / len(clients) ** len(clients) for cut, count in decisions.items()
    }


def test_resamples_of_clients_against_all_draws():
    clients = {
        "a": [1.0, 1.1, 1.2, 4.0],
        "b": [1.0, 1.5, 2.0, 3.0],
        "c": [1.0, 1.0, 1.9, 3.5],
    }
    weights = {"a": 10, "b": 30, "c": 5}

    def decide(draw):
        v = np.average(
            [clients[c] for c in draw], axis=0, weights=[weights[c] for c in draw]
        )
        return sensitivity_ratio(v.tolist(), 1.3)

    expected = shares(clients, decide)
    assert len(expected) == 3
    result = stability(
        curve(clients, weights=weights),
        RULES["sensitivity_ratio"].cut,
        1.3,
        1,
        seed=5,
        resamples=N,
    )
    assert (result["status"], result["of"], result["undecided"]) == ("ok", "clients", 0)
    assert set(result["cuts"]) == {LAYERS[cut - 1].name for cut in expected}
    for cut, probability in expected.items():
        assert likely(result["cuts"][LAYERS[cut - 1].name], probability)
    assert result["agreement"] == result["cuts"]["l1"]


def test_resamples_of_pairs_against_all_draws():
    pairs = {
        ("a", "b"): [0.1, 0.5, 0.6, 0.7],
        ("a", "c"): [0.1, 0.1, 0.6, 0.7],
        ("b", "c"): [0.1, 0.12, 0.13, 0.7],
    }

    def decide(draw):
        pair_values = [
            pairs.get((a, b), pairs.get((b, a)))
            for k, a in enumerate(draw)
            for b in draw[k + 1 :]
            if a != b
        ]
        return knee(np.mean(pair_values, axis=0).tolist()) if pair_values else None

    expected = shares("abc", decide)
    assert expected[None] == 1 / 9
    result = stability(
        pair_curve(pairs), RULES["knee"].cut, 1.2, 1, seed=0, resamples=N
    )
    assert likely(result["undecided"], 1 / 9)
    for cut, probability in expected.items():
        assert cut is None or likely(result["cuts"][LAYERS[cut - 1].name], probability)


def test_resamples_of_measurement_errors():
    one = curve({"a": [1.0, 1.2, 5.0, 25.0]}, stderr={"a": 0.05})
    result = stability(
        one, RULES["sensitivity_ratio"].cut, 1.25, 2, seed=0, resamples=N
    )
    # S2 > 1.25 S1, both with a standard error of 0.05
    probability = norm.sf((1.25 - 1.2) / (0.05 * math.hypot(1, 1.25)))
    assert result["of"] == "measurement errors"
    assert likely(result["cuts"]["l1"], probability)
    assert result["agreement"] == result["cuts"]["l2"]
