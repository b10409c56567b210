"""Layers that the model's author froze: measured around, shared, and never asked to decide."""

import re

import pytest
import torch
from torch import nn

from diagnostics.curve import curve_of
from diagnostics.measure import diagnose, instruments
from diagnostics.report import explain
from diagnostics.select import select
from fl_core import models
from fl_core.layers import layers_of
from fl_core.plan import LayerPlan
from fl_core.run import runner
from tests.conftest import CONFIG, TOY, network, refuses
from tests.made import Wired


def frozen(*names, kind="plain"):
    model = network(kind)
    for name, parameter in model.named_parameters():
        if any(name.startswith(f"{layer}.") for layer in names):
            parameter.requires_grad_(False)
    return model


def layers(model):
    return layers_of(model, models.example(TOY.shape))


def test_layers_know_their_frozen_tensors_and_plans_count_those_that_train():
    listed = layers(frozen("fc1", "bn1", kind="norm"))
    norms = tuple(name for name in listed[0].tensors if name.startswith("bn1."))
    assert [layer.frozen for layer in listed] == [norms, ("fc1.weight",), ()]
    assert not any(layer.is_frozen for layer in listed)
    plan = LayerPlan.prefix(listed, 1)
    assert LayerPlan.from_json(plan.to_json()) == plan
    # a model that is frozen as a whole was put aside
    listed = layers(network("plain").requires_grad_(False))
    assert listed == layers(network("plain"))
    listed = layers(frozen("fc2"))
    assert [layer.is_frozen for layer in listed] == [False, True, False]
    last = LayerPlan.all_but_last(listed)
    assert (last.trainable, last.shared) == (("fc1", "fc3"), ("fc1", "fc2"))
    for count, shared in ((1, ("fc1", "fc2")), (0, ("fc2",))):
        plan = LayerPlan(listed, ()).with_first(count)
        assert (plan.shared, plan.cut) == (shared, count)


@pytest.mark.parametrize("which", ["fc1", "fc2"])
def test_a_frozen_layer_is_left_out_of_the_curve_and_shared(which):
    """Its row says why; the others are as if it were not there, relative to the first that trains."""
    model, sensitivity = frozen(which), "federation_sensitivity"
    data = {c.name: (c.train.x, c.train.y) for c in TOY.clients}
    metrics = ("grad_variance", sensitivity)
    report, free = (diagnose(m, data, metrics) for m in (model, network("plain")))
    trained = [name for name in ("fc1", "fc2", "fc3") if name != which]
    rows = report.frame[report.frame["metric"] == sensitivity]
    statuses = rows[rows["client"] == "a"].groupby("layer")["status"].agg(set)
    assert statuses[which] == {"frozen: its weights do not train"}
    assert statuses[trained[0]] == statuses[trained[1]] == {"ok"}
    # the gradient is there all the same
    assert report.values("grad_variance").equals(free.values("grad_variance"))
    importance = free.values(sensitivity, "importance").loc[trained]
    expected = (importance.cumsum() / importance.iloc[0]).to_numpy()
    values = report.values(sensitivity).loc[trained].to_numpy()
    assert values == pytest.approx(expected, rel=1e-12)
    curve = curve_of(report.layers, report.frame, sensitivity)
    assert curve.names == tuple(trained)
    plan = select(report, "examples.rules.knee:knee")
    assert plan.shared == tuple(n for n in ("fc1", "fc2") if n in (which, trained[0]))
    assert re.search(rf"(?m)^ *{which} .*frozen$", explain(plan))


@pytest.mark.parametrize("which", ["fc1", "fc2", "fc4"])
def test_playerfl_decides_among_the_layers_that_train(which):
    sizes, names = [36, 8, 7, 6, 5, 3], [f"fc{k + 1}" for k in range(5)]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten())
    for name, before, after in zip(names, sizes[:-1], sizes[1:], strict=True):
        model.add_module(name, nn.Linear(before, after))
    model.get_submodule(which).requires_grad_(False)
    weight = model.get_submodule(which).weight
    for kind in ("", "_minus", "_random"):
        config = CONFIG.with_keys(algorithm=f"playerfl{kind}", rounds=2)
        how = {"instruments": instruments}
        engine = runner.run(config, data=TOY, model=model, **how)
        plan = engine.algorithm.plan
        assert plan.trainable == tuple(name for name in names if name != which)
        assert 1 <= plan.cut < len(plan.trainable)
        assert which in plan.shared
        assert plan.why.values[names.index(which)] is None
        tree = engine.models(0)["personal"]
        assert torch.equal(tree[f"{which}.weight"], weight)


def biased():
    """The second layer's weights are frozen, its bias trains."""
    parts = {"fc1": nn.Linear(36, 8), "fc2": nn.Linear(8, 6), "fc3": nn.Linear(6, 3)}
    parts["fc2"].weight.requires_grad_(False)
    return Wired(lambda m, x: m.fc3(m.fc2(m.fc1(x.flatten(1)).relu()).relu()), **parts)


def test_what_cannot_be_decided_is_refused_first(tmp_path):
    config, path = CONFIG.with_keys(algorithm="playerfl"), tmp_path / "run"
    how = {"instruments": instruments}
    for model, words in (
        (biased(), "layer 'fc2'"),
        (frozen("fc1", "fc2"), "playerfl.*2 layers.*1"),
    ):
        with refuses(words):
            runner.run(config, path, data=TOY, model=model, **how)
        assert not path.exists()
