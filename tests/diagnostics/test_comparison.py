"""Similarity of clients' layers on one probe: positions, samples, and layers that have no value."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from diagnostics.measure import diagnose
from diagnostics.measurement import ClientModel
from diagnostics.metrics.base import METRICS
from diagnostics.representation.features import probe_set, shared_probe
from diagnostics.representation.similarity import by_position
from fl_core.layers import layers_of
from fl_core.tree import digest
from tests.conftest import refuses
from tests.diagnostics.calls import call
from tests.diagnostics.similarities import (
    linear_cka,
    mean_cca,
    procrustes_distance,
    rbf_cka,
    shifted_procrustes,
    svcca,
)
from tests.made import Wired, cnn, labelled

C, N = 3, 48
RELEASED = "figures.player_fl.released"
REFERENCES = {
    "cka": linear_cka,
    "rbf_cka": rbf_cka,
    "procrustes": procrustes_distance,
    "cca": mean_cca,
    "svcca": svcca,
}
WAYS = [(name, way) for name in REFERENCES for way in METRICS[name].variants]
WAYS += [("procrustes", "released")]


def net(seed=0):
    return cnn(4, "pool", seed=seed)


def pair(n=N, seed=1):
    return labelled(n, seed, (1, 6, 6))


def measured(
    metric,
    models,
    data=None,
    layers=(),
    **how,
):
    data = pair() if data is None else data
    if how.get("positions") == "released":
        metric = f"{RELEASED}:{metric}"
    x = (data if isinstance(data, tuple) else pair())[0][:2]
    clients = [ClientModel(f"c{k}", model, data, N) for k, model in enumerate(models)]
    return call(metric, clients, layers or layers_of(models[0], x), **how)


def by_layer(rows, a="c0", b="c1"):
    return {
        r["layer"]: r["value"] if r["status"] == "ok" else r["status"]
        for r in rows
        if (r["client"], r["client_b"]) == (a, b)
    }


def outputs(model, x):
    """The layers' own outputs, computed module by module; clones, because a ReLU here works in place."""
    output_of = {}
    with torch.no_grad():
        for name, module in model.named_children():
            x = module(x.clone())
            output_of[name] = x.clone().flatten(1)
    return output_of


TREATED = {
    "flatten": lambda x: x.flatten(1),
    "samples": lambda x: x.flatten(0, 2),
    "mean": lambda x: x.mean((1, 2)),
}


@pytest.mark.parametrize(("metric", "positions"), WAYS)
def test_all_pairs_and_positions_against_the_definition(metric, positions):
    models = [net(k).double() for k in range(3)]
    data = (pair()[0].double(), pair()[1])
    seen = [outputs(model, data[0]) for model in models]
    maps = [model[0](data[0]).detach().movedim(1, -1) for model in models]
    for batch in (7, N):
        how = {"variant": "pairs"} if positions == "flatten" else {}
        rows = measured(metric, models, data, batch=batch, positions=positions, **how)
        pairs = [(int(r["client"][1]), int(r["client_b"][1])) for r in rows]
        assert pairs[:3] == [(0, 1), (0, 2), (1, 2)]
        assert len(rows) == 9 + 27 * bool(how)
        for k, (r, (i, j)) in enumerate(zip(rows, pairs, strict=True)):
            other = r["layer"] if k < 9 else r["variant"].removeprefix("pairs ")
            if k >= 9 or r["layer"] != "0":
                expected = REFERENCES[metric](seen[i][r["layer"]], seen[j][other])
            elif positions == "released":
                expected = shifted_procrustes(maps[i], maps[j])
            else:
                sides = (TREATED[positions](maps[k]) for k in (i, j))
                expected = REFERENCES[metric](*sides)
            if math.isnan(expected):
                assert "space" in r["status"]
            else:
                assert r["value"] == pytest.approx(expected, abs=1e-7), r["layer"]
            stated = (r["variant"], r["n_samples"], r["metric"], r["unit"])
            unit = "rad" if metric == "procrustes" else ""
            variant = positions if k < 9 else f"pairs {other}"
            assert stated == (variant, N, metric, unit)
            assert r["n_params"] == {"0": 40, "4": 85, "6": 18}[r["layer"]]


PACKAGE = {"estimator": "minibatch", "backend": "torch_cka"}


def test_torch_cka_agrees_until_an_offset_rounds_its_products():
    """A bias of the last layer changes no CKA. The package multiplies in float32 before it centres."""
    x, y = pair()
    for offset, least, most in ((0, 0, 1e-2), (3, 0.2, math.inf)):
        models = [net(0), net(1)]
        for model in models:
            model[6].bias.data += offset
        before = [digest(model.state_dict()) for model in models]
        theirs = measured("cka", models, (x, y), batch=12, **PACKAGE)
        ours = measured("cka", models, (x, y), batch=12, estimator="minibatch")
        assert {r["estimator"] for r in theirs} == {"minibatch, torch_cka"}
        assert [digest(model.state_dict()) for model in models] == before
        assert not any(m._forward_hooks for model in models for m in model.modules())
        sides = [outputs(model.double(), x.double())["6"] for model in models]
        exact = linear_cka(*sides, "minibatch", 12)
        assert by_layer(ours)["6"] == pytest.approx(exact, abs=1e-5)
        assert least <= abs(by_layer(theirs)["6"] / exact - 1) <= most
        assert by_layer(theirs)["0"] == pytest.approx(by_layer(ours)["0"], abs=1e-4)


def test_options_change_values_and_estimators():
    models = [net(0), net(1)]
    for metric, how, estimator in (
        ("rbf_cka", {"bandwidth": 0.8}, "full, bandwidth 0.8 x median distance"),
        ("svcca", {"variance": 0.9}, "full, 90 % of the variance"),
        ("procrustes", {"positions": "released"}, "full, least over shifts"),
        ("cka", {"estimator": "minibatch", "batch": 12}, "minibatch"),
    ):
        rows, plain = measured(metric, models, **how), measured(metric, models)
        assert {r["estimator"] for r in rows} == {estimator}
        assert [r["value"] for r in rows] != [r["value"] for r in plain]
    for how, words in (
        ({"positions": "samples", "estimator": "minibatch"}, "estimator 'full'"),
        ({"positions": "samples", "variant": "pairs"}, "must be 'flatten' or 'mean'"),
        ({"positions": "sample"}, "mean 'samples'"),
        ({"backend": "torch-cka"}, "mean 'torch_cka'"),
        ({"backend": "torch_cka"}, "estimator 'minibatch'"),
        ({**PACKAGE, "batch": 13}, "divide the 48 samples"),
        ({**PACKAGE, "batch": 12, "mode": "train"}, "mode .*'eval'"),
    ):
        with refuses(words):
            measured("cka", models, **how)


@pytest.mark.parametrize(
    ("module", "shape", "expected"),
    [
        (nn.Identity(), (2,), (2, 1)),
        (nn.Identity(), (2, 7, 5), (2, 7, 5)),
        (nn.Sequential(nn.Conv1d(1, 5, 1), nn.ReLU()), (2, 5, 7), (2, 7, 5)),
        (nn.BatchNorm2d(5), (2, 5, 3, 4), (2, 3, 4, 5)),
    ],
)
def test_where_the_features_are(module, shape, expected):
    x = torch.randn(shape)
    placed = by_position(module, x)
    assert tuple(placed.shape) == expected
    if len(shape) > 2 and shape != expected:
        assert torch.equal(placed.movedim(-1, 1), x)


def test_each_client_gives_its_own_samples_to_a_probe_that_all_share():
    models, client_data = [net(0), net(1)], [pair(seed=1), pair(seed=2)]
    x = torch.cat([data[0][:5] for data in client_data])
    layers = layers_of(models[0], x)
    subjects = [ClientModel(f"c{k}", models[k], client_data[k], N) for k in (0, 1)]
    by_probe = by_layer(call("cka", subjects, layers, samples=10))
    sides = [outputs(model, x)["6"] for model in models]
    assert by_probe["6"] == pytest.approx(linear_cka(*sides), abs=1e-6)
    options = {"cka": {"probe": pair(9, 6)}, "probe": pair(20, 5)}
    how = {"options": options}
    frame = diagnose(models, pair(), ["cka", "cca"], **how).frame
    assert frame.groupby("metric")["n_samples"].agg(set).to_dict() == {
        "cka": {9},
        "cca": {20},
    }


def test_a_probe_takes_equally_many_of_each_client():
    def federated(*sizes):
        """Clients whose validation samples are numbered client * 100 + position."""
        splits = [torch.arange(n)[:, None] + 100.0 * k for k, n in enumerate(sizes)]
        parts = [SimpleNamespace(x=x, y=x[:, 0].long()) for x in splits]
        return SimpleNamespace(clients=[SimpleNamespace(validation=v) for v in parts])

    for sizes, n, expected in (
        ((5, 5), 5, [0, 1, 2, 100, 101]),
        ((1, 5), 6, [0, 100, 101, 102]),
        ((2, 1, 2), 100, [0, 1, 100, 200, 201]),
    ):
        x, y = probe_set(federated(*sizes), n)
        assert x[:, 0].tolist() == y.tolist() == expected
    with refuses(r"2 .*3"):
        probe_set(federated(1, 1, 1), 2)
    both = torch.arange(10.0)[:, None], torch.arange(10)
    with refuses("shapes"):
        shared_probe([both, (torch.zeros(2, 4), torch.zeros(2))], 4)


@pytest.mark.parametrize("metric", REFERENCES)
def test_a_loader_that_shuffles_is_read_once_for_all_models(metric):
    loader = DataLoader(TensorDataset(*pair()), batch_size=10, shuffle=True)
    rows = measured(metric, [net(), net(), net(1)], loader, positions="mean")
    same = 0.0 if METRICS[metric].distance else 1.0
    assert [*by_layer(rows).values()] == pytest.approx([same] * 3, abs=1e-3)
    others = by_layer(rows, "c0", "c2").values()
    assert min(abs(value - same) for value in others) > 1e-3


def maps_of(views):
    """Maps that are flattened by a view, which needs them to lie channel by channel, or by reshape."""

    def run(m, x):
        maps = m.conv(x)
        m.seen.append(maps.is_contiguous())
        return m.fc(maps.view(len(x), -1) if views else maps.reshape(len(x), -1))

    return Wired(run, conv=nn.Conv2d(1, 3, 3), fc=nn.Linear(48, 4), seen=[])


def test_images_lie_channels_last_unless_the_model_takes_a_view():
    torch.manual_seed(0)
    x, y = torch.randn(12, 1, 6, 6).double(), torch.zeros(12)
    for views in (True, False):
        models = [maps_of(views).double() for _ in range(2)]
        values = by_layer(measured("cka", models, (x, y), batch=6))
        assert models[0].seen[-1] == views
        maps = [model.conv(x).detach().flatten(1) for model in models]
        assert values["conv"] == pytest.approx(linear_cka(*maps))
