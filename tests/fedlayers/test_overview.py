"""The first page of a report: what it holds for every outcome, and the page of data with two classes."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from diagnostics.plots.page import Page
from fedlayers.studies import inference, summary
from fedlayers.studies.answers import NO, OPEN, YES
from fedlayers.studies.overview import overview
from fedlayers.studies.predictions import Predictions
from fedlayers.studies.runtime_estimate import Cost
from fedlayers.studies.study import study
from fedlayers.studies.study_page import _add_clients
from fl_core import runner
from fl_core.config import RunConfig
from fl_core.errors import UsageError
from fl_core.plan import LayerPlan

module = importlib.import_module("fedlayers.studies.study")
ITEMS = 7
HEART = RunConfig(dataset="heart", rounds=2)
GAINS = pd.DataFrame(
    [
        ["fedavg", "macro_f1", 0.031, 0.01, 0.05, "higher", YES],
        ["local", "macro_f1", 0.0, 0.0, 0.0, "the same", OPEN],
    ],
    columns=summary.COLUMNS,
)


def lines(
    verdict: str, shared: int = 2, guessing: str = YES, seeds: int = 5
) -> list[str]:
    task = runner.assemble(HEART)
    plan = LayerPlan(task.layers, ()).with_first(shared)
    seen = SimpleNamespace(
        verdict=verdict,
        remaining=("half", "all"),
        leader="half",
        seeds=seeds,
        at_stake=lambda: 0.02,
    )
    winner = SimpleNamespace(name="half", algorithm="fedper")
    cost = Cost(12, 48, 12.0, 2e6, 3.0)
    choice: Any = SimpleNamespace(
        inference=seen, winner=winner, arms=(1, 2, 3, 4), main="macro_f1", measured=cost
    )
    codes = {"split": YES, "which": verdict, "guessing": guessing}
    lead = summary.Headline("Federate fc1.", ("An answer.",), "", (), "", codes)
    return overview(task, lead, GAINS, choice, plan, seeds)


@pytest.mark.parametrize("verdict", inference.VERDICTS)
def test_every_verdict_has_all_items(verdict: str) -> None:
    found = lines(verdict)
    assert len(found) == ITEMS
    assert all(re.match(r"\*\*[^*]+:\*\* \w", line) for line in found)
    assert "cleveland" in found[1]
    assert "470" in found[2]
    assert "3.1 points" in found[3]
    assert "48 rounds" in found[5]
    assert ("plan.json" in found[6]) == (
        verdict not in (inference.NOTHING, inference.ALL_DIVERGED)
    )


def test_how_sure_names_the_candidate_and_the_score_that_it_is_about() -> None:
    """The outcome above it may be another: the base rate is not among the candidates."""
    assert all(
        "than half" in lines(inference.DECIDED, guessing=guessing)[4]
        for guessing in (YES, NO)
    )
    assert "macro-F1" in lines(inference.UNDECIDED)[4]


def test_what_to_do_depends_on_what_is_shared_and_learned() -> None:
    assert "plan.json" not in lines(inference.DECIDED, shared=0)[6]
    assert "plan.json" not in lines(inference.DECIDED, guessing=NO)[6]
    assert "--seeds" in lines(inference.UNDECIDED, seeds=1)[6]
    assert "--seeds" not in lines(inference.DECIDED)[6]


def two_classes(path: Path) -> Path:
    draw, parts = np.random.default_rng(0), []
    for name in ("<b>north</b>", "south & west"):
        x = draw.normal(size=(120, 4))
        died = np.where(x[:, 0] + draw.normal(size=120) > 0.5, "died", "lived")
        parts.append(pd.DataFrame(x, columns=[*"abcd"]).assign(outcome=died, ward=name))
    pd.concat(parts).to_csv(path, index=False)
    return path


@pytest.mark.slow
def test_the_report_of_two_classes(tmp_path: Path) -> None:
    """It begins with the first page, escapes what comes from the data, and folds diagnostics and words."""
    config = RunConfig(
        dataset=str(two_classes(tmp_path / "wards.csv")),
        client_column="ward",
        label_column="outcome",
        positive="died",
        rounds=2,
    )
    found = study(
        config,
        ("local", "fedavg"),
        (0,),
        tmp_path / "out",
        arms=("nothing", "all"),
        progress=False,
    )
    html = found.page.read_text()
    first, _, rest = html.partition("<h2>")
    assert first.count("<li>") == ITEMS
    clients = rest[: rest.index("<h2>")]
    assert "<td>&lt;b&gt;north&lt;/b&gt;</td>" in clients
    assert "south &amp; west" in clients
    assert "<b>north</b>" not in html
    assert len(re.findall(r"\[\d+\.\d, \d+\.\d\]", clients)) == 4
    assert clients.count("<img") == 2
    assert {"roc.png", "calibration.png"} <= {
        path.name for path in (tmp_path / "out").iterdir()
    }
    folded = html[html.index("<details>") :]
    assert html.count("<details>") == 3
    assert "Hessian" in folded
    assert "<dt>macro-F1</dt>" in folded
    assert "Hessian" not in html[: html.index("<details>")]


def test_a_client_with_one_test_sample_has_no_interval_of_macro_f1(
    tmp_path: Path,
) -> None:
    data: Any = SimpleNamespace(
        clients=[SimpleNamespace(name="north", train=range(3))], n_classes=3
    )
    one = Predictions(
        {"north": np.eye(3)[:1]}, {"north": np.array([0])}, SimpleNamespace(data=data)
    )  # type: ignore[arg-type]
    frame = pd.DataFrame(
        columns=[
            "algorithm",
            "seed",
            "client",
            "model",
            "metric",
            "split",
            "round",
            "value",
        ]
    )
    page = Page("A study")
    _add_clients(page, tmp_path, one, SimpleNamespace(frame=frame, best=False), 0)  # type: ignore[arg-type]
    assert "<td>100.0</td>" in page.html()
    assert "nan" not in page.html()


@pytest.mark.slow
def test_a_report_without_the_chosen_run_says_why(tmp_path: Path) -> None:
    found = study(
        HEART, ("local",), (0,), tmp_path, rule="sensitivity_ratio", progress=False
    )
    clients = found.page.read_text().split("<h2>")[1]
    assert "<table>" not in clients
    assert "not compared" in clients


def test_models_that_cannot_predict_alone_are_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **own: Any) -> None:
        raise UsageError("client 'a' held a part of the model")

    monkeypatch.setattr(module, "predictions_of", refuse)
    choice: Any = SimpleNamespace(run=tmp_path)
    assert "part of the model" in module._predict(choice, tmp_path, HEART, 3)
