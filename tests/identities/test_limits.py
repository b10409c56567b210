"""Algorithms at the limits where their definitions coincide: the same bits after every round."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from fl_core import models, tree
from fl_core.algorithms import Round, registry
from fl_core.layers import layers_of
from fl_core.plan import LayerPlan
from fl_core.task import assemble
from tests.conftest import (
    CONFIG,
    TOY,
    every_other,
    federation,
    kind_for,
    network,
    play,
)

SGD = {"momentum": 0.9, "weight_decay": 0.01}
ADAMW = {
    "optimizer": "adamw",
    "lr": 0.01,
    "weight_decay": 0.01,
    "amsgrad": True,
}


@dataclass(frozen=True)
class Setting:
    """A network and how it is trained."""

    name: str
    model: str = "plain"
    options: dict[str, Any] = field(default_factory=dict, hash=False)

    def __repr__(self):
        return self.name


SETTINGS = [
    Setting("sgd"),
    Setting("momentum and decay", options=SGD),
    Setting("adamw, 2 epochs", options=ADAMW | {"epochs": 2}),
    Setting("dropout", "drop", SGD),
    Setting("unused layer with decay", "unused", SGD),
    Setting("batch norm global", "norm", SGD),
    Setting("batch norm local", "norm", ADAMW | {"batchnorm": "local"}),
    Setting("batch norm drop", "norm", SGD | {"batchnorm": "drop"}),
    Setting("two of four clients", options=SGD | {"participation": 0.5}),
    Setting(
        "dropout, optimiser kept, two of four",
        "drop",
        ADAMW | {"keep_optimizer": True, "participation": 0.5},
    ),
]
QUICK = (
    "unused layer with decay",
    "batch norm local",
    "dropout, optimiser kept, two of four",
)


def settings(quick):
    """Parametrise by settings, all but one of which are slow."""
    return pytest.mark.parametrize(
        "setting",
        [
            pytest.param(
                each,
                marks=[pytest.mark.slow] * (each.name != QUICK[quick]),
                id=each.name,
            )
            for each in SETTINGS
        ],
    )


PLAYED = {}


def run(setting, algorithm, plan=None, **changes):
    """A run, played once in this file; scores are of no interest here, so most are left out."""
    key = repr((setting, algorithm, plan and plan.shared, sorted(changes.items())))
    if key not in PLAYED:
        options = setting.options | changes
        PLAYED[key] = play(
            model=setting.model, algorithm=algorithm, plan=plan, eval_every=3, **options
        )
    return PLAYED[key]


def fedavg(setting):
    return run(setting, "fedavg")


def local(setting):
    return run(setting, "local")


def layers(setting):
    return layers_of(fedavg(setting).task.model, models.example(TOY.shape))


FEDAVG_LIMITS = {  # algorithm, everything shared?, its options
    "fedprox, mu 0": ("fedprox", False, {"mu": 0}),
    "fedper, all shared": ("fedper", True, {}),
    "fedrep, all shared, no head epochs": ("fedrep", True, {"head_epochs": 0}),
    "fedrep, all shared": ("fedrep", True, {"head_epochs": 2}),
    "fedbabu, all shared": ("fedbabu", True, {"finetune_epochs": 1}),
    "playerfl, all shared": ("playerfl", True, {}),
    "local_adaptation": ("local_adaptation", False, {"finetune_epochs": 1}),
    "ditto's global model": ("ditto", False, {"lam": 0.7}),
    "lg_fedavg, all shared": ("lg_fedavg", True, {}),
    "fedlp, everything kept": ("fedlp", False, {"keep": 1}),
    "fedlama, phi 1": ("fedlama", False, {"phi": 1}),
    "pfedsd's global model, lam 0": ("pfedsd", False, {"lam": 0}),
    "fedbn, nothing normalised": ("fedbn", False, {}),
}


PAIRS = [  # in make test, each limit in one of the quick settings in turn
    pytest.param(
        limit,
        each,
        marks=[pytest.mark.slow] * (each.name != QUICK[k % 3]),
        id=f"{limit}-{each.name}",
    )
    for k, limit in enumerate(FEDAVG_LIMITS)
    for each in SETTINGS
]


@pytest.mark.parametrize(("limit", "setting"), PAIRS)
def test_the_limit_is_fedavg_bit_for_bit(limit, setting):
    algorithm, shares, options = FEDAVG_LIMITS[limit]
    if algorithm == "fedbn" and setting.model == "norm":
        assert run(setting, algorithm).server() != fedavg(setting).server()
        return
    plan = LayerPlan.everything(layers(setting)) if shares else None
    found, wanted = run(setting, algorithm, plan, options=options), fedavg(setting)
    assert found.server() == wanted.server()
    assert (
        found.evaluated() == wanted.evaluated()
    )  # with what clients keep to themselves
    assert len(set(wanted.server())) == 3, "the model must move in every round"


@settings(0)
def test_ditto_without_a_pull_is_local(setting):
    found = run(setting, "ditto", options={"lam": 0})
    assert found.models("personal") == local(setting).models("personal")


@settings(1)
def test_local_head_without_a_body_is_local_bit_for_bit(setting):
    plan = LayerPlan(layers(setting), ())
    assert run(setting, "local_head", plan).evaluated() == local(setting).evaluated()


@settings(0)
def test_playerfl_with_a_plan_is_fedper_with_it(setting):
    plan = LayerPlan.prefix(layers(setting), 1)
    ours, theirs = run(setting, "playerfl", plan), run(setting, "fedper", plan)
    assert ours.everything() == theirs.everything()
    assert [r | {"algorithm": ""} for r in ours.rows] == [
        r | {"algorithm": ""} for r in theirs.rows
    ]


@settings(2)
def test_fedper_with_a_measured_plan_decides_and_trains_as_playerfl(
    setting,
):
    ours, theirs = run(setting, "fedper", config_plan="auto"), run(setting, "playerfl")
    assert ours.engine.algorithm.plan == theirs.engine.algorithm.plan
    assert ours.server() == theirs.server()
    assert ours.evaluated() == theirs.evaluated()
    assert ours.everything() == theirs.everything()


@settings(1)
@pytest.mark.parametrize(
    ("variant", "by"), [("playerfl_minus", -1), ("playerfl_plus", 1)]
)
def test_one_layer_less_or_more_is_playerfl_with_that_plan(setting, variant, by):
    decided = run(setting, "playerfl").engine.algorithm.plan
    assert decided is not None
    assert decided.cut is not None
    count = min(max(decided.cut + by, 1), len(decided.layers) - 1)
    ours = run(setting, variant)
    assert ours.engine.algorithm.plan is not None
    assert ours.engine.algorithm.plan.cut == count
    assert (
        ours.server()
        == run(setting, "playerfl", LayerPlan.prefix(decided.layers, count)).server()
    )


@settings(2)
def test_fedavg_of_one_client_is_local_training(setting):
    options = setting.options | {"participation": 1.0}
    common = {
        "data": federation(sizes=(45,)),
        "model": setting.model,
        "eval_every": 3,
        **options,
    }
    assert (
        play(algorithm="fedavg", **common).evaluated()
        == play(algorithm="local", **common).evaluated()
    )


@pytest.mark.parametrize("name", every_other(sorted(registry().keys() - {"pfedhn"})))
def test_the_common_start_does_not_depend_on_the_algorithm(name):
    """An algorithm's additions leave the model's values alone, and personal ones are the client's.

    Only pFedHN draws a start of its own.
    """
    plain, found = (
        assemble(
            CONFIG.with_keys(algorithm=each),
            data=TOY,
            model=network(kind_for(name, "plain")),
        )
        for each in ("fedavg", name)
    )
    algorithm, start = found.algorithm(found.plan), tree.state_dict(found.model)
    given = tree.state_dict(plain.model)
    assert all(torch.equal(start[n], given[n]) for n in given.keys() & start.keys())
    server = algorithm.server_state(tree.clone(start))
    common = start.keys() - found.task_info.never_sent
    assert common
    for client in range(len(TOY.clients)):
        state = algorithm.client_state(tree.clone(start), client)
        for model in algorithm.models(server, state, Round(0)).values():
            assert model.keys() == start.keys()
            assert all(torch.equal(model[n], start[n]) for n in common)


def test_the_networks_are_as_their_settings_say():
    """Dropout draws, batch normalisation has buffers: otherwise the settings above would test nothing."""
    assert [layer.name for layer in layers(SETTINGS[0])] == ["fc1", "fc2", "fc3"]
    assert any(layer.buffers for layer in layers(SETTINGS[5]))
    assert not any(layer.buffers for layer in layers(SETTINGS[7]))
    assert layers(SETTINGS[4])[-1].used is False
    assert (
        fedavg(SETTINGS[3]).server()
        != play(model=network("plain"), algorithm="fedavg", **SGD).server()
    )
    assert fedavg(SETTINGS[8]).server() != fedavg(SETTINGS[1]).server()
