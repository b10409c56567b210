"""RBF CKA, the Procrustes angle, CCA and SVCCA: dense references in float64, what they ignore, and what they refuse."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from diagnostics.representation.similarity import (
    CCA as CCA_MEASURE,
    LINEAR_CKA,
    PROCRUSTES,
    svcca_measure,
)
from tests.diagnostics.similarities import (
    mean_cca,
    procrustes_distance,
    rbf_cka,
    shifted_procrustes,
    svcca,
)
from tests.diagnostics.test_similarity import dense, features, mixed, song

Number = Callable[[Tensor, Tensor], float]
SIMILARITIES: dict[str, Number] = {"rbf_cka": rbf_cka, "cca": mean_cca, "svcca": svcca}
ALL: dict[str, Number] = {**SIMILARITIES, "procrustes": procrustes_distance}


def centred(x: Tensor) -> Any:
    return (x.double() - x.double().mean(0)).numpy()


def kernel(x: Tensor, bandwidth: float) -> Tensor:
    """The radial kernel, pair by pair."""
    n = len(x)
    apart = {
        (i, j): float((x[i] - x[j]).double().norm()) for i in range(n) for j in range(n)
    }
    width = bandwidth * float(
        np.median([apart[i, j] for i, j in itertools.combinations(range(n), 2)])
    )
    return torch.tensor(
        [
            [math.exp(-(apart[i, j] ** 2) / (2 * width**2)) for j in range(n)]
            for i in range(n)
        ],
        dtype=torch.float64,
    )


def kernel_cka(k: Tensor, m: Tensor) -> float:
    """Kornblith et al. 2019, Eq. 3 and 4."""
    n = len(k)
    h = torch.eye(n, dtype=torch.float64) - 1 / n
    hsic = [float((a @ h @ b @ h).trace()) for a, b in ((k, m), (k, k), (m, m))]
    return hsic[0] / math.sqrt(hsic[1] * hsic[2])


def angle(x: Tensor, y: Tensor) -> float:
    """The angle that is left after scipy's best orthogonal map; the narrower side is filled up with zeros."""
    a, b = centred(x), centred(y)
    width = max(a.shape[1], b.shape[1])
    a, b = (np.pad(side, ((0, 0), (0, width - side.shape[1]))) for side in (a, b))
    a, b = a / np.linalg.norm(a), b / np.linalg.norm(b)
    rotation, _ = scipy.linalg.orthogonal_procrustes(a, b)
    return math.acos(min(1.0, float((a @ rotation * b).sum())))


def correlations(x: Tensor, y: Tensor) -> Any:
    """Canonical correlations from the whitened covariance (Hotelling)."""
    a, b = centred(x), centred(y)
    left, right = (np.linalg.inv(scipy.linalg.sqrtm(side.T @ side)) for side in (a, b))
    return np.linalg.svd(left @ a.T @ b @ right, compute_uv=False)


def principal(x: Tensor, variance: float) -> Tensor:
    u, s, _ = np.linalg.svd(centred(x), full_matrices=False)
    share = np.cumsum(s**2) / np.sum(s**2)
    rank = int(np.searchsorted(share, variance - 1e-12)) + 1
    return torch.tensor(u[:, :rank] * s[:rank])


@pytest.mark.parametrize("bandwidth", [0.2, 0.4, 2.0])
@pytest.mark.parametrize(
    ("n", "d"), [(3, 2), (10, 20), (42, 3)]
)  # an odd number of pairs: the median is one of them
def test_rbf_cka_against_the_definition(n: int, d: int, bandwidth: float) -> None:
    x, y = mixed(n, d)
    expected = kernel_cka(kernel(x, bandwidth), kernel(y, bandwidth))
    assert rbf_cka(x, y, bandwidth) == pytest.approx(expected, rel=1e-10)
    assert rbf_cka(x.float(), y.float(), bandwidth) == pytest.approx(
        rbf_cka(x, y, bandwidth), abs=1e-5
    )


def test_unbiased_rbf_cka_against_the_definition() -> None:
    x, y = mixed(21, 4)
    parts = list(zip(x.split(7), y.split(7), strict=True))  # 21 pairs in each batch

    def factor(side: Tensor) -> Tensor:
        return torch.linalg.cholesky(
            kernel(side, 0.4) + 1e-14 * torch.eye(len(side), dtype=torch.float64)
        )

    xy, xx, yy = (
        sum(song(factor(a), factor(b)) for a, b in pairs)
        for pairs in (parts, [(a, a) for a, _ in parts], [(b, b) for _, b in parts])
    )
    assert rbf_cka(x, y, 0.4, "minibatch", 7) == pytest.approx(
        xy / math.sqrt(xx * yy), rel=1e-9
    )


@pytest.mark.parametrize(("n", "d"), [(3, 3), (8, 8), (40, 5), (12, 40), (30, 9000)])
def test_procrustes_against_scipy(n: int, d: int) -> None:
    x = features(n, d)
    y = x @ features(d, 5, 1) / d**0.5 + 0.3 * features(n, 5, 2)
    if d < 100:
        assert procrustes_distance(x, y) == pytest.approx(angle(x, y), abs=1e-7)
    else:  # the same inner products, with fewer features
        q = torch.linalg.qr(x.T)[0]
        assert procrustes_distance(x, y) == pytest.approx(angle(x @ q, y), abs=1e-7)
    assert procrustes_distance(x.float(), y.float()) == pytest.approx(
        procrustes_distance(x, y), abs=1e-3
    )


@pytest.mark.parametrize(("n", "d"), [(12, 3), (60, 5), (300, 20)])
def test_cca_against_the_definition(n: int, d: int) -> None:
    x, y = mixed(n, d)
    x, y = x, y[:, : d - 1]
    assert mean_cca(x, y) == pytest.approx(correlations(x, y).mean(), abs=1e-9)
    assert mean_cca(x.float(), y.float()) == pytest.approx(mean_cca(x, y), abs=1e-5)


@pytest.mark.parametrize("variance", [0.5, 0.9, 0.99])
@pytest.mark.parametrize(("n", "d"), [(40, 8), (400, 30)])
def test_svcca_against_the_definition(n: int, d: int, variance: float) -> None:
    x, y = mixed(n, d)
    x = x * torch.logspace(0, -2, d, dtype=torch.float64)
    expected = correlations(principal(x, variance), principal(y, variance)).mean()
    assert svcca(x, y, variance) == pytest.approx(expected, abs=1e-9)
    assert svcca(x, y, 1.0) == pytest.approx(mean_cca(x, y), abs=1e-9)


def test_svcca_with_more_features_than_samples() -> None:
    base = features(30, 3)
    x, y = (
        base @ features(3, 200, k) + 1e-3 * features(30, 200, k + 5) for k in (1, 2)
    )
    assert svcca(x, y) == pytest.approx(1, abs=1e-4)
    expected = correlations(principal(x, 0.99), principal(y, 0.99)).mean()
    assert svcca(x, y) == pytest.approx(expected, abs=1e-8)
    assert math.isnan(mean_cca(x, y))


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    n=st.integers(14, 30),
    d=st.integers(1, 10),
    scale=st.sampled_from([1e-9, 1, 1e9]),
)
def test_identities(name: str, seed: int, n: int, d: int, scale: float) -> None:
    x, y = mixed(n, d, seed)
    value = ALL[name]
    same = 0.0 if name == "procrustes" else 1.0
    assert value(x, x) == pytest.approx(same, abs=1e-6)
    assert value(x, y) == pytest.approx(value(y, x), abs=1e-9)
    assert -1e-12 <= value(x, y) <= (math.pi / 2 if name == "procrustes" else 1) + 1e-12
    rotation = torch.linalg.qr(features(d, d, seed + 9))[0]
    for alike in (x @ rotation, x * scale, x + 100 * features(1, d, seed + 8), -x):
        assert value(alike, y) == pytest.approx(value(x, y), abs=1e-6)
        assert value(alike, x) == pytest.approx(same, abs=1e-6)


def test_cca_alone_ignores_every_invertible_map() -> None:
    x, y = mixed(40, 5)
    bent = (
        x
        @ torch.diag(torch.tensor([100.0, 10, 1, 1, 0.1]).double())
        @ features(5, 5, 7)
    )
    assert mean_cca(bent, y) == pytest.approx(mean_cca(x, y), abs=1e-8)
    assert procrustes_distance(bent, x) > 0.3
    assert rbf_cka(bent, x) < 0.9


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    "dead",
    [
        torch.zeros(12, 3),
        torch.full((12, 3), 0.1),
        torch.full((12, 3), torch.inf),
    ],
)
def test_features_without_variation_have_no_value(name: str, dead: Tensor) -> None:
    assert math.isnan(ALL[name](features(12, 3).float(), dead))
    assert math.isnan(ALL[name](dead, dead))


def test_a_median_distance_of_0_has_no_value() -> None:
    x = features(8, 3)
    assert math.isnan(rbf_cka(x[[0, 0, 0, 0, 0, 0, 1, 2]], x))


@pytest.mark.parametrize(("n", "fine"), [(4, False), (5, True), (6, True)])
def test_cca_has_no_value_where_one_side_spans_everything(n: int, fine: bool) -> None:
    assert math.isnan(mean_cca(features(n, 3), features(n, 2, 1))) != fine


def test_the_rank_of_cca_leaves_out_rounding() -> None:
    x, y = mixed(60, 4)
    doubled = torch.cat([x, x @ features(4, 3, 3)], 1)  # seven features of rank four
    assert mean_cca(doubled, y) == pytest.approx(mean_cca(x, y), abs=1e-8)
    assert mean_cca(doubled.float(), y.float()) == pytest.approx(
        mean_cca(x, y), abs=1e-4
    )


@pytest.mark.parametrize("offset", [0.0, 3.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_rank_of_cca_leaves_out_the_rounding_of_half_precision(
    dtype: torch.dtype, offset: float
) -> None:
    """Forty features of low rank; taken for float32, their rounding would be directions of its own."""
    x, y = mixed(300, 4)
    wide = [
        side @ features(side.shape[1], 40, k) + offset for k, side in enumerate((x, y))
    ]
    assert mean_cca(*wide) == pytest.approx(mean_cca(x, y), abs=1e-8)
    assert mean_cca(*(side.to(dtype) for side in wide)) == pytest.approx(
        mean_cca(x, y), abs=0.01
    )
    assert mean_cca(*(side.to(dtype).float() for side in wide)) < mean_cca(x, y) - 0.1


@pytest.mark.parametrize("rank", [12, 24])
@pytest.mark.parametrize(
    ("scale", "offset", "count"),
    [
        (1.0, 0.0, 24),
        (1e-5, 0.0, 4),
        (1e-3, 10.0, 4),
        (1e-4, 1.0, 24),
        (1e-5, 1.0, 24),
        (1.0, 100.0, 24),
    ],
)
def test_cca_of_nearly_constant_features_in_float32_is_that_in_float64(
    scale: float, offset: float, count: int, rank: int
) -> None:
    """So many of 24 features of that rank are scaled down, and all are moved far from 0 as they are after a bias."""
    base, noise = features(300, rank), features(300, rank, 1)
    maps = (
        torch.linalg.qr(features(24, rank, k))[0].T for k in (2, 3)
    )  # no direction is small by itself
    x, y = (
        side @ to for side, to in zip((base, base + 0.4 * noise), maps, strict=True)
    )
    small = torch.ones(24, dtype=torch.float64)
    small[:count] = scale
    x, y = x * small + offset, y * small + offset
    a, b = (
        np.linalg.svd(centred(side), full_matrices=False)[0][:, :rank]
        for side in (x, y)
    )
    reference = np.linalg.svd(a.T @ b, compute_uv=False).mean()
    assert mean_cca(x, y) == pytest.approx(reference, abs=1e-6)
    assert mean_cca(x.float(), y.float()) == pytest.approx(reference, abs=5e-5)


@pytest.mark.parametrize(
    "measure", [LINEAR_CKA, PROCRUSTES, CCA_MEASURE, svcca_measure()]
)
def test_positions_are_rows(measure: Any) -> None:
    x = [50 + features(60, 4, k) + 2 * features(60, 4, 9) for k in range(2)]
    value = measure.between(*(measure.side(side.reshape(10, 6, 4)) for side in x))
    assert value == measure.between(*map(measure.side, x))
    if measure is LINEAR_CKA:
        assert value == pytest.approx(dense(*x), abs=1e-9)
    assert "40 rows" in measure.between(measure.side(x[0][:40]), measure.side(x[1]))


def maps(seed: int, *shape: int) -> Tensor:
    return features(math.prod(shape[:-1]), shape[-1], seed).reshape(shape)


@pytest.mark.parametrize(
    ("size", "d"),
    [((4, 5), (3, 3)), ((5, 4), (2, 4)), ((7,), (3, 2)), ((1, 6), (1, 1))],
)
@pytest.mark.parametrize("n", [3, 70])
def test_least_angle_against_every_shift(
    size: tuple[int, ...], d: tuple[int, int], n: int
) -> None:
    axes = tuple(range(1, 1 + len(size)))
    x = maps(1, n, *size, d[0])
    y = x.roll(tuple(range(1, 1 + len(size))), axes) @ features(d[0], d[1], 3) + maps(
        2, n, *size, d[1]
    )
    angles = [
        angle(x.flatten(0, -2), y.roll(shift, axes).flatten(0, -2))
        for shift in itertools.product(*(range(k) for k in size))
    ]
    assert shifted_procrustes(x, y) == pytest.approx(min(angles), abs=1e-7)
    assert shifted_procrustes(y, x) == pytest.approx(min(angles), abs=1e-7)
    assert min(angles) < max(angles) - 1e-3


@pytest.mark.parametrize("seed", range(4))
def test_shifts_are_left_out_only_where_they_cannot_win(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = maps(seed, 3, 5, 5, 4), maps(seed + 10, 3, 5, 5, 4)
    whole = shifted_procrustes(x, y)
    monkeypatch.setattr("figures.player_fl.shifts._SHIFTS", 1)
    assert shifted_procrustes(x, y) == pytest.approx(whole, abs=1e-12)


def test_shifted_maps_are_the_same_and_unrelated_ones_look_more_alike_than_they_are() -> (
    None
):
    x, y = maps(1, 6, 5, 5, 3), maps(2, 6, 5, 5, 3)
    assert shifted_procrustes(x, 3 * x.roll((2, 4), (1, 2)) + 7) == pytest.approx(
        0, abs=1e-6
    )
    assert shifted_procrustes(x, y) < procrustes_distance(
        x.flatten(0, 2), y.flatten(0, 2)
    )


def test_maps_that_cannot_be_shifted() -> None:
    x = maps(1, 4, 3, 3, 2)
    assert math.isnan(shifted_procrustes(x, torch.ones_like(x)))
