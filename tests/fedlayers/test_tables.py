"""What commands print of many clients: three of them and all together, the split and the round named."""

import numpy as np
import pytest

import fedlayers as fl
from diagnostics.report import Report
from fedlayers.cli import tables
from fl_core import rows, runner
from fl_core.config import RunConfig


def scored(n):
    """Rows of a run whose client k has macro-F1 k / 100, accuracy 1 - k / 100, and k + 1 training samples."""
    found = []
    for k in range(n):
        for metric, value in (("macro_f1", k / 100), ("accuracy", 1 - k / 100)):
            where = {"client": f"client_{k}", "model": "global", "n_train": k + 1}
            for number, split, shown in (
                (3, "test", value),
                (3, "validation", 9.0),
                (2, "test", 9.0),
            ):
                at = {"split": split, "round": number, **where}
                found.append(rows.row(metric, shown, **at))
    return rows.frame(found)


@pytest.mark.parametrize("n", [1, 8, 9])
def test_scores_of_many_clients_are_condensed(n):
    text = tables.scores(scored(n), 3)
    assert text.startswith("test split, round 3")
    assert "9.0" not in text
    which = dict.fromkeys(range(n), "")
    if n > 8:
        which = {0: "lowest: ", n // 2: "median: ", n - 1: "highest: "}
    wanted = {f"{rank}client_{k}": k / 100 for k, rank in which.items()}
    if n > 1:
        wanted[f"all {n}"] = np.average(np.arange(n) / 100, weights=np.arange(n) + 1)
    lines = [
        line.removeprefix("global").rsplit(maxsplit=2) for line in text.splitlines()[3:]
    ]
    found = {name.strip(): float(f1) for name, _, f1 in lines}
    assert found == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("clients", [8, 9])
def test_a_diagnosis_of_many_clients_is_condensed(clients):
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
    text = tables.format_metric(report, "grad_variance", "epoch")
    header, _, first, *_ = (line.split() for line in text.splitlines())
    values = report.values("grad_variance")
    of = values.iloc[0]
    if clients <= 8:
        assert header == ["client", *values.columns]
        return
    assert header == ["lowest", "at", "median", "highest", "at", "mean", "clients"]
    lowest, highest = [of.min(), of.idxmin()], [of.max(), of.idxmax()]
    wanted = [*lowest, of.median(), *highest, of.mean()]
    shown = [v if isinstance(v, str) else f"{v:.4g}" for v in wanted]
    assert first[1:-1] == shown


def test_clients_without_a_value_are_counted_and_are_not_the_lowest():
    values = {"fc1": [None, *range(2, 10)], "fc2": [None] * 9, "fc3": range(2, 11)}
    found = []
    for layer, each in values.items():
        for k, value in enumerate(each):
            at = {"client": f"client_{k}", "layer": layer, "variant": "l2"}
            status = "ok" if value else "no value"
            found.append(rows.row("grad_norm", value, status=status, **at))
    layers = [{"name": name, "parameters": [], "buffers": []} for name in values]
    report = Report(rows.frame(found), {"layers": layers})
    text = tables.format_metric(report, "grad_norm", "l2")
    lines = [line.split() for line in text.splitlines()]
    assert {line[0]: line[1:] for line in lines if line[0] in ("fc1", "fc3")} == {
        "fc1": ["2", "client_1", "5.5", "9", "client_8", "5.5", "8"],
        "fc3": ["2", "client_0", "6", "10", "client_8", "6", "9"],
    }


def test_a_metric_of_pairs_of_a_single_client_has_its_reason():
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
