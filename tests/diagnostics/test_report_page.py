"""The page of a diagnosis: a picture of each metric, and beneath it the plan of each rule."""

import pytest
import torch
from torch import nn

import fedlayers as fl
from diagnostics.report_page import cuts, report_page
from diagnostics.select import RULES, select


@pytest.fixture(scope="module")
def report():
    torch.manual_seed(0)
    data = {name: (torch.randn(30, 4), torch.arange(30) % 3) for name in "ab"}
    models = {
        name: nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
        for name in data
    }
    return fl.diagnose(models, data, ["grad_norm", "cka"], progress=False)


@pytest.mark.parametrize("metric", ["grad_norm", "cka"])
def test_each_rule_has_its_plan_or_the_reason(report, metric):
    lines = cuts(report, metric).set_index("rule")
    assert [*lines.index] == [
        name for name, rule in RULES.members().items() if rule.decides
    ]
    for name in ("sensitivity_ratio", "largest_rise", "top"):
        plan = select(report, name, metric=metric)
        shared = [report.labels[layer] for layer in plan.shared]
        assert lines.loc[name, "shared"] == ", ".join(shared)
        assert lines.loc[name, "trust"] == plan.why.detail["benchmark"]
        assert f"{name} of {metric} after 1 round" in lines.loc[name, "trust"]
    assert lines.loc["above_null", "shared"] == "no plan"
    assert "null" in lines.loc["above_null", "trust"]


def test_the_page_has_a_picture_and_the_cuts_of_each_metric(report):
    html = report_page(report, "Mine").html()
    assert html.count("<img") >= 2
    assert "<h1>Mine</h1>" in html
    for metric in ("grad_norm", "cka"):
        shared = cuts(report, metric).set_index("rule")["shared"]
        assert f"<h2>{metric}</h2>" in html
        assert f"Share {shared['top']} by top." in html
    assert html.count("No plan by above_null.") == 2


def test_a_rule_of_the_session_that_raises_has_a_line(report, own_members):
    own_members(fl.RULES)

    @fl.rule(summary="raise")
    def flat(values):
        raise ZeroDivisionError("no slope")

    line = cuts(report, "grad_norm").set_index("rule").loc["flat"]
    assert tuple(line) == ("no plan", "ZeroDivisionError: no slope")
