"""Algorithms at the limits where their definitions coincide: the same bits after every round."""

import pytest
import torch

from fl_core import models, tree
from fl_core.algorithms import Round, find, registry
from fl_core.layers import Layer, layers_of
from fl_core.plan import LayerPlan
from fl_core.run.task import assemble
from tests.conftest import CONFIG, TOY, every_other, federation, kind_for, network, play

SGD = {"momentum": 0.9, "weight_decay": 0.01}
ADAMW = {"optimizer": "adamw", "lr": 0.01, "weight_decay": 0.01, "amsgrad": True}
HALF = {"participation": 0.5}
SETTINGS = {  # a network and how it is trained
    "unused layer with decay": ("unused", SGD),
    "batch norm local": ("norm", ADAMW | {"batchnorm": "local"}),
    "dropout, optimiser kept": ("drop", ADAMW | HALF | {"keep_optimizer": True}),
    "batch norm, half": ("norm", SGD | HALF | {"lr": 0.1}),
    "sgd": ("plain", {}),
    "adamw, 2 epochs": ("plain", ADAMW | {"epochs": 2}),
    "batch norm drop": ("norm", SGD | {"batchnorm": "drop"}),
    "half": ("plain", SGD | HALF),
}
QUICK = list(SETTINGS)[:3]
BOTH, APART = "server evaluated", {"adapt": False}
LIMITS = {  # algorithm, options, plan, the algorithm that it is, and where
    "fedprox, mu 0": ("fedprox", {"mu": 0}, "", "fedavg", BOTH),
    "fedper, all shared": ("fedper", {}, "all", "fedavg", BOTH),
    "fedrep, body": ("fedrep", {"head_epochs": 0}, "all", "fedavg", BOTH),
    "fedrep, all shared": ("fedrep", {"head_epochs": 2}, "all", "fedavg", BOTH),
    "fedbabu, all shared": ("fedbabu", {"finetune_epochs": 1}, "all", "fedavg", BOTH),
    "playerfl, all shared": ("playerfl", {}, "all", "fedavg", BOTH),
    "local_adaptation": ("local_adaptation", {}, "", "fedavg", BOTH),
    "ditto": ("ditto", {"lam": 0.7}, "", "fedavg", "server global"),
    "lg_fedavg, all shared": ("lg_fedavg", {}, "all", "fedavg", BOTH),
    "fedlp, all kept": ("fedlp", {"keep": 1}, "", "fedavg", BOTH),
    "fedlama, phi 1": ("fedlama", {"phi": 1}, "", "fedavg", BOTH),
    "pfedsd, lam 0": ("pfedsd", {"lam": 0}, "", "fedavg", "server"),
    "fedbn, no norms": ("fedbn", {}, "", "fedavg", BOTH),
    "first order": ("per_fedavg", {"alpha": 0, "beta": "lr"}, "", "fedavg", "server"),
    "ditto, no pull": ("ditto", {"lam": 0}, "", "local", "personal"),
    "local_head, no body": ("local_head", {}, "none", "local", "evaluated"),
    "fedamp, no pull": ("fedamp", {"lam": 0}, "", "local", "evaluated"),
    "heurfedamp, itself": ("heurfedamp", {"self_weight": 1, "lam": 0}, "", "local", "evaluated"),
    "heurfedamp, cloud": ("heurfedamp", {"self_weight": 1, "lam": 0, "start": "cloud"}, "", "local", "evaluated"),
    "mr_mtl, no pull": ("mr_mtl", {"lam": 0}, "", "local", "evaluated"),
    "apfl": ("apfl", {}, "", "fedavg", "server"),
    "apfl, all of it": ("apfl", APART | {"alpha": 1.0}, "", "local", "evaluated"),
    "apfl, no share": ("apfl", APART | {"alpha": 0.0}, "", "fedavg", "evaluated"),
    "fedala, learns nothing": ("fedala", {"first": 0, "later": 0, "layers": 2}, "", "fedavg", "server"),
    "playerfl, planned": ("playerfl", {}, "first", "fedper", "everything scores"),
    "lg_fedavg": ("lg_fedavg", {}, "last", "fedper", "everything scores"),
    "fedper, measured": ("fedper", {}, "auto", "playerfl", "everything"),
}  # fmt: skip
DRAWS = ("apfl", "apfl, all of it")
"""Limits that hold without dropout: the second model draws, too."""
PLAYED = {}


def run(setting, algorithm, plan=None, **changes):
    """Play a run once in this file; most scores are left out."""
    model, keys = SETTINGS[setting]
    key = repr((setting, algorithm, plan and plan.shared, sorted(changes.items())))
    if key not in PLAYED:
        keys = {"eval_every": 3, **keys, **changes}
        PLAYED[key] = play(model=model, algorithm=algorithm, plan=plan, **keys)
    return PLAYED[key]


def layers(setting):
    return layers_of(run(setting, "fedavg").task.model, models.example(TOY.shape))


def views(played, names):
    for name in names.split():
        if name == "scores":
            yield [row | {"algorithm": ""} for row in played.rows]
        elif name in ("global", "personal"):
            yield played.models(name)
        else:
            yield getattr(played, name)()


@pytest.mark.parametrize(
    ("limit", "setting"),
    [
        pytest.param(
            limit, setting, marks=[pytest.mark.slow] * (setting != QUICK[k % 3])
        )
        for k, limit in enumerate(LIMITS)
        for setting in SETTINGS
        if limit not in DRAWS or SETTINGS[setting][0] != "drop"
    ],
)
def test_the_limit_is_the_other_bit_for_bit(limit, setting):
    """In ``make test`` each limit has one of three settings in turn."""
    algorithm, options, shared, other, where = LIMITS[limit]
    model, keys = SETTINGS[setting]
    lr, every = keys.get("lr", CONFIG.training.lr), layers(setting)
    options = {name: lr if v == "lr" else v for name, v in options.items()}
    counts = {"all": len(every), "none": 0, "first": 1}
    plan, config_keys = None, {"config_plan": "auto"} if shared == "auto" else {}
    if shared in counts:
        plan = LayerPlan.prefix(every, counts[shared])
    elif shared == "last":
        plan = LayerPlan(every, [layer.name for layer in every if layer.used][-1:])
    limit_run = run(
        setting,
        algorithm,
        None if shared == "last" else plan,
        options=options,
        **config_keys,
    )
    wanted = run(setting, other, plan if other == "fedper" else None)
    same = algorithm != "fedbn" or model != "norm"
    for ours, theirs in zip(views(limit_run, where), views(wanted, where), strict=True):
        assert (ours == theirs) == same
    assert len({str(digest) for digest in wanted.everything()}) == 3, "each round moves"


@pytest.mark.parametrize(
    ("variant", "by"), [("playerfl_minus", -1), ("playerfl_plus", 1)]
)
def test_one_layer_less_or_more_is_playerfl_with_that_plan(variant, by):
    middle = LayerPlan.prefix([Layer(name, (name,)) for name in "abcde"], 2)
    assert find(variant).resolve_plan(None, middle).cut == 2 + by
    setting = "batch norm local"
    decided = run(setting, "playerfl").engine.algorithm.plan
    count = min(max(decided.cut + by, 1), len(decided.layers) - 1)
    ours, plan = run(setting, variant), LayerPlan.prefix(decided.layers, count)
    assert ours.engine.algorithm.plan.cut == count
    assert ours.server() == run(setting, "playerfl", plan).server()


def test_groups_are_fedavg_at_one_end_and_local_training_at_the_other():
    """A client that is its own group trains alone, whatever the others do."""
    one, apart = (
        play(algorithm="grouped", model="drop", options={"groups": groups}, **ADAMW)
        for groups in ((), (2, 1, 1, 1))
    )
    together, alone = (
        play(algorithm=name, model="drop", **ADAMW) for name in ("fedavg", "local")
    )
    scores = together.values("loss", model="global", split="test")
    assert one.values("loss", model="personal", split="test") == pytest.approx(scores)
    for ours, theirs in zip(apart.evaluated(), alone.evaluated(), strict=True):
        assert ours[0] == theirs[0]
        assert len({*ours[1:]}) == 1
    assert ours[1] not in theirs


def test_fedavg_of_one_client_is_local_training():
    one = {"data": federation(sizes=(45,)), "model": "drop", **ADAMW}
    ours, theirs = (play(algorithm=name, **one) for name in ("fedavg", "local"))
    assert ours.evaluated() == theirs.evaluated()


@pytest.mark.parametrize(
    "name", every_other(sorted(registry().keys() - {"pfedhn"}), of=4)
)
def test_the_common_start_does_not_depend_on_the_algorithm(name):
    """An algorithm's additions leave the model's values alone, and personal ones are the client's.

    Only pFedHN draws a start of its own.
    """
    plain, extended = (
        assemble(
            CONFIG.with_keys(algorithm=each),
            data=TOY,
            model=network(kind_for(name, "plain")),
        )
        for each in ("fedavg", name)
    )
    algorithm, start = (
        extended.algorithm(extended.plan),
        tree.state_dict(extended.model),
    )
    plain_state = tree.state_dict(plain.model)
    assert all(
        torch.equal(start[n], plain_state[n]) for n in plain_state.keys() & start.keys()
    )
    server = algorithm.server_state(tree.clone(start))
    common = start.keys() - extended.task_info.never_sent
    assert common
    for client in range(len(TOY.clients)):
        state = algorithm.client_state(tree.clone(start), client)
        for model in algorithm.models(server, state, Round(0)).values():
            assert model.keys() == start.keys()
            assert all(torch.equal(model[n], start[n]) for n in common)


def test_the_networks_are_as_their_settings_say():
    """Dropout draws, batch normalisation has buffers: otherwise the settings above would test nothing."""
    assert [layer.name for layer in layers("sgd")] == ["fc1", "fc2", "fc3"]
    assert any(layer.buffers for layer in layers("batch norm, half"))
    assert not any(layer.buffers for layer in layers("batch norm drop"))
    assert layers("unused layer with decay")[-1].used is False
    drop, plain = (play(model=kind, algorithm="fedavg") for kind in ("drop", "plain"))
    assert drop.server() != plain.server()
