"""A diagnosis of models of one's own: who could use whose model, whether clients differ, and what to conclude."""

import pytest
import torch
from torch import nn

import fedlayers as fl


def right(sign):
    """A model that is right where the label is whether sign * x[0] is above 0."""
    model = nn.Sequential(nn.Linear(4, 2, bias=False), nn.Linear(2, 2))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[0.0] * 4, [4.0 * sign, 0, 0, 0]]))
        model[1].weight.copy_(torch.eye(2))
        model[1].bias.zero_()
    return model


def samples(sign, seed):
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(seed))
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
