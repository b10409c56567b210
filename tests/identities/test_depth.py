"""Clients of limited depth at the limits where their definitions coincide: the same bits after every round."""

from dataclasses import dataclass
from functools import cache

import pytest
import torch

from fl_core import models, tree
from fl_core.algorithms import base, registry
from fl_core.algorithms.fedra import AllLarge
from fl_core.algorithms.inclusivefl import DepthFL
from tests.conftest import TOY, every_other, network, play

FULL = (3,)
SETTINGS = {
    "momentum": {"momentum": 0.9, "weight_decay": 0.01},
    "adamw kept": {
        "optimizer": "adamw",
        "lr": 0.01,
        "weight_decay": 0.01,
        "keep_optimizer": True,
    },
    "two of four clients": {"participation": 0.5},
}
settings = pytest.mark.parametrize("setting", every_other(SETTINGS, start=1, of=3))
ATTENTION = {"lora_targets": "attn.proj", "lora_dropout": 0}
EVERYTHING = {"lora_targets": "none"}
AT_FULL_DEPTH = [  # algorithm, its options, those of both, setting
    ("fedra", {"allocation": "cover"}, ATTENTION, "adamw kept"),
    ("inclusivefl", {}, ATTENTION, "adamw kept"),
    ("fedra", {}, EVERYTHING, "momentum"),
    ("inclusivefl", {"momentum": False}, {}, "two of four clients"),
    ("inclusivefl", {}, {"weighted": False}, "momentum"),
]


@cache
def played(algorithm, setting, options):
    """Play two rounds of a small transformer."""
    keys = {"rounds": 2, "eval_every": 2, **SETTINGS[setting]}
    return play(algorithm=algorithm, model="vit", options=dict(options), **keys)


def run(algorithm, setting, **options):
    return played(algorithm, setting, tuple(options.items()))


@pytest.mark.parametrize("row", every_other(AT_FULL_DEPTH))
def test_at_full_depth_it_is_alllarge(row):
    name, options, common, setting = row
    played_run = run(name, setting, depths=FULL, **options, **common)
    wanted = run("alllarge", setting, **common)
    assert played_run.server() == wanted.server()
    assert played_run.evaluated() == wanted.evaluated()
    assert len(set(wanted.server())) == 2, "the model must move in every round"


@settings
def test_alllarge_that_trains_everything_is_fedavg(setting):
    of_alllarge, wanted = run("alllarge", setting, **EVERYTHING), run("fedavg", setting)
    assert of_alllarge.server() == wanted.server()
    losses = {"metric": "loss", "model": "global", "split": "test"}
    assert of_alllarge.values(**losses) == wanted.values(**losses)


@settings
def test_without_further_classifiers_depthfl_is_alllarge(setting):
    of_depthfl = run("depthfl", setting, depths=FULL, exits=(), weighted=True)
    wanted = run("alllarge", setting)
    for ours, theirs in zip(of_depthfl.checkpoints, wanted.checkpoints, strict=True):
        model = ours.server.trees["model"]
        named = {name.removeprefix("model."): t for name, t in model.items()}
        assert tree.digest(named) == tree.digest(theirs.server.trees["model"])


@dataclass(frozen=True)
class _Config(AllLarge.Config):
    exits: tuple[int, ...] | None = None
    ensemble: bool = True
    distillation: float = 0.0


class Summed(AllLarge):
    """AllLarge with DepthFL's model and the sum of its classifiers' losses."""

    name = "summed"
    added_modules = DepthFL.added_modules
    Config = _Config
    wrap_model = DepthFL.wrap_model
    loss = DepthFL.loss


@pytest.fixture(autouse=True)
def _registered():
    registry()
    base.ALGORITHMS._members["summed"] = Summed
    yield
    del base.ALGORITHMS._members["summed"]


def test_depthfl_without_distillation_is_the_summed_loss():
    common = {"exits": (1, 2), "depths": FULL, "weighted": True}
    wanted = run("summed", "momentum", exits=(1, 2))
    untaught, taught = (
        run("depthfl", "momentum", **common, distillation=k) for k in (0, 1)
    )
    assert untaught.server() == wanted.server()
    assert untaught.evaluated() == wanted.evaluated()
    assert taught.server()[0] != wanted.server()[0]


@pytest.mark.parametrize("targets", every_other(["patch_embed.proj,last", "mlp.fc2"]))
def test_fresh_adapters_leave_the_model_as_it_was(targets):
    """B is zero: the built model predicts what the plain one does, bit for bit, until it trains."""
    fresh, moved = (
        play(
            algorithm="fedra",
            model="vit",
            rounds=1,
            epochs=epochs,
            options={"lora_targets": targets},
        )
        for epochs in (0, 1)
    )
    model, plain = fresh.task.model.eval(), network("vit").eval()
    x = models.example(TOY.shape, 16)
    assert torch.equal(model(x), plain(x))
    tree.load(model, moved.checkpoints[-1].server.trees["model"])
    assert not torch.allclose(model(x), plain(x))
