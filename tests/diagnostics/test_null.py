"""Nulls: what is shuffled and what stays, rows that nothing else reads, and whether a decision is the same on them."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from diagnostics import measure, select
from diagnostics.curve import curve_of
from diagnostics.measure import diagnose
from diagnostics.null import (
    NULLS,
    Nulls,
    kept_in,
    null_data,
    null_samples,
    nulls_in,
    untrained_copy,
)
from diagnostics.plots.page import album
from diagnostics.report import Report, explain
from fedlayers.cli import app as cli
from fl_core import rows
from fl_core.config import RunConfig
from fl_core.data import Split
from fl_core.data.partitions import SPLITS
from fl_core.layers import Layer
from fl_core.plan import LayerPlan
from fl_core.run import runner
from fl_core.run.restore import load_models
from tests.conftest import TOY, refuses
from tests.made import Wired, normal

SHUFFLED = [name for name, null in NULLS.items() if null.shuffles]
SENSITIVITY = "federation_sensitivity"


def samples(data, split, clients=None):
    """Each sample of the clients with its label, as a sorted list: who holds it and in which order does not count."""
    splits = [
        c.split(split) for c in data.clients if clients is None or c.name in clients
    ]
    pairs = [pair for part in splits for pair in zip(part.x, part.y, strict=True)]
    return sorted((*x.flatten().tolist(), int(y)) for x, y in pairs)


def test_groups_are_shuffled_whole():
    """Patients with four rows and one label: after a shuffle, rows of one patient still have one."""
    rows = np.random.default_rng(0).permutation(np.repeat(np.arange(30), 4))
    part = Split(torch.tensor(rows)[:, None], torch.tensor(rows % 2), rows)
    for null in SHUFFLED:
        cut, real = 0, []
        for null_part in null_samples({"a": part, "b": part}, null, seed=0).values():
            table = pd.DataFrame(
                {"group": null_part.groups, "label": null_part.y.numpy()}
            )
            patients = table.groupby("group")["label"]
            assert (patients.nunique() == 1).all()
            cut += (patients.size() != 4).sum()
            real.append(torch.equal(null_part.y, null_part.x[:, 0] % 2))
        assert cut <= 2 * (null == "clients")  # the patient at the border of two
        assert all(real) == (null == "clients")


def test_what_each_null_shuffles_and_what_it_keeps():
    before = tree_of(TOY)
    for null in SHUFFLED:
        shuffled = null_data(TOY, null, seed=0)
        dealt = null == "clients"
        assert [c.name for c in shuffled.clients] == [c.name for c in TOY.clients]
        assert shuffled.source_digest == TOY.source_digest
        assert (shuffled.partition.digest == TOY.partition.digest) != dealt
        after = tree_of(shuffled)
        for name, old in before.items():
            new = after[name]
            assert (old.shape, old.dtype) == (new.shape, new.dtype)
            if name.endswith("x"):
                assert torch.equal(old, new) != dealt
            elif "test" not in name:
                assert not torch.equal(old, new)
        for split in SPLITS:
            counts, plain_counts = (
                data.class_counts(split) for data in (shuffled, TOY)
            )
            assert counts.sum().equals(plain_counts.sum())
            assert split != "train" or counts.equals(plain_counts) == (
                null == "labels_within"
            )
        draws = [{"seed": 3}, {"seed": 3}, {"seed": 4}, {"seed": 3, "draw": 2}]
        first, again, *others = (null_data(TOY, null, **how).digest for how in draws)
        assert first == again
        assert len({TOY.digest, first, *others}) == 4
    assert_equal(before, tree_of(TOY))
    assert null_data(TOY, "fresh", seed=0) is TOY
    with refuses("mean 'labels'"):
        null_data(TOY, "label", seed=0)


def tree_of(data):
    """All samples and labels by client and split, cloned."""
    return {
        f"{client.name} {split} {name}": getattr(client.split(split), name).clone()
        for client in data.clients
        for split in SPLITS
        for name in "xy"
    }


def assert_equal(one, two):
    torch.testing.assert_close(one, two, rtol=0, atol=0)


def test_dealt_samples_keep_their_labels_and_their_split():
    dealt = null_data(TOY, "clients", seed=0)
    for split in SPLITS:
        assert samples(dealt, split) == samples(TOY, split)
        assert samples(dealt, split, ["a"]) != samples(TOY, split, ["a"])
        at = {}
        for client in TOY.clients:
            positions = TOY.partition.indices[client.name][split]
            for x, position in zip(client.split(split).x, positions, strict=True):
                at[tuple(x.flatten().tolist())] = int(position)
        assert len(at) == len(samples(TOY, split))  # no sample twice
        for client in dealt.clients:
            positions = dealt.partition.indices[client.name][split]
            owners = [at[tuple(x.flatten().tolist())] for x in client.split(split).x]
            assert owners == positions.tolist()
            assert (np.diff(positions) > 0).all()


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


def test_nulls_stand_beside_the_values_and_change_none(plain, report, tmp_path):
    """Also on disk. Readers of rows read past them."""
    pd.testing.assert_frame_equal(report.frame, plain.frame)
    assert report.header == plain.header
    assert plain.nulls.empty
    keys = ["client", "client_b", "layer", "metric", "variant", "split"]
    keys += ["n_params", "n_train"]
    plain_rows, nulls = plain.frame[keys], nulls_in(report.table)
    assert [*nulls] == [*NULLS]
    for name, draws in nulls.items():
        shuffles = name in SHUFFLED
        assert len(draws) == (2 if shuffles else 1)
        for draw in draws:
            compared = (
                plain_rows
                if shuffles
                else plain_rows[plain_rows["variant"] != "training"]
            )
            pd.testing.assert_frame_equal(draw[keys], compared.reset_index(drop=True))
    report.write(tmp_path / "rows.jsonl")
    read = Report.read(tmp_path / "rows.jsonl")
    pd.testing.assert_frame_equal(read.nulls, report.nulls, check_dtype=False)
    assert read.values("cka").equals(plain.values("cka"))
    _, table = rows.read(tmp_path / "rows.jsonl")
    curve = curve_of(plain.layers, plain.frame, "cka")
    assert curve_of(read.layers, table, "cka") == curve
    assert album(table).keys() == album(plain.frame).keys()


def test_the_picture_of_a_curve_has_a_grey_line_for_each_draw(plain, report):
    """The mean over clients of each draw stands beside the lines without nulls."""
    for metric in ("cka", SENSITIVITY):
        alone, beside = (album(e.table)[metric]().axes[0] for e in (plain, report))
        before, after = (
            {tuple(line.get_ydata()) for line in ax.lines} for ax in (alone, beside)
        )
        assert len(after - before) == len(report.nulls["model"].unique())
        second = nulls_in(report.table)["labels"][1]
        expected = curve_of(report.layers, second, metric).combined
        assert any(np.allclose(curve, expected) for curve in after - before)
        texts = " ".join(text.get_text() for text in beside.get_legend().get_texts())
        assert all(texts.count(null.title) == 1 for null in NULLS.values())


@pytest.mark.parametrize(
    "how", [{}, {"metric": "cka", "rule": "examples.rules.knee:knee"}]
)
def test_a_plan_is_the_same_but_for_what_it_says_of_nulls(plain, report, how):
    """The same decision of each null by hand, from a report of that null alone."""
    without, plan = select.select(plain, **how), select.select(report, **how)
    rest = dict(plan.why.detail)
    verdicts = rest.pop("null")
    assert list(verdicts) == list(NULLS)
    assert "null" not in without.why.detail
    assert replace(plan, why=replace(plan.why, detail=rest)) == without
    for name, draws in nulls_in(report.table).items():
        verdict = verdicts[name]
        if not verdict["decided"]:
            assert name == "fresh"
            continue
        plans = [select.select((report.header, draw), **how) for draw in draws]
        same = [null_plan.shared == plan.shared for null_plan in plans]
        assert verdict["shared"] == list(plans[0].shared)
        assert verdict["values"] == list(plans[0].why.values)
        assert (verdict["same_draws"], verdict["same"]) == (sum(same), all(same))


LAYERS = tuple(
    Layer(name, (f"{name}.weight",), (), name) for name in ("l1", "l2", "l3")
)


def test_the_command_measures_nulls_and_select_reads_them(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    heart = ["--dataset", "heart"]
    for words, message in (
        ([*heart, "--null", "label"], "mean 'labels'"),
        (
            [*heart, "--null", "labels", "--null-draws", "0"],
            "null_draws must be from 1",
        ),
        ([*heart, "--null-draws", "2"], "--null-draws goes with"),
        ([*heart, "--allow-code", "mine:net"], "--allow-code goes with"),
    ):
        with pytest.raises(SystemExit):
            cli.main(["diagnose", *words])
        assert message in capsys.readouterr().err
        assert not list(tmp_path.iterdir())
    flags = ["--metrics", SENSITIVITY, "--null", "labels", "fresh"]
    cli.main(["diagnose", *heart, *flags])
    assert "permuted labels; " in capsys.readouterr().out
    cli.main(["select", "diagnosis"])
    assert "permuted labels" in capsys.readouterr().out
    null = LayerPlan.load(tmp_path / "plan.json").why.detail["null"]
    assert set(null) == {"labels", "fresh"}


# --- models that were trained elsewhere ------------------------------------------------------------------------


def silos():
    """Two clients of unlike labels and sizes: models and samples."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(1)
    sizes = {"north": 20, "south": 30}
    models = {
        name: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
        for name in sizes
    }
    data = {
        name: (torch.randn(n, 4, generator=generator), torch.arange(n) % 3)
        for name, n in sizes.items()
    }
    return models, data


def measured(models, data, metrics=("grad_norm", "cka"), **how):
    return diagnose(models, data, metrics, seed=3, **how)


def same_values(one, two):
    pd.testing.assert_frame_equal(one.drop(columns="model"), two.drop(columns="model"))


def test_given_models_are_measured_on_shuffled_samples_and_the_rows_say_it():
    models, data = silos()
    report = measured(models, data, null=Nulls(list(NULLS), 2))
    pd.testing.assert_frame_equal(report.frame, measured(models, data).frame)
    drawn = nulls_in(report.nulls)
    counts = {name: len(draws) for name, draws in drawn.items()}
    assert counts == {**dict.fromkeys(SHUFFLED, 2), "fresh": 1}
    assert kept_in(report.nulls) == set(SHUFFLED)
    how = {"options": {"n_train": {"north": 20, "south": 30}}}
    for null in SHUFFLED:
        again = measured(models, null_samples(data, null, 3, 2), **how)
        same_values(drawn[null][1], again.frame)
        assert not np.allclose(drawn[null][1]["value"], report.frame["value"])
    plan = select.select(report, "largest_rise", metric="grad_norm")
    for null, verdict in plan.why.detail["null"].items():
        assert verdict["kept"] == (null in SHUFFLED)
    assert "permuted labels (" in explain(plan, full=True)


def test_models_that_are_trained_anew_are_those_that_are_measured():
    models, data = silos()
    other = {name: untrained_copy(model, seed=7) for name, model in models.items()}
    seen = []

    def retrain(shuffled):
        seen.append(shuffled)
        return other

    report = measured(models, data, null=Nulls("labels", retrain=retrain))
    shuffled = null_samples(data, "labels", 3)
    for name, (_, y) in shuffled.items():
        assert torch.equal(seen[0][name][1], y)
    assert len(seen) == 1
    assert not kept_in(report.nulls)
    same_values(nulls_in(report.nulls)["labels"][0], measured(other, shuffled).frame)


def test_an_untrained_model_is_the_one_given_or_draws_its_weights_anew():
    """Normalisations have untrained statistics. Constants stay, and so do frozen modules."""
    models, data = silos()
    start = untrained_copy(models["north"], seed=5)
    report = measured(models, data, null=Nulls("fresh", start=start))
    expected = measured(dict.fromkeys(models, start), data).frame
    same_values(nulls_in(report.nulls)["fresh"][0], expected)
    model = nn.Sequential(
        nn.Linear(4, 4).requires_grad_(False),
        nn.BatchNorm1d(4, affine=False),
        nn.Linear(4, 3),
        nn.BatchNorm1d(3).requires_grad_(False),
    )
    model.register_buffer("constant", torch.full((2,), 7.0))
    model(normal(9, 4) + 5)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    fresh = untrained_copy(model, seed=3)
    assert_equal(before, model.state_dict())
    drawn = {n for n, t in fresh.state_dict().items() if not torch.equal(t, before[n])}
    statistics = ("running_mean", "running_var", "num_batches_tracked")
    assert drawn == {"2.weight", "2.bias", *(f"1.{name}" for name in statistics)}
    unknown = Wired(lambda m, x: x * m.scale, scale=nn.Parameter(torch.ones(4)))
    with refuses("'0', a Wired"):
        untrained_copy(nn.Sequential(unknown, nn.Linear(4, 3)), seed=0)


def test_loaders_keep_their_batches_and_what_cannot_be_dealt_is_refused():
    models, data = silos()
    loaders = {name: [(x[:7], y[:7]), (x[7:], y[7:])] for name, (x, y) in data.items()}
    whole = null_samples(data, "clients", 3)
    for name, parts in null_samples(loaders, "clients", 3).items():
        assert [len(y) for _, y in parts] == [7, len(data[name][1]) - 7]
        assert torch.equal(torch.cat([x for x, _ in parts]), whole[name][0])
    with refuses("at least 2"):
        measured(models["north"], data["north"], null="clients")
    odd = {"a": data["north"], "b": (torch.randn(3, 5), torch.zeros(3).long())}
    with refuses("shapes"):
        null_samples(odd, "labels", 0)


def test_a_runs_models_are_measured_on_nulls(tmp_path):
    path = tmp_path / "run"
    config = RunConfig(dataset="heart", algorithm="fedper", rounds=1)
    runner.run(config, path)
    how = {"which": "personal", "progress": False}
    report = measure.diagnose_run(path, [SENSITIVITY], null=("labels", "fresh"), **how)
    models, task = load_models(path, which="personal")
    starts = dict.fromkeys(models, task.model)
    how = {"loss": task.criterion, "options": {"layering": task.layers}}
    for null, whose, data in (
        ("labels", models, null_data(task.data, "labels", 0)),
        ("fresh", starts, task.data),
    ):
        training_samples = {c.name: (c.train.x, c.train.y) for c in data.clients}
        again = diagnose(whose, training_samples, [SENSITIVITY], **how)
        drawn = nulls_in(report.nulls)[null][0]
        assert drawn["value"].tolist() == again.frame["value"].tolist()
    assert kept_in(report.nulls) == {"labels"}


def test_the_tests_of_a_probe_are_shuffled_too():
    models, data = silos()
    tests = {name: (x + 0.1, y) for name, (x, y) in data.items()}

    def probed(data, tests, **how):
        options = {"linear_probe": {"test": tests}}
        return measured(models, data, "linear_probe", options=options, **how)

    report = probed(data, tests, null="labels")
    shuffled = null_samples(tests, "labels", 3, split="validation")
    again = probed(null_samples(data, "labels", 3), shuffled)
    same_values(nulls_in(report.nulls)["labels"][0], again.frame)
