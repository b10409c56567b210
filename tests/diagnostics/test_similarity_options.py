"""Similarity of clients' layers: positions, any two layers, and layers that have no value."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from diagnostics import plots
from diagnostics.decide.curve import curve_of
from diagnostics.measure import diagnose
from diagnostics.metrics.base import METRICS
from diagnostics.report import Report
from diagnostics.representation.probe import by_position
from fl_core.errors import UsageError
from fl_core.layers import Layer, layers_of
from fl_core.rows import Row
from tests.diagnostics.calls import call
from tests.diagnostics.similarities import (
    mean_cca,
    procrustes_distance,
    rbf_cka,
    shifted_procrustes,
    svcca,
)
from tests.diagnostics.test_similarity import (
    by_layer,
    clients,
    dense,
    net,
    odd,
    outputs,
    pair,
)
from tests.networks import Wired

N = 48
RELEASED = "figures.player_fl.released"
REFERENCES: dict[str, Callable[[Tensor, Tensor], float]] = {
    "cka": dense,
    "rbf_cka": rbf_cka,
    "procrustes": procrustes_distance,
    "cca": mean_cca,
    "svcca": svcca,
}
WAYS = [
    *((name, way) for name in REFERENCES for way in METRICS[name].variants),
    ("procrustes", "released"),
]


def measured(
    metric: str, models: Sequence[nn.Module], data: Any = None, **how: Any
) -> list[Row]:
    data = pair() if data is None else data
    if how.get("positions") == "released":
        metric = f"{RELEASED}:{metric}"
    layers = layers_of(models[0], (data if isinstance(data, tuple) else pair())[0][:2])
    return call(metric, clients(models, data), layers, **how)


@pytest.mark.parametrize("batch", [7, N])
@pytest.mark.parametrize(
    ("metric", "positions"),
    [
        *((name, way) for name in REFERENCES for way in METRICS[name].variants),
        ("procrustes", "released"),
    ],
)
def test_all_pairs_and_positions_against_the_definition(
    metric: str, positions: str, batch: int
) -> None:
    models = [net(k).double() for k in range(3)]
    data = (pair()[0].double(), pair()[1])
    rows = measured(metric, models, data, batch=batch, positions=positions)
    assert [(r["client"], r["client_b"]) for r in rows[:3]] == [
        ("c0", "c1"),
        ("c0", "c2"),
        ("c1", "c2"),
    ]
    treat: dict[str, Callable[[Tensor], Tensor]] = {
        "flatten": lambda x: x.flatten(1),
        "samples": lambda x: x.flatten(0, 1),
        "mean": lambda x: x.mean(1),
    }
    for r in rows:
        a, b = (models[int(r[side][1])] for side in ("client", "client_b"))
        if r["layer"] == "0":
            left, right = (m[0](data[0]).detach().movedim(1, -1) for m in (a, b))
            if positions == "released":
                expected = shifted_procrustes(left, right)
            else:
                expected = REFERENCES[metric](
                    *(treat[positions](x.flatten(1, 2)) for x in (left, right))
                )
        else:
            left, right = (outputs(m, data[0])[r["layer"]] for m in (a, b))
            expected = REFERENCES[metric](left, right)
        if math.isnan(expected):
            assert "space" in r["status"]
        else:
            assert r["value"] == pytest.approx(expected, abs=1e-7), r["layer"]
        assert (r["variant"], r["n_samples"], r["metric"]) == (positions, N, metric)
        assert r["n_params"] == {"0": 40, "4": 85, "6": 18}[r["layer"]]
        assert r["unit"] == ("rad" if metric == "procrustes" else "")


def test_estimators_state_what_they_depend_on() -> None:
    models = [net(0), net(1)]
    said = {
        "rbf_cka": ({"bandwidth": 0.8}, "full, bandwidth 0.8 x median distance"),
        "svcca": ({"variance": 0.9}, "full, 90 % of the variance"),
        "procrustes": ({"positions": "released"}, "full, least over shifts"),
    }
    for metric, (how, estimator) in said.items():
        assert {r["estimator"] for r in measured(metric, models, **how)} == {estimator}
    values = [by_layer(measured("svcca", models, variance=v))["6"] for v in (0.5, 1.0)]
    assert values[0] != values[1]


@pytest.mark.parametrize(
    ("module", "shape", "expected"),
    [
        (nn.Identity(), (2, 5), (2, 5)),
        (nn.Identity(), (2,), (2, 1)),
        (nn.Identity(), (2, 7, 5), (2, 7, 5)),
        (nn.Conv1d(1, 5, 1), (2, 5, 7), (2, 7, 5)),
        (nn.Sequential(nn.Conv1d(1, 5, 1), nn.ReLU()), (2, 5, 7), (2, 7, 5)),
        (nn.Conv2d(1, 5, 1), (2, 5, 3, 4), (2, 3, 4, 5)),
        (nn.BatchNorm2d(5), (2, 5, 3, 4), (2, 3, 4, 5)),
        (nn.Linear(1, 5), (2, 3, 4, 5), (2, 3, 4, 5)),
        (nn.Conv3d(1, 5, 1), (2, 5, 3, 4, 6), (2, 3, 4, 6, 5)),
    ],
)
def test_where_the_features_are(
    module: nn.Module, shape: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    x = torch.randn(shape)
    placed = by_position(module, x)
    assert tuple(placed.shape) == expected
    if len(shape) > 2 and shape != expected:
        assert torch.equal(placed.movedim(-1, 1), x)


def test_the_authors_way_sums_tokens_and_never_exceeds_the_plain_angle() -> None:
    torch.manual_seed(0)
    models = [
        nn.Sequential(nn.Linear(4, 3), nn.Flatten(), nn.Linear(15, 3)).double()
        for _ in range(2)
    ]
    x = torch.randn(20, 5, 4, dtype=torch.float64)
    rows = measured("procrustes", models, (x, torch.zeros(20)), positions="released")
    sums = [m[0](x).detach().sum(1) for m in models]
    assert by_layer(rows)["0"] == pytest.approx(procrustes_distance(*sums), abs=1e-9)
    images = [net(0), net(1)]
    released, plain = (
        by_layer(measured("procrustes", images, positions=p))
        for p in ("released", "samples")
    )
    assert released["0"] < plain["0"]
    assert released["6"] == pytest.approx(plain["6"], abs=1e-9)
    lines = [
        nn.Sequential(nn.Conv1d(5, 3, 2), nn.Flatten(), nn.Linear(9, 3)).double()
        for _ in range(2)
    ]
    shifted = by_layer(
        measured("procrustes", lines, (x, torch.zeros(20)), positions="released")
    )["0"]
    assert shifted == pytest.approx(
        shifted_procrustes(*(m[0](x).detach().mT for m in lines)), abs=1e-9
    )


@pytest.mark.parametrize("metric", REFERENCES)
def test_layers_against_another_layer(metric: str) -> None:
    models = [net(0), net(1)]
    rows = measured(metric, models, against="4", samples=N)
    plain = [r for r in rows if r["variant"] == "flatten"]
    assert [r["value"] for r in plain] == pytest.approx(
        [r["value"] for r in measured(metric, models)], abs=1e-6, nan_ok=True
    )
    across = [r for r in rows if r["variant"] == "flatten, against 4"]
    assert len(across) == 2 * 4  # layers 0 and 6, every client with every client
    seen = [outputs(model, pair()[0]) for model in models]
    for r in across:
        a, b = seen[int(r["client"][1])][r["layer"]], seen[int(r["client_b"][1])]["4"]
        expected = REFERENCES[metric](a, b)
        if math.isnan(expected):
            assert r["status"].startswith(f"output of layer '{r['layer']}'")
        else:
            assert r["value"] == pytest.approx(expected, abs=1e-4)


def test_one_model_has_layers_to_compare() -> None:
    rows = measured("cka", [net(0)], against=["0", "4", "6"])
    alone = [r for r in rows if r["variant"] == "flatten"]
    assert {r["status"] for r in alone} == {"needs at least two models"}
    across = {(r["layer"], r["variant"][-1]): r["value"] for r in rows if r["client"]}
    assert len(across) == 6
    assert across["0", "6"] == pytest.approx(across["6", "0"], abs=1e-12)


def test_the_report_keeps_both_kinds_apart() -> None:
    report = diagnose(
        [net(0), net(1)],
        pair(),
        ["cka"],
        options={"cka": {"against": ["6"]}},
        progress=False,
    )
    assert list(report.values("cka").index) == ["0", "4", "6"]
    across = report.frame[report.frame["variant"] == "flatten, against 6"].set_index(
        ["client", "client_b", "layer"]
    )
    table, between = (
        report.values("cka", "flatten, against 6"),
        ("client_0", "client_1"),
    )
    expected = [
        [across.loc[(a, b, layer), "value"] for a, b in (between, between[::-1])]
        for layer in ("0", "4")
    ]
    assert list(table.index) == ["0", "4"]
    assert list(table.columns) == list(between)
    assert table.to_numpy().tolist() == expected
    ax: Any = plots.metric(report.frame, "cka", variant="flatten, against 6")
    for k, name in enumerate(between):
        drawn = next(line for line in ax.lines if line.get_label() == name)
        assert drawn.get_ydata() == pytest.approx([1 - row[k] for row in expected])
    curve = curve_of(report.layers[:2], report.frame, "cka", "flatten, against 6")
    assert curve.clients == {
        name: pytest.approx([1 - row[k] for row in expected])
        for k, name in enumerate(between)
    }
    matrix = (
        plots.cka_matrices(report.frame, variant="flatten, against 6")[0]
        .collections[0]
        .get_array()
    )
    assert matrix.ravel()[0] == pytest.approx(
        across.loc[("client_0", "client_0", "0"), "value"]
    )
    assert report.plot("cka").has_data()
    plain = diagnose([net(0), net(1)], pair(), ["cka"], progress=False)
    assert report.cka("4").to_numpy() == pytest.approx(
        plain.cka("4").to_numpy(), abs=1e-6
    )
    drawn = [
        plots.cka_matrices(r.frame)[1].collections[0].get_array().ravel()
        for r in (report, plain)
    ]
    assert drawn[0].filled(9).tolist() == pytest.approx(
        drawn[1].filled(9).tolist(), abs=1e-6
    )
    assert "2 clients" in repr(plain)


@pytest.mark.parametrize(
    ("metric", "how", "words"),
    [
        ("cka", {"positions": "sample"}, "mean 'samples'"),
        ("rbf_cka", {"positions": "samples"}, "flatten, mean"),
        ("cka", {"positions": "samples", "estimator": "minibatch"}, "estimator 'full'"),
        ("cka", {"against": "7"}, "layer .*'7'"),
        (
            "procrustes",
            {"against": "4", "positions": "released"},
            "against.*'released'",
        ),
        ("cca", {"against": "4", "positions": "samples"}, "against.*'samples'"),
        ("rbf_cka", {"bandwidth": 0}, "above 0"),
        ("rbf_cka", {"bandwidth": math.inf}, "above 0"),
        ("svcca", {"variance": 0.0}, "above 0"),
        ("rbf_cka", {"estimator": "mini"}, "estimator"),
        ("svcca", {"variance": 2.0}, "at most 1"),
        ("cka", {"samples": -5}, "cka.*samples.*-5"),
        ("rbf_cka", {"batch": 0}, "batch.*0"),
        ("procrustes", {"batch": -1}, "batch.*-1"),
    ],
)
def test_bad_requests_are_named(metric: str, how: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        measured(metric, [net(0), net(1)], **how)


@pytest.mark.parametrize(
    ("metric", "positions"),
    [
        *((name, way) for name in REFERENCES for way in METRICS[name].variants),
        ("procrustes", "released"),
    ],
)
def test_tuples_repeats_dead_and_unused_layers(metric: str, positions: str) -> None:
    torch.manual_seed(0)
    models = [odd(), odd(), odd()]
    nn.init.zeros_(models[1].dead.weight)
    x = torch.randn(30, 5, 4)
    rows = measured(metric, models, (x, torch.zeros(30)), positions=positions)
    found = by_layer(rows)
    assert isinstance(found["lstm"], float)
    assert isinstance(found["twice"], float)
    assert found["timefirst"].startswith(
        "output of layer 'timefirst' at client 'c0': shape (5, 30, 2)"
    )
    assert (
        found["dead"]
        == "output of layer 'dead' at client 'c1': constant over the probe"
    )
    assert found["unused"] == "unused in the forward pass"
    assert isinstance(by_layer(rows, "c0", "c2")["dead"], float)


def sometimes() -> Wired:
    """A layer that the second call does not reach, and one whose output has another size then."""

    def run(m: Any, x: Tensor) -> Tensor:
        h, late = m.first(x), m.calls % 2
        m.calls += 1
        h = h if late else m.skipped(h)
        return m.head(m.growing(h[..., : h.shape[-1] - late]).mean(-1))

    parts = {
        "first": nn.Conv1d(1, 2, 3),
        "skipped": nn.Conv1d(2, 2, 1),
        "growing": nn.Conv1d(2, 2, 1),
    }
    return Wired(run, **parts, head=nn.Linear(2, 3), calls=0)


@pytest.mark.parametrize("positions", ["flatten", "samples", "mean", "released"])
def test_outputs_that_change_between_batches(positions: str) -> None:
    models = [sometimes(), sometimes()]
    layers = [
        Layer(n, (f"{n}.weight",), output=n)
        for n in ("first", "skipped", "growing", "head")
    ]
    data = (torch.randn(20, 1, 9), torch.zeros(20))
    metric = f"{RELEASED}:procrustes" if positions == "released" else "procrustes"
    found = by_layer(
        call(metric, clients(models, data), layers, batch=10, positions=positions)
    )
    assert isinstance(found["first"], float)
    assert "not computed" in found["skipped"]
    if positions == "mean":
        assert isinstance(found["growing"], float)
    else:
        assert "output of layer 'growing' at client 'c0'" in found["growing"]


def test_few_positions_are_rows_enough() -> None:
    """With positions as rows a single sample can be compared; as features it cannot."""
    models, data = [net(0), net(1)], pair(1)
    assert isinstance(
        by_layer(measured("procrustes", models, data, positions="samples"))["0"], float
    )
    assert (
        "1 samples, at least 3" in by_layer(measured("procrustes", models, data))["0"]
    )
    assert (
        "1 samples, at least 3"
        in by_layer(measured("procrustes", models, data, positions="released"))["6"]
    )


@pytest.mark.parametrize("metric", REFERENCES)
def test_a_shuffling_loader_is_read_once_for_all_models(metric: str) -> None:
    loader = DataLoader(TensorDataset(*pair()), batch_size=10, shuffle=True)
    model = net()
    rows = measured(
        metric, [model, copy.deepcopy(model), net(1)], loader, positions="mean"
    )
    same = 0.0 if METRICS[metric].distance else 1.0
    assert list(by_layer(rows).values()) == pytest.approx([same] * 3, abs=1e-3)
    assert all(
        abs(value - same) > 1e-3 for value in by_layer(rows, "c0", "c2").values()
    )


@pytest.fixture(scope="module")
def report() -> Report:
    return diagnose(
        [net(k) for k in range(3)], pair(), list(REFERENCES), progress=False
    )


@pytest.mark.parametrize("metric", REFERENCES)
def test_curves_and_pictures_grow_with_the_distance(
    report: Report, metric: str
) -> None:
    table = report.values(metric)
    assert list(table.index) == ["0", "4", "6"]
    if table.isna().to_numpy().any():  # 64 features of 48 samples
        assert metric == "cca"
        return
    apart = table if METRICS[metric].distance else 1 - table
    curve = curve_of(report.layers, report.frame, metric)
    for client in table:
        assert curve.clients[client] == pytest.approx(apart[client].tolist())
    ax: Any = plots.metric(report.frame, metric)
    drawn = next(line for line in ax.lines if line.get_label() == "client_0")
    assert list(drawn.get_ydata()) == pytest.approx(apart["client_0"].tolist())
    assert ("1 −" in ax.get_ylabel()) != METRICS[metric].distance
    assert ("[rad]" in ax.get_ylabel()) == METRICS[metric].distance


def test_a_metric_s_own_probe_is_its_own() -> None:
    models, own = [net(0), net(1)], {"cka": {"probe": pair(9, 6)}}
    report = diagnose(
        models,
        pair(),
        ["cka", "cca"],
        options={**own, "probe": pair(20, 5)},
        progress=False,
    )
    assert dict(
        zip(report.frame["metric"], report.frame["n_samples"], strict=True)
    ) == {"cka": 9, "cca": 20}
    with pytest.raises(UsageError, match=r"probe.*samples=9"):
        diagnose(
            models,
            pair(),
            ["cka"],
            options={"cka": {"samples": 9}, "probe": pair(20, 5)},
            progress=False,
        )
