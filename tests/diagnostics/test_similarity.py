"""Linear CKA against its definition in float64, its invariances, and one pass over all pairs of clients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from diagnostics.measurement import ClientModel
from diagnostics.representation.probe import probe_set, shared_probe
from fl_core.errors import UsageError
from fl_core.layers import layers_of
from fl_core.rows import Row
from tests.diagnostics.calls import call, cka
from tests.diagnostics.similarities import linear_cka, rbf_cka
from tests.networks import Wired

C = 3


def features(
    n: int, d: int, seed: int = 0, dtype: torch.dtype = torch.float64
) -> Tensor:
    return torch.randn(
        n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def mixed(n: int, d: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Two related sets of features."""
    x = features(n, d, seed)
    return x, x @ features(d, d + 1, seed + 1) + 2 * features(n, d + 1, seed + 2)


def dense(x: Tensor, y: Tensor) -> float:
    """Kornblith et al. 2019, Eq. 5."""
    x, y = (side.double() - side.double().mean(0) for side in (x, y))
    return float((y.T @ x).norm() ** 2 / ((x.T @ x).norm() * (y.T @ y).norm()))


def song(x: Tensor, y: Tensor) -> float:
    """Song et al. 2012, Eq. 5, term by term."""
    n = len(x)
    k, m = (side.double() @ side.double().T for side in (x, y))
    k, m = k - k.diag().diag(), m - m.diag().diag()
    one = torch.ones(n, 1, dtype=torch.float64)
    trace = (k @ m).trace()
    product = (one.T @ k @ one) * (one.T @ m @ one) / ((n - 1) * (n - 2))
    cross = 2 / (n - 2) * (one.T @ k @ m @ one)
    return float((trace + product - cross) / (n * (n - 3)))


def unbiased(x: Tensor, y: Tensor, batch: int) -> float:
    """Nguyen et al. 2021, Eq. 3, over whole batches."""
    parts = list(zip(x.split(batch), y.split(batch), strict=True))
    xy, xx, yy = (
        sum(song(a, b) for a, b in pairs)
        for pairs in (parts, [(a, a) for a, _ in parts], [(b, b) for _, b in parts])
    )
    return xy / math.sqrt(xx * yy)


@pytest.mark.parametrize(("n", "d"), [(3, 3), (5, 40), (40, 5), (300, 3), (520, 7)])
def test_full_against_the_definition(n: int, d: int) -> None:
    x, y = mixed(n, d)
    assert linear_cka(x, y) == pytest.approx(dense(x, y), rel=1e-12)
    assert linear_cka(x.float(), y.float()) == pytest.approx(dense(x, y), abs=1e-6)


@pytest.mark.parametrize(
    ("n", "d", "batch"),
    [(4, 3, 4), (12, 6, 4), (60, 5, 20), (300, 4, 100), (600, 4, 600)],
)
def test_minibatch_against_the_definition(n: int, d: int, batch: int) -> None:
    x, y = mixed(n, d)
    assert linear_cka(x, y, "minibatch", batch) == pytest.approx(
        unbiased(x, y, batch), rel=1e-9
    )


@pytest.mark.parametrize("n", [21, 22, 23, 25])
def test_a_last_batch_that_is_too_small_joins_the_one_before(n: int) -> None:
    x, y = mixed(n, 3)
    sizes = [10, n - 10] if n - 20 < 4 else [10, 10, n - 20]
    xy, xx, yy = (
        sum(song(a, b) for a, b in zip(p.split(sizes), q.split(sizes), strict=True))
        for p, q in ((x, y), (x, x), (y, y))
    )
    assert linear_cka(x, y, "minibatch", 10) == pytest.approx(
        xy / math.sqrt(xx * yy), rel=1e-9
    )


ESTIMATORS = [("full", None), ("minibatch", None), ("minibatch", 8)]


@pytest.mark.parametrize(("estimator", "batch"), ESTIMATORS)
@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    n=st.integers(8, 30),
    d=st.integers(1, 12),
    scale=st.sampled_from([1e-20, 1e-3, 1, 1e12]),
)
def test_identities(
    estimator: str, batch: int | None, seed: int, n: int, d: int, scale: float
) -> None:
    x, y = mixed(n, d, seed)

    def value(a: Tensor, b: Tensor) -> float:
        return linear_cka(a, b, estimator, batch)

    assert value(x, x) == pytest.approx(1, abs=1e-12)
    assert value(x, y) == pytest.approx(value(y, x), rel=1e-13)
    rotation = torch.linalg.qr(features(d, d, seed + 9))[0]
    for same in (x @ rotation, x * scale, x + 100 * features(1, d, seed + 8), -x):
        assert value(same, y) == pytest.approx(value(x, y), abs=1e-7)
    if estimator == "full":
        assert -1e-12 <= value(x, y) <= 1 + 1e-12


@pytest.mark.parametrize("estimator", ["full", "minibatch"])
@pytest.mark.parametrize(
    "change",
    [lambda x: x * 1e30, lambda x: x * 1e-30, lambda x: x * 1e12, lambda x: x + 100],
)
def test_float32_survives_scale_and_offset(estimator: str, change: Any) -> None:
    x, y = (side.float() for side in mixed(40, 6))
    assert linear_cka(change(x), y, estimator) == pytest.approx(
        linear_cka(x, y, estimator), abs=1e-4
    )
    assert linear_cka(change(x), change(x), estimator) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("estimator", ["full", "minibatch"])
@pytest.mark.parametrize(
    "dead",
    [
        torch.zeros(8, 3),
        torch.full((8, 3), 0.1),
        torch.full((8, 3), torch.inf),
    ],
)
def test_features_without_variation_have_no_value(estimator: str, dead: Tensor) -> None:
    assert math.isnan(linear_cka(features(8, 3).float(), dead, estimator))
    assert math.isnan(linear_cka(dead, dead, estimator))


def test_arguments_that_do_not_fit_are_refused() -> None:
    x = features(8, 3)
    for batch in (1, 2, 3):
        with pytest.raises(UsageError, match="least 4"):
            linear_cka(x, x, "minibatch", batch)


def net(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16, 5),
        nn.ReLU(),
        nn.Linear(5, C),
    )


def pair(n: int = 48, seed: int = 1) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, 1, 6, 6, generator=g), torch.randint(C, (n,), generator=g)


def clients(models: Sequence[nn.Module], data: Any = None) -> list[ClientModel]:
    data = pair() if data is None else data
    return [ClientModel(f"c{k}", model, data, 48) for k, model in enumerate(models)]


def by_layer(rows: Sequence[Row], a: str = "c0", b: str = "c1") -> dict[str, Any]:
    return {
        r["layer"]: r["value"] if r["status"] == "ok" else r["status"]
        for r in rows
        if (r["client"], r["client_b"]) == (a, b)
    }


def outputs(model: nn.Sequential, x: Tensor) -> dict[str, Tensor]:
    """The layers' own outputs, computed module by module; clones, because a ReLU here works in place."""
    found = {}
    with torch.no_grad():
        for name, module in model.named_children():
            x = module(x.clone())
            found[name] = x.clone().flatten(1)
    return found


def test_minibatches_against_the_definition() -> None:
    models = [net(0), net(1)]
    layers = layers_of(models[0], pair()[0][:2])
    found = by_layer(cka(clients(models), layers, batch=12, estimator="minibatch"))
    seen = [outputs(model, pair()[0]) for model in models]
    for layer in layers:
        assert found[layer.name] == pytest.approx(
            unbiased(seen[0][layer.name], seen[1][layer.name], 12), abs=1e-5
        )


@pytest.mark.parametrize("samples", [20, 400])
def test_keeping_features_or_grams_gives_the_same(samples: int) -> None:
    models = [
        nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, C)).double()
        for _ in range(4)
    ]
    x = features(400, 6)
    data = (x, torch.zeros(400, dtype=torch.int64))
    layers = layers_of(
        models[0], x
    )  # widths 9 and 3 with 4 models: features from 23 and 8 samples on
    rows = cka(clients(models, data), layers, samples=samples)
    seen = [outputs(model, x[:samples]) for model in models]
    for r in rows:
        a, b = (seen[int(r[side][1])][r["layer"]] for side in ("client", "client_b"))
        assert r["value"] == pytest.approx(dense(a, b), rel=1e-11)


def test_each_client_gives_its_own_samples_to_a_probe_that_all_share() -> None:
    models = [net(0), net(1)]
    x = torch.cat([pair(seed=1)[0][:5], pair(seed=2)[0][:5]])
    subjects = [
        ClientModel(f"c{k}", m, pair(seed=k + 1), 48) for k, m in enumerate(models)
    ]
    layers = layers_of(models[0], x)
    found = by_layer(cka(subjects, layers, samples=10))
    assert found == by_layer(
        cka(subjects, layers, probe=(x, torch.zeros(10, dtype=torch.int64)))
    )
    seen = [outputs(model, x) for model in models]
    assert found["6"] == pytest.approx(dense(seen[0]["6"], seen[1]["6"]), abs=1e-6)


def test_a_single_model_has_no_similarity() -> None:
    layers = layers_of(net(), pair()[0])
    rows = cka(clients([net()]), layers)
    assert [(r["layer"], r["value"], r["status"]) for r in rows] == [
        (layer.name, None, "needs at least two models") for layer in layers
    ]


def odd() -> Wired:
    """Outputs that are tuples, sequences first, repeated, constant, or never computed."""

    def run(m: Any, x: Tensor) -> Tensor:
        h, _ = m.lstm(x)
        m.timefirst(h.transpose(0, 1))
        h = m.twice(m.twice(h[:, -1]))
        return m.head(h + m.dead(h).sum())

    linear = {
        name: nn.Linear(3, C if name == "head" else 3)
        for name in ("twice", "dead", "head", "unused")
    }
    return Wired(
        run, lstm=nn.LSTM(4, 3, batch_first=True), timefirst=nn.GRU(3, 2), **linear
    )


def test_activations_that_are_not_finite_are_said() -> None:
    broken = net(1)
    with torch.no_grad():
        broken[4].weight[0, 0] = torch.nan
    found = by_layer(cka(clients([net(), broken]), layers_of(net(), pair()[0])))
    assert isinstance(found["0"], float)
    assert found["4"] == "output of layer '4' at client 'c1': not finite"


@pytest.mark.parametrize(
    ("estimator", "n", "fine"),
    [
        ("full", 2, False),
        ("full", 3, True),
        ("minibatch", 3, False),
        ("minibatch", 4, True),
    ],
)
def test_too_few_samples_are_said(estimator: str, n: int, fine: bool) -> None:
    models = [nn.Linear(6, C), nn.Linear(6, C)]
    data = (features(n, 6).float(), torch.zeros(n, dtype=torch.int64))
    (row,) = cka(
        clients(models, data), layers_of(models[0], data[0]), estimator=estimator
    )
    assert (row["status"] == "ok") == fine
    assert fine or f"{n} samples, at least" in row["status"]


def federated(*sizes: int) -> Any:
    """Clients whose validation samples are numbered client * 100 + position."""
    splits = [torch.arange(n)[:, None] + 100.0 * k for k, n in enumerate(sizes)]
    held = [SimpleNamespace(x=x, y=x[:, 0].long()) for x in splits]
    return SimpleNamespace(
        clients=[SimpleNamespace(validation=split) for split in held]
    )


@pytest.mark.parametrize(
    ("sizes", "n", "expected"),
    [
        ((5, 5), 4, [0, 1, 100, 101]),
        ((5, 5), 5, [0, 1, 2, 100, 101]),
        ((1, 5), 6, [0, 100, 101, 102]),
        ((2, 1, 2), 100, [0, 1, 100, 200, 201]),
    ],
)
def test_a_probe_takes_equally_many_of_each_client(
    sizes: tuple[int, ...], n: int, expected: list[int]
) -> None:
    x, y = probe_set(federated(*sizes), n)
    assert x[:, 0].tolist() == expected
    assert y.tolist() == expected


def test_a_probe_from_loaders_and_from_data_given_twice() -> None:
    x, y = torch.arange(10.0)[:, None], torch.arange(10)
    loader = DataLoader(TensorDataset(x, y), batch_size=3)
    assert shared_probe([loader, loader], 7)[1].tolist() == list(range(7))
    both = (x, y)
    assert shared_probe([both, both, (x + 50, y + 50)], 4)[1].tolist() == [0, 1, 50, 51]


def test_probes_that_cannot_be_are_refused() -> None:
    with pytest.raises(UsageError, match=r"2 .*3"):
        probe_set(federated(1, 1, 1), 2)
    with pytest.raises(UsageError, match="shapes"):
        shared_probe(
            [(torch.zeros(2, 3), torch.zeros(2)), (torch.zeros(2, 4), torch.zeros(2))],
            4,
        )


def maps_of(views: bool) -> Any:
    """Maps that are flattened by a view, which needs them to lie channel by channel, or by reshape."""

    def run(m: Any, x: Tensor) -> Tensor:
        maps = m.conv(x)
        m.seen.append(maps.is_contiguous())
        return m.fc(maps.view(len(x), -1) if views else maps.reshape(len(x), -1))

    return Wired(run, conv=nn.Conv2d(1, 3, 3), fc=nn.Linear(48, 4), seen=[])


@pytest.mark.parametrize("views", [True, False])
def test_images_lie_channels_last_unless_the_model_takes_a_view(views: bool) -> None:
    torch.manual_seed(0)
    models = [maps_of(views).double() for _ in range(2)]
    x, y = (
        torch.randn(12, 1, 6, 6, dtype=torch.float64),
        torch.zeros(12, dtype=torch.int64),
    )
    subjects = [
        ClientModel(f"{k}", model, (x, y), 12) for k, model in enumerate(models)
    ]
    rows = cka(subjects, layers_of(models[0], x[:2]), batch=6)
    assert models[0].seen[-1] == views
    maps = [model.conv(x).detach().flatten(1) for model in models]
    torch.testing.assert_close(rows[0]["value"], linear_cka(*maps))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("metric", ["cka", "rbf_cka", "procrustes", "cca", "svcca"])
def test_images_are_given_to_a_convolution_in_its_own_type(
    metric: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    models = [maps_of(False).to(dtype) for _ in range(2)]
    x, y = torch.randn(80, 1, 6, 6), torch.zeros(80, dtype=torch.int64)
    layers = layers_of(models[0], x[:2].to(dtype))
    rows = [
        call(
            metric,
            [
                ClientModel(f"{k}", model, (own, y), 80)
                for k, model in enumerate(models)
            ],
            layers,
        )
        for own in (x, x.to(dtype))
    ]
    assert {row["status"] for row in rows[0]} == {"ok"}
    assert rows[0] == rows[1]


@pytest.mark.parametrize("estimator", ["full", "minibatch"])
@pytest.mark.parametrize("similarity", [linear_cka, rbf_cka])
def test_no_samples_have_no_similarity(similarity: Any, estimator: str) -> None:
    assert math.isnan(
        similarity(torch.empty(0, 3), torch.empty(0, 2), estimator=estimator)
    )
