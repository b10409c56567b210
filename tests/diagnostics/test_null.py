"""Nulls: what is shuffled and what stays, rows that nothing else reads, and whether a decision is the same on them."""

from __future__ import annotations

from dataclasses import asdict, replace

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from diagnostics import measure
from diagnostics.decide import select
from diagnostics.decide.curve import curve_of
from diagnostics.measure import diagnose
from diagnostics.null import (
    NULLS,
    Nulls,
    kept_in,
    mark_null,
    null_data,
    null_samples,
    nulls_in,
    of_null,
    split_resamples,
    untrained_copy,
)
from diagnostics.plots.collect import album
from diagnostics.report import Report
from fedlayers.cli import app as cli
from fl_core import rows, runner
from fl_core.config import RunConfig
from fl_core.data import Split
from fl_core.data.partitions import SPLITS
from fl_core.errors import UsageError
from fl_core.layers import Layer
from fl_core.plan import LayerPlan
from fl_core.stored_models import load_models
from tests.conftest import TOY

SHUFFLED = [name for name, null in NULLS.items() if null.shuffle is not None]
SENSITIVITY = "federation_sensitivity"


def samples(data, split, clients=None):
    """Each sample of the clients with its label, as a sorted list: who holds it and in which order does not count."""
    held = [
        c.split(split) for c in data.clients if clients is None or c.name in clients
    ]
    return sorted(
        (*x.flatten().tolist(), int(y))
        for part in held
        for x, y in zip(part.x, part.y, strict=True)
    )


def labels(data, split, clients=None):
    return sorted(
        y
        for c in data.clients
        if clients is None or c.name in clients
        for y in c.split(split).y.tolist()
    )


@pytest.mark.parametrize("null", SHUFFLED)
def test_groups_are_shuffled_whole(null):
    """Patients with four rows and one label: after a shuffle, rows of one patient still have one."""
    rows = np.random.default_rng(0).permutation(np.repeat(np.arange(30), 4))
    samples = {
        name: Split(torch.tensor(rows)[:, None], torch.tensor(rows % 2), rows)
        for name in "ab"
    }
    shuffled = null_samples(samples, null, seed=0)
    cut = 0
    for part in shuffled.values():
        found = pd.DataFrame({"group": part.groups, "label": part.y.numpy()})
        assert (found.groupby("group")["label"].nunique() == 1).all()
        cut += (found.groupby("group").size() != 4).sum()
    assert cut <= 2 * (null == "clients")  # the patient at the border of two clients
    real = [torch.equal(part.y, part.x[:, 0] % 2) for part in shuffled.values()]
    assert all(real) == (null == "clients")


@pytest.mark.parametrize("null", SHUFFLED)
@pytest.mark.parametrize("split", SPLITS)
def test_a_null_keeps_sizes_and_labels_of_each_split(null, split):
    shuffled = null_data(TOY, null, seed=0)
    assert [c.name for c in shuffled.clients] == [c.name for c in TOY.clients]
    for before, after in zip(TOY.clients, shuffled.clients, strict=True):
        old, new = before.split(split), after.split(split)
        assert (new.x.shape, new.x.dtype, new.y.shape, new.y.dtype) == (
            old.x.shape,
            old.x.dtype,
            old.y.shape,
            old.y.dtype,
        )
        assert new.x.is_contiguous()
    assert labels(shuffled, split) == labels(TOY, split)
    assert shuffled.digest != TOY.digest
    assert shuffled.source_digest == TOY.source_digest


def test_permuted_labels_leave_the_samples_and_mix_the_clients():
    shuffled = null_data(TOY, "labels", seed=0)
    for before, after in zip(TOY.clients, shuffled.clients, strict=True):
        assert torch.equal(before.train.x, after.train.x)
        assert not torch.equal(before.train.y, after.train.y)
    assert not shuffled.class_counts().equals(TOY.class_counts())
    assert shuffled.partition.digest == TOY.partition.digest


def test_labels_permuted_within_clients_leave_their_skew():
    shuffled = null_data(TOY, "labels_within", seed=0)
    for split in SPLITS:
        pd.testing.assert_frame_equal(
            shuffled.class_counts(split), TOY.class_counts(split)
        )
    for before, after in zip(TOY.clients, shuffled.clients, strict=True):
        assert torch.equal(before.train.x, after.train.x)
        assert not torch.equal(before.train.y, after.train.y)


@pytest.mark.parametrize("split", SPLITS)
def test_dealt_samples_keep_their_labels_and_their_split(split):
    dealt = null_data(TOY, "clients", seed=0)
    assert samples(dealt, split) == samples(TOY, split)
    assert samples(dealt, split, ["a"]) != samples(TOY, split, ["a"])
    everything = {
        tuple(x.flatten().tolist()): k
        for c in TOY.clients
        for k, x in enumerate(c.split(split).x)
    }
    assert len(everything) == len(
        samples(TOY, split)
    )  # no sample twice, so that the partition can be checked:
    at = {
        tuple(x.flatten().tolist()): int(position)
        for c in TOY.clients
        for x, position in zip(
            c.split(split).x, TOY.partition.indices[c.name][split], strict=True
        )
    }
    for client in dealt.clients:
        positions = dealt.partition.indices[client.name][split]
        assert [
            at[tuple(x.flatten().tolist())] for x in client.split(split).x
        ] == positions.tolist()
        assert (np.diff(positions) > 0).all()


@pytest.mark.parametrize("null", SHUFFLED)
def test_seed_and_draw_decide_a_null_and_the_data_stay_as_they_were(null):
    before = [(c.train.x.clone(), c.train.y.clone()) for c in TOY.clients]
    positions = TOY.partition.digest
    first, again = null_data(TOY, null, seed=3), null_data(TOY, null, seed=3)
    assert first.digest == again.digest
    for split in SPLITS:
        for one, two in zip(first.clients, again.clients, strict=True):
            assert torch.equal(one.split(split).x, two.split(split).x)
            assert torch.equal(one.split(split).y, two.split(split).y)
    for other in (null_data(TOY, null, seed=4), null_data(TOY, null, seed=3, draw=2)):
        assert other.digest != first.digest
        assert any(
            not torch.equal(a.train.y, b.train.y)
            for a, b in zip(first.clients, other.clients, strict=True)
        )
    for client, (x, y) in zip(TOY.clients, before, strict=True):
        assert torch.equal(client.train.x, x)
        assert torch.equal(client.train.y, y)
    assert TOY.partition.digest == positions


def test_the_untrained_start_has_the_same_data_and_an_unknown_null_is_refused():
    assert null_data(TOY, "fresh", seed=0) is TOY
    with pytest.raises(UsageError, match="mean 'labels'"):
        null_data(TOY, "label", seed=0)


@pytest.fixture(scope="module")
def task():
    return runner.assemble(RunConfig(dataset="heart", seed=3))


@pytest.fixture(scope="module")
def plain(task):
    return measure.diagnose_task(task, [SENSITIVITY, "cka"], progress=False)


@pytest.fixture(scope="module")
def report(task):
    return measure.diagnose_task(
        task, [SENSITIVITY, "cka"], null=Nulls(tuple(NULLS), 2), progress=False
    )


def test_nulls_stand_beside_the_values_and_change_none(plain, report):
    pd.testing.assert_frame_equal(report.frame, plain.frame)
    assert report.header == plain.header
    assert plain.nulls.empty
    drawn = {name: len(draws) for name, draws in nulls_in(report.table).items()}
    assert drawn == {
        name: 2 if null.shuffle is not None else 1 for name, null in NULLS.items()
    }
    assert of_null(report.nulls).all()
    assert not of_null(report.frame).any()
    keys = [
        "client",
        "client_b",
        "layer",
        "metric",
        "variant",
        "split",
        "n_params",
        "n_train",
    ]
    own = plain.frame[keys].reset_index(drop=True)
    for name, draws in nulls_in(report.table).items():
        for draw in draws:
            expected = (
                own
                if NULLS[name].shuffle is not None
                else own[own["variant"] != "training"]
            )
            pd.testing.assert_frame_equal(draw[keys], expected.reset_index(drop=True))


def test_a_null_is_what_measuring_its_data_gives(task, report):
    data = null_data(task.data, "clients", task.config.execution.seed, 2)
    alone = measure.diagnose_task(
        replace(task, data=data), [SENSITIVITY, "cka"], progress=False
    )
    second = nulls_in(report.table)["clients"][1]
    pd.testing.assert_frame_equal(
        second.drop(columns="model"), alone.frame.drop(columns="model")
    )
    values = report.values(SENSITIVITY, "training")
    assert not np.allclose(values, alone.values(SENSITIVITY, "training"))


def test_readers_of_rows_read_past_nulls(plain, report, tmp_path):
    report.write(tmp_path / "rows.jsonl")
    read = Report.read(tmp_path / "rows.jsonl")
    pd.testing.assert_frame_equal(read.nulls, report.nulls, check_dtype=False)
    assert len(read.frame) == len(plain.frame)
    assert read.values("cka").equals(plain.values("cka"))
    _, table = rows.read(tmp_path / "rows.jsonl")
    assert len(split_resamples(table)[0]) == len(plain.frame)
    assert curve_of(read.layers, table, "cka") == curve_of(
        plain.layers, plain.frame, "cka"
    )
    assert album(table).keys() == album(plain.frame).keys()


@pytest.mark.parametrize("metric", ["cka", SENSITIVITY])
def test_the_picture_of_a_curve_has_a_grey_line_for_each_draw(plain, report, metric):
    """The same lines and axis labels as without nulls, and the mean over clients of each draw beside them."""
    figures = [album(each.table)[metric]() for each in (plain, report)]
    (before, after), (alone, beside) = [
        [f.axes[0].lines for f in figures],
        [f.axes[0] for f in figures],
    ]
    assert (alone.get_xlabel(), alone.get_ylabel()) == (
        beside.get_xlabel(),
        beside.get_ylabel(),
    )
    curves = {tuple(line.get_ydata()) for line in after} - {
        tuple(line.get_ydata()) for line in before
    }
    assert (
        len(after) - len(before) == len(curves) == len(report.nulls["model"].unique())
    )
    expected = curve_of(
        report.layers, nulls_in(report.table)["labels"][1], metric
    ).combined
    assert any(np.allclose(curve, expected) for curve in curves)
    texts = [text.get_text() for text in beside.get_legend().get_texts()]
    assert [sum(null.title in text for text in texts) for null in NULLS.values()] == [
        1
    ] * len(NULLS)
    assert len(report.plot(metric).lines) > len(plain.plot(metric).lines)
    plt.close("all")


@pytest.mark.parametrize("how", [{}, {"metric": "cka", "rule": "largest_jump"}])
def test_a_plan_is_the_same_but_for_what_it_says_of_nulls(plain, report, how):
    """The same decision of each null by hand, from a report of that null alone."""
    without, plan = select.select(plain, **how), select.select(report, **how)
    said = plan.why.detail["null"]
    assert list(said) == list(NULLS)
    assert "null" not in without.why.detail
    rest = {key: value for key, value in plan.why.detail.items() if key != "null"}
    assert replace(plan, why=replace(plan.why, detail=rest)) == without
    for name, draws in nulls_in(report.table).items():
        if not said[name]["decided"]:
            assert name == "fresh"
            continue
        plans = [select.select((report.header, draw), **how) for draw in draws]
        assert said[name]["shared"] == list(plans[0].shared)
        assert said[name]["values"] == list(plans[0].why.values)
        assert said[name]["same_draws"] == sum(
            each.shared == plan.shared for each in plans
        )
        assert said[name]["same"] == all(each.shared == plan.shared for each in plans)


LAYERS = tuple(
    Layer(name, (f"{name}.weight",), (), name) for name in ("l1", "l2", "l3")
)


def table(*curves):
    """Rows of one client: its own curve, then those of (null, draw)."""
    parts = []
    for mark, values in curves:
        part = rows.frame(
            rows.row("m", v, client="a", layer=layer.name, variant="x", n_train=1)
            for layer, v in zip(LAYERS, values, strict=True)
        )
        parts.append(mark_null(part, *mark) if mark else part)
    header = {"layers": [asdict(layer) for layer in LAYERS]}
    return header, pd.concat(parts, ignore_index=True)


def test_what_follows_from_each_null_is_said_in_words(tmp_path):
    early, late = [1.0, 2.0, 2.0], [1.0, 1.0, 2.0]
    given = table(
        ((), early),
        (("labels", 1), early),
        (("labels_within", 1), late),
        (("clients", 1), early),
        (("clients", 2), late),
        (("fresh", 1), [0.0, 0.0, 0.0]),
    )
    plan = select.select(given, metric="m")
    assert plan.shared == ("l1",)
    plan.save(tmp_path / "plan.json")
    plan = LayerPlan.load(tmp_path / "plan.json")
    short, full = select.explain(plan), select.explain(plan, full=True)
    assert "the same plan comes from permuted labels;" in short
    assert "another plan comes from labels permuted within each client;" in short
    assert (
        "the same plan comes from 1 of 2 draws of samples dealt to clients at random;"
        in short
    )
    assert short.count("no plan comes from the untrained common start") == 1
    assert "from permuted labels: " in full
    assert "within each client: it shares l1, l2" in full
    assert "from 1 of 2 draws" in full
    assert "layer 'l1' has a m of 0" in full
    assert (
        "null"
        not in select.explain(
            select.select(table(((), early)), metric="m"), full=True
        ).lower()
    )
    manual = select.select(given, "manual", layers=["l1"])
    assert "null" not in manual.why.detail


def test_a_null_that_was_measured_by_another_variant_is_said_in_both_forms():
    header, own = table(((), [1.0, 2.0, 2.0]))
    both = pd.concat([own.assign(variant="training"), own.assign(variant="after")])
    fresh = mark_null(own.assign(variant="after"), "fresh", 1)
    given = (
        header,
        pd.concat([both, fresh], ignore_index=True).assign(metric=SENSITIVITY),
    )
    plan = select.select(given)
    assert plan.why.variant == "training"
    for full in (False, True):
        assert (
            "same plan comes from the untrained common start (variant after)"
            in select.explain(plan, full=full)
        )
        undecided = select.explain(select.select(given, variant="training"), full=full)
        assert "no plan comes from the untrained common start" in undecided
        assert "variant after" not in select.explain(
            select.select(given, variant="after"), full=full
        )


def test_the_command_measures_nulls_and_select_reads_them(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    cli.main(
        [
            "diagnose",
            "--dataset",
            "heart",
            "--metrics",
            SENSITIVITY,
            "--null",
            "labels",
            "fresh",
        ]
    )
    assert "permuted labels; " in capsys.readouterr().out
    assert set(nulls_in(rows.read(tmp_path / "diagnosis/rows.jsonl")[1])) == {
        "labels",
        "fresh",
    }
    cli.main(["select", "diagnosis"])
    assert "permuted labels" in capsys.readouterr().out
    assert set(LayerPlan.load(tmp_path / "plan.json").why.detail["null"]) == {
        "labels",
        "fresh",
    }


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--dataset", "heart", "--null", "label"], "mean 'labels'"),
        (
            ["--dataset", "heart", "--null", "labels", "--null-draws", "0"],
            "null_draws must be at least 1",
        ),
        (["--dataset", "heart", "--null-draws", "2"], "--null-draws must"),
        (["runs/one", "--null-draws", "3"], "such as --null labels"),
        (["--dataset", "heart", "--allow-code", "mine:net"], "--allow-code is"),
        (["runs/one", "--null", "label"], "mean 'labels'"),
    ],
)
def test_a_null_that_cannot_be_measured_is_refused_before_any_work(
    words, said, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        cli.main(["diagnose", *words])
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


# --- models that were trained elsewhere ------------------------------------------------------------------------


def silos():
    """Two clients of unlike labels and sizes: models and samples."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(1)
    models = {
        name: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
        for name in ("north", "south")
    }
    sizes = {"north": 20, "south": 30}
    data = {
        name: (torch.randn(n, 4, generator=generator), torch.arange(n) % 3)
        for name, n in sizes.items()
    }
    return models, data


METRICS = ["grad_norm", "cka", "linear_probe"]


def measured(models, data, **how):
    return diagnose(models, data, METRICS, progress=False, seed=3, **how)


def same_values(one, two):
    pd.testing.assert_frame_equal(one.drop(columns="model"), two.drop(columns="model"))


def test_given_models_are_measured_on_shuffled_samples_and_the_rows_say_that_they_stayed():
    models, data = silos()
    report = measured(models, data, null=Nulls(list(NULLS), 2))
    pd.testing.assert_frame_equal(report.frame, measured(models, data).frame)
    drawn = nulls_in(report.nulls)
    assert {name: len(draws) for name, draws in drawn.items()} == {
        **dict.fromkeys(SHUFFLED, 2),
        "fresh": 1,
    }
    assert kept_in(report.nulls) == set(SHUFFLED)
    for null in SHUFFLED:
        again = measured(
            models,
            null_samples(data, null, 3, 2),
            options={"n_train": {"north": 20, "south": 30}},
        )
        same_values(drawn[null][1], again.frame)
        assert not np.allclose(drawn[null][1]["value"], report.frame["value"])
    plan = select.select(report, "largest_jump", metric="grad_norm")
    assert {null: each["kept"] for null, each in plan.why.detail["null"].items()} == {
        **dict.fromkeys(SHUFFLED, True),
        "fresh": False,
    }
    assert "permuted labels (" in select.explain(plan, full=True)


def test_models_that_are_trained_anew_are_those_that_are_measured():
    models, data = silos()
    other, seen = (
        {name: untrained_copy(model, seed=7) for name, model in models.items()},
        [],
    )

    def retrain(shuffled):
        seen.append({name: y.tolist() for name, (_, y) in shuffled.items()})
        return other

    report = measured(models, data, null=Nulls("labels", retrain=retrain))
    shuffled = null_samples(data, "labels", 3)
    assert seen == [{name: y.tolist() for name, (_, y) in shuffled.items()}]
    assert not kept_in(report.nulls)
    same_values(nulls_in(report.nulls)["labels"][0], measured(other, shuffled).frame)


def test_an_untrained_model_is_the_one_given_or_draws_its_weights_anew():
    models, data = silos()
    start = untrained_copy(models["north"], seed=5)
    for given in ({"start": start}, {}):
        report = measured(models, data, null=Nulls("fresh", **given))
        fresh = given.get("start") or untrained_copy(models["north"], seed=3)
        same_values(
            nulls_in(report.nulls)["fresh"][0],
            measured(dict.fromkeys(models, fresh), data).frame,
        )
    model = models["north"]
    model[0].requires_grad_(False)
    before = [parameter.clone() for parameter in model.parameters()]
    fresh = untrained_copy(model, seed=3)
    assert [
        torch.equal(a, b) for a, b in zip(fresh.parameters(), before, strict=True)
    ] == [True, True, False, False]
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True)
    )

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x):
            return x * self.scale

    with pytest.raises(UsageError, match="'0', a Scaled"):
        untrained_copy(nn.Sequential(Scaled(), nn.Linear(4, 3)), seed=0)


def test_loaders_keep_their_batches_and_what_cannot_be_dealt_is_refused():
    models, data = silos()
    loaders = {name: [(x[:7], y[:7]), (x[7:], y[7:])] for name, (x, y) in data.items()}
    whole = null_samples(data, "clients", 3)
    for name, parts in null_samples(loaders, "clients", 3).items():
        assert [len(y) for _, y in parts] == [7, len(data[name][1]) - 7]
        assert torch.equal(torch.cat([x for x, _ in parts]), whole[name][0])
    with pytest.raises(UsageError, match="at least 2"):
        measured(models["north"], data["north"], null="clients")
    with pytest.raises(UsageError, match="shapes"):
        null_samples(
            {"a": data["north"], "b": (torch.randn(3, 5), torch.zeros(3).long())},
            "labels",
            0,
        )
    with pytest.raises(UsageError, match="mean 'labels'"):
        measured(models, data, null="label")


def test_what_a_probe_is_tested_on_is_shuffled_too_and_one_set_of_data_serves_many_models():
    models, data = silos()
    tests = {name: (x + 0.1, y) for name, (x, y) in data.items()}
    report = measured(
        models, data, null="labels", options={"linear_probe": {"test": tests}}
    )
    again = measured(
        models,
        null_samples(data, "labels", 3),
        options={
            "linear_probe": {
                "test": null_samples(tests, "labels", 3, split="validation")
            }
        },
    )
    same_values(nulls_in(report.nulls)["labels"][0], again.frame)
    one = measured(models, data["north"], null="labels")
    permuted = null_samples({"": data["north"]}, "labels", 3)[""]
    same_values(nulls_in(one.nulls)["labels"][0], measured(models, permuted).frame)


def test_a_runs_models_are_measured_on_nulls(tmp_path, capsys):
    runner.run(
        RunConfig(dataset="heart", algorithm="fedper", rounds=1),
        tmp_path / "run",
        progress=False,
    )
    how = {"which": "personal", "progress": False}
    report = measure.diagnose_run(
        tmp_path / "run", [SENSITIVITY], null=("labels", "fresh"), **how
    )
    pd.testing.assert_frame_equal(
        report.frame, measure.diagnose_run(tmp_path / "run", [SENSITIVITY], **how).frame
    )
    models, task = load_models(tmp_path / "run", which="personal")
    data = null_data(task.data, "labels", 0)
    samples = {client.name: (client.train.x, client.train.y) for client in data.clients}
    drawn = nulls_in(report.nulls)
    for null, whose, own in (
        ("labels", models, samples),
        (
            "fresh",
            dict.fromkeys(models, task.model),
            {c.name: (c.train.x, c.train.y) for c in task.data.clients},
        ),
    ):
        again = diagnose(
            whose,
            own,
            [SENSITIVITY],
            loss=task.criterion,
            progress=False,
            options={"layering": task.layers},
        )
        assert drawn[null][0]["value"].tolist() == again.frame["value"].tolist()
    assert kept_in(report.nulls) == {"labels"}
    out = tmp_path / "measured"
    cli.main(
        [
            "diagnose",
            str(tmp_path / "run"),
            "--metrics",
            SENSITIVITY,
            "--null",
            "labels",
            "--out",
            str(out),
        ]
    )
    assert "permuted labels" in capsys.readouterr().out
    pd.testing.assert_frame_equal(
        Report.read(out / "rows.jsonl").nulls.drop(columns=["value", "stderr"]),
        measure.diagnose_run(
            tmp_path / "run", [SENSITIVITY], null="labels", progress=False
        ).nulls.drop(columns=["value", "stderr"]),
        check_dtype=False,
    )


def test_an_untrained_model_has_untrained_statistics():
    """Those of a normalisation without parameters too; constants stay, and so do frozen modules."""
    model = nn.Sequential(
        nn.BatchNorm1d(4, affine=False),
        nn.Linear(4, 3),
        nn.BatchNorm1d(3).requires_grad_(False),
    )
    model.register_buffer("constant", torch.full((2,), 7.0))
    model(torch.randn(9, 4, generator=torch.Generator().manual_seed(0)) + 5)
    fresh = untrained_copy(model, seed=0)
    assert fresh[0].running_mean.tolist() == [0.0] * 4
    assert fresh[0].running_var.tolist() == [1.0] * 4
    assert fresh.constant.tolist() == [7.0, 7.0]
    assert torch.equal(fresh[2].running_mean, model[2].running_mean)
