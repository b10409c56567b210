"""What commands print of many clients: three of them and all together, the split and the round named."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

import fedlayers as fl
from diagnostics.report import Report
from fedlayers.cli import tables
from fl_core import rows, runner
from fl_core.config import RunConfig


def scored(n: int) -> pd.DataFrame:
    """Rows of a run whose client k has macro-F1 k / 100, accuracy 1 - k / 100, and k + 1 training samples."""
    found = []
    for k in range(n):
        for metric, value in (("macro_f1", k / 100), ("accuracy", 1 - k / 100)):
            for round, split in ((3, "test"), (3, "validation"), (2, "test")):
                where = {
                    "client": f"client_{k}",
                    "split": split,
                    "round": round,
                    "model": "global",
                    "n_train": k + 1,
                }
                found.append(
                    rows.row(
                        metric, value if (round, split) == (3, "test") else 9.0, **where
                    )
                )
    return rows.frame(found)


@pytest.mark.parametrize("n", [1, 8, 9, 30])
def test_scores_of_many_clients_are_condensed(n: int) -> None:
    text = tables.scores(scored(n), 3)
    assert text.startswith("test split, round 3")
    assert "9.0" not in text
    which = (
        dict.fromkeys(range(n), "")
        if n <= 8
        else {0: "lowest: ", n // 2: "median: ", n - 1: "highest: "}
    )
    wanted = {f"{rank}client_{k}": k / 100 for k, rank in which.items()}
    if n > 1:
        wanted[f"all {n}"] = np.average(np.arange(n) / 100, weights=np.arange(n) + 1)
    lines = [
        line.removeprefix("global").rsplit(maxsplit=2) for line in text.splitlines()[3:]
    ]
    assert {name.strip(): float(f1) for name, _, f1 in lines} == pytest.approx(
        wanted, abs=1e-4
    )
    assert all(
        float(accuracy) + float(f1) == pytest.approx(1, abs=2e-4)
        for _, accuracy, f1 in lines
    )


def test_clients_are_printed_by_their_numbers() -> None:
    frame = scored(8)
    frame["client"] = (
        frame["client"]
        .str.replace("client_", "ward ")
        .replace({"ward 1": "ward 10", "ward 0": "ward 1"})
    )
    text = tables.scores(frame.sort_values("client"), 3)
    assert [
        line.split("ward ")[1].split()[0]
        for line in text.splitlines()
        if "ward" in line
    ] == [*"1234567", "10"]


@pytest.mark.parametrize("clients", [8, 9])
def test_a_diagnosis_of_many_clients_is_condensed(clients: int) -> None:
    config = RunConfig(
        dataset="digits",
        clients=clients,
        max_samples=300,
        batch_size=8,
        model_options={"sizes": [8]},
    )
    report = fl.measure.diagnose_task(
        runner.assemble(config), ["grad_variance"], progress=False
    )
    values, text = (
        report.values("grad_variance"),
        tables.format_metric(report, "grad_variance", "epoch"),
    )
    header, first = text.splitlines()[0].split(), text.splitlines()[2].split()
    of_first = values.iloc[0]
    if clients <= 8:
        assert header == ["client", *values.columns]
        return
    assert header == ["lowest", "at", "median", "highest", "at", "mean", "clients"]
    wanted = [
        of_first.min(),
        of_first.idxmin(),
        of_first.median(),
        of_first.max(),
        of_first.idxmax(),
        of_first.mean(),
    ]
    assert first[1:-1] == [
        value if isinstance(value, str) else f"{value:.4g}" for value in wanted
    ]
    assert tables.splits(report, "grad_variance", "epoch") == "train split"
    assert not any("client_3" in note for note in runner.assemble(config).notes())


def test_clients_without_a_value_are_counted_and_are_not_the_lowest() -> None:
    frame = rows.frame(
        rows.row(
            "grad_norm",
            value,
            client=f"client_{k}",
            layer=layer,
            variant="l2",
            status="ok" if value else "no value",
        )
        for layer, base in (("fc1", 1.0), ("fc2", None), ("fc3", 2.0))
        for k in range(9)
        for value in [None if base is None or (layer, k) == ("fc1", 0) else base + k]
    )
    report = Report(
        frame,
        {
            "layers": [
                {"name": f"fc{k}", "parameters": [], "buffers": []} for k in (1, 2, 3)
            ]
        },
    )
    header, *lines = [
        line.split()
        for line in tables.format_metric(report, "grad_norm", "l2").splitlines()
    ]
    assert header == ["lowest", "at", "median", "highest", "at", "mean", "clients"]
    found = {line[0]: line[1:] for line in lines if len(line) > 1}
    assert found == {
        "fc1": ["2", "client_1", "5.5", "9", "client_8", "5.5", "8"],
        "fc3": ["2", "client_0", "6", "10", "client_8", "6", "9"],
    }


def test_measurements_of_several_metrics_are_medians() -> None:
    config = RunConfig(
        dataset="digits",
        max_samples=300,
        batch_size=8,
        model_options={"sizes": [8] * tables.ROOM},
    )
    report = fl.measure.diagnose_task(
        runner.assemble(config), ["grad_variance", "weight_magnitude"], progress=False
    )
    shown = [
        ("grad_variance", "epoch"),
        ("weight_magnitude", "mean_abs"),
        ("weight_magnitude", "l2"),
    ]
    lines = tables.measurements(report, shown).splitlines()
    first = report.values("grad_variance").median(axis=1).iloc[0]
    assert lines[3].split()[1] == f"{first:.4g}"
    assert "1 more" in lines[-1]


def test_a_metric_of_pairs_of_a_single_client_has_its_reason() -> None:
    config = RunConfig(
        dataset="digits", clients=1, max_samples=60, model_options={"sizes": [8]}
    )
    report = fl.measure.diagnose_task(
        runner.assemble(config), ["grad_variance", "weight_divergence"], progress=False
    )
    pair = ("weight_divergence", "relative_l2")
    assert tables.format_metric(report, *pair).startswith("no value: ")
    shown = [("grad_variance", "epoch")] * 2 + [pair]
    assert "weight_divergence" in tables.measurements(report, shown).splitlines()[-1]
