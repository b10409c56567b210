"""What commands print of many clients: three of them and all together, the split and the round named."""

import numpy as np
import pytest

import fedlayers as fl
from diagnostics.report import Report
from fedlayers.run_result import final_rows, scores_text
from fl_core import rows
from fl_core.config import RunConfig
from fl_core.run import runner


def scored(n):
    """Rows of a run whose client k has macro-F1 k / 100, accuracy 1 - k / 100, and k + 1 training samples."""
    lines = []
    for k in range(n):
        for metric, value in (("macro_f1", k / 100), ("accuracy", 1 - k / 100)):
            where = {"client": f"client_{k}", "model": "global", "n_train": k + 1}
            for number, split, shown in (
                (3, "test", value),
                (3, "validation", 9.0),
                (2, "test", 9.0),
            ):
                at = {"split": split, "round": number, **where}
                lines.append(rows.row(metric, shown, **at))
    return rows.frame(lines)


@pytest.mark.parametrize(
    ("best", "wanted", "note"),
    [
        (None, {"global": 4, "personal": 4}, ", round 4"),
        ({"personal": 2}, {"global": 2, "personal": 2}, "; global has none: round 2"),
        ({"global": 3}, {"global": 3, "personal": 4}, "; personal has none: round 4"),
        ({"global": 3, "personal": 2}, {"global": 3, "personal": 2}, "personal 2)"),
    ],
)
def test_a_model_without_a_best_round_has_that_of_the_model_in_use(best, wanted, note):
    lines = []
    for number in range(5):
        for model in wanted:
            at = {"split": "test", "round": number, "client": "a", "model": model}
            lines.append(rows.row("accuracy", number / 10, n_train=9, **at))
    frame = rows.frame(lines)
    last_rows = final_rows(frame, 4, best)
    assert dict(zip(last_rows["model"], last_rows["round"], strict=True)) == wanted
    title = scores_text(frame, 4, best).splitlines()[0]
    assert title.endswith(note)
    assert title.count("has none") == len(wanted) - len(best or wanted)


@pytest.mark.parametrize("n", [1, 8, 9])
def test_scores_of_many_clients_are_condensed(n):
    text = scores_text(scored(n), 3)
    title, *_ = text.splitlines()
    assert title.startswith("test split, round 3")
    assert ("all: their mean, weighted by training samples" in title) == (n > 1)
    assert "9.0" not in text
    which = dict.fromkeys(range(n), "")
    if n > 8:
        which = {0: "lowest", n // 2: "median", n - 1: "highest"}
    wanted = {rank or f"client_{k}": k / 100 for k, rank in which.items()}
    if n > 1:
        wanted[f"all {n}"] = np.average(np.arange(n) / 100, weights=np.arange(n) + 1)
    lines = [
        line.removeprefix("global").rsplit(maxsplit=2) for line in text.splitlines()[3:]
    ]
    scores = {name.strip(): float(f1) for name, _, f1 in lines}
    assert scores == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("clients", [8, 9])
def test_a_diagnosis_of_many_clients_shows_their_medians(clients):
    lines = [
        rows.row("grad_norm", k**2, client=f"c{k}", layer="fc1", variant="l2")
        for k in range(clients)
    ]
    layers = [{"name": "fc1", "parameters": [], "buffers": []}]
    report = Report(rows.frame(lines), {"layers": layers})
    shown = report.text(["grad_norm"])
    (values,) = (line for line in shown.splitlines() if line.startswith("fc1"))
    squares = [str(k**2) for k in range(clients)]
    assert values.split()[1:] == (squares if clients <= 8 else ["16"])


def test_a_metric_of_pairs_of_a_single_client_has_its_reason():
    config = RunConfig(
        dataset="digits", clients=1, max_samples=60, model_options={"sizes": [8]}
    )
    report = fl.measure.diagnose_task(
        runner.assemble(config), ["grad_variance", "weight_divergence"]
    )
    assert "\nno value: " in report.text(["weight_divergence"])
    shown = ["grad_variance", "grad_variance", "weight_divergence"]
    assert "weight_divergence" in report.text(shown).splitlines()[-1]
