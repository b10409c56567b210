"""pFedLA's Table 1 and the accuracies of its Table 3: which score of a method counts, and what scores decide."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from figures import recipe
from figures.pfedla import costs, dominant, methods, overlap
from fl_core import rows
from fl_core.errors import UsageError
from tests.figures.conftest import TINY, drawn, header_of

pytestmark = pytest.mark.filterwarnings("ignore:client")
HEADER = header_of(methods.STUDY)
PRINTED = {method: value for (method, _), value in methods.printed().items()}
TABLES = {
    "pfedla.table1": (HEADER, "Table 1"),
    "pfedla.table2": (header_of(dominant.STUDY), "Table 2"),
}
WHOLE = frozenset({"per_fedavg", "pfedme", "fedavg"})
"""Methods with a global model, of which FedAvg has no other."""


def line(run: str, seed: int, model: str, value: float, done: int = 40) -> Any:
    return rows.row(
        "accuracy", value, run=run, seed=seed, model=model, round=done, split="test"
    )


def frame_of(values: dict[str, float], seeds: int = 3) -> pd.DataFrame:
    """Rows of both studies as their runs have them: the start, global and personal models, and after training."""
    made = []
    for k, (run, value) in enumerate(values.items()):
        for seed in range(seeds):
            score = value + 0.001 * ((seed * (k + 1)) % 3)
            made.append(
                line(
                    run, seed, "personal" if run not in WHOLE else "global", 0.1, done=0
                )
            )
            for done, more in ((10, 0.2), (20, -0.03), (30, 0.01), (40, 0.02)):
                made.append(line(run, seed, "local", score + 0.05 + more, done))
                if run in WHOLE:
                    made.append(
                        line(
                            run,
                            seed,
                            "global",
                            score + more if run == "fedavg" else 0.2,
                            done,
                        )
                    )
                if run != "fedavg":
                    made.append(line(run, seed, "personal", score + more, done))
    return rows.frame(made)


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames here hold the other study's runs already."""
    monkeypatch.setattr(methods, "joined", lambda frame: frame)


def test_scores_are_means_of_three_evaluations_of_the_model_that_a_client_uses() -> (
    None
):
    values = methods.scores(
        frame_of({"fedavg": 0.4, "pfedme": 0.5, "fedbn": 0.6}, seeds=1)
    )[0]
    expected = {"fedavg": 0.4, "pfedme": 0.5, "fedbn": 0.6}
    for run, value in expected.items():
        assert values[run, methods.BEFORE] == pytest.approx(value)
        assert values[run, methods.AFTER] == pytest.approx(value + 0.05)


@pytest.mark.parametrize("name", TABLES)
def test_the_published_table_would_be_reproduced_and_its_opposite_not(
    beside: None, name: str
) -> None:
    header, place = TABLES[name]
    published = {method: value for (method, _), value in methods.printed(place).items()}
    assert set(published) == set(methods.METHODS)
    drawing = drawn(name, header, frame_of(published))
    assert [finding.held for finding in drawing.findings] == [True] * 4
    others = [finding.measured.count("(above)") for finding in drawing.findings[:2]]
    assert others == [len(methods.METHODS) - 1, len(methods.METHODS) - 2], (
        "Per-FedAvg is not used without adaptation"
    )
    turned = drawn(
        name, header, frame_of({run: 1 - value for run, value in published.items()})
    )
    assert [finding.held for finding in turned.findings] == [False] * 4
    few = drawn(name, header, frame_of(published, seeds=2))
    assert [finding.held for finding in few.findings] == [None] * 4


def test_a_level_result_refutes_a_printed_lead(beside: None) -> None:
    level = drawn(
        "pfedla.table1",
        HEADER,
        frame_of({**PRINTED, "fedavg": PRINTED["pfedla"] - 0.001}),
    )
    assert level.findings[3].held is False


def test_a_page_says_how_many_images_the_dominant_classes_have(beside: None) -> None:
    header, _ = TABLES["pfedla.table2"]
    caption = drawn("pfedla.table2", header, frame_of(PRINTED)).caption
    assert all(part in caption for part in ("all classes", "50 %", "600 images"))
    assert (
        "10 clients with 4 classes"
        in drawn("pfedla.table1", HEADER, frame_of(PRINTED)).caption
    )


def test_the_best_of_some_is_not_called_the_best_of_all(beside: None) -> None:
    some = {run: PRINTED[run] for run in ("local", "fedavg", "fedrep", "pfedla")}
    assert drawn("pfedla.table1", HEADER, frame_of(some)).findings[0].held is None
    with pytest.raises(UsageError, match="per_fedavg"):
        drawn("pfedla.table1", HEADER, frame_of({"local": 0.5, "pfedla": 0.6}))


def test_what_retained_layers_cost() -> None:
    runs = {
        "pfedla": 0.6143,
        "heurpfedla": 0.6002,
        "heurpfedla_2": 0.599,
        "heurpfedla_3": 0.5923,
    }

    def held(values: dict[str, float], **how: int) -> bool | None:
        before, after = (
            methods.compromises(frame_of(values, **how), q) for q in methods.QUANTITIES
        )
        assert before.held == after.held, (
            "frames here have 5 points more after local training, whatever the run"
        )
        return before.held

    assert held(runs) is True
    assert held(runs, seeds=2) is None
    assert held({**runs, "heurpfedla_3": 0.7}) is False
    assert held({run: runs[run] for run in ("pfedla", "heurpfedla")}) is None


def test_a_small_study_scores_every_method_before_and_after_training(
    tmp_path: Path,
) -> None:
    tiny = TINY.with_keys(
        clients=2,
        partition="non_iid_1",
        classes_per_client=4,
        samples_per_client=40,
        max_samples=None,
        rounds=3,
        eval_every=1,
    )
    runs = {
        run: tiny.with_keys(
            algorithm=config.federation.algorithm, options=config.federation.options
        )
        for run, config in methods.RUNS.items()
    }
    item = replace(methods.STUDY, runs=runs, seeds=1)
    recipe.train(item, tmp_path / methods.NAME, command="typed", progress=False)
    values = methods.scores(item.read(tmp_path / methods.NAME)[1])
    both = {(run, quantity) for run in runs for quantity in methods.QUANTITIES}
    assert set(values.index) == both - {("per_fedavg", methods.AFTER)}
    assert values[0].between(0, 1).all()


def test_what_runs_share_with_pfedlas() -> None:
    other = overlap.RUNS["pfedla"]
    own = ("algorithm", "options", "eval_every")
    for run, config in methods.RUNS.items():
        differ = {
            name
            for name, value in config.to_json().items()
            if value != other.to_json()[name]
        } - set(own)
        assert differ == ({"epochs"} if run == "pfedme" else set())
    assert (
        int(methods.RUNS["pfedme"].training.epochs or 0) * methods.INNER
        == other.training.epochs
    )
    for run, config in dominant.RUNS.items():
        same = {**overlap.RUNS, **methods.RUNS}[run].to_json()
        differ = {
            name for name, value in config.to_json().items() if value != same[name]
        }
        assert differ - {"eval_every"} == set(dominant.DOMINANT)
    assert costs.lines(costs.STUDY.read(costs.STUDY.path())[1])[
        "retained"
    ].max() == max(overlap.RETAINING)
