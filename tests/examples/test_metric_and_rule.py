"""The metric and the rule from outside: named by their place, measured, stored, decided with, drawn."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

import fedlayers as fl
from fedlayers.cli.app import main

METRIC = "examples.metrics.gradient_snr:gradient_snr"
RULE = "examples.rules.knee:knee"


def test_the_value_is_that_of_the_formula() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    x, y = torch.randn(20, 3), torch.randint(2, (20,))
    report = fl.diagnose(
        {"a": model},
        {"a": (x, y)},
        metrics=[METRIC],
        options={"gradient_snr": {"parts": 4}},
    )
    frame = report.frame.set_index("layer")
    for layer, weight in (("0", model[0].weight), ("2", model[2].weight)):
        grads = []
        for k in range(4):
            loss = nn.functional.cross_entropy(
                model(x[5 * k : 5 * k + 5]), y[5 * k : 5 * k + 5]
            )
            grads.append(torch.autograd.grad(loss, weight)[0].double().flatten())
        mean = sum(grads) / 4
        noise = sum(float((g - mean) @ (g - mean)) for g in grads) / 3
        assert frame.loc[layer, "value"] == pytest.approx(
            float(mean @ mean) / noise, rel=1e-6
        )


def test_what_cannot_be_measured_says_why() -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    report = fl.diagnose(
        {"a": model},
        {"a": (torch.randn(5, 3), torch.tensor([0, 1, 0, 1, 1]))},
        metrics=[METRIC],
    )
    assert report.frame["value"].isna().all()
    assert set(report.frame["status"]) == {"fewer samples than parts"}


@pytest.mark.parametrize(
    ("values", "shared"),
    [
        ([1, 1, 1, 10], 3),
        ([1, 9, 10, 11], 1),
        ([1.0, 1.1, 1.2, 5.0, 20.0], 3),
        ([2, 2], 1),
    ],
)
def test_the_knee_is_where_the_log_curve_sags_most(
    values: list[float], shared: int
) -> None:
    logs = [math.log(value) for value in values]
    sag = [
        logs[0] + (logs[-1] - logs[0]) * k / (len(logs) - 1) - log
        for k, log in enumerate(logs)
    ]
    assert fl.RULES[RULE].cut(values) == shared
    assert sag[shared - 1] == pytest.approx(max(sag[:-1]))


def test_from_the_command_line_to_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, plan = str(tmp_path / "diagnosis"), tmp_path / "plan.json"
    main(
        [
            "diagnose",
            "--dataset",
            "heart",
            "--metrics",
            METRIC,
            "federation_sensitivity",
            "--out",
            rows,
        ]
    )
    main(
        ["select", rows, "--rule", RULE, "--metric", "gradient_snr", "--out", str(plan)]
    )
    main(["plot", rows, "--out", str(tmp_path / "pictures")])
    assert "gradient_snr" in capsys.readouterr().out
    assert fl.LayerPlan.load(plan).why.metric == "gradient_snr"
    assert (tmp_path / "pictures" / "gradient_snr.png").exists()
