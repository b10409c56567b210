"""The ways that a decision trains, and the names by which they are asked for."""

from pathlib import Path

import pytest

from fedlayers.decision import jobs
from fedlayers.decision.ways import default_names, ways_of
from fl_core.config import RunConfig
from fl_core.layers import Layer
from fl_core.plan import LayerPlan
from tests.conftest import refuses

LAYERS = tuple(Layer(name, (f"{name}.weight",)) for name in ("a", "b", "c", "d", "e"))


def test_a_plan_file_and_an_algorithm_are_ways(tmp_path):
    LayerPlan(LAYERS, ("b", "d")).save(tmp_path / "mine.json")
    mine, ditto = ways_of([str(tmp_path / "mine.json"), "ditto"], LAYERS)
    assert mine.plan is not None
    assert mine.plan.shared == ("b", "d")
    assert (ditto.algorithm, ditto.plan, ditto.action) == ("ditto", None, "share_all")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["loca"], "'loca'.*'local'"),
        (["half", "halve"], "'halve'.*'half'"),
        (["first_9"], "5 layers"),
        (["fedavg:half"], "fedavg .*plan"),
        (["fedpr:half"], "algorithm 'fedpr'"),
        (["lora_A"], "adapt="),
    ],
)
def test_ways_that_cannot_train_are_refused(names, message):
    with refuses(message):
        ways_of(names, LAYERS)


def test_ways_with_one_folder_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("p").mkdir()
    LayerPlan(LAYERS, ()).save(Path("p/x.json"))
    LayerPlan(LAYERS, ("a", "b", "c", "d", "e")).save(Path("p_x.json"))
    both = ways_of(["p/x.json", "p_x.json"], LAYERS)
    with refuses(r"'p/x\.json' and 'p_x\.json'.*Rename"):
        jobs.jobs_of(both, RunConfig(dataset="heart"), (0,), tmp_path)


@pytest.mark.parametrize(
    ("names", "last", "first_half"),
    [
        ("a b", "b", "a"),
        ("a b c", "c", "a"),
        ("a b c d e", "e", "a b"),
        ("stem l.0.x l.0.y l.1.x head", "head", "stem l.0.x l.0.y"),
    ],
)
def test_what_stays_local_at_each_end(names, last, first_half):
    layers = tuple(Layer(name, (name,)) for name in names.split())
    assert default_names(layers) == ("fedavg", "local", "head_local")
    head, half = ways_of(("head_local", "first_half_local"), layers)
    for way, local in ((head, last), (half, first_half)):
        local_names = [name for name in way.plan.names if name not in way.plan.shared]
        assert local_names == local.split()


def test_adapters_keep_their_factor_b_and_the_head_local():
    names = "m.0.lora_A m.0.lora_B m.1.lora_A m.1.lora_B head"
    layers = tuple(Layer(name, (name,)) for name in names.split())
    assert default_names(layers) == ("fedavg", "local", "lora_A")
    (way,) = ways_of(["lora_A"], layers)
    assert way.plan.shared == ("m.0.lora_A", "m.1.lora_A")
    assert way.action == "share_some"


def test_a_single_layer_has_no_head_to_keep():
    assert default_names(LAYERS[:1]) == ("fedavg", "local")
