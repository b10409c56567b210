"""Clients of limited depth at the limits where their definitions coincide: the same bits after every round."""

from dataclasses import dataclass

import pytest
import torch

from fl_core import models, tree
from fl_core.algorithms import base, registry
from fl_core.algorithms.fedra import AllLarge
from fl_core.algorithms.inclusivefl import DepthFL
from tests.conftest import BLOCKS, TOY, every_other, network, play

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
TRAINED = {
    "adapters": {},
    "attention's adapters": {"lora_targets": "attn.proj", "lora_dropout": 0},
    "everything": {"lora_targets": "none"},
    "unweighted": {"weighted": False},
}
settings = pytest.mark.parametrize("setting", every_other(SETTINGS, start=1, of=3))
pairs = pytest.mark.parametrize(
    ("setting", "trained"),
    [
        ("adamw kept", "attention's adapters"),
        *(
            pytest.param(setting, each, marks=pytest.mark.slow)
            for setting, each in (
                ("two of four clients", "adapters"),
                ("momentum", "everything"),
                ("momentum", "unweighted"),
            )
        ),
    ],
)
PLAYED = {}


def run(
    algorithm,
    setting="momentum",
    kind="vit",
    **options,
):
    """Two rounds; those of a named network are played once in this file."""
    key = repr((algorithm, setting, kind, sorted(options.items())))
    if key not in PLAYED or not isinstance(kind, str):
        PLAYED[key] = play(
            algorithm=algorithm,
            model=kind,
            options=options,
            rounds=2,
            eval_every=2,
            **SETTINGS[setting],
        )
    return PLAYED[key]


@pairs
@pytest.mark.parametrize(
    ("name", "limits"),
    [
        ("fedra", {"allocation": "cover"}),
        ("inclusivefl", {}),
        *(
            pytest.param(name, limits, marks=pytest.mark.slow)
            for name, limits in (("fedra", {}), ("inclusivefl", {"momentum": False}))
        ),
    ],
    ids=str,
)
def test_at_full_depth_it_is_alllarge(name, limits, trained, setting):
    options = TRAINED[trained]
    found, wanted = (
        run(name, setting, depths=FULL, **limits, **options),
        run("alllarge", setting, **options),
    )
    assert found.server() == wanted.server()
    assert found.evaluated() == wanted.evaluated()
    assert len(set(wanted.server())) == 2, "the model must move in every round"


@settings
def test_alllarge_that_trains_everything_is_fedavg(setting):
    found = run("alllarge", setting, lora_targets="none")
    wanted = play(
        algorithm="fedavg", model="vit", rounds=2, eval_every=2, **SETTINGS[setting]
    )
    assert found.server() == wanted.server()
    assert found.values("loss", model="global", split="test") == wanted.values(
        "loss", model="global", split="test"
    )


@settings
def test_without_further_classifiers_depthfl_is_alllarge(setting):
    found = run("depthfl", setting, depths=FULL, exits=(), weighted=True)
    wanted = run("alllarge", setting)
    for ours, theirs in zip(found.checkpoints, wanted.checkpoints, strict=True):
        named = {
            name.removeprefix("model."): t
            for name, t in ours.server.trees["model"].items()
        }
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


@pytest.mark.parametrize(
    ("setting", "exits"),
    [
        ("momentum", (1, 2)),
        pytest.param("two of four clients", (2,), marks=pytest.mark.slow),
    ],
)
def test_depthfl_without_distillation_is_the_summed_loss(setting, exits):
    common = {"exits": exits}
    wanted = run("summed", setting, **common)
    found = run(
        "depthfl", setting, depths=FULL, weighted=True, distillation=0, **common
    )
    assert found.server() == wanted.server()
    assert found.evaluated() == wanted.evaluated()
    taught = run(
        "depthfl", setting, depths=FULL, weighted=True, distillation=1, **common
    )
    assert taught.server()[0] != wanted.server()[0]


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("targets", every_other(["patch_embed.proj,last", "mlp.fc2"]))
def test_fresh_adapters_leave_the_model_as_it_was(kind, targets):
    """B is zero: the built model predicts what the plain one does, a ViT bit for bit.

    An MLP-Mixer mixes tokens in transposed layers; adding the adapter's zeros changes how their outputs lie in memory,
    and with it the order of later sums.
    """
    if kind == "mixer":
        targets = targets.replace("mlp.fc2", "mlp_tokens.fc2").replace(
            "patch_embed", "stem"
        )
    played = play(
        algorithm="fedra",
        model=kind,
        rounds=1,
        epochs=0,
        options={"lora_targets": targets},
    )
    model, plain = played.task.model.eval(), network(kind).eval()
    x = models.example(TOY.shape, 16)
    if kind == "vit":
        assert torch.equal(model(x), plain(x))
    exact = [each.double()(x.double()) for each in (model, plain)]
    assert torch.allclose(*exact, rtol=0, atol=1e-12)
    moved = play(
        algorithm="fedra", model=kind, rounds=1, options={"lora_targets": targets}
    )
    tree.load(model, moved.checkpoints[-1].server.trees["model"])
    assert not torch.allclose(model(x.double()), exact[1])
