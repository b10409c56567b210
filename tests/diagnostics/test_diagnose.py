"""From models and data to a report: forms of input, the report's views, and no trace left on any model."""

from __future__ import annotations

import copy
import gc
import json
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from diagnostics.curvature.trace import hessian_trace
from diagnostics.gradients import passes
from diagnostics.measure import SETTINGS, diagnose
from diagnostics.measurement import ClientModel
from diagnostics.metrics.base import METRICS
from diagnostics.report import Report
from fl_core.errors import UsageError
from fl_core.layers import layers_of
from fl_core.plan import LayerPlan
from fl_core.training import losses
from tests.diagnostics.calls import call
from tests.networks import Wired

mpl.use("agg")
C = 3
CE = losses.build("cross_entropy")
CHEAP: dict[str, dict[str, Any]] = {
    "linear_probe": {"folds": 2, "samples": 12},
    "knn_probe": {"folds": 2},
    "hessian_spectrum": {"k": 1, "tol": 0.1},
}
OF_CLASSES = ("linear_probe", "knn_probe", "separability")


def net(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(4, 6),
        nn.BatchNorm1d(6),
        nn.ReLU(inplace=True),
        nn.Dropout(0.2),
        nn.Linear(6, 5),
        nn.ReLU(),
        nn.Linear(5, C),
    )


def pair(n: int = 12, seed: int = 1) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, 4, generator=g), torch.randint(C, (n,), generator=g)


def run(
    models: Any = None, data: Any = None, metrics: Any = tuple(METRICS), **how: Any
) -> Report:
    models = {"a": net(0), "b": net(1), "c": net(2)} if models is None else models
    given = (
        [models]
        if isinstance(models, nn.Module)
        else [*getattr(models, "values", lambda: models)()]
    )
    if given and (
        metrics == tuple(METRICS) or metrics == ["update_magnitude"]
    ):  # as if all had started as the first
        how["options"] = {
            "update_magnitude": {"start": given[0]},
            **how.get("options", {}),
        }
    if metrics == tuple(METRICS):
        how["options"] = {**CHEAP, **how.get("options", {})}
    rare = {name: how.pop(name) for name in SETTINGS if name in how}
    how["options"] = {**how.get("options", {}), **rare}
    return diagnose(
        models, pair() if data is None else data, metrics, progress=False, **how
    )


def test_every_metric_gives_a_row_for_every_client_and_layer() -> None:
    report = run()
    frame, layers = report.frame, ["0", "4", "6"]
    assert [layer.name for layer in report.layers] == layers
    missing = frame[frame["status"] != "ok"]
    assert set(zip(missing["metric"], missing["layer"], strict=True)) == {
        ("bn_scale", "4"),
        ("bn_scale", "6"),
    }
    assert list(dict.fromkeys(frame["metric"])) == list(METRICS)
    for name, metric in METRICS.members().items():
        rows = frame[(frame["metric"] == name) & (frame["variant"] == metric.variant)]
        who = (
            [("a", "b"), ("a", "c"), ("b", "c")]
            if metric.pairs
            else [("a", ""), ("b", ""), ("c", "")]
        )
        who += [("", "")] if name == "federation_sensitivity" else []
        found = layers[-1:] if name == "output_disagreement" else layers
        assert set(
            zip(rows["client"], rows["client_b"], rows["layer"], strict=True)
        ) == {(*pair_, layer) for pair_ in who for layer in found}
        assert len(rows) == len(who) * len(found)
        assert set(rows["estimator"]) != {""}


@pytest.mark.parametrize("estimator", ["auto", "hutchinson", "activation"])
def test_the_hessian_rows_are_the_trace_and_its_mean(estimator: str) -> None:
    """Signs in the weights divide a pair into several batches, and leave a loader's as they are."""
    model, data, how = net(), pair(40), {"estimator": estimator, "probes": 3}
    layers = layers_of(model, data[0])
    frame = run(
        {"a": model}, data, metrics=["hessian_trace"], options={"hessian_trace": how}
    ).frame
    expected = hessian_trace(
        model, data, layers, loss=CE, estimator=estimator, probes=3
    )
    loaded = run(
        {"a": model},
        DataLoader(TensorDataset(*data), 40),
        ["hessian_trace"],
        options={"hessian_trace": how},
    ).frame
    assert frame["value"].equals(loaded["value"]) == (estimator != "hutchinson")
    for variant, value, stderr in (
        ("absolute", "trace", "stderr"),
        ("per_parameter", "per_parameter", "stderr_per_parameter"),
    ):
        rows = frame[frame["variant"] == variant]
        assert rows["value"].tolist() == [getattr(result, value) for result in expected]
        assert rows["stderr"].tolist() == [
            getattr(result, stderr) for result in expected
        ]
        assert rows["n_params"].tolist() == [result.n_params for result in expected]


def test_the_report_s_tables() -> None:
    report = run()
    table = report.values("grad_variance")
    assert list(table.index) == ["0", "4", "6"]
    assert list(table.columns) == ["a", "b", "c"]
    frame = report.frame
    (row,) = frame[
        (frame["metric"] == "grad_variance")
        & (frame["client"] == "b")
        & (frame["layer"] == "4")
    ].to_dict("records")
    assert table.loc["4", "b"] == row["value"]
    assert (report.values("federation_sensitivity").loc["0"] == 1).all()
    assert (report.values("federation_sensitivity", "importance").loc["0"] < 1).all()
    matrix = report.cka("4")
    assert list(matrix.index) == list(matrix.columns) == ["a", "b", "c"]
    assert (matrix == matrix.T).all().all()
    assert matrix.to_numpy().diagonal().tolist() == [1, 1, 1]
    assert report.values("cka").loc["4", "b"] == pytest.approx(
        (matrix.loc["b", "a"] + matrix.loc["b", "c"]) / 2
    )
    for wrong, words in (
        (lambda: report.values("grad_varianc"), "mean 'grad_variance'"),
        (lambda: report.values("grad_variance", "batch"), "epoch"),
        (lambda: report.cka("5"), "layer '5'"),
        (lambda: run(metrics=["grad_variance"]).cka("0"), "report 'cka'"),
    ):
        with pytest.raises(UsageError, match=words):
            wrong()


def test_a_value_that_is_missing_is_missing_in_the_tables_too() -> None:
    broken = net(1)
    nn.init.zeros_(broken[4].weight)
    nn.init.zeros_(broken[4].bias)
    report = run({"a": net(0), "b": broken, "c": net(2)}, metrics=["cka"])
    assert report.values("cka").isna().to_numpy().tolist() == [
        [False] * 3,
        [True] * 3,
        [True] * 3,
    ]
    assert report.cka("4").isna().sum().sum() == 4
    assert "2 rows" not in repr(report)
    assert "4 rows" in repr(report)


def test_a_report_survives_the_disk_and_a_plan_can_be_made_from_it(
    tmp_path: Path,
) -> None:
    data = {name: pair(seed=k) for k, name in enumerate("abc")}
    report = run(data=data, context={"round": 3, "algorithm": "fedavg"}, probe=pair(8))
    report.write(tmp_path / "rows.jsonl")
    again = Report.read(tmp_path / "rows.jsonl")
    pd.testing.assert_frame_equal(again.frame, report.frame)
    assert again.header == report.header
    assert again.layers == report.layers
    LayerPlan.prefix(again.layers, 2).check_fits(net())
    assert sum(again.header["bytes"].values()) == sum(
        t.numel() * t.element_size() for t in net().state_dict().values()
    )
    assert set(again.frame["round"]) == {3}
    assert set(again.frame["algorithm"]) == {"fedavg"}
    assert (
        json.loads((tmp_path / "rows.jsonl").read_text().splitlines()[0])
        == report.header
    )
    (tmp_path / "other.jsonl").write_text('{"schema": 1}\n')
    with pytest.raises(UsageError, match="no layers"):
        Report.read(tmp_path / "other.jsonl")


def test_digests_name_what_was_measured() -> None:
    first, same, other = (
        run(m, metrics=["grad_variance"]).header for m in (net(0), net(0), net(1))
    )
    assert first == same
    assert first["checkpoint"] != other["checkpoint"]
    assert first["data"] == other["data"]
    assert (
        run(net(), pair(seed=5), metrics=["grad_variance"]).header["data"]
        != first["data"]
    )
    loader = DataLoader(TensorDataset(*pair()), batch_size=5)
    assert (
        run(net(), loader, metrics=["grad_variance"]).header["data"] == ""
    )  # its samples may come in any order


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(*pair()), batch_size=5, shuffle=True)


def split() -> Any:
    return SimpleNamespace(x=pair()[0], y=pair()[1])


@pytest.mark.parametrize(
    ("models", "data", "names"),
    [
        (lambda: net(), pair, ["client_0"]),
        (lambda: net(), list(pair()), ["client_0"]),
        (lambda: net(), split, ["client_0"]),
        (lambda: net(), loader, ["client_0"]),
        (lambda: [net(), net(1)], pair, ["client_0", "client_1"]),
        (lambda: [net(), net(1)], lambda: [pair(), pair()], ["client_0", "client_1"]),
        (
            lambda: (net(), net(1)),
            lambda: (loader(), loader()),
            ["client_0", "client_1"],
        ),
        (lambda: {"x": net(), "y": net(1)}, lambda: [pair(), pair()], ["x", "y"]),
        (
            lambda: {"x": net(), "y": net(1)},
            lambda: {"y": pair(), "x": split()},
            ["x", "y"],
        ),
        (lambda: [net(), net(1)], lambda: {"x": pair(), "y": pair()}, ["x", "y"]),
        (lambda: net(), lambda: {"x": pair(), "y": loader()}, ["x", "y"]),
    ],
)
def test_models_and_data_in_every_form(
    models: Any, data: Any, names: list[str]
) -> None:
    report = run(
        models(),
        data() if callable(data) else data,
        ["grad_variance", "hessian_trace", "federation_sensitivity"],
    )
    assert list(report.values("grad_variance").columns) == names
    assert set(report.frame["status"]) == {"ok"}
    assert set(report.frame.loc[report.frame["client"] != "", "n_train"]) == {12}
    plain = run(net(), metrics=["grad_variance"])
    assert report.values("grad_variance")[names[0]].tolist() == pytest.approx(
        plain.values("grad_variance")["client_0"].tolist(), rel=1e-4
    )


def test_data_follow_their_clients_names() -> None:
    models, data = {"x": net(), "y": net(1)}, {"y": pair(seed=2), "x": pair(seed=3)}
    found = run(models, data, ["grad_variance"]).values("grad_variance")
    assert (
        found["y"].tolist()
        == run(models["y"], data["y"], ["grad_variance"])
        .values("grad_variance")["client_0"]
        .tolist()
    )


@pytest.mark.parametrize(
    "how", [{}, {"n_train": 7}, {"n_train": [7, 8]}, {"n_train": {"y": 8, "x": 7}}]
)
def test_weights_of_clients(how: dict[str, Any]) -> None:
    frame = run(
        {"x": net(), "y": net(1)}, [pair(7), pair(8)], ["grad_variance"], **how
    ).frame
    weights = frame.drop_duplicates("client").set_index("client")["n_train"].to_dict()
    assert weights == {"x": 7, "y": 7 if how.get("n_train") == 7 else 8}


def test_one_model_on_many_clients_data_has_no_pair_but_a_model_given_twice_is_its_own_twin() -> (
    None
):
    data = {"x": pair(), "y": pair(seed=2)}
    report = run(net(), data, ["cka", "grad_variance"])
    assert set(report.frame.loc[report.frame["metric"] == "cka", "status"]) == {
        "needs at least two models"
    }
    with pytest.raises(UsageError, match="two models"):
        report.cka("0")
    with pytest.raises(UsageError, match=r"cka.*two models"):
        report.values("cka")
    model = net()
    twins = run([model, model], loader(), ["cka"])
    assert twins.frame["value"].tolist() == pytest.approx([1, 1, 1], abs=1e-6)


def test_some_layers_have_the_values_they_have_among_all() -> None:
    every, some = run(), run(layers=["6", "4"])
    for name, metric in METRICS.members().items():
        for variant in (
            metric.variant,
            every.frame.loc[every.frame["metric"] == name, "variant"].iloc[-1],
        ):
            values = every.values(name, variant)
            pd.testing.assert_frame_equal(
                some.values(name, variant), values.loc[values.index.isin(["4", "6"])]
            )
    assert some.layers == every.layers


def test_options_reach_their_metric() -> None:
    report = run(
        loss="focal",
        options={
            "grad_variance": {"tensors": "all"},
            "cka": {"estimator": "minibatch"},
            "federation_sensitivity": {"reduce": "mean_of_tensors"},
        },
    )
    of = {name: report.frame[report.frame["metric"] == name] for name in METRICS}
    assert set(of["grad_variance"]["estimator"]) == {"full_gradient, all tensors"}
    assert set(of["cka"]["estimator"]) == {"minibatch"}
    assert set(of["federation_sensitivity"]["estimator"]) == {
        "batch_mean, mean of tensors"
    }
    assert report.header["loss"] == "focal"
    assert report.values("grad_variance").equals(
        run(
            metrics=["grad_variance"],
            loss=losses.build("focal"),
            options={"grad_variance": {"tensors": "all"}},
        ).values("grad_variance")
    )


def test_every_metric_says_what_it_keeps_in_memory() -> None:
    for metric in METRICS.members().values():
        assert "\n    Memory: " in (metric.compute.__doc__ or ""), metric.name


def wider() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 7), nn.Linear(7, C))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"metrics": ["grad_varience"]}, "mean 'grad_variance'"),
        ({"layers": ["40"]}, "layer '40'"),
        ({"layers": [""]}, "layer ''"),
        ({"by": "blocks"}, "mean 'block'"),
        ({"mode": "evaluation"}, "mode"),
        ({"loss": "cross_entrop"}, "mean 'cross_entropy'"),
        ({"loss": nn.CrossEntropyLoss}, "CrossEntropyLoss"),
        ({"options": {"ckaa": {}}}, "mean 'cka'"),
        ({"options": {"cka": {"estimater": "full"}}}, "mean 'estimator'"),
        ({"options": {"cka": {"subjects": []}}}, "option of cka 'subjects'"),
        (
            {"metrics": ["cka"], "options": {"grad_variance": {}}},
            "options 'grad_variance'",
        ),
        ({"context": {"metric": "x"}}, "context"),
        ({"models": []}, "no models"),
        ({"data": []}, "no data"),
        ({"models": [net(), "net"]}, "str"),
        ({"models": [net()] * 3, "data": [pair()] * 2}, "3 models .*2"),
        ({"models": {"a": net()}, "data": {"b": pair()}}, "data 'a'"),
        ({"models": [net(), wider()]}, "'client_0'"),
        ({"models": [net()] * 2, "n_train": [1]}, "n_train.*1 .*2"),
        ({"models": {"a": net()}, "n_train": {"b": 1}}, "n_train 'a'"),
        ({"data": (pair()[0], pair()[1] + C)}, "label"),
        ({"data": (torch.full((2, 4), torch.nan), torch.tensor([0, 1]))}, "NaN"),
        ({"data": pair(0)}, "samples"),
    ],
)
def test_bad_requests_are_named(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        run(**change)


UNLIKELY: dict[type, Any] = {str: "nonsense", int: -1, float: -1.0}
OUT_OF_RANGE = [
    (name, option, UNLIKELY[type(default)])
    for name, metric in METRICS.members().items()
    for option, default in metric.options.items()
    if type(default) in UNLIKELY
] + [
    ("hessian_trace", "probes", 1),
    ("cka", "estimator", "nonsense"),
    ("cka", "against", ["nonsense"]),
    ("cka", "estimator", "minibatch"),  # of too small batches
    ("federation_sensitivity", "reduce", "nonsense"),
    ("linear_probe", "holdout", 1.0),
    ("knn_probe", "holdout", 0.0),
]


@pytest.mark.parametrize(("metric", "option", "value"), OUT_OF_RANGE)
def test_an_option_out_of_range_is_refused_before_anything_is_measured(
    metric: str, option: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[str] = []
    monkeypatch.setattr(
        passes, "one_pass", lambda *_, **__: measured.append("gradients")
    )
    with pytest.raises(UsageError, match=metric):
        run(
            metrics=["grad_norm", metric],
            options={metric: {option: value}},
            batch=3 if value == "minibatch" else 256,
        )
    assert not measured
    if option != "against" and value != "minibatch":  # which hang on layers and batches
        with pytest.raises(UsageError):
            METRICS[metric].settings(**{option: value})


def state(model: nn.Module) -> dict[str, Any]:
    """Everything a diagnosis must leave alone, by value, and the gradients' identities."""
    hooks = (
        "_forward_hooks",
        "_forward_pre_hooks",
        "_backward_hooks",
        "_backward_pre_hooks",
    )
    return {
        "tensors": {
            name: tensor.detach().clone() for name, tensor in model.state_dict().items()
        },
        "grads": {
            name: None if p.grad is None else p.grad.clone()
            for name, p in model.named_parameters()
        },
        "identities": [id(p.grad) for p in model.parameters() if p.grad is not None],
        "flags": [p.requires_grad for p in model.parameters()],
        "modes": [module.training for module in model.modules()],
        "hooks": [
            len(getattr(module, name)) for module in model.modules() for name in hooks
        ],
        "random": torch.get_rng_state(),
    }


def assert_same(a: Any, b: Any) -> None:
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            assert_same(one, other)
    elif isinstance(a, Tensor):
        assert torch.equal(a, b)
    else:
        assert a == b


class Raising(nn.Module):
    """The same tensors; the forward pass fails after some calls, between its layers."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.body, self.left = net(), after

    def forward(self, x: Tensor) -> Tensor:
        h = self.body[:4](x)
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("broken on purpose")
        return self.body[4:](h)


def used(model: nn.Module) -> nn.Module:
    """In a state of its own: mixed modes, one frozen tensor, gradients that are there already."""
    model.train()
    parameters = list(model.parameters())
    parameters[0].requires_grad_(False)
    for p in parameters[1:3]:
        p.grad = torch.ones_like(p)
    next(module for module in model.modules() if isinstance(module, nn.Dropout)).eval()
    return model


@pytest.mark.parametrize(
    "mode", [pytest.param("eval", marks=pytest.mark.slow), "train"]
)
@pytest.mark.parametrize("metric", [*METRICS, "all"])
def test_nothing_is_left_on_the_models(metric: str, mode: str) -> None:
    """By each metric alone, and by one diagnosis of all."""
    models = [used(net(k)) for k in range(2)]
    if metric == "all":
        before = [state(model) for model in models]
        run(models, loader(), tuple(METRICS), mode=mode)
    else:
        layers = layers_of(models[0], pair()[0])
        subjects = [
            ClientModel(str(k), model, loader(), 12) for k, model in enumerate(models)
        ]
        before = [state(model) for model in models]
        call(metric, subjects, layers, batch=5, mode=mode, **CHEAP.get(metric, {}))
    assert_same(before, [state(model) for model in models])


class Rewritten(nn.Module):
    """A layer that writes its own parameter and buffer in each forward pass, in any mode."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.mul_(0.9)
        self.passes += 1
        return x @ self.weight


WRITERS: dict[str, Callable[[], nn.Module]] = {
    "max_norm": lambda: nn.Sequential(
        nn.Embedding(7, 4, max_norm=0.5), nn.Flatten(), nn.Linear(12, 4)
    ),
    "in place": lambda: nn.Sequential(nn.Linear(3, 4), Rewritten()),
    "spectral norm": lambda: nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(3, 4))
    ),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_what_a_forward_pass_writes_is_restored(kind: str) -> None:
    """Weights are those of the model as passed, whatever was measured before."""
    torch.manual_seed(0)
    models = [
        nn.Sequential(WRITERS[kind](), nn.ReLU(), nn.Linear(4, C)) for _ in range(2)
    ]
    x = torch.randint(7, (12, 3)) if kind == "max_norm" else torch.randn(12, 3)
    data = (x, torch.arange(12) % C)
    before = [state(model) for model in models]
    metrics = (
        "grad_norm",
        "cka",
        "linear_probe",
        "layer_cost",
        "hessian_trace",
        "hessian_spectrum",
        "weight_magnitude",
    )
    found = run(
        models, data, metrics, mode="train", options={"linear_probe": {"folds": 2}}
    ).frame
    assert_same(before, [state(model) for model in models])
    alone = run(models, data, ["weight_magnitude"]).frame["value"]
    assert (
        found.loc[found["metric"] == "weight_magnitude", "value"].tolist()
        == alone.tolist()
    )
    layer = layers_of(models[0], data[0])[0]
    if kind == "max_norm":
        assert alone[0] == pytest.approx(
            float(models[0].get_parameter(layer.weights[0]).detach().abs().mean())
        )


@pytest.mark.parametrize("source", ["pair", "loader"])
def test_a_last_batch_of_one_joins_the_batch_before_it(source: str) -> None:
    """As in training, where the model normalises over batches."""
    models, samples = {"a": net(0), "b": net(1)}, pair(9)
    one_each = ["grad_noise", "hessian_trace", "cka", "cca", "linear_probe"]
    metrics = [*one_each, "output_disagreement", "layer_swap"]
    data = TensorDataset(*samples)
    own = torch.Generator()  # a loader draws a seed, which would move dropout's draws
    given: Any = samples if source == "pair" else DataLoader(data, 4, generator=own)
    joined = DataLoader(
        data, batch_sampler=[[0, 1, 2, 3], [4, 5, 6, 7, 8]], generator=own
    )
    found, expected = (
        run(models, each, metrics, batch=4, mode="train", probe=samples).frame
        for each in (given, joined)
    )
    assert found["status"].tolist() == expected["status"].tolist()
    assert np.allclose(
        found["value"].astype(float),
        expected["value"].astype(float),
        rtol=1e-6,
        equal_nan=True,
    )


def test_one_sample_alone_cannot_be_normalised() -> None:
    for metric in ("grad_norm", "hessian_trace", "linear_probe", "cka"):
        with pytest.raises(
            UsageError, match=r"at least 2, since .* normalises over .*; got 1\."
        ):
            run({"a": net(0), "b": net(1)}, pair(1), [metric], mode="train")


def wide(seed: int) -> nn.Sequential:
    """A network of which one forgotten graph or gradient a call is far above the limit after twenty."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(4, 400),
        nn.BatchNorm1d(400),
        nn.ReLU(inplace=True),
        nn.Dropout(0.2),
        nn.Linear(400, C),
    )


def resident() -> float:
    """Megabytes of this process in memory."""
    gc.collect()
    return (
        int(Path("/proc/self/statm").read_text().split()[1])
        * os.sysconf("SC_PAGE_SIZE")
        / 2**20
    )


def growth(call: Callable[[], Any], times: int = 20, series: int = 4) -> float:
    """Megabytes by which so many calls grow the process: the least of several series.

    What is lost with every call grows them all; what the allocator sets aside once, only the first ones.
    """
    least = math.inf
    for _ in range(series):
        before = resident()
        for _ in range(times):
            call()
        least = min(least, resident() - before)
        if least < 1:
            break
    return least


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc"
)
@pytest.mark.parametrize("metric", list(METRICS))
def test_twenty_calls_keep_no_memory_and_change_nothing(metric: str) -> None:
    models = [used(wide(k)) for k in range(2)]
    x, y = pair(48)
    layers = layers_of(models[0], x)
    subjects = [
        ClientModel(str(k), model, (x, y), 48) for k, model in enumerate(models)
    ]
    whom = subjects if METRICS[metric].pairs else subjects[:1]
    which = layers[-1:] if metric == "hessian_spectrum" else layers
    options: dict[str, Any] = dict(CHEAP.get(metric, {}))
    if metric == "update_magnitude":
        options["start"] = models[0]

    def measured() -> None:
        call(metric, whom, which, batch=24, **options)

    before = [state(model) for model in models]
    for _ in range(3):
        measured()
    gc.collect()
    tensors = sum(isinstance(each, Tensor) for each in gc.get_objects())
    assert growth(measured) < 1
    assert sum(isinstance(each, Tensor) for each in gc.get_objects()) == tensors
    assert_same(before, [state(model) for model in models])


@pytest.mark.slow
def test_the_growth_of_a_call_that_forgets_is_seen() -> None:
    """A graph kept alive by its own tensors, as after ``backward(create_graph=True)``, which gc does not see."""
    x, y = pair(48)
    model = nn.Sequential(
        nn.Flatten(),
        nn.Linear(x[0].numel(), 4096),
        nn.ReLU(),
        nn.Linear(4096, int(y.max()) + 1),
    )

    def forgets() -> None:
        for p in model.parameters():
            p.grad = None
        CE(model(x), y).backward(create_graph=True)
        kept.append(model[1].weight.grad)

    kept: list[Any] = []
    assert growth(forgets, series=2) > 2


def test_nothing_is_left_after_a_bad_argument() -> None:
    models = [used(net(k)) for k in range(2)]
    before = [state(model) for model in models]
    for metric, member in METRICS.members().items():
        kinds = ("estimator", "tensors", "positions")
        name = next((name for name in kinds if name in member.options), "choice")
        hows: list[dict[str, Any]] = [{"options": {metric: {name: "nearly"}}}]
        if member.requires == "losses":
            hows.append({"data": (pair()[0], pair()[1] + 9)})
        for how in hows:
            with pytest.raises(UsageError):
                run(models, **{"metrics": [metric], **how})
            assert_same(before, [state(model) for model in models])


@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize(
    "metric",
    [
        name
        for name, metric in METRICS.members().items()
        if metric.requires != "weights"
    ],
)
def test_nothing_is_left_after_a_forward_pass_that_fails(
    metric: str, after: int
) -> None:
    model = used(Raising(0 if metric == "layer_cost" else after))  # costs take one pass
    models = [model, copy.deepcopy(model)]
    before = [state(model) for model in models]
    subjects = [ClientModel(str(k), m, loader(), 12) for k, m in enumerate(models)]
    layers = layers_of(net(), pair()[0])
    layers = tuple(
        replace(
            layer,
            parameters=tuple(f"body.{n}" for n in layer.parameters),
            output=f"body.{layer.output}",
        )
        for layer in layers
    )
    with pytest.raises(RuntimeError, match="on purpose"):
        call(metric, subjects, layers, batch=5, mode="train")
    assert_same(before, [state(model) for model in models])
    with pytest.raises((RuntimeError, UsageError), match="on purpose"):
        run(models, loader(), [metric])
    assert_same(before, [state(model) for model in models])


@pytest.mark.parametrize(
    ("n", "one_class"), [(1, False), (2, False), (3, False), (2, True)]
)
def test_few_samples_and_one_class(n: int, one_class: bool) -> None:
    x, y = pair(n)
    report = run(
        {"a": net(0), "b": net(1)},
        (x, torch.zeros_like(y) if one_class else y),
        batch=2,
    )
    told = report.frame[report.frame["metric"].isin(OF_CLASSES)]
    said = told.loc[told["status"] != "ok", "status"]
    assert len(said) == len(told) if one_class else n > 1 or len(said)
    reasons = (
        "one class",
        "1 samples, at least 2 are needed",
        "more than 5 neighbours",
        "no scatter within",
    )
    assert all(any(words in status for words in reasons) for status in said)
    assert all(
        f"layer {layer!r}" in status
        for layer, status in told.loc[said.index, ["layer", "status"]].values
    )
    rest = ~report.frame["metric"].isin(["bn_scale", *OF_CLASSES])
    missing = report.frame[(report.frame["status"] != "ok") & rest]
    on_a_probe = {
        name for name, metric in METRICS.members().items() if "probe" in metric.options
    }
    assert set(missing["metric"]) <= (
        {*on_a_probe, "grad_noise"} if n < 3 else {"cca", "svcca"}
    )
    few = (
        (f"{n} samples, at least 3 are needed", "needs at least two samples")
        if n < 3
        else ("rows fill their space",)
    )
    assert all(any(words in status for words in few) for status in missing["status"])


@pytest.mark.parametrize("n", [2, 3])
def test_no_value_is_the_same_for_any_models(n: int) -> None:
    """With few samples a formula may give one number whatever the models are; then there is no value."""
    metrics = [
        name
        for name, metric in METRICS.members().items()
        if metric.pairs or name in OF_CLASSES
    ]
    found = [
        run([net(k), net(k + 9)], (pair(n, k)[0], torch.arange(n) % 2), metrics).frame
        for k in range(8)
    ]
    values = np.stack([frame["value"].astype(float) for frame in found])
    measured = ~np.isnan(values).any(0)
    assert bool((np.ptp(values[:, measured], 0) > 1e-9).all())
    assert set(found[0].loc[~measured, "metric"]) >= {"cca", "knn_probe"}


def rich(seed: int) -> Wired:
    """A tuple from an LSTM, an in-place ReLU, a module that is never called."""
    torch.manual_seed(seed)
    parts = {
        "lstm": nn.LSTM(4, 5, batch_first=True),
        "relu": nn.ReLU(inplace=True),
        "head": nn.Linear(5, C),
    }
    run = lambda m, x: m.head(m.relu(m.lstm(x.unsqueeze(1))[0][:, 0] + 0))  # noqa: E731
    return Wired(run, **parts, unused=nn.Linear(2, 2))


def test_unused_modules_and_tuples_by_every_metric() -> None:
    report = run([rich(0), rich(1)])
    # what the weights say, they say of any layer
    passes = report.frame["metric"].map(
        lambda name: METRICS[name].requires != "weights"
    )
    passes &= ~report.frame["variant"].isin(["parameters", "bytes"])
    by_layer = report.frame[passes].groupby("layer")["status"].agg(set).to_dict()
    assert by_layer["lstm"] == by_layer["head"] == {"ok"}
    assert all("unused" in status for status in by_layer["unused"])
    assert (report.cka("lstm").to_numpy() <= 1 + 1e-6).all()


def test_progress_counts_every_metric_and_client(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fl_core.progress.SECONDS", 0.0)
    diagnose([net(), net(1)], pair(), progress=True)
    assert "6 of 6" in capsys.readouterr().err  # two gradient metrics share a pass
    run()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("models", "data"),
    [
        ({"a": net()}, {name: pair() for name in "bcd"}),
        ({"a": net()}, {name: pair() for name in "abc"}),
        ({name: net() for name in "abc"}, {"d": pair()}),
    ],
)
def test_a_model_of_one_client_is_not_measured_on_others(
    models: Any, data: Any
) -> None:
    with pytest.raises(UsageError, match="same clients"):
        diagnose(models, data, "grad_norm", progress=False)
    whole = diagnose(
        net(), {name: pair() for name in "bcd"}, "grad_norm", progress=False
    )
    assert set(whole.frame["client"]) >= set("bcd")
