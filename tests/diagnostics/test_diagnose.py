"""From models and data to a report: forms of input, the report's views, and no trace left on any model."""

import copy
import gc
import importlib
import json
from types import SimpleNamespace

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from diagnostics import diagnosis, plots
from diagnostics.load_weights import load_weights
from diagnostics.measure import diagnose, tsne
from diagnostics.measurement import ClientModel
from diagnostics.metrics.base import METRICS
from diagnostics.report import Report
from diagnostics.request import RARE
from diagnostics.select import select
from diagnostics.through_time import through_time
from fl_core import tree
from fl_core.errors import RunError, UsageError
from fl_core.layers import Layer, layers_of
from fl_core.plan import LayerPlan
from tests.bounds import forbidden
from tests.conftest import every_other, refuses
from tests.diagnostics.calls import call
from tests.made import Wired, labelled as pair, snapshot

C = 3
ALL = tuple(name for name in METRICS if not METRICS[name].shared)
"""Without those that train copies of a run's shared model: test_tuning has them."""
CHEAP = {
    "linear_probe": {"folds": 2, "samples": 12},
    "knn_probe": {"folds": 2},
    "hessian_spectrum": {"k": 1, "tol": 0.1},
}
OF_CLASSES = ("linear_probe", "knn_probe", "separability")


def net(seed=0):
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


def run(models=None, data=None, metrics=ALL, **how):
    models = {"a": net(0), "b": net(1), "c": net(2)} if models is None else models
    data = pair() if data is None else data
    options = dict(how.pop("options", {}))
    if metrics == ALL:  # as if all had started as the first
        first = next(iter(models.values() if isinstance(models, dict) else models))
        options = {**CHEAP, "update_magnitude": {"start": first}, **options}
    options |= {name: how.pop(name) for name in RARE if name in how}
    return diagnose(models, data, metrics, options=options, **how)


def test_every_metric_gives_a_row_for_every_client_and_layer():
    report = run()
    frame, layers = report.frame, ["0", "4", "6"]
    assert [layer.name for layer in report.layers] == layers
    missing = frame[frame["status"] != "ok"]
    assert set(zip(missing["metric"], missing["layer"], strict=True)) == {
        ("bn_scale", "4"),
        ("bn_scale", "6"),
    }
    assert tuple(dict.fromkeys(frame["metric"])) == ALL
    for name, metric in ((name, METRICS[name]) for name in ALL):
        rows = frame[(frame["metric"] == name) & (frame["variant"] == metric.variant)]
        who = (
            [("a", "b"), ("a", "c"), ("b", "c")]
            if metric.pairs
            else [("a", ""), ("b", ""), ("c", "")]
        )
        who += [("", "")] if name == "federation_sensitivity" else []
        measured_layers = layers[-1:] if name == "output_disagreement" else layers
        assert set(
            zip(rows["client"], rows["client_b"], rows["layer"], strict=True)
        ) == {(*clients, layer) for clients in who for layer in measured_layers}
        assert len(rows) == len(who) * len(measured_layers)
        assert set(rows["estimator"]) != {""}


def test_the_report_s_tables():
    report = run()
    table, frame = report.values("grad_variance"), report.frame
    assert list(table.index) == ["0", "4", "6"]
    assert list(table.columns) == ["a", "b", "c"]
    variances = frame[frame["metric"] == "grad_variance"].set_index(["client", "layer"])
    assert table.loc["4", "b"] == variances.loc[("b", "4"), "value"]
    pairs = frame[(frame["metric"] == "cka") & (frame["layer"] == "4")]
    mean = pairs.loc[(pairs[["client", "client_b"]] == "b").any(axis=1), "value"].mean()
    assert report.values("cka").loc["4", "b"] == pytest.approx(mean)
    for metric_and_variant, words in (
        (["grad_varianc"], "mean 'grad_variance'"),
        (["grad_variance", "batch"], "epoch"),
    ):
        with refuses(words):
            report.values(*metric_and_variant)


def test_a_report_survives_the_disk_and_a_plan_can_be_made_from_it(
    tmp_path,
):
    data = {name: pair(seed=k) for k, name in enumerate("abc")}
    report = run(data=data, context={"round": 3, "algorithm": "fedavg"}, probe=pair(8))
    report.write(tmp_path / "rows.jsonl")
    again = Report.read(tmp_path / "rows.jsonl")
    pd.testing.assert_frame_equal(again.frame, report.frame)
    assert again.header == report.header
    assert again.layers == report.layers
    LayerPlan.prefix(again.layers, 2).check_fits(net())
    sent = tree.n_bytes(net().state_dict())  # without the count of batches
    assert sum(again.header["bytes"].values()) == sent
    assert set(again.frame["round"]) == {3}
    assert set(again.frame["algorithm"]) == {"fedavg"}
    assert (
        json.loads((tmp_path / "rows.jsonl").read_text().splitlines()[0])
        == report.header
    )
    (tmp_path / "other.jsonl").write_text('{"schema": 1}\n')
    with refuses("without layers"):
        Report.read(tmp_path / "other.jsonl")


def test_digests_name_what_was_measured():
    def header(model, data=None):
        return run(model, data, metrics=["grad_variance"]).header

    first, same, other = (header(net(k)) for k in (0, 0, 1))
    assert first == same
    assert first["checkpoint"] != other["checkpoint"]
    assert first["data"] == other["data"]
    assert header(net(), pair(seed=5))["data"] != first["data"]
    assert header(net(), loader())["data"] == ""  # its samples come in any order


def loader():
    return DataLoader(TensorDataset(*pair()), batch_size=5, shuffle=True)


def split():
    return SimpleNamespace(x=pair()[0], y=pair()[1])


def test_models_and_data_in_every_form():
    one, two, names = net(), [net(), net(1)], ["client_0", "client_1"]
    named = dict(zip("xy", two, strict=True))
    metrics = ["grad_variance", "hessian_trace", "federation_sensitivity"]
    plain = run(net(), metrics=["grad_variance"]).values("grad_variance")["client_0"]
    for models, data, clients in (
        (nn.DataParallel(one), list(pair()), names[:1]),
        (one, (pair()[0], pair()[1].int()), names[:1]),
        (one, split(), names[:1]),
        (one, loader(), names[:1]),
        (two, pair(), names),
        (tuple(two), (loader(), loader()), names),
        (named, [pair(), pair()], ["x", "y"]),
        (two, {"x": pair(), "y": pair()}, ["x", "y"]),
        (one, {"x": pair(), "y": loader()}, ["x", "y"]),
    ):
        report = run(models, data, metrics)
        values = report.values("grad_variance")
        assert list(values.columns) == clients
        assert set(report.frame["status"]) == {"ok"}
        assert set(report.frame.loc[report.frame["client"] != "", "n_train"]) == {12}
        assert values[clients[0]].tolist() == pytest.approx(plain.tolist(), rel=1e-4)
    data = {"y": pair(seed=2), "x": split()}  # data follow their names
    values = run(named, data, metrics).values("grad_variance")
    alone = run(named["y"], data["y"], metrics).values("grad_variance")
    assert values["y"].tolist() == alone["client_0"].tolist()


def test_one_model_on_many_clients_data_has_no_pair_but_a_model_given_twice_is_its_own_twin():
    data = {"x": pair(), "y": pair(seed=2)}
    report = run(net(), data, ["cka", "grad_variance"])
    assert set(report.frame.loc[report.frame["metric"] == "cka", "status"]) == {
        "needs at least two models"
    }
    with refuses(r"cka.*two models"):
        report.values("cka")
    model = net()
    twins = run([model, model], loader(), ["cka"])
    assert twins.frame["value"].tolist() == pytest.approx([1, 1, 1], abs=1e-6)


@pytest.mark.slow
def test_some_layers_have_the_values_they_have_among_all():
    every, some = run(), run(layers=["6", "4"])
    for name, metric_rows in every.frame.groupby("metric"):
        last = metric_rows.loc[metric_rows["client"] != "", "variant"].iloc[-1]
        for variant in (METRICS[name].variant, last):
            values = every.values(name, variant)
            of_some_layers = values.loc[values.index.isin(["4", "6"])]
            pd.testing.assert_frame_equal(some.values(name, variant), of_some_layers)
    assert some.layers == every.layers


@pytest.mark.parametrize("metric", ALL)
def test_an_option_out_of_range_is_refused_before_anything_is_measured(
    metric, monkeypatch
):
    """By the types and bounds that options declare, and by what no annotation says."""
    monkeypatch.setattr(diagnosis, "one_pass", None)
    models = [used(net(k)) for k in range(2)]
    before = [snapshot(model) for model in models]
    wrong = [*forbidden(METRICS[metric].options_type), ("choice", "nearly")]
    wrong += {
        "hessian_trace": [("probes", 1)],
        "linear_probe": [("samples", 1), ("folds", 1)],
    }.get(metric, [])
    for option, value in wrong:
        with refuses(rf"(?s){metric}.*{option}") as caught:
            run(
                models, metrics=["grad_norm", metric], options={metric: {option: value}}
            )
        assert "\n" not in str(caught.value)
        assert [snapshot(model) for model in models] == before


class Raising(nn.Module):
    """The same tensors; the forward pass fails after some calls, between its layers."""

    def __init__(self, after):
        super().__init__()
        self.body, self.left = net(), after

    def forward(self, x):
        h = self.body[:4](x)
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("broken on purpose")
        return self.body[4:](h)


def used(model):
    """In a state of its own: mixed modes, one frozen tensor, gradients that are there already."""
    model.train()
    parameters = list(model.parameters())
    parameters[0].requires_grad_(False)
    for p in parameters[1:3]:
        p.grad = torch.ones_like(p)
    next(module for module in model.modules() if isinstance(module, nn.Dropout)).eval()
    return model


def rounds(models, data, metrics=("grad_similarity", "weight_divergence", "knn_probe")):
    report = through_time({1: models, 2: models}, metrics, data)
    report.layer_map()
    return report


def planned(models, data):
    report = run(models, data, ["federation_sensitivity"], batch=4, resamples=3)
    return select(report)


def stored(models, data):
    torch.save(models["a"].state_dict(), "net.pt")
    load_weights("net.pt", into=models["a"])


FUNCTIONS = {
    "all": lambda models, data: run(models, data, mode="train"),
    "nulls": lambda m, d: run(m, d, ["grad_norm"], null=["labels", "fresh"]),
    "through_time": rounds,
    "select": planned,
    "tsne": lambda m, d: plots.tsne(tsne(m, d, iterations=250)),
    "load_weights": stored,
}
"""What reads clients' models beside single metrics."""


@pytest.fixture(scope="module")
def new_objects():
    """Let the collector see what is made from now on, which is quick to go through."""
    importlib.import_module("rich.style")  # its first import draws from random
    gc.collect()
    gc.freeze()
    yield gc.get_objects
    gc.unfreeze()


@pytest.mark.parametrize("name", [*every_other(METRICS), *FUNCTIONS])
def test_nothing_is_left_on_the_models(name, tmp_path, monkeypatch, new_objects):
    """By each metric alone, whatever the mode, and by each function: neither a trace nor a tensor."""
    monkeypatch.chdir(tmp_path)
    models = [used(net(k)) for k in range(2)]
    layers = layers_of(models[0], pair()[0])
    subjects = [ClientModel(str(k), m, loader(), 12) for k, m in enumerate(models)]
    before, alive = [snapshot(model) for model in models], []
    for mode in ("train", "eval", "eval") if name in METRICS else ("train",):
        if name in FUNCTIONS:
            FUNCTIONS[name](
                dict(zip("ab", models, strict=True)), {k: loader() for k in "ab"}
            )
            plt.close("all")
        else:
            call(name, subjects, layers, batch=5, mode=mode, **CHEAP.get(name, {}))
        gc.collect()
        alive.append(sum(issubclass(type(new), Tensor) for new in new_objects()))
        assert [snapshot(model) for model in models] == before
    assert alive[-1] == alive[-2:][0]


def by_place(report):
    """Values and states by metric, layer and clients, whatever the order of a pair."""
    values = {}
    for row in report.frame.to_dict("records"):
        who = tuple(sorted((row["client"], row["client_b"])))
        place = (row["metric"], row["variant"], row["layer"], *who)
        values[place] = (
            row["status"],
            pytest.approx(row["value"], 1e-4, 1e-6, nan_ok=True),
        )
    return values


def clients_of(names):
    models = {name: net("abc".index(name)) for name in names}
    return models, {name: pair(seed="abc".index(name)) for name in names}


@pytest.mark.slow
def test_neither_batches_nor_the_order_of_clients_change_a_value():
    how = {"options": {"update_magnitude": {"start": net(9)}}}
    whole = by_place(run(*clients_of("abc"), **how))
    parts = by_place(run(*clients_of("cab"), batch=5, **how))
    assert parts.keys() == whole.keys()
    steps = "federation_sensitivity"  # a mean over steps, which are batches
    for place, values in parts.items():
        assert place[0] == steps or values == whole[place], place
    one, other = (by_place(rounds(*clients_of(names))) for names in ("abc", "cab"))
    assert one == other
    one, other = (planned(*clients_of(names)) for names in ("abc", "cab"))
    assert one.why.detail["stability"] == other.why.detail["stability"]


def test_a_layer_that_is_not_finite_says_so_wherever_it_is_read():
    (models, data), start = clients_of("ab"), {"update_magnitude": {"start": net(9)}}
    models["b"][4].weight.data[0, 0] = torch.nan
    frame = run(models, data, options=start).frame
    of_b = (frame[["client", "client_b"]] == "b").any(axis=1)
    read = frame[of_b & (frame["layer"] == "4")]
    assert set(read.loc[read["status"] == "ok", "metric"]) == {"layer_cost"}
    assert read.loc[read["status"] != "ok", "value"].isna().all()
    alone = frame[(frame["client"] == "a") & (frame["client_b"] == "")]
    alone = alone[(alone["variant"] != "pooled") & (alone["status"] != "ok")]
    assert set(alone["metric"]) == {"bn_scale", "layer_swap"}
    missing = rounds(models, data).frame
    assert set(missing.loc[missing["layer"] == "4", "status"]) - {"ok"}
    for name, words in (("select", "not finite"), ("tsne", "client 'b': not finite")):
        with pytest.raises((RunError, UsageError), match=words):
            FUNCTIONS[name](models, data)


class Rewritten(nn.Module):
    """A layer that writes its own parameter and buffer in each forward pass, in any mode."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x):
        with torch.no_grad():
            self.weight.mul_(0.9)
        self.passes += 1
        return x @ self.weight


WRITERS = {
    "max_norm": lambda: nn.Sequential(
        nn.Embedding(7, 4, max_norm=0.5), nn.Flatten(), nn.Linear(12, 4)
    ),
    "in place": lambda: nn.Sequential(nn.Linear(3, 4), Rewritten()),
    "spectral norm": lambda: nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(3, 4))
    ),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_what_a_forward_pass_writes_is_restored(kind):
    """Weights are those of the model as passed, whatever was measured before."""
    torch.manual_seed(0)
    models = [
        nn.Sequential(WRITERS[kind](), nn.ReLU(), nn.Linear(4, C)) for _ in range(2)
    ]
    x = torch.randint(7, (12, 3)) if kind == "max_norm" else torch.randn(12, 3)
    data = (x, torch.arange(12) % C)
    before = [snapshot(model) for model in models]
    rows = run(models, data, mode="train").frame
    assert [snapshot(model) for model in models] == before
    alone = run(models, data, ["weight_magnitude"]).frame["value"]
    among = rows.loc[rows["metric"] == "weight_magnitude", "value"]
    assert among.tolist() == alone.tolist()
    if kind == "max_norm":
        weights = models[0].get_parameter(layers_of(models[0], x)[0].weights[0])
        assert alone[0] == pytest.approx(float(weights.detach().abs().mean()))


def test_a_last_batch_of_one_joins_the_batch_before_it():
    """As in training, where the model normalises over batches."""
    models, samples = {"a": net(0), "b": net(1)}, pair(9)
    metrics = ["grad_noise", "hessian_trace", "cka", "cca", "linear_probe"]
    metrics += ["output_disagreement", "layer_swap"]
    generator = (
        torch.Generator()
    )  # a loader draws a seed, which would move dropout's draws
    data, parts = TensorDataset(*samples), [[0, 1, 2, 3], [4, 5, 6, 7, 8]]
    joined = DataLoader(data, batch_sampler=parts, generator=generator)
    how = {"batch": 4, "mode": "train", "probe": samples}
    expected, *others = (
        run(models, form, metrics, **how).frame[["status", "value"]]
        for form in (joined, samples, DataLoader(data, 4, generator=generator))
    )
    for rows in others:
        pd.testing.assert_frame_equal(rows, expected, rtol=1e-6, check_dtype=False)


def test_one_sample_alone_cannot_be_normalised():
    for metric in ("grad_norm", "hessian_trace", "linear_probe", "cka"):
        with refuses(r"at least 2, since .* normalises over .*; got 1\."):
            run({"a": net(0), "b": net(1)}, pair(1), [metric], mode="train")


@pytest.mark.parametrize(
    "metric", [name for name in ALL if METRICS[name].requires != "weights"]
)
def test_nothing_is_left_after_a_forward_pass_that_fails(metric):
    for after in (0, 2) if metric != "layer_cost" else (0,):  # costs take one pass
        model = used(Raising(after))
        models = [model, copy.deepcopy(model)]
        before = [snapshot(network) for network in models]
        layers = [
            Layer(name, (f"body.{name}.weight",), output=f"body.{name}")
            for name in ("0", "4", "6")
        ]
        subjects = [ClientModel(str(k), m, loader(), 12) for k, m in enumerate(models)]
        with pytest.raises((RuntimeError, UsageError), match="on purpose"):
            call(metric, subjects, layers, batch=5, mode="train")
        with pytest.raises((RuntimeError, UsageError), match="on purpose"):
            run(models, loader(), [metric])
        assert [snapshot(network) for network in models] == before


@pytest.mark.parametrize(
    ("n", "one_class"), [(1, False), (2, False), (3, False), (2, True)]
)
def test_few_samples_and_one_class(n, one_class):
    x, y = pair(n)
    data = (x, torch.zeros_like(y) if one_class else y)
    frame = run({"a": net(0), "b": net(1)}, data, batch=2).frame
    missing = frame[(frame["status"] != "ok") & (frame["metric"] != "bn_scale")]
    classes = missing["metric"].isin(OF_CLASSES)
    assert not one_class or classes.sum() == frame["metric"].isin(OF_CLASSES).sum()
    assert n > 1 or classes.any()
    reasons = (
        "one class|1 samples, at least 2 are|more than 5 neighbours|no scatter with"
    )
    assert missing[classes]["status"].str.contains(reasons).all()
    for layer, status in missing.loc[classes, ["layer", "status"]].values:
        assert f"layer {layer!r}" in status
    probed = {name for name in METRICS if "probe" in METRICS[name].options}
    few, who = "rows fill their space", {"cca", "svcca"}
    if n < 3:
        few = f"{n} samples, at least 3 are needed|needs at least two samples"
        who = {*probed, "grad_noise"}
    assert set(missing[~classes]["metric"]) <= who
    assert missing[~classes]["status"].str.contains(few).all()


def test_no_value_is_the_same_for_any_models():
    """With few samples a formula may give one number whatever the models are; then there is no value."""
    metrics = [n for n in METRICS if METRICS[n].pairs or n in OF_CLASSES]
    for n in (2, 3):
        reports = [
            run([net(k), net(k + 9)], (pair(n, k)[0], torch.arange(n) % 2), metrics)
            for k in range(8)
        ]
        values = np.stack([report.frame["value"].astype(float) for report in reports])
        guessed = reports[0].frame["variant"].str.endswith("_guessing")
        measured = ~np.isnan(values).any(0) & ~guessed  # that one is of the labels
        assert bool((np.ptp(values[:, measured], 0) > 1e-9).all())
        assert set(reports[0].frame.loc[~measured, "metric"]) >= {"cca", "knn_probe"}


def rich(seed):
    """A tuple from an LSTM, an in-place ReLU, a module that is never called."""
    torch.manual_seed(seed)
    parts = {
        "lstm": nn.LSTM(4, 5, batch_first=True),
        "relu": nn.ReLU(inplace=True),
        "head": nn.Linear(5, C),
    }
    run = lambda m, x: m.head(m.relu(m.lstm(x.unsqueeze(1))[0][:, 0] + 0))  # noqa: E731
    return Wired(run, **parts, unused=nn.Linear(2, 2))


def test_unused_modules_and_tuples_by_every_metric():
    report = run([rich(0), rich(1)])
    frame = report.frame  # what the weights say, they say of any layer
    of_weights = [name for name in METRICS if METRICS[name].requires == "weights"]
    frame = frame[~frame["metric"].isin(of_weights)]
    frame = frame[~frame["variant"].isin(["parameters", "bytes"])]
    by_layer = frame.groupby("layer")["status"].agg(set).to_dict()
    assert by_layer["lstm"] == by_layer["head"] == {"ok"}
    assert all("unused" in status for status in by_layer["unused"])
