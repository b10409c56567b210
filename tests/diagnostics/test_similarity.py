"""CKA, the Procrustes angle, CCA and SVCCA: dense references in float64, what they ignore, where they have none."""

import itertools
import math

import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given, settings, strategies as st

from diagnostics.measurement import NoValue
from diagnostics.representation.similarity import LINEAR_CKA, PROCRUSTES, check_rows
from tests.conftest import refuses
from tests.diagnostics.similarities import (
    linear_cka,
    mean_cca,
    procrustes_distance,
    rbf_cka,
    shifted_procrustes,
    svcca,
)

MEASURES = {
    "cka": linear_cka,
    "rbf_cka": rbf_cka,
    "cca": mean_cca,
    "svcca": svcca,
    "procrustes": procrustes_distance,
}


def features(n, d, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, d, generator=g, dtype=torch.float64)


def mixed(n, d, seed=0):
    """Two related sets of features."""
    x = features(n, d, seed)
    return x, x @ features(d, d + 1, seed + 1) + 2 * features(n, d + 1, seed + 2)


def centred(x):
    return (x.double() - x.double().mean(0)).numpy()


def kernel(x, bandwidth):
    """The radial kernel."""
    apart = torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist")
    pairs = [float(apart[i, j]) for i, j in itertools.combinations(range(len(x)), 2)]
    return torch.exp(-(apart**2) / (2 * (bandwidth * np.median(pairs)) ** 2))


def kernel_cka(k, m):
    """Kornblith et al. 2019, Eq. 3 and 4."""
    h = torch.eye(len(k), dtype=torch.float64) - 1 / len(k)
    hsic = [float((a @ h @ b @ h).trace()) for a, b in ((k, m), (k, k), (m, m))]
    return hsic[0] / math.sqrt(hsic[1] * hsic[2])


def song(k, m):
    """Song et al. 2012, Eq. 5, term by term."""
    n = len(k)
    k, m = k - k.diag().diag(), m - m.diag().diag()
    one = torch.ones(n, 1, dtype=torch.float64)
    product = (one.T @ k @ one) * (one.T @ m @ one) / ((n - 1) * (n - 2))
    cross = 2 / (n - 2) * (one.T @ k @ m @ one)
    return float(((k @ m).trace() + product - cross) / (n * (n - 3)))


def unbiased(x, y, sizes, width):
    """Nguyen et al. 2021, Eq. 3, over batches of these sizes."""
    grams = [
        [kernel(part, width) if width else part @ part.T for part in side.split(sizes)]
        for side in (x, y)
    ]
    xy, xx, yy = (
        sum(song(k, m) for k, m in zip(grams[a], grams[b], strict=True))
        for a, b in ((0, 1), (0, 0), (1, 1))
    )
    return xy / math.sqrt(xx * yy)


def angle(x, y):
    """The angle that is left after scipy's best orthogonal map; the narrower side is filled up with zeros."""
    a, b = centred(x), centred(y)
    width = max(a.shape[1], b.shape[1])
    a, b = (np.pad(side, ((0, 0), (0, width - side.shape[1]))) for side in (a, b))
    a, b = a / np.linalg.norm(a), b / np.linalg.norm(b)
    rotation, _ = scipy.linalg.orthogonal_procrustes(a, b)
    return math.acos(min(1.0, float((a @ rotation * b).sum())))


def correlations(x, y):
    """The mean of canonical correlations from the whitened covariance (Hotelling)."""
    a, b = centred(x), centred(y)
    left, right = (np.linalg.inv(scipy.linalg.sqrtm(side.T @ side)) for side in (a, b))
    return float(np.linalg.svd(left @ a.T @ b @ right, compute_uv=False).mean())


def principal(x, variance):
    u, s, _ = np.linalg.svd(centred(x), full_matrices=False)
    share = np.cumsum(s**2) / np.sum(s**2)
    rank = int(np.searchsorted(share, variance - 1e-12)) + 1
    return torch.tensor(u[:, :rank] * s[:rank])


def of_variance(x, y, variance):
    return correlations(principal(x, variance), principal(y, variance))


def test_values_are_those_of_the_definitions():
    """Also of a type of less precision."""
    for n, d in ((3, 3), (10, 20), (42, 3), (302, 7)):  # odd numbers of pairs
        x, y = mixed(n, d)
        cases = {"cka": kernel_cka(x @ x.T, y @ y.T), "procrustes": angle(x, y)}
        for name, expected in cases.items():
            value = MEASURES[name]
            assert value(x, y) == pytest.approx(expected, abs=1e-7)
            assert value(x.float(), y.float()) == pytest.approx(expected, abs=1e-3)
        for width in (0.2, 2.0):
            expected = kernel_cka(kernel(x, width), kernel(y, width))
            assert rbf_cka(x, y, width) == pytest.approx(expected, rel=1e-10)
    for n, d in ((12, 3), (300, 20)):
        x, y = mixed(n, d)
        y = y[:, : d - 1]
        assert mean_cca(x, y) == pytest.approx(correlations(x, y), abs=1e-9)
        x = x * torch.logspace(0, -2, d, dtype=torch.float64)
        for variance in (0.5, 0.99, 1.0):
            expected = of_variance(x, y, variance)
            assert svcca(x, y, variance) == pytest.approx(expected, abs=1e-9)
    x, many = features(30, 9000), features(30, 5, 2)
    few = x @ torch.linalg.qr(x.T)[0]  # the same inner products, with fewer features
    assert procrustes_distance(x, many) == pytest.approx(angle(few, many), abs=1e-7)


def test_minibatches_are_unbiased_and_a_small_last_one_joins_the_one_before():
    for n, batch, sizes in (
        (4, 4, [4]),
        (21, 7, [7, 7, 7]),
        (23, 10, [10, 13]),
        (25, 10, [10, 10, 5]),
    ):
        x, y = mixed(n, 4)
        odd = all(size * (size - 1) // 2 % 2 for size in sizes)  # of pairs
        for width in (None, 0.4) if odd else (None,):
            similarity = linear_cka(x, y, "minibatch", batch, width)
            expected = unbiased(x, y, sizes, width)
            assert similarity == pytest.approx(expected, rel=1e-8)
    with refuses("least 4"):
        linear_cka(x, x, "minibatch", 3)


@pytest.mark.parametrize("name", [*MEASURES, "minibatch"])
@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    n=st.integers(14, 30),
    d=st.integers(1, 10),
    scale=st.sampled_from([1e-9, 1, 1e12]),
)
def test_identities(name, seed, n, d, scale):
    x, y = mixed(n, d, seed)
    value = MEASURES.get(name, lambda a, b: linear_cka(a, b, "minibatch", 8))
    same, most = (0.0, math.pi / 2) if name == "procrustes" else (1.0, 1.0)
    assert value(x, x) == pytest.approx(same, abs=1e-6)
    assert value(x, y) == pytest.approx(value(y, x), abs=1e-9)
    assert name == "minibatch" or -1e-12 <= value(x, y) <= most + 1e-12
    rotation = torch.linalg.qr(features(d, d, seed + 9))[0]
    for alike in (x @ rotation, x * scale, x + 100 * features(1, d, seed + 8), -x):
        assert value(alike, y) == pytest.approx(value(x, y), abs=1e-6)
        assert value(alike, x) == pytest.approx(same, abs=1e-6)


def test_features_without_variation_have_no_value():
    x = features(12, 3).float()
    constant = torch.full((12, 3), 0.1)
    for value in MEASURES.values():
        for dead in (constant * 0, constant, constant / 0):
            assert math.isnan(value(x, dead))
            assert math.isnan(value(dead, dead))
    assert math.isnan(linear_cka(x, constant, estimator="minibatch"))
    assert math.isnan(rbf_cka(x[[0, 0, 0, 0, 0, 0, 1, 2]], x[:8]))  # median distance 0
    for n, fine in ((4, False), (5, True)):  # one side spans everything
        assert math.isnan(mean_cca(features(n, 3), features(n, 2, 1))) != fine


@pytest.mark.parametrize("rank", [12, 24])
def test_cca_of_nearly_constant_features_in_float32_is_that_in_float64(rank):
    """Of 24 features of that rank some are scaled down, and all are moved far from 0 as they are after a bias."""
    base, noise = features(300, rank), features(300, rank, 1)
    maps = [torch.linalg.qr(features(24, rank, k))[0].T for k in (2, 3)]
    for scale, offset, count in ((1e-5, 0.0, 4), (1e-4, 1.0, 24), (1.0, 100.0, 24)):
        small = torch.ones(24, dtype=torch.float64)
        small[:count] = scale
        sides = zip((base, base + 0.4 * noise), maps, strict=True)
        x, y = (side @ to * small + offset for side, to in sides)
        a, b = (np.linalg.svd(centred(side))[0][:, :rank] for side in (x, y))
        reference = np.linalg.svd(a.T @ b, compute_uv=False).mean()
        assert mean_cca(x, y) == pytest.approx(reference, abs=1e-6)
        assert mean_cca(x.float(), y.float()) == pytest.approx(reference, abs=5e-5)


def test_positions_are_rows():
    x, y = (50 + features(60, 4, k) + 2 * features(60, 4, 9) for k in range(2))
    for name, measure in (("cka", LINEAR_CKA), ("procrustes", PROCRUSTES)):
        sides = (measure.side(side.reshape(10, 6, 4)) for side in (x, y))
        value = measure.between(*sides)
        assert value == pytest.approx(MEASURES[name](x, y), abs=1e-9)
        assert "40 rows" in measure.between(measure.side(x[:40]), measure.side(y))


def maps(seed, *shape):
    return features(math.prod(shape[:-1]), shape[-1], seed).reshape(shape)


@pytest.mark.parametrize("n", [3, 70])
def test_least_angle_against_every_shift(n, monkeypatch):
    for size, d in (((4, 5), (3, 3)), ((7,), (3, 2))):
        axes = tuple(range(1, 1 + len(size)))
        x = maps(1, n, *size, d[0])
        noise = maps(2, n, *size, d[1])
        y = x.roll(axes, axes) @ features(d[0], d[1], 3) + noise
        angles = [
            angle(x.flatten(0, -2), y.roll(shift, axes).flatten(0, -2))
            for shift in itertools.product(*(range(k) for k in size))
        ]
        for pieces in (64, 1):
            monkeypatch.setattr("figures.player_fl.shifts._SHIFTS", pieces)
            assert shifted_procrustes(x, y) == pytest.approx(min(angles), abs=1e-7)
            assert shifted_procrustes(y, x) == pytest.approx(min(angles), abs=1e-7)
    assert math.isnan(shifted_procrustes(x, torch.ones_like(x)))


def test_too_few_samples_to_compare_have_no_value():
    for least in (3, 5):
        check_rows(least, "tokens", least)
        with pytest.raises(NoValue, match=f"^{least - 1} tokens, at least {least} are"):
            check_rows(least - 1, "tokens", least)
    check_rows(3, "samples")
    with pytest.raises(NoValue, match="2 samples, at least 3"):
        check_rows(2, "samples")
