"""From a task or a run to rows: the same numbers as the steps taken by hand, and rows that say where they are from."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
import pytest
import torch

import fedlayers as fl
from diagnostics import measure
from diagnostics.decide import select
from diagnostics.measure import diagnose
from diagnostics.representation.probe import probe_set
from fl_core import runner, tree
from fl_core.config import RunConfig, in_memory
from fl_core.data.federated import Split
from fl_core.errors import UsageError
from fl_core.plan import LayerPlan
from fl_core.records.store import Run
from fl_core.stored_models import load_models

SENSITIVITY = "federation_sensitivity"
CONFIG = RunConfig(dataset="heart", algorithm="fedavg", rounds=2, seed=3)


@pytest.fixture(scope="module")
def task():
    return runner.assemble(CONFIG)


@pytest.fixture(scope="module")
def report(task):
    return measure.diagnose_task(task, command="by hand", progress=False)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "half"
    config = RunConfig(
        dataset="heart",
        algorithm="local_adaptation",
        rounds=2,
        seed=3,
        participation=0.5,
    )
    runner.run(config, path, instruments=measure.instruments(), progress=False)
    return path


def test_a_run_and_its_result_are_measured_as_the_run_s_models(tmp_path):
    asked = {"metrics": ["grad_norm", "weight_divergence"], "progress": False}
    config = RunConfig(
        dataset="heart", algorithm="fedper", rounds=2, checkpoint_every=1
    )
    kept = fl.run(config, tmp_path / "run", progress=False)
    found = fl.diagnose(kept.path, model="personal", round=1, **asked).frame
    assert set(found["model"]) == {"personal"}
    assert set(found["round"]) == {1}
    wanted = measure.diagnose_run(kept.path, which="personal", round=1, **asked).frame
    pd.testing.assert_frame_equal(found, wanted)
    pd.testing.assert_frame_equal(
        fl.diagnose(kept, **asked).frame, fl.diagnose(kept.path, **asked).frame
    )
    result = fl.run(config, progress=False)
    data = {client.name: client.train for client in result.engine.data.clients}
    ours = fl.diagnose(result, **asked).frame["value"]
    loss = runner.assemble(config).criterion
    theirs = diagnose(result.models, data, loss=loss, **asked).frame["value"]
    assert ours.to_list() == theirs.to_list()


def test_a_task_is_measured_on_its_models_after_one_epoch(task, report):
    models, _ = runner.train_first_round(task, measure.instruments().observers)
    data = {
        client.name: (client.train.x, client.train.y) for client in task.data.clients
    }
    by_hand = diagnose(
        models,
        data,
        loss=task.criterion,
        seed=3,
        progress=False,
        options={"probe": probe_set(task.data)},
    )
    ours = report.frame[report.frame["variant"] != "training"].reset_index(drop=True)
    columns = [
        name for name in by_hand.frame if name not in ("round", "model", "split")
    ]
    pd.testing.assert_frame_equal(ours[columns], by_hand.frame[columns])


@pytest.mark.parametrize("metric", ["cka", "grad_variance", "hessian_trace"])
def test_adapters_are_measured_as_other_layers_are(metric):
    pytest.importorskip("peft")
    report = measure.diagnose_task(
        runner.assemble(CONFIG.with_keys(adapt="lora:r=2")), (metric,), progress=False
    )
    assert list(dict.fromkeys(report.frame["layer"]))[:2] == [
        "fc1.lora_A",
        "fc1.lora_B",
    ]
    values = report.frame["value"]
    assert values.notna().all()
    assert values.nunique() > 4


def test_the_training_rows_are_what_a_run_decides_on(task, report, tmp_path):
    config = RunConfig(dataset="heart", algorithm="playerfl", rounds=1, seed=3)
    runner.run(
        config, tmp_path / "run", instruments=measure.instruments(), progress=False
    )
    theirs = LayerPlan.load(tmp_path / "run" / "plan.json")
    table = report.values(SENSITIVITY, "training")
    for client, values in theirs.why.clients.items():
        assert list(values) == pytest.approx(table[client].tolist(), rel=1e-6)
    ours = select.select(report, metric=SENSITIVITY, variant="training")
    assert ours.digest == theirs.digest
    assert ours.why.weights == theirs.why.weights


@pytest.mark.parametrize(
    "chosen",
    [{"algorithm": "playerfl"}, {"algorithm": "fedper", "plan": "auto"}],
    ids=str,
)
def test_a_decision_weights_clients_by_their_samples_however_models_are_averaged(
    chosen,
):
    config = RunConfig(
        dataset="heart", rounds=1, seed=3, client_weights="uniform", **chosen
    )
    engine = runner.run(config, instruments=measure.instruments(), progress=False)
    theirs, task = engine.algorithm.plan, runner.assemble(config)
    ours = select.select(measure.diagnose_task(task, [SENSITIVITY], progress=False))
    assert ours.digest == theirs.digest
    assert ours.why.weights == theirs.why.weights
    assert list(theirs.why.weights.values()) == list(task.data.weights)
    assert theirs.why.values == pytest.approx(ours.why.values, rel=1e-6)
    assert theirs.why.alternatives == ours.why.alternatives


def test_rows_and_header_say_where_they_are_from(task, report):
    assert set(report.frame["seed"]) == {3}
    assert set(report.frame["round"]) == {0}
    assert set(report.frame["model"]) == {"local"}
    splits = set(zip(report.frame["metric"], report.frame["split"], strict=True))
    assert splits == {
        (name, "validation" if name == "cka" else "train")
        for name in measure.DEFAULT_METRICS
    }
    sizes = dict(
        zip((c.name for c in task.data.clients), task.data.weights, strict=True)
    )
    single = report.frame[
        (report.frame["client"] != "") & (report.frame["client_b"] == "")
    ]
    assert {(row.client, row.n_train) for row in single.itertuples()} == set(
        sizes.items()
    )
    assert report.header["command"] == "by hand"
    assert report.header["dataset"] == "heart"
    assert report.header["data"] == task.data.digest
    assert report.header["checkpoint"] == tree.digest(tree.state_dict(task.model))
    assert report.header["absent"] == []


def test_measuring_leaves_the_task_as_it_was(task):
    before = tree.clone(tree.state_dict(task.model))
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    measure.diagnose_task(task, [SENSITIVITY], progress=False)
    assert torch.equal(torch.rand(1), expected)
    after = tree.state_dict(task.model)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_only_what_is_asked_is_measured(task):
    report = measure.diagnose_task(task, ["cka"], progress=False)
    assert set(report.frame["metric"]) == {"cka"}
    assert measure.shown_variants(report, "cka") == ["flatten"]
    both = measure.diagnose_task(task, [SENSITIVITY], progress=False)
    assert measure.shown_variants(both, SENSITIVITY) == ["after", "training"]
    with pytest.raises(UsageError, match="mean 'cka'"):
        measure.diagnose_task(task, ["ckaa"])
    only = measure.diagnose_task(task, [SENSITIVITY], layers=["fc2"], progress=False)
    assert list(only.values(SENSITIVITY, "training").index) == ["fc2"]
    assert set(only.frame["layer"]) == {"fc2"}


def test_the_header_names_the_layers_that_were_measured(task):
    found = measure.diagnose_task(
        task, ["grad_variance", SENSITIVITY], by="module", progress=False
    )
    assert [layer.name for layer in found.layers] == list(
        found.values("grad_variance").index
    )
    assert found.layers != tuple(task.layers)
    assert "training" not in set(found.frame["variant"])  # of other layers than these
    assert select.select(found).names == tuple(layer.name for layer in found.layers)


PROBE = (torch.eye(5, 10), torch.zeros(5).long())


@pytest.mark.parametrize(
    ("metric", "options", "given", "split", "count"),
    [
        ("cka", {"samples": 20}, {}, "validation", 20),
        ("cka", {"probe": PROBE}, {"probe": (PROBE[0][:3], PROBE[1][:3])}, "probe", 5),
        ("cka", {}, {"probe": PROBE}, "probe", 5),
        ("knn_probe", {}, {}, "validation", 120),
        ("knn_probe", {"holdout": 0.25}, {}, "train", 118),
        ("knn_probe", {"folds": 3}, {}, "train", 470),
    ],
)
def test_a_metric_s_own_samples_are_used_and_named(
    task, metric, options, given, split, count
):
    frame = measure.diagnose_task(
        task, [metric], options={metric: options}, progress=False, **given
    ).frame
    assert set(frame["split"]) == {split}
    assert set(
        frame.loc[frame["client"].eq("") | frame["client_b"].ne(""), "n_samples"]
    ) == {count}


@pytest.mark.parametrize(
    ("which", "round"),
    [("local", "last"), ("global", 1), ("global", "last"), ("personal", 2)],
)
def test_a_run_is_measured_on_its_stored_models(run, which, round):
    report = measure.diagnose_run(
        run, [SENSITIVITY], round=round, which=which, progress=False
    )
    models, task = load_models(run, round, which)
    data = {
        c.name: (c.train.x, c.train.y) for c in task.data.clients if c.name in models
    }
    by_hand = diagnose(
        models, data, [SENSITIVITY], loss=task.criterion, seed=3, progress=False
    )
    pd.testing.assert_frame_equal(
        report.values(SENSITIVITY, "after"),
        by_hand.values(SENSITIVITY, "after"),
        check_names=False,
    )
    assert set(report.frame["round"]) == {2 if round == "last" else round}
    assert set(report.frame["model"]) == {which}
    assert set(report.frame["algorithm"]) == {"local_adaptation"}
    assert set(report.frame["run"]) == {"half"}


def test_a_run_moved_from_its_own_start(run):
    report = measure.diagnose_run(run, "update_magnitude", progress=False)
    models, task = load_models(run)
    first = task.layers[0]
    for client, model in models.items():
        now, start = (
            torch.cat(
                [
                    tree.state_dict(each)[name].double().flatten()
                    for name in first.weights
                ]
            )
            for each in (model, task.model)
        )
        rows = report.frame[report.frame["variant"] == "relative_l2"].set_index(
            ["client", "layer"]
        )
        row = rows.loc[(client, first.name)]
        assert row["status"] == "ok"
        assert row["value"] == pytest.approx(float((now - start).norm() / start.norm()))
        assert row["value"] > 0


def test_local_models_are_those_before_aggregation(run):
    stored = Run(run).checkpoint().models["local"]
    report = measure.diagnose_run(run, [SENSITIVITY], progress=False)
    assert set(report.frame["client"]) - {""} == set(stored)
    assert len(stored) == 2
    everyone = {
        client.name for client in load_models(run, which="global")[1].data.clients
    }
    assert set(report.header["absent"]) == everyone - set(stored)


@pytest.mark.parametrize("which", ["personal", "global", "local"])
def test_the_layers_of_a_built_model_are_the_plain_models_and_what_was_added(
    tmp_path, which
):
    """A second head: rows by the names that other algorithms' rows have, and a plan from them that the run obeys."""
    config = RunConfig(dataset="heart", algorithm="fedrod", rounds=2, seed=3)
    runner.run(config, tmp_path / "run", progress=False)
    report = measure.diagnose_run(
        tmp_path / "run", (SENSITIVITY, "cka"), which=which, progress=False
    )
    plain = [layer.name for layer in runner.assemble(CONFIG).layers]
    assert [layer["name"] for layer in report.header["layers"]] == [*plain, "personal"]
    assert set(report.frame["layer"]) == {*plain, "personal"}
    cka = report.frame[
        (report.frame["metric"] == "cka") & (report.frame["status"] == "ok")
    ]
    assert set(plain) <= set(cka["layer"])
    plan = select.select(report, "manual", layers=plain[:2])
    plan.check_fits(load_models(tmp_path / "run", which=which)[0]["cleveland"])
    by = measure.diagnose_run(
        tmp_path / "run", (SENSITIVITY,), which=which, by="module", progress=False
    )
    assert "body.fc1.linear" in set(by.frame["layer"])


def test_what_a_run_does_not_have_is_refused(run):
    with pytest.raises(UsageError, match="mean 'global'"):
        measure.diagnose_run(run, which="globl")
    with pytest.raises(UsageError, match=r"local, global.*'personal'"):
        measure.diagnose_run(run, round=1, which="personal")
    with pytest.raises(UsageError, match=r"1, 2.*got 9"):
        measure.diagnose_run(run, round=9)
    with pytest.raises(UsageError, match="metric 'x'"):
        measure.diagnose_run(run, ["x"])


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"options": {"cka": {"samples": 1}}}, "1 samples .*4"),
        ({"options": {"cka": {"sample": 9}}}, "mean 'samples'"),
        ({"options": {"cka": {"against": "fc9"}}}, "layer .*'fc9'"),
        ({"options": {"cka": {"against": "fc1"}}, "by": "module"}, "layer .*'fc1'"),
        ({"options": {"cka": {"against": "fc4"}}, "layers": "fc2"}, "layer .*'fc4'"),
        ({"options": {"cka": {"estimator": "minibatch"}}, "batch": 3}, "least 4"),
        (
            {"options": {"cka": {"samples": 40}}, "probe": torch.zeros(4, 13)},
            "probe.*samples=40",
        ),
        ({"options": {"grad_norm": {}}}, "options 'grad_norm'"),
        ({"mode": "evaluation"}, "mode"),
        ({"layers": ["fc9"]}, "layer 'fc9'"),
        ({"by": "modul"}, "mean 'module'"),
        ({"resamples": -1}, "resamples.*-1"),
    ],
)
def test_nobody_trains_for_a_wrong_request(task, wrong, words, monkeypatch):
    monkeypatch.setattr(runner, "train_first_round", None)
    with pytest.raises(UsageError, match=words):
        measure.diagnose_task(task, "cka", progress=False, **wrong)


def test_training_is_measured_in_its_first_epoch_however_many_follow() -> None:
    """Steps of later epochs are no part of the values, nor of what the rows say was seen."""
    once, twice = (
        measure.diagnose_task(
            runner.assemble(RunConfig(dataset="heart", epochs=epochs)),
            [measure.SENSITIVITY],
        ).frame
        for epochs in (1, 2)
    )
    once, twice = (frame[frame["variant"] == "training"] for frame in (once, twice))
    for column in ("client", "layer", "value", "estimator", "n_samples"):
        assert once[column].tolist() == twice[column].tolist(), column


@pytest.mark.parametrize("null", ["", "labels", "fresh"])
def test_a_start_that_is_not_the_run_s_is_not_used(tmp_path, null):
    """An own model's start is not stored: another one of its architecture has other weights."""

    def own(seed):
        torch.manual_seed(seed)
        return torch.nn.Sequential(
            torch.nn.Linear(10, 4), torch.nn.ReLU(), torch.nn.Linear(4, 5)
        )

    runner.run(
        in_memory(RunConfig(dataset="heart", rounds=1), None, own(0)),
        tmp_path / "run",
        progress=False,
    )
    how = {"null": null or (), "progress": False}
    known = measure.diagnose_run(
        tmp_path / "run", "update_magnitude", model=own(0), **how
    )
    assert set(known.frame["status"]) == {"ok"}
    if null == "fresh":
        with pytest.raises(
            UsageError,
            match=r"model must have the weights that .*run started from.*'fresh'",
        ):
            measure.diagnose_run(
                tmp_path / "run", "update_magnitude", model=own(1), **how
            )
        return
    other = measure.diagnose_run(
        tmp_path / "run", ["update_magnitude", "weight_magnitude"], model=own(1), **how
    )
    frame = pd.concat([other.frame, other.nulls]) if null else other.frame
    assert set(frame.loc[frame["metric"] == "weight_magnitude", "status"]) == {"ok"}
    moved = frame[frame["metric"] == "update_magnitude"]
    assert moved["value"].isna().all()
    assert all("common start is not known" in status for status in moved["status"])
    said = {"update_magnitude": {"start": own(0)}}
    again = measure.diagnose_run(
        tmp_path / "run", "update_magnitude", model=own(1), options=said, progress=False
    )
    pd.testing.assert_frame_equal(again.frame, known.frame)


class Products:
    """The products of weights and gradients, float64, at each step of a training."""

    def __init__(self, layers):
        self.steps = []

    def update(self, params, grads, n=1):
        self.steps.append(
            {
                name: (params[name] * grad).detach().double()
                for name, grad in grads.items()
            }
        )

    def result(self):
        return {"steps": self.steps}


@pytest.mark.parametrize(
    "options",
    [{"tensors": "all"}, {"tensors": "all", "reduce": "mean_of_tensors"}],
    ids=str,
)
def test_options_of_sensitivity_hold_for_what_training_measures(task, options):
    _, seen = runner.train_first_round(task, {SENSITIVITY: Products})
    report = measure.diagnose_task(
        task, [SENSITIVITY], options={SENSITIVITY: options}, progress=False
    )
    table = report.values(SENSITIVITY, "training")
    for client, found in seen.items():
        importance = []
        for layer in task.layers:
            steps = [
                [step[name].square() for name in layer.parameters]
                for step in found["steps"]
            ]
            if "reduce" in options:
                each = [
                    torch.stack([square.mean() for square in squares]).mean()
                    for squares in steps
                ]
            else:
                each = [
                    torch.cat([square.flatten() for square in squares]).mean()
                    for squares in steps
                ]
            importance.append(torch.stack(each).mean())
        wanted = torch.stack(importance).cumsum(0) / importance[0]
        assert table[client].tolist() == pytest.approx(wanted.tolist(), rel=1e-5)
    rows = report.frame[report.frame["variant"] == "training"]
    assert set(rows["estimator"]) == {
        "epoch" + ", mean of tensors" * ("reduce" in options) + ", all tensors"
    }
    assert select.select(report).why.metric == SENSITIVITY


def test_a_client_without_validation_samples_is_named(task):
    first, *others = task.data.clients
    empty = replace(
        first, validation=Split(first.validation.x[:0], first.validation.y[:0])
    )
    lacking = replace(task, data=replace(task.data, clients=(empty, *others)))
    with pytest.raises(
        UsageError, match=f"validation samples .*got none for {first.name}"
    ):
        measure.diagnose_task(lacking, ["cka"], progress=False)
