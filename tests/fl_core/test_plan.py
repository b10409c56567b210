"""The decision: what is shared, held against a model, and the same after a trip to disk."""

import json
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

from diagnostics.report import explain
from fl_core import tree
from fl_core.errors import UsageError
from fl_core.layers import Layer, layers_of
from fl_core.plan import Evidence, LayerPlan
from tests.conftest import refuses
from tests.made import Wired


def net():
    sizes = {"fc1": (3, 4), "fc2": (4, 4), "fc10": (4, 2), "unused": (2, 2)}
    parts = {name: nn.Linear(*size) for name, size in sizes.items()} | {
        "norm": nn.BatchNorm1d(4)
    }
    return Wired(lambda m, x: m.fc10(m.fc2(m.norm(m.fc1(x)))), **parts)


LAYERS = layers_of(net(), torch.zeros(2, 3))
WHY = Evidence(
    rule="sensitivity_ratio",
    metric="federation_sensitivity",
    variant="training",
    threshold=1.2,
    values=(1.0, 1.01, 1.5, None),
    clients={"a": (1.0, 1.0, 1.25, None), "b": (1.0, 1.02, 1.75, None)},
    weights={"a": 100.0, "b": 100.0},
    votes={"a": "fc2", "b": "fc2"},
    alternatives={"2": "fc2", "largest_jump": "fc1"},
    data="d" * 64,
    checkpoint="c" * 64,
    seed=3,
    version="0.1.0",
    race=("race up to round 3, seeds 0", "Share every layer."),
)
PLAN = LayerPlan.prefix(LAYERS, 2, WHY)


def test_body_and_head_divide_the_tensors():
    assert PLAN.names == ("fc1", "fc2", "fc10", "unused")
    assert [layer.name for layer in PLAN.body] == ["fc1", "fc2"]
    assert [layer.name for layer in PLAN.head] == ["fc10", "unused"]
    assert PLAN.body_tensors | PLAN.head_tensors == set(tree.named_tensors(net()))
    assert not PLAN.body_tensors & PLAN.head_tensors
    assert {
        "norm.running_mean",
        "norm.num_batches_tracked",
        "fc1.bias",
    } <= PLAN.body_tensors
    assert "fc10.weight" in PLAN.head_tensors


@pytest.mark.parametrize(
    ("layers", "shared", "message"),
    [
        (LAYERS, ("fc3",), "'fc3'.*'fc2'"),
        (LAYERS, ("fc",), "layer 'fc'"),
        (("fc1", "fc2"), ("fc1",), "a Layer; got 'fc1'"),
        (LAYERS, ("fc1", "fc1"), "shared.*'fc1'"),
        ((*LAYERS, LAYERS[0]), (), "layer.*'fc1'"),
        ((*LAYERS, Layer("fc3", ("fc1.bias",))), (), r"'fc1\.bias'"),
        ((Layer("a", ("w",), ("w",)),), (), "tensor.*'w'"),
    ],
)
def test_contradictions_are_refused(layers, shared, message):
    with refuses(message):
        LayerPlan(layers, shared)


def test_another_model_is_refused_by_the_first_differences():
    other = net()
    other.fc1 = nn.Sequential(nn.Linear(3, 4))
    with refuses(r"plan: fc1\.bias, fc1\.weight.*model: fc1\.0\.bias"):
        PLAN.check_fits(other)
    more = net()
    more.register_buffer("running", torch.zeros(1))
    with pytest.raises(UsageError) as caught:
        PLAN.check_fits(more)
    assert "model: running" in str(caught.value)


words = st.text(min_size=1, max_size=6)
numbers = st.floats(allow_nan=False, allow_infinity=False)
curves = st.lists(st.none() | numbers, max_size=4).map(tuple)
evidence = st.builds(
    Evidence,
    rule=words,
    metric=words,
    variant=st.text(max_size=4),
    threshold=st.none() | numbers,
    values=curves,
    clients=st.dictionaries(words, curves, max_size=3),
    weights=st.dictionaries(words, numbers, max_size=3),
    votes=st.dictionaries(words, words, max_size=3),
    alternatives=st.dictionaries(words, words, max_size=3),
    status=words,
    data=words,
    seed=st.none() | st.integers(0, 2**62),
    race=st.lists(words).map(tuple),
)


@given(evidence, st.lists(st.sampled_from(PLAN.names), unique=True))
def test_json_gives_an_equal_plan_back(why, shared):
    plan = LayerPlan(LAYERS, tuple(shared), why)
    back = LayerPlan.from_json(json.loads(json.dumps(plan.to_json(), allow_nan=False)))
    assert back == plan
    other_order = dict(reversed(plan.to_json().items()))
    assert LayerPlan.from_json(other_order) == plan
    assert (back.digest, repr(back)) == (plan.digest, repr(plan))


def damaged(**changes):
    data = json.loads(json.dumps(PLAN.to_json()))
    for path, value in changes.items():
        *parents, last = (int(k) if k.isdigit() else k for k in path.split("__"))
        place = data
        for key in parents:
            place = place[key]
        if value is None:
            del place[last]
        else:
            place[last] = value
    return data


def places(value, *path):
    """Paths to all entries of a JSON value."""
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield (*path, key)
            yield from places(value[key], *path, key)


PLACES = sorted(places(damaged(sha256=None)), key=str)


@given(
    st.sampled_from(PLACES), st.sampled_from([[1], {"a": 1}, True, 10**400, math.nan])
)
def test_a_value_of_another_type_is_refused(place, value):
    data = damaged(sha256=None)
    *parents, last = place
    inner = data
    for key in parents:
        inner = inner[key]
    if isinstance(value, type(inner[last])):
        return
    inner[last] = value
    with pytest.raises(UsageError) as caught:
        LayerPlan.from_json(data)
    assert "\n" not in str(caught.value)


def test_damaged_plans_are_refused(tmp_path):
    path = tmp_path / "plan.json"
    for data, message in (
        ([], "list"),
        ({}, "format"),
        (damaged(format="fedlayers.plan/9"), "format"),
        (damaged(layers=None, why=None), "layers is missing"),
        (damaged(layers__0__name=None), "name is missing"),
        (damaged(layers__0__tensors=["x"]), "layer.*'tensors'"),
        (damaged(layers__1__name="fc1"), "layer.*'fc1'"),
        (damaged(extra=1), "'extra'"),
        (damaged(why__rules="x"), "'rules'.*'rule'"),
        (damaged(why__race=[3]), "race.0 must be"),
    ):
        with refuses(message):
            LayerPlan.from_json(data)
        path.write_text(json.dumps(data))
        with refuses(message):
            LayerPlan.load(path)
    for content, message in (
        (b"", "JSON"),
        (b"{", "JSON"),
        (b"\xff", "plan"),
        (None, "plan"),
    ):
        path.write_bytes(content) if content is not None else path.unlink()
        with refuses(message) as caught:
            LayerPlan.load(path)
        assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"shared": ["fc1"]},
        {"why__values__0": 2.0},
        {"why__race__0": "Share nothing."},
        {"layers__0__used": False},
        {"sha256": "0" * 64},
        {"sha256": None},
    ],
)
def test_an_edited_plan_says_so(changes, tmp_path):
    path, data = tmp_path / "plan.json", damaged(**changes)
    path.write_text(json.dumps(data))
    plan = LayerPlan.load(path)
    assert plan.is_edited
    assert plan.why.rule == f"edited by hand (was {data['why']['rule']})"
    assert plan.shared == tuple(data["shared"])
    assert "by hand" in repr(plan)
    assert "by hand" in explain(plan).splitlines()[0]
    assert "evidence" in plan.notes()[0]
    plan.save(path)
    assert LayerPlan.load(path) == plan, "said once, and kept"
    data = json.loads(path.read_bytes())
    path.write_text(json.dumps({**data, "shared": []}))
    assert LayerPlan.load(path).why.rule == plan.why.rule


def test_a_plan_shows_the_sentences_of_its_race():
    assert str(PLAN).split("\n  ")[:3] == [repr(PLAN), *WHY.race]
    forged = replace(PLAN, why=replace(WHY, race=("\x1b[31m",)))
    assert "\x1b" not in str(forged) + explain(forged)
