"""What holds of every metric and rule, and one of each added from outside in a single file."""

import copy
import dataclasses
import sys
from types import SimpleNamespace

import matplotlib as mpl
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from diagnostics import diagnosis, measurement
from diagnostics.measure import diagnose
from diagnostics.metrics.base import METRICS, NoValue, layer_metric, metric
from diagnostics.select import RULES, rule, select
from fl_core.errors import RunError
from fl_core.rows import row
from tests.conftest import refuses, with_slow
from tests.made import labelled as pair

mpl.use("agg")


def models():
    torch.manual_seed(0)
    sizes = [nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 6)]
    last = [nn.ReLU(), nn.Linear(6, 3)]
    return {name: nn.Sequential(*copy.deepcopy([*sizes, *last])) for name in "ab"}


@pytest.fixture(scope="module")
def frame():
    start = {"update_magnitude": {"start": models()["a"]}}
    names = list(METRICS)
    return diagnose(models(), pair(16), names, options=start).frame


def test_every_metric_says_what_it_is(frame):
    for name, member in METRICS.members().items():
        assert member.name == name == member.compute.__name__
        for text in (member.description, member.direction):
            assert text
            assert "\n" not in text
        assert (member.compute.__doc__ or "").partition("\n")[0].strip().endswith(".")
        last = member.preferred[-len(member.variants) :]
        assert last == member.variants or member.default_variant in member.variants
        rows = frame[frame["metric"] == name]
        assert member.variant in set(rows["variant"])
        assert set(rows["client_b"] != "") == {member.pairs}
        settings = member.settings()
        for option, default in member.options.items():
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(settings, option, None)
            assert getattr(settings, option) == default
        with refuses(f"{name} 'nonsense'"):
            member.settings(nonsense=1)


ALIKE = (
    "value_x == value_y or n_samples_x < n_samples_y "
    "or estimator_x != estimator_y or stderr_x > stderr_y"
)


class Counted(nn.Linear):
    """A layer whose calls are the time."""

    now = 0

    def forward(self, x):
        Counted.now += 1
        return super().forward(x)


@pytest.mark.parametrize("name", with_slow(METRICS, ["hessian_spectrum"]))
def test_a_budget_is_kept_and_each_layer_of_a_client_has_a_row(name, monkeypatch):
    """Time is counted work, and a unit a pass over a client's samples. A value of less than all says so."""
    net = nn.Sequential(Counted(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))
    models_of_clients = dict.fromkeys("abc", net)
    options = {"start": net, "test": dict.fromkeys("abc", pair(16))}
    options = {
        key: options[key] for key in options.keys() & METRICS[name].options.keys()
    }
    began = []
    clock = SimpleNamespace(monotonic=lambda: began.append(Counted.now) or Counted.now)
    for module in (measurement, diagnosis):
        monkeypatch.setattr(module, "time", clock)

    def measured(budget=None):
        began.clear()
        how = {"options": {name: options}, "batch": 4}
        table = diagnose(models_of_clients, pair(40), name, budget=budget, **how).frame
        return table, Counted.now - began[0]

    whole, work = measured()
    for budget in (0.5, 3, work // 2):
        part, spent = measured(budget)
        assert spent <= budget + 12
        keys = ["client", "client_b", "layer"]
        at = [set(map(tuple, table[keys].to_numpy())) for table in (whole, part)]
        assert at[0] == at[1]
        both = part[part["status"] == "ok"].merge(whole, on=[*keys, "variant"])
        assert both.eval(ALIKE, engine="python").all()


def test_every_rule_says_what_it_is():
    for name, member in RULES.members().items():
        assert member.name == name
        assert member.summary
        assert (member.choose.__doc__ or "").strip()
        if member.cuts:
            assert 1 <= member.cut([1.0, 1.1, 3.0, 3.1]) <= 4


OWN = '''
"""A metric and a rule of one's own."""

from dataclasses import dataclass

from diagnostics.measurement import Measurement
from diagnostics.metrics.base import metric
from fl_core.errors import UsageError
from fl_core.rows import row


@dataclass(frozen=True)
class Loudness:
    power: float = 1.0

    def __post_init__(self):
        if self.power <= 0:
            raise UsageError(f"power={self.power}; it must be above 0")

    def check(self, measurement):
        if measurement.mode == "train":
            raise UsageError("mode 'train' has no loudness")


@metric(
    description="largest absolute weight of a layer",
    direction="higher = louder",
    variants=("largest",),
    look={"label": "loudness", "log": True},
    requires="weights",
)
def loudness(measurement: Measurement, options: Loudness):
    """One row a client and layer."""
    rows = []
    for subject in measurement.subjects:
        params = dict(subject.model.named_parameters())
        for place, layer in enumerate(measurement.layers, 1):
            value = max(float(params[name].detach().abs().max()) for name in layer.weights)
            value = value ** options.power * place
            rows.append(row("loudness", value, variant="largest", client=subject.client, layer=layer.name,
                            n_train=subject.n_train))
        measurement.tick(subject.client)
    return rows


def none(values):
    return 0
'''


@pytest.fixture
def _own(tmp_path, monkeypatch):
    (tmp_path / "own_layers.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with _forgotten():
        yield
    sys.modules.pop("own_layers", None)


class _forgotten:  # noqa: N801
    """What is added to the registries inside the block is gone after it."""

    def __enter__(self):
        self.kept = [(r, dict(r._members), dict(r._origins)) for r in (METRICS, RULES)]

    def __exit__(self, *_):
        for registry, members, origins in self.kept:
            registry._members, registry._origins = members, origins


@pytest.mark.usefixtures("_own")
def test_the_options_and_errors_of_a_metric_from_outside_are_named():
    def run(name="own_layers:loudness", **how):
        return diagnose(models(), pair(16), [name], **how)

    assert (
        METRICS["own_layers:loudness"] is METRICS["loudness"]
    )  # known by its name from here on
    for how, words in (
        ({"options": {"loudness": {"power": -1.0}}}, "loudness.*power=-1.0"),
        ({"options": {"loudness": {"power": "high"}}}, "power.*float"),
        ({"options": {"loudness": {"volume": 1}}}, "option of loudness 'volume'"),
        ({"options": {"mode": "train"}}, "mode 'train'"),
        ({"name": "own_layers:loudnes"}, "mean 'loudness'"),
        ({"name": "own_layer:loudness"}, "'own_layer'"),
        ({"name": "own_layers:Loudness"}, "function.*type"),
    ):
        with refuses(words):
            run(**how)
    with refuses("rule 'own_layers:Loudness'"):
        select(run(), "own_layers:Loudness", metric="loudness")
    with refuses(r"'none'.* 1 .*3.*0", RunError):
        select(run(), "own_layers:none", metric="loudness")


def test_a_decorator_that_says_something_wrong_is_refused():
    facts = {"description": "x", "direction": "y"}
    for make, words in (
        (lambda: metric(**facts, requires="labels"), "metric .*'labels'"),
        (lambda: metric(**facts, look={"colour": "red"}), "look 'colour'"),
        (lambda: metric(**facts)(lambda a, b: []), "frozen dataclass"),
        (lambda: metric(**facts)(lambda a, b, c: []), "3 arguments"),
        (
            lambda: layer_metric(**facts)(lambda model, layer: 1),
            "a probe .*2 arguments",
        ),
        (lambda: rule(summary="x")(lambda: 1), "0 arguments"),
    ):
        with refuses(words):
            make()


def scaled(model):
    model[0].weight.data *= 2
    return 1.0


def gone(model):
    raise KeyError("gone")


@pytest.mark.parametrize(
    ("formula", "said"),
    [
        (lambda model: [1.0], "number; got list"),
        (lambda model: float("nan"), "number; got nan"),
        (lambda model: None, "number; got None"),
        (gone, "gone"),
        (scaled, "must not change a model"),
    ],
)
def test_a_formula_of_a_layer_returns_a_number_and_changes_nothing(formula, said):
    """The metric and the client are named, and the layer whose value is wrong."""
    with _forgotten():
        client_models = models()

        @layer_metric(description="x", direction="y")
        def odd(model, layer, probe):
            """Return a number at the first layer and no value at the second."""
            assert not model.training
            if layer.name != "0":
                raise NoValue("not the first")
            return (
                formula(model) if probe.subject.client == "b" else len(probe.samples[1])
            )

        @layer_metric(description="x", direction="y")
        def mean_loss(model, layer, probe):
            x, y = probe.samples
            return float(probe.loss(model(x), y))

        x, y = pair(16)
        wanted = cross_entropy(client_models["a"].eval()(x), y).item()
        values = diagnose({"a": client_models["a"]}, (x, y), ["mean_loss"]).frame
        assert values["value"].tolist() == [pytest.approx(wanted)] * 3

        alone = diagnose({"a": client_models["a"]}, pair(16), ["odd"]).frame
        assert alone["status"].tolist() == ["ok", *["not the first"] * 2]
        assert alone["value"][0] == alone["n_samples"][0] == 16
        before = client_models["b"][0].weight.clone()
        with refuses(f"'odd'.*client 'b'.*{said}|'odd'.*{said}.*client 'b'") as error:
            diagnose(client_models, pair(16), ["odd"])
        assert "layer '0'" in str(error.value) or formula is scaled
        assert torch.equal(client_models["b"][0].weight, before)


def test_what_a_metric_may_not_return_is_refused(
    monkeypatch,
):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    for returned, message in (
        (None, "'odd_one'.*None"),
        (3.0, "'odd_one'.*3.0"),
        ([1], r"'odd_one'.*\[1\]"),
        ([row("odd_one", 1.0, layer="O")], "'odd_one' 'O'.*0, 1"),
        ([row("odd_one", 1.0)], "'odd_one' ''"),
    ):
        how = {"name": "odd_one", "compute": lambda *_, g=returned: g}
        odd = dataclasses.replace(METRICS["weight_magnitude"], **how)
        monkeypatch.setitem(METRICS._members, "odd_one", odd)
        with refuses(message):
            diagnose(model, pair(16), metrics=["odd_one"])
