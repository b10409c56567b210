"""Runs by configuration: what is refused before any work, what a run leaves on disk, and going on from there."""

import json
import re
import warnings
from dataclasses import replace
from functools import cache

import pytest
import torch

from diagnostics.measure import instruments
from fl_core import tree
from fl_core.algorithms import Round, registry
from fl_core.config import RunConfig
from fl_core.data import Split
from fl_core.layers import layers_of
from fl_core.models import example
from fl_core.plan import Evidence, LayerPlan
from fl_core.records import store, writing
from fl_core.rounds.steering import Instruments
from fl_core.run import runner
from fl_core.run.restore import load_models
from tests.conftest import CONFIG, TOY, federation, network, refuses
from tests.faults.injected import contents, cut_back

ALL = sorted(registry())
SPLITTING = sorted(name for name, kind in registry().items() if kind.uses_plan)
HEART = RunConfig(
    rounds=3,
    eval_every=1,
    checkpoint_every=1,
    optimizer="sgd",
    lr=0.01,
    momentum=0.9,
    keep_optimizer=True,
)


def layers(kind="plain"):
    return layers_of(network(kind), example(TOY.shape))


def test_clients_that_are_made_up_are_told(tmp_path):
    path = tmp_path / "wards.csv"
    lines = [f"{k % 3},{k * k % 53},{k % 2}\n" for k in range(120)]
    path.write_text("ward,age,label\n" + "".join(lines))
    config = RunConfig(dataset=str(path), rounds=1, batch_size=8)
    for changes in (
        {},
        {"partition": "dirichlet"},
        {"clients": 5},
        {"client_column": "ward"},
    ):
        notes = runner.assemble(config.with_keys(**changes)).notes()
        made_up = [note for note in notes if "made-up" in note]
        assert len(made_up) == (not changes)
        assert all("wards.csv" in note and "'dirichlet'" in note for note in made_up)


def test_a_client_without_training_samples_is_refused_by_name():
    first, *rest = TOY.clients
    empty = replace(first, train=Split(first.train.x[:0], first.train.y[:0]))
    with refuses(r"for a\b"):
        runner.assemble(
            CONFIG, data=replace(TOY, clients=(empty, *rest)), model=network("plain")
        )


@pytest.mark.parametrize(
    ("changes", "sizes", "message"),
    [
        ({"batch_size": 1}, (30, 30), "batch_size.*2.*1"),
        ({}, (30, 3), r"'b'.*train"),
        ({"batchnorm": "drop"}, (30, 5), "'b'.*(validation|test)"),
    ],
)
def test_normalising_over_one_sample_is_refused(changes, sizes, message):
    data = federation(sizes=sizes)
    with refuses(message):
        runner.assemble(CONFIG.with_keys(**changes), data=data, model=network("norm"))
    runner.assemble(CONFIG.with_keys(**changes), data=data, model=network("plain"))


@pytest.mark.parametrize("bn", ["global", "drop"])
def test_your_own_model_is_left_as_it_was(bn):
    model = network("norm")
    before = tree.digest(tree.state_dict(model))
    first, second = (
        runner.run(
            CONFIG.with_keys(batchnorm=bn, rounds=1),
            data=TOY,
            model=model,
        )
        for _ in range(2)
    )
    assert tree.digest(tree.state_dict(model)) == before
    assert tree.digest(first.server.trees["model"]) == tree.digest(
        second.server.trees["model"]
    )


CASES = {
    **{name: {"algorithm": name} for name in ("playerfl", "fedbabu")},
    "fedper auto": {"algorithm": "fedper", "plan": "auto"},
    "fedper, adapters": {
        "algorithm": "fedper",
        "adapt": "lora:dropout=0.5",
        "dataset": "digits",
        "max_samples": 400,
        "model": "vit",
        "model_options": {"depth": 3, "width": 8, "heads": 2, "patch": 4},
    },
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")

    @cache
    def one(case):
        out, config = folder / case / "run", HEART.with_keys(**CASES[case])
        runner.run(config, out, instruments=instruments)
        return out

    return one


def test_who_goes_on_with_other_versions_is_told(undisturbed, tmp_path, monkeypatch):
    began = writing.versions()
    versions = {**began["versions"], "torch": "9.9", "timm": ""}
    other = {**began, "python": "3.99.0", "versions": versions}
    words = (
        rf"torch {re.escape(began['versions']['torch'])}.*9\.9.*timm .*missing.*3\.99"
    )
    for place, after, now in (("same", 1, began), ("done", 99, other), ("x", 1, other)):
        monkeypatch.setattr(writing, "versions", lambda now=now: now)
        run = cut_back(undisturbed("fedbabu"), tmp_path / place, after)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            runner.resume(run)
        notes = [str(w.message) for w in caught if "began with" in str(w.message)]
        assert len(notes) == (place == "x")
    assert re.search(words, notes[0])


def test_going_on_after_the_decision_needs_no_instruments(undisturbed, tmp_path):
    broken = cut_back(undisturbed("fedper auto"), tmp_path, after=1)
    runner.resume(broken)
    assert contents(broken) == contents(undisturbed("fedper auto"))
    fresh = cut_back(undisturbed("fedper auto"), tmp_path / "other", after=0)
    with refuses(r"plan.*instruments"):
        runner.resume(fresh, instruments=Instruments)


def test_a_given_plan_travels_with_the_run(tmp_path):
    LayerPlan.prefix(runner.assemble(HEART).layers, 2).save(tmp_path / "plan.json")
    config = HEART.with_keys(
        algorithm="playerfl_minus", plan=str(tmp_path / "plan.json"), rounds=2
    )
    runner.run(config, tmp_path / "a" / "run")
    (tmp_path / "plan.json").unlink()
    broken = cut_back(tmp_path / "a" / "run", tmp_path / "b", after=1)
    engine = runner.resume(broken)
    assert contents(broken) == contents(tmp_path / "a" / "run")
    assert engine.algorithm.plan.shared == ("fc1",), (
        "one layer less than the one given, and not less again"
    )


@pytest.mark.parametrize("own", [False, True])
def test_a_run_with_a_split_seed_resumes_to_the_same_bits(own, tmp_path):
    config, objects = HEART.with_keys(rounds=2, split_seed=0), {}
    if own:
        samples = {part.name: (part.train.x, part.train.y) for part in TOY.clients}
        config = CONFIG.with_keys(split_seed=0, scale="none")
        objects = {"data": samples, "model": network("plain")}
    whole = tmp_path / "a" / "run"
    engine = runner.run(config.with_keys(seed=2), whole, **objects)
    stored = json.loads((whole / "config.json").read_text())
    assert (stored["seed"], stored["split_seed"]) == (2, 0)
    broken = cut_back(whole, tmp_path / "b", after=1)
    runner.resume(broken, **objects)
    assert contents(broken) == contents(whole)
    first = runner.assemble(config.with_keys(seed=0), **objects).data
    for client in first.clients:
        same = engine.data.client(client.name)
        assert torch.equal(client.test.x, same.test.x)
        assert not torch.equal(client.validation.x, same.validation.x)


def test_your_own_data_and_model_must_be_given_again(tmp_path):
    common = {"data": TOY, "model": network("plain")}
    runner.run(CONFIG, tmp_path / "a" / "run", **common)
    other = {"data": federation(seed=1)}
    for after in (0, 2):
        broken = cut_back(tmp_path / "a" / "run", tmp_path / f"b{after}", after)
        refused = [
            ({"model": network("plain")}, "data="),
            (common | other, "same data"),
            (common | {"model": network("norm")}, "other code of its layers"),
        ]
        if after == 0:
            refused += [(common | {"model": network("plain", 1)}, "other weights")]
        for objects, message in refused:
            with refuses(message):
                runner.resume(broken, **objects)
        runner.resume(broken, **common)
        assert contents(broken) == contents(tmp_path / "a" / "run")


@pytest.mark.parametrize("case", ["fedbabu", "fedper auto"])
def test_the_models_of_a_checkpoint_are_those_of_the_run(case, undisturbed):
    path = undisturbed(case)
    checkpoint, last = store.Run(path).checkpoint(2), store.Run(path).checkpoint()
    engine = runner.resume(path, instruments=instruments)
    algorithm = engine.algorithm
    which = algorithm.evaluates
    evaluated = {
        name: algorithm.models(checkpoint.server, state, Round(2))[which]
        for name, state in checkpoint.clients.items()
    }
    wanted = {(2, "local"): checkpoint.models["local"], (2, which): evaluated}
    if algorithm.finetuning(3, 0):
        wanted["last", "personal"] = last.models["personal"]
    for (done, kind), trees in wanted.items():
        models, task = load_models(path, done, kind)
        assert task.data.digest == engine.data.digest
        assert list(models) == list(trees)
        assert {k: tree.digest(tree.state_dict(m)) for k, m in models.items()} == {
            k: tree.digest(t) for k, t in trees.items()
        }


def test_a_run_says_that_its_plan_was_edited(tmp_path, recwarn):
    layers, path = runner.assemble(HEART).layers, tmp_path / "plan.json"
    config = HEART.with_keys(algorithm="fedper", plan=str(path), rounds=2)
    decided = LayerPlan.prefix(layers, 2, Evidence(rule="sensitivity_ratio"))
    decided.save(path)
    runner.run(config, tmp_path / "unedited", until=1)
    assert "edited" not in "".join(str(warning.message) for warning in recwarn)
    path.write_text(json.dumps({**decided.to_json(), "shared": ["fc1"]}))
    with pytest.warns(UserWarning, match=r"\(was sensitivity_ratio\)"):
        runner.run(config, tmp_path / "run", until=1)
    path.unlink()
    plan = runner.resume(tmp_path / "run").algorithm.plan
    assert plan.shared == ("fc1",)
    assert plan.why.rule == "edited by hand (was sensitivity_ratio)"
    again = runner.assemble(config.with_keys(plan=str(tmp_path / "run")))
    assert again.plan == plan


def test_the_first_epoch_is_the_one_that_playerfl_decides_on(
    undisturbed,
):
    task = runner.assemble(HEART.with_keys(algorithm="playerfl"))
    before = tree.digest(tree.state_dict(task.model))
    trained, measured = runner.train_first_round(task, instruments().observers)
    assert tree.digest(tree.state_dict(task.model)) == before
    path = undisturbed("playerfl")
    local = store.Run(path).checkpoint(1).models["local"]
    assert {k: tree.digest(tree.state_dict(m)) for k, m in trained.items()} == {
        k: tree.digest(t) for k, t in local.items()
    }
    why = LayerPlan.from_json(store.Run(path).plan()).why
    for client, values in why.clients.items():
        importance = torch.tensor(measured[client]["importance"], dtype=torch.float64)
        torch.testing.assert_close(
            torch.tensor(values, dtype=torch.float64),
            importance.cumsum(0) / importance[0],
        )


def test_plans_that_do_not_fit_are_refused(tmp_path):
    plan, other = (LayerPlan.prefix(layers(kind), 1) for kind in ("plain", "norm"))
    cases = [
        (name, None, plan, rf"plan.*fedbabu.*{name}")
        for name in sorted(set(ALL) - set(SPLITTING))
    ]
    cases += [("fedavg", name, None, "plan.*fedbabu") for name in ("auto", "x.json")]
    cases += [("fedper", name, plan, f"plan='{name}'") for name in ("auto", "x.json")]
    cases += [("fedper", None, other, r"plan: bn1\.bias")]
    cases += [("fedper", str(tmp_path / "none.json"), None, r"none\.json")]
    for name, by_name, wrong_plan, message in cases:
        config = CONFIG.with_keys(algorithm=name, plan=by_name)
        with refuses(message):
            runner.assemble(config, data=TOY, model=network("plain"), plan=wrong_plan)
