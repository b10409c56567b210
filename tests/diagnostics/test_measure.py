"""From a task or a run to rows: the same numbers as the steps taken by hand, and rows that say where they are from."""

from dataclasses import replace

import pandas as pd
import pytest
import torch
from torch import nn

import fedlayers as fl
from diagnostics import measure, select
from diagnostics.measure import diagnose
from diagnostics.representation.features import probe_set
from fl_core import tree
from fl_core.config import RunConfig
from fl_core.data.federated import Split
from fl_core.display import in_order
from fl_core.records.store import Run
from fl_core.run import runner
from fl_core.run.restore import load_models
from tests.conftest import refuses

SENSITIVITY = "federation_sensitivity"
CONFIG = RunConfig(dataset="heart", algorithm="fedavg", rounds=2, seed=3)


@pytest.fixture(scope="module")
def task():
    return runner.assemble(CONFIG)


@pytest.fixture(scope="module")
def report(task):
    return measure.diagnose_task(task, command="by hand")


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
    runner.run(config, path, instruments=measure.instruments)
    return path


def test_a_run_and_its_result_are_measured_as_the_run_s_models(tmp_path):
    arguments = {"metrics": ["grad_norm", "weight_divergence"]}
    config = RunConfig(
        dataset="heart", algorithm="fedper", rounds=2, checkpoint_every=1
    )
    stored = fl.run(config, tmp_path / "run")
    rows = fl.diagnose(stored.path, model="personal", round=1, **arguments).frame
    assert set(rows["model"]) == {"personal"}
    assert set(rows["round"]) == {1}
    wanted = measure.diagnose_run(
        stored.path, which="personal", round=1, **arguments
    ).frame
    pd.testing.assert_frame_equal(rows, wanted)
    pd.testing.assert_frame_equal(
        fl.diagnose(stored, **arguments).frame,
        fl.diagnose(stored.path, **arguments).frame,
    )
    config = config.with_keys(
        patience=1, rounds=8, seed=1, loss="focal", algorithm="local"
    )
    for out in (None, tmp_path / "stopped"):
        result = fl.run(config, out)
        data = {client.name: client.train for client in result.engine.data.clients}
        for round in ("", "best") if out else ("",):
            which = {"model": "personal", "round": round} if out else {}
            report = fl.diagnose(result, **arguments, **which)
            theirs = diagnose(result.models, data, **arguments)
            assert report.header["loss"] == theirs.header["loss"] == "focal"
            ours = report.frame["value"].to_list()
            assert ours == theirs.frame["value"].to_list()
    rule = Run(out).stopping_rule()
    assert set(report.frame["round"]) == {rule.best[rule.main]} != {result.done}
    assert f"round {rule.best[rule.main]}, loss focal" in report.summary().lead


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
        options={"probe": probe_set(task.data)},
    )
    ours = report.frame[report.frame["variant"] != "training"].reset_index(drop=True)
    columns = [
        name for name in by_hand.frame if name not in ("round", "model", "split")
    ]
    pd.testing.assert_frame_equal(ours[columns], by_hand.frame[columns])


def test_adapters_are_measured_as_other_layers_are():
    pytest.importorskip("peft")
    task = runner.assemble(CONFIG.with_keys(adapt="lora:r=2"))
    metrics = ["cka", "grad_variance", "hessian_trace"]
    frame = measure.diagnose_task(task, metrics).frame
    for _, rows in frame.groupby("metric"):
        names = list(dict.fromkeys(rows["layer"]))
        assert names[:2] == ["fc1.lora_A", "fc1.lora_B"]
        assert rows["value"].notna().all()
        assert rows["value"].nunique() > 4


def test_a_decision_weights_clients_by_their_samples_however_models_are_averaged():
    for chosen in (
        {"algorithm": "playerfl"},
        {"algorithm": "fedper", "plan": "auto"},
    ):
        config = CONFIG.with_keys(rounds=1, client_weights="uniform", **chosen)
        engine = runner.run(config, instruments=measure.instruments)
        theirs, task = engine.algorithm.plan, runner.assemble(config)
        ours = select.select(measure.diagnose_task(task, [SENSITIVITY]))
        assert ours.digest == theirs.digest
        assert ours.why.weights == theirs.why.weights
        assert list(theirs.why.weights.values()) == list(task.data.weights)
        assert theirs.why.values == pytest.approx(ours.why.values, rel=1e-6)
        assert theirs.why.alternatives == ours.why.alternatives


def test_rows_and_header_say_where_they_are_from(task, report):
    frame = report.frame
    for column, value in (("seed", 3), ("round", 0), ("model", "local")):
        assert set(frame[column]) == {value}
    for name, rows in frame.groupby("metric"):
        assert set(rows["split"]) == {"validation" if name == "cka" else "train"}
    single = frame[(frame["client"] != "") & (frame["client_b"] == "")]
    sizes = zip((c.name for c in task.data.clients), task.data.weights, strict=True)
    assert set(zip(single["client"], single["n_train"], strict=True)) == set(sizes)
    expected = {
        "command": "by hand",
        "dataset": "heart",
        "data": task.data.digest,
        "checkpoint": tree.digest(tree.state_dict(task.model)),
        "absent": [],
    }
    assert {name: report.header[name] for name in expected} == expected


def test_only_what_is_asked_is_measured(task):
    def measured(*metrics, **how):
        return measure.diagnose_task(task, [*metrics], **how)

    report = measured("cka", SENSITIVITY)
    assert set(report.frame["metric"]) == {"cka", SENSITIVITY}
    assert report.shown_variants("cka") == ["flatten"]
    assert report.shown_variants(SENSITIVITY) == ["after", "training"]
    only = measured(SENSITIVITY, layers=["fc2"])
    assert list(only.values(SENSITIVITY, "training").index) == ["fc2"]
    assert set(only.frame["layer"]) == {"fc2"}
    reported = measured("grad_variance", SENSITIVITY, by="module")
    names = [layer.name for layer in reported.layers]
    assert names == list(reported.values("grad_variance").index)
    assert reported.layers != tuple(task.layers)
    assert "training" not in set(
        reported.frame["variant"]
    )  # of other layers than these


PROBE = (torch.eye(5, 10), torch.zeros(5).long())


def test_a_metric_s_own_samples_are_used_and_named(task):
    for metric, options, data, split, count in (
        ("cka", {"samples": 20}, {}, "validation", 20),
        ("cka", {"probe": PROBE}, {"probe": PROBE[0][:3]}, "probe", 5),
        ("knn_probe", {}, {}, "validation", 120),
        ("knn_probe", {"folds": 3}, {}, "train", 470),
    ):
        how = {"options": {metric: options}, **data}
        frame = measure.diagnose_task(task, [metric], **how).frame
        assert set(frame["split"]) == {split}
        whole = frame["client"].eq("") | frame["client_b"].ne("")
        assert set(frame.loc[whole, "n_samples"]) == {count}


def test_a_run_is_measured_on_its_stored_models(run):
    for which, number in (
        ("local", "last"),
        ("global", 1),
        ("global", "last"),
        ("personal", 2),
    ):
        how = {"round": number, "which": which}
        report = measure.diagnose_run(run, [SENSITIVITY], **how)
        models, task = load_models(run, number, which)
        measured_clients = [
            client for client in task.data.clients if client.name in models
        ]
        data = {
            client.name: (client.train.x, client.train.y) for client in measured_clients
        }
        how = {"loss": task.criterion, "seed": 3}
        by_hand = diagnose(models, data, [SENSITIVITY], **how)
        ours, theirs = (r.values(SENSITIVITY, "after") for r in (report, by_hand))
        pd.testing.assert_frame_equal(ours, theirs, check_names=False)
        for column, value in (
            ("round", 2 if number == "last" else number),
            ("model", which),
            ("algorithm", "local_adaptation"),
            ("run", "half"),
        ):
            assert set(report.frame[column]) == {value}
        absent = {client.name for client in task.data.clients} - set(models)
        assert set(report.header["absent"]) == absent
        named = "without a model in this round: " + ", ".join(in_order(sorted(absent)))
        assert (named in str(report)) == bool(absent)
        assert len(absent) == (len(task.data.clients) - 2 if which == "local" else 0)
        if which == "local":  # those before aggregation, of the clients of that round
            stored = Run(run).checkpoint().models["local"]
            assert set(report.frame["client"]) - {""} == set(stored)


def test_the_layers_of_a_built_model_are_the_plain_models_and_what_was_added(tmp_path):
    """A second head: rows by the names that other algorithms' rows have, and a plan from them that the run obeys."""
    path = tmp_path / "run"
    runner.run(CONFIG.with_keys(algorithm="fedrod"), path)
    plain = [layer.name for layer in runner.assemble(CONFIG).layers]
    for which in ("personal", "global"):
        how = {"which": which}
        report = measure.diagnose_run(path, (SENSITIVITY, "cka"), **how)
        assert [layer.name for layer in report.layers] == [*plain, "personal"]
        frame = report.frame
        fine = frame[(frame["metric"] == "cka") & (frame["status"] == "ok")]
        assert set(plain) <= set(fine["layer"])
        plan = select.select(report, "manual", layers=plain[:2])
        plan.check_fits(load_models(path, which=which)[0]["cleveland"])


def test_what_a_run_or_a_task_does_not_have_is_refused(run, task, monkeypatch):
    """Nobody trains for it."""
    for how, words in (
        ({"which": "globl"}, "mean 'global'"),
        ({"round": 1, "which": "personal"}, r"local, global.*'personal'"),
        ({"round": 9}, "1, 2.*got 9"),
    ):
        with refuses(words):
            measure.diagnose_run(run, **how)
    first, *others = task.data.clients
    none = Split(first.validation.x[:0], first.validation.y[:0])
    clients = (replace(first, validation=none), *others)
    lacking = replace(task, data=replace(task.data, clients=clients))
    with refuses(f"validation .*got none for {first.name}"):
        measure.diagnose_task(lacking, ["cka"])
    with refuses("client 'nobody'"):
        measure.diagnose_task(task, ["grad_norm"], clients=[first.name, "nobody"])
    monkeypatch.setattr(runner, "train_first_round", None)
    for how, words in (
        ({"metrics": ["ckaa"]}, "mean 'cka'"),
        ({"options": {"cka": {"samples": 1}}}, "1 samples .*4"),
        ({"resamples": -1}, "resamples.*-1"),
    ):
        with refuses(words):
            measure.diagnose_task(task, **{"metrics": "cka", **how})


@pytest.mark.parametrize("null", ["", "labels"])
def test_a_start_that_is_not_the_run_s_is_not_used(tmp_path, null):
    """An own model's start is not stored: another one of its architecture has other weights."""

    def own(seed):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(10, 4), nn.ReLU(), nn.Linear(4, 5))

    def measured(*metrics, seed=1, **how):
        how = {"model": own(seed), **how}
        return measure.diagnose_run(tmp_path / "run", metrics, **how)

    config = RunConfig(dataset="heart", rounds=1)
    runner.run(config, tmp_path / "run", model=own(0))
    moved, nulls = "update_magnitude", {"null": null or ()}
    with_seed = measured(moved, seed=0, **nulls)
    assert set(with_seed.frame["status"]) == {"ok"}
    with refuses("model must have the weights"):
        measured(moved, null="fresh")
    other = measured(moved, "weight_magnitude", **nulls)
    frame = pd.concat([other.frame, other.nulls]) if null else other.frame
    of_metric = frame["metric"] == moved
    assert set(frame[~of_metric]["status"]) == {"ok"}
    assert frame[of_metric]["status"].str.contains("common start is not known").all()
    again = measured(moved, options={moved: {"start": own(0)}})
    pd.testing.assert_frame_equal(again.frame, with_seed.frame)


def test_options_of_sensitivity_hold_for_what_training_measures(task):
    values = []
    for reduce, suffix in (("pooled", ""), ("mean_of_tensors", ", mean of tensors")):
        options = {SENSITIVITY: {"tensors": "all", "reduce": reduce}}
        how = {"options": options}
        report = measure.diagnose_task(task, [SENSITIVITY], **how)
        rows = report.frame[report.frame["variant"] == "training"]
        assert set(rows["estimator"]) == {f"epoch{suffix}, all tensors"}
        assert select.select(report).why.metric == SENSITIVITY
        values.append(report.values(SENSITIVITY, "training"))
    assert not values[0].equals(values[1])


@pytest.mark.parametrize("patience", [0, 1])
def test_a_result_in_memory_is_measured_after_local_training(patience, tmp_path):
    """FedAvg's clients predict with one model. What they trained is in memory as it is in a directory."""
    config = RunConfig(dataset="heart", algorithm="fedavg", rounds=4, patience=patience)
    stored = fl.run(config, tmp_path / "run", progress=False)
    result = fl.run(config, progress=False)
    for metrics in ("grad_norm", "weight_divergence"):
        from_memory, wanted = (
            fl.diagnose(models, metrics=metrics) for models in (result, stored)
        )
        assert from_memory.frame["value"].equals(wanted.frame["value"])
    assert (from_memory.frame["value"] > 0).all()
    for name, model in result.local_models.items():
        theirs = stored.local_models[name].state_dict()
        assert tree.distance(model.state_dict(), theirs) == 0
    assert fl.diagnose(result, metrics="layer_tuning").values("layer_tuning").size


def test_equal_models_of_a_result_in_memory_are_refused(monkeypatch):
    monkeypatch.setattr(runner, "KEPT_BYTES", 0)
    config = RunConfig(dataset="heart", algorithm="fedavg", rounds=1)
    with refuses("4 equal models. Pass out= to fl.run"):
        fl.diagnose(fl.run(config, progress=False), metrics="cka")
    result = fl.run(config.with_keys(algorithm="local"), progress=False)
    assert fl.diagnose(result, metrics="cka").values("cka").size
