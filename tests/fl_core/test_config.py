"""What a run is asked to be: names, types, ranges, and the defaults of each dataset."""

import json
from dataclasses import is_dataclass
from pathlib import Path
from typing import get_type_hints

import pytest
import torch

from fl_core import data
from fl_core.config import GROUPS, KEYS, RunConfig, resolve
from fl_core.data.registry import ROOT_VARIABLE
from fl_core.errors import UsageError
from fl_core.plan import LayerPlan
from fl_core.run import runner
from fl_core.training.phases import Training
from tests.bounds import forbidden
from tests.conftest import refuses

DATASETS = sorted(data.datasets())


@pytest.fixture(autouse=True)
def _no_data_root(monkeypatch):
    monkeypatch.delenv(ROOT_VARIABLE, raising=False)


def test_an_unknown_key_is_refused_with_the_nearest():
    for key, near in (("epoch", "'epochs'"), ("nothing_alike_zzz", "known: ")):
        with refuses(rf"unknown.*'{key}'.*{near}"):
            RunConfig(**{key: 1})


def test_a_value_that_an_annotation_forbids_is_refused():
    """It has another type, another name, or is out of bounds."""
    count = 0
    for group in get_type_hints(RunConfig).values():
        for key, value in forbidden(group) if is_dataclass(group) else ():
            with refuses(f"{key}|{value}") as caught:
                resolve(RunConfig(**{key: value}))
            assert "\n" not in str(caught.value)
            count += 1
    assert count > 60


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"seed": None}, "seed.*int.*None"),
        ({"dataset": Path("heart")}, "dataset.*str.*PosixPath"),
        ({"options": "mu=1"}, "options.*dict.*'mu=1'"),
        ({"loss_options": [1]}, r"loss_options.*dict.*list\.$"),
    ],
)
def test_a_value_without_meaning_is_refused(changes, wanted):
    with refuses(wanted):
        resolve(RunConfig(**changes))


def test_a_refusal_shows_nothing_of_data():
    x, y = torch.full((8, 3), 71.25), torch.arange(8) % 2
    federated = data.from_clients({"north": (x, y), "south": (x, y)})
    with pytest.raises(UsageError) as caught:
        resolve(RunConfig(dataset=federated))
    assert "FederatedData" in str(caught.value)
    assert "data=" in str(caught.value)
    for value, shown in ((x, "Tensor"), ([71.25], "list"), ("x" * 79, "str")):
        with refuses(rf"rounds.*int.*\b{shown}\.$"):
            resolve(RunConfig(rounds=value))


@pytest.mark.parametrize("name", DATASETS)
def test_what_is_not_given_is_the_datasets_own(name):
    recipe, resolved = data.recipe(name), resolve(RunConfig(dataset=name))
    for key in (
        "model",
        "rounds",
        "epochs",
        "batch_size",
        "lr",
        "optimizer",
        "loss",
        "loss_options",
    ):
        assert resolved.value(key) == getattr(recipe, key), key
    for key, default in (("momentum", 0.0), ("weight_decay", 0.0), ("amsgrad", False)):
        assert resolved.value(key) == recipe.optimizer_options.get(key, default)
    assert resolved.execution.checkpoint_every == max(1, recipe.rounds // 20)
    # all of them train everyone for one epoch
    if recipe.rounds >= 20:
        assert resolved.execution.eval_every == 5
    else:
        assert 1 <= resolved.execution.eval_every < recipe.rounds / 2
    assert resolved.data.dataset == name
    assert Training.of(resolved.training) == Training(
        recipe.epochs,
        recipe.batch_size,
        recipe.lr,
        recipe.optimizer,
        keep_optimizer=recipe.keep_optimizer,
        **recipe.optimizer_options,
    )
    assert resolve(resolved) == resolved, "resolving again changes nothing"


def test_the_options_of_another_optimizer_or_loss_are_not_taken_over():
    recipe = data.recipe("fashion_mnist")
    assert recipe.optimizer == "adamw"
    assert recipe.optimizer_options["weight_decay"] > 0
    resolved = resolve(RunConfig(dataset="fashion_mnist", optimizer="sgd"))
    assert (resolved.training.weight_decay, resolved.training.amsgrad) == (0.0, False)
    assert data.recipe("heart").loss_options
    assert resolve(RunConfig(dataset="heart", loss="focal")).training.loss_options == {}


def test_paths_do_not_depend_on_the_folder_a_run_is_resumed_from(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.csv").write_text(
        "client,label,x\n" + "".join(f"{k % 2},{k % 3},{k}\n" for k in range(20))
    )
    resolved = resolve(
        RunConfig(dataset="mine.csv", init="weights.safetensors", data_root="files")
    )
    assert resolved.data.dataset == str(tmp_path / "mine.csv")
    assert resolved.model.init == str(tmp_path / "weights.safetensors")
    assert resolved.data.data_root == str(tmp_path / "files")
    monkeypatch.setenv(ROOT_VARIABLE, "elsewhere")
    assert resolve(RunConfig()).data.data_root == str(tmp_path / "elsewhere")


def test_a_configuration_survives_json():
    config = resolve(
        RunConfig(
            algorithm="fedrep",
            options={"head_epochs": 2},
            loss="focal",
            loss_options={"alpha": [0.1, 0.2, 0.3, 0.2, 0.2]},
            participation=1,
        )
    )
    stored = json.loads(json.dumps(config.to_json()))
    assert RunConfig(**stored) == config
    assert resolve(RunConfig(**stored)) == config
    assert config.with_keys(seed=1) != config


def test_a_plan_is_a_path_or_an_object():
    """A configuration holds the object as JSON, so it is stored and compared like any other key."""
    config = RunConfig(plan=Path("plan.json"))
    assert config.federation.plan == "plan.json"
    plain = RunConfig(dataset="heart", algorithm="fedper")
    plan = LayerPlan.prefix(runner.assemble(plain).layers, 2)
    config = plain.with_keys(plan=plan)
    assert config == RunConfig(**json.loads(json.dumps(config.to_json()))) != plain
    task = runner.assemble(config)
    assert (task.plan, task.config.federation.plan) == (plan, None)
    with refuses("got an object and another one in the configuration"):
        runner.assemble(config, plan=plan)
    with refuses("plan must be str or none; got 3. Pass a LayerPlan, or the path of"):
        RunConfig(plan=3)


def test_a_group_s_own_keys_come_before_those_that_it_shares():
    """So they are listed, in help and on pages."""
    order = [*KEYS]
    for group, kind in GROUPS.items():
        own = {*vars(kind)["__annotations__"]}
        names = [name for name in order if KEYS[name].group == group]
        assert own == {*names[: len(own)]}
    assert order.index("dataset") < order.index("client_column")
