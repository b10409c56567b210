"""A diagnosis of models of one's own: who could use whose model, whether clients differ, and what to conclude."""

import warnings
from dataclasses import asdict

import matplotlib.pyplot as plt
import pytest
import torch
from matplotlib.text import Text
from torch import nn

import fedlayers as fl
from fedlayers.cli.app import main
from fl_core.plan import Evidence, labels_of
from fl_core.rows import frame, row
from tests.made import mlp, normal


def right(sign):
    """A model that is right where the label is whether sign * x[0] is above 0."""
    model = nn.Sequential(nn.Linear(4, 2, bias=False), nn.Linear(2, 2))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[0.0] * 4, [4.0 * sign, 0, 0, 0]]))
        model[1].weight.copy_(torch.eye(2))
        model[1].bias.zero_()
    return model


def samples(sign, seed):
    x = normal(60, 4, seed=seed)
    return x, (sign * x[:, 0] > 0).long()


MODELS = {"north": right(1), "south": right(-1)}
DIFFERENT = {"north": samples(1, 0), "south": samples(-1, 1)}
ALIKE = {"north": samples(1, 0), "south": samples(1, 1)}


@pytest.mark.parametrize(("data", "differ"), [(DIFFERENT, 1.0), (ALIKE, 0.0)])
def test_clients_differ_takes_models_of_ones_own(data, differ):
    for options in ({}, {"clients_differ": {"test": data}}):
        report = fl.diagnose(
            MODELS, data, ["clients_differ"], options=options, progress=False
        )
        values = report.frame.set_index("variant")["value"]
        assert values["differ"] == differ
        assert (values["p"] <= 0.05) == bool(differ)
        shown = "are shown to" if differ else "are not shown to"
        assert f"Clients {shown} differ" in str(report).splitlines()[-1]


def test_a_diagnosis_begins_with_cross_scores_and_ends_with_a_conclusion(tmp_path):
    report = fl.diagnose(MODELS, ALIKE, ["cka", "layer_tuning"], progress=False)
    first, *_, reason, last = str(report).splitlines()
    assert first.startswith(
        "A lower loss than their own model: south: the model of north"
    )
    assert first.endswith("only if no model was trained on these samples.")
    assert reason.startswith("layer_tuning has no value: needs one model")
    cka = report.values("cka").mean(axis=1)
    assert f"differ most at {report.labels[cka.idxmin()]}" in last
    report.write(tmp_path / "rows.jsonl")
    assert str(fl.Report.read(tmp_path / "rows.jsonl")) == str(report)


@pytest.mark.parametrize(
    ("metric", "reads_losses"),
    [("cka", False), ("weight_divergence", False), ("grad_norm", True)],
)
def test_models_are_scored_on_others_samples_if_a_metric_reads_losses(
    metric, reads_losses
):
    report = fl.diagnose(MODELS, ALIKE, metric, progress=False)
    assert ("cross_scores" in report.header) == reads_losses


def test_a_summary_shows_the_value_of_all_clients_that_a_rule_reads():
    counts = {"north": 30, "south": 10}
    options = {"n_train": counts}
    report = fl.diagnose(
        MODELS, ALIKE, ["federation_sensitivity"], options=options, progress=False
    )
    plan = fl.select(report, "sensitivity_ratio")
    shown = report.summary().rows
    assert [row[1] for row in shown] == pytest.approx([*plan.why.values])


@pytest.mark.parametrize("door", [fl.diagnose, fl.cross_scores])
def test_a_softmax_at_the_end_is_noted(door):
    models = {name: nn.Sequential(nn.Linear(4, 2), nn.Softmax(1)) for name in ALIKE}
    with pytest.warns(UserWarning, match="leave out a softmax"):
        door(models, ALIKE, **({"progress": False} if door is fl.diagnose else {}))


@pytest.mark.parametrize("kind", [torch.long, torch.float32])
def test_one_hot_labels_get_their_remedy(kind):
    data = {
        name: (x, nn.functional.one_hot(y, 2).to(kind))
        for name, (x, y) in ALIKE.items()
    }
    with pytest.raises(fl.UsageError, match=r"Write y\.argmax\(1\) if it is one-hot"):
        fl.diagnose(MODELS, data, ["grad_norm"], progress=False)


def test_doors_that_train_note_a_softmax_at_the_end(tmp_path):
    model = nn.Sequential(nn.Linear(4, 2), nn.Softmax(1))
    config = fl.RunConfig(rounds=1, epochs=1)
    arguments = {"data": ALIKE, "model": model}
    with pytest.warns(UserWarning, match="leave out a softmax"):
        fl.run(config, progress=False, **arguments)
    with pytest.warns(UserWarning, match="leave out a softmax"):
        fl.choose(
            config, tmp_path / "choice", dry_run=True, progress=False, **arguments
        )
    with pytest.warns(UserWarning, match="leave out a softmax"):
        fl.compare(config, ["local"], 1, tmp_path / "rows", progress=False, **arguments)


def test_select_says_in_python_what_the_command_line_says(tmp_path, capsys):
    """Models of other widths have no average. A plan that shares nothing or all says so."""
    wide = {"north": mlp(4, 3, 2), "south": mlp(4, 5, 2)}
    report = fl.diagnose(wide, ALIKE, ["cka"], progress=False)
    with pytest.warns(UserWarning, match=r"cannot be averaged: tensor '0.weight'"):
        fl.select(report, "largest_rise", metric="cka")
    report.write(tmp_path / "rows.jsonl")
    out = str(tmp_path / "plan.json")
    words = ["--rule", "largest_rise", "--metric", "cka", "--out", out]
    main(["select", str(tmp_path / "rows.jsonl"), *words])
    assert "note: the clients' models cannot be averaged" in capsys.readouterr().err

    alike = {"north": mlp(4, 3, 2), "south": mlp(4, 3, 2)}
    report = fl.diagnose(alike, ALIKE, progress=False)
    with pytest.warns(UserWarning, match="every client trains alone"):
        fl.select(report, "manual", layers=[])
    with pytest.warns(UserWarning, match="shares all of 2 layers"):
        fl.select(report, "manual", layers="0,2")
    with pytest.warns(UserWarning, match="no ratio exceeds 1000"):
        fl.select(report, threshold=1000)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fl.select(report, "manual", layers="0")
    assert "different" not in report.header


def test_a_plan_prints_what_explain_says_of_its_trust():
    null = {"permuted": {"same_draws": 2, "draws": 3}}
    why = Evidence(detail={"null": null, "benchmark": "It is a coin."}, status="cut")
    plan = fl.LayerPlan((fl.Layer("a", ("a",)), fl.Layer("b", ("b",))), ("a",), why)
    lines = str(plan).splitlines()[1:]
    assert [line.strip() for line in lines] == [
        "the same plan comes from 2 of 3 draws of the null 'permuted'",
        "It is a coin.",
        "note: cut",
    ]


def adapted_layers():
    """Layers as peft names them: a frozen block, its adapter, and a head that is trained whole."""
    root = "base_model.model"
    names = {
        f"{root}.block.0": "block.0 Linear",
        f"{root}.block.0.lora_A": "block.0.lora_A Linear",
        f"{root}.head.modules_to_save.default": "head",
    }
    kinds = ("Linear", "Linear", "")
    layers = tuple(
        fl.Layer(name, (f"{name}.weight",), kind=kind)
        for name, kind in zip(names, kinds, strict=True)
    )
    return layers, names


def test_names_of_peft_are_short_in_plans_tables_and_pictures():
    """They stay exact in files, and where two would be equal."""
    layers, names = adapted_layers()
    why = Evidence(values=(1.0, 2.0, 3.0), votes={"a": layers[1].name})
    plan = fl.LayerPlan(layers, (layers[0].name,), why)
    assert [*plan.by_layer()] == [*names.values()]
    assert plan.to_json()["shared"] == [layers[0].name]
    told = f"{plan} {fl.explain(plan, full=True)} {plan.summary().lead}"
    assert "base_model" not in told
    assert "[block.0 Linear] block.0.lora_A Linear head" in repr(plan)

    rows = [
        row("grad_norm", float(k + len(c)), client=c, layer=name)
        for c in ("a", "bb")
        for k, name in enumerate(names)
    ]
    header = {"layers": [asdict(layer) for layer in layers]}
    report = fl.Report(frame(rows), header)
    assert list(report.labels.values()) == [*names.values()]
    figure = report.plot("grad_norm").figure
    texts = [text.get_text() for text in figure.findobj(Text)]
    assert not any("base_model" in text for text in texts)
    assert "head" in " ".join(texts)
    plt.close(figure)

    other = fl.Layer("base_model.model.head", ("w",))
    assert labels_of([layers[2], other]) == {
        layers[2].name: layers[2].name,
        other.name: other.name,
    }
