"""The metric and the rule from outside: named by their place, measured, stored, decided with, drawn."""

import math

import pytest

import fedlayers as fl
from fedlayers.cli.app import main

METRIC = "examples.metrics.gradient_snr:gradient_snr"
RULE = "examples.rules.knee:knee"


@pytest.fixture(autouse=True)
def nothing_stays(own_members):
    """What is named by its place is known to its test alone."""
    own_members(fl.METRICS)
    own_members(fl.RULES)


@pytest.mark.parametrize(
    ("values", "shared"),
    [
        ([1, 1, 1, 10], 3),
        ([1, 9, 10, 11], 1),
        ([1.0, 1.1, 1.2, 5.0, 20.0], 3),
        ([2, 2], 1),
    ],
)
def test_the_knee_is_where_the_log_curve_sags_most(values, shared):
    logs = [math.log(value) for value in values]
    sag = [
        logs[0] + (logs[-1] - logs[0]) * k / (len(logs) - 1) - log
        for k, log in enumerate(logs)
    ]
    assert fl.RULES[RULE].cut(values) == shared
    assert sag[shared - 1] == pytest.approx(max(sag[:-1]))


def test_from_the_command_line_to_a_picture(tmp_path, capsys):
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
    page = (tmp_path / "pictures" / "report.html").read_text(encoding="utf-8")
    assert "by largest_rise." in page
