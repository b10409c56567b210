"""Vanilla and anti scheduling: what thaws when, what it costs, and over which algorithms."""

import pytest
import torch

from fl_core import models, tree
from fl_core.algorithms import Round, TaskInfo, find
from fl_core.algorithms.scheduling import Scheduled
from fl_core.layers import layers_of
from fl_core.plan import LayerPlan
from fl_core.run import runner
from fl_core.run.costs import round_cost
from fl_core.training.workspace import Workspace
from tests.conftest import CONFIG, TOY, network, play

HARD = {"momentum": 0.9, "weight_decay": 0.05, "lr": 0.1}
ORDER = {"vanilla": ("fc1", "fc2", "fc3"), "anti": ("fc3", "fc2", "fc1")}


def layers():
    return layers_of(network("plain"), models.example(TOY.shape))


def algorithm(name, plan=None, rounds=300, **options):
    scheduled = find(name, options)(
        TaskInfo(layers(), frozenset(), TOY.weights, 1, 0, rounds=rounds), plan, options
    )
    assert isinstance(scheduled, Scheduled)
    return scheduled


def everything():
    return LayerPlan.prefix(layers(), 9)


def frozen_layers(made, index):
    frozen = made.frozen(Round(index))
    names = {
        layer.name for layer in made.task_info.layers if set(layer.tensors) <= frozen
    }
    assert frozen == {
        n
        for layer in made.task_info.layers
        if layer.name in names
        for n in layer.tensors
    }
    return names


@pytest.mark.parametrize("name", ORDER)
def test_layers_thaw_in_order_at_their_rounds(name):
    scheduled = algorithm(name, everything(), unfreeze="0,5,9")
    _, second, third = ORDER[name]
    for index, wanted in {
        0: {second, third},
        4: {second, third},
        5: {third},
        8: {third},
        9: set(),
        300: set(),
    }.items():
        assert frozen_layers(scheduled, index) == wanted


@pytest.mark.parametrize("participation", [1.0, 0.25])
@pytest.mark.parametrize("kind", ["plain", "norm"])
@pytest.mark.parametrize("name", ORDER)
def test_a_layer_stands_at_its_start_until_it_thaws_and_then_moves(
    name, kind, participation
):
    """At the server and in every client's model, with momentum and weight decay; the head stands until the end."""
    played = play(
        algorithm=name,
        model=kind,
        rounds=4,
        participation=participation,
        options={"unfreeze": "1,2"},
        **HARD,
    )
    scheduled, start = played.engine.algorithm, tree.state_dict(network(kind))
    previous = start
    for checkpoint in played.checkpoints:
        index = checkpoint.round - 1
        still = scheduled.frozen(Round(index)) | scheduled.plan.head_tensors
        server = checkpoint.server.trees["model"]
        for n in start:
            assert torch.equal(server[n], previous[n]) == (n in still), n
            assert not (n in still and not torch.equal(server[n], start[n])), n
        for state in checkpoint.clients.values():
            model = scheduled.models(checkpoint.server, state, Round(checkpoint.round))[
                "global"
            ]
            assert tree.digest(model) == tree.digest(server), (
                "also for a client that has not been there for long"
            )
        for local in checkpoint.models["local"].values():
            assert all(torch.equal(local[n], start[n]) for n in still)
        previous = server
    tuned = played.checkpoints[-1].models["personal"].values()
    assert all(
        not torch.equal(t[n], start[n])
        for t in tuned
        for n in scheduled.task_info.parameters
    )


@pytest.mark.parametrize(
    ("name", "thirds", "published"),
    [
        ("fedavg", (582_026, 582_026, 582_026), "873.04"),
        ("fedbabu", (576_896, 576_896, 576_896), "865.34"),
        ("vanilla", (832, 52_096, 576_896), "314.91"),
        ("anti", (524_800, 576_064, 576_896), "838.88"),
    ],
)
def test_naive_costs_are_those_of_the_papers_table_4(name, thirds, published):
    """Of 300 rounds, in each of which 100 clients pass once over 500 samples in batches of 10."""
    shape = (1, 28, 28)
    model = models.build("scheduling_cnn", shape, 10, seed=0)
    listed = layers_of(model, models.example(shape))
    plan = LayerPlan.all_but_last(listed) if name != "fedavg" else None
    problem = TaskInfo(listed, frozenset(), (500,) * 100, 1, 0, rounds=300)
    cost = round_cost(find(name)(problem, plan), Workspace(model), shape, 10)
    naive = sum(cost(Round(index))["naive"] for index in range(300))
    assert naive == sum(100 * trained * 50 * 100 for trained in thirds)
    assert f"{naive / 1e9:.2f}" == published


@pytest.mark.parametrize("below", ["fedavg", "fedrep", "ditto", "scaffold"])
def test_over_another_without_waiting_it_is_that_one(below):
    """Bit for bit, in all that the server and the clients' models are."""
    keys = {"rounds": 2, "participation": 0.5, **HARD}
    scheduled = algorithm("anti", base=below)
    count = len(scheduled.scheduled_layers(scheduled.default_plan(layers())))
    options = {"base": below, "unfreeze": (0,) * count}
    wanted, of_schedule = (
        play(algorithm=below, **keys),
        play(algorithm="anti", options=options, **keys),
    )
    assert of_schedule.evaluated() == wanted.evaluated()
    servers = [
        [state["server"] for state in one.everything()] for one in (of_schedule, wanted)
    ]
    assert servers[0] == servers[1]


@pytest.mark.parametrize("name", ORDER)
@pytest.mark.parametrize("below", ["fedrod", "pfedpt"])
def test_the_model_is_extended_as_by_the_base_algorithm(name, below):
    own = CONFIG.with_keys(algorithm=below)
    over = CONFIG.with_keys(algorithm=name, options={"base": below})
    models_of = [
        tree.state_dict(runner.assemble(config, data=TOY, model=network("plain")).model)
        for config in (own, over)
    ]
    assert models_of[0].keys() != tree.state_dict(network("plain")).keys()
    assert tree.digest(models_of[0]) == tree.digest(models_of[1])
