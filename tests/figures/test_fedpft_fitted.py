"""FedPFT's features and a classifier fitted to them: what is measured of a small run, and what its tables decide."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from figures import recipe
from figures.fedpft import federations, fitted, longer
from fl_core import rows, runner
from fl_core.errors import UsageError
from tests.figures.conftest import drawn, header_of
from tests.figures.test_fedpft import CLASSES, images

pytestmark = pytest.mark.filterwarnings("ignore:client")
LONGER = {longer.NAME: longer.TABLE}
STUDIES = (
    (fitted.STUDY, fitted.TABLES),
    (federations.STUDY, federations.TABLES),
    (longer.STUDY, LONGER),
)
TABLES = {**fitted.TABLES, **federations.TABLES, **LONGER}
HEADERS = {name: header_of(study) for study, tables in STUDIES for name in tables}


def frame_of(table: fitted.Table, lift: float = 0.0, seeds: int = 3) -> pd.DataFrame:
    """Rows as published, of two clients a run; what FedPFT's classifier takes in is ``lift`` better than that."""
    lifted = fitted.PROBE if fitted.PROBE in table.quantities else fitted.ORIGIN
    made = []
    for (line, metric), value in table.published().items():
        method, _, variant = line.partition(">")
        for seed in range(seeds):
            mean = (
                value
                + lift
                * (line in (fitted.OURS, "few.fedpft", "part.all") and metric == lifted)
                + 0.001 * seed
            )
            made += [
                rows.row(
                    metric,
                    mean + more,
                    run=method,
                    variant=variant,
                    seed=seed,
                    client=client,
                    round=12,
                )
                for client, more in (("a", 0.02), ("b", -0.02))
            ]
    return rows.frame(made)


@pytest.mark.parametrize("name", TABLES)
def test_what_is_published_would_be_reproduced_and_its_opposite_not(name: str) -> None:
    table = TABLES[name]

    def held(**how: Any) -> list[bool | None]:
        return [
            finding.held
            for finding in drawn(name, HEADERS[name], frame_of(table, **how)).findings
        ]

    drawing = drawn(name, HEADERS[name], frame_of(table))
    assert {finding.verdict for finding in drawing.findings} == {"held"}
    np.testing.assert_allclose(
        drawing.table["value"], drawing.table["published"] + 0.001, atol=1e-9
    )
    assert held() == [True] * len(drawing.findings)
    assert False in held(lift=-0.3) + held(lift=0.3)
    assert set(held(seeds=2)) == {None}
    with pytest.raises(UsageError, match="none"):
        drawn(name, HEADERS[name], frame_of(table).assign(run="local"))


def test_a_level_far_below_the_papers_is_not_comparable() -> None:
    low = drawn(
        "fedpft.table7",
        HEADERS["fedpft.table7"],
        frame_of(TABLES["fedpft.table7"], lift=-0.5),
    )
    assert {finding.verdict for finding in low.findings} == {"not comparable"}
    assert "78 %" in low.findings[0].incomparable


def test_captions_name_the_federation_that_is_drawn() -> None:
    said = {
        name: drawn(name, HEADERS[name], frame_of(table)).caption
        for name, table in TABLES.items()
    }
    assert "10 clients by Dirichlet(0.5)" in said["fedpft.table7"]
    assert "10 clients by classes, 2 a client" in said["fedpft.table6"]
    assert "10 clients by Dirichlet(0.1)" in said["fedpft.table9"]


def test_a_small_study_measures_every_kind_of_prompts(tmp_path: Path) -> None:
    tiny: dict[str, Any] = {
        "dataset": images(tmp_path / "noise.npz", 600, 12, CLASSES), "clients": 2, "samples_per_client": 40,
        "rounds": 4, "epochs": 2, "batch_size": 20, "eval_every": 1, "checkpoint_every": 4,
    }  # fmt: skip
    wanted = ("fedavg", "fedpft")
    runs = {name: config.with_keys(**tiny) for name, config in fitted.RUNS.items()}
    item = replace(fitted.STUDY, runs=runs, seeds=1)
    recipe.train(
        item, tmp_path / fitted.NAME, only=wanted, command="typed", progress=False
    )
    _, frame = item.read(tmp_path / fitted.NAME)
    assert (frame["status"] == "ok").all()
    assert frame["value"].between(0, 1).all()
    probes = (
        frame[frame["metric"] == fitted.PROBE]
        .groupby("run")["variant"]
        .unique()
        .map(set)
        .to_dict()
    )
    assert probes == {"fedavg": {""}, "fedpft": set(fitted.KINDS)}
    assert frame.groupby(["run", "variant", "metric"])["client"].nunique().eq(2).all()
    times = frame.groupby("metric")["round"].unique().map(sorted).to_dict()
    assert times == {
        fitted.ORIGIN: [1, 2, 3, 4],
        fitted.PROBE: [2, 3, 4],
        fitted.MATCH: [2, 3, 4],
    }
    task = runner.assemble(runs["fedavg"].with_keys(seed=0))
    _, unpaused = recipe.trained(task)
    whole = fitted.origins(unpaused, recipe.labels(task)).set_index(
        ["client", "round"]
    )["value"]
    stopped = frame[
        (frame["run"] == "fedavg") & (frame["metric"] == fitted.ORIGIN)
    ].set_index(["client", "round"])
    pd.testing.assert_series_equal(
        stopped["value"].sort_index(), whole.sort_index(), check_index_type=False
    )
    values = fitted.measured(frame)
    assert (f"fedpft>{fitted.BARE}", fitted.PROBE) in values.index


def test_a_table_is_judged_by_the_last_three_evaluations_and_not_while_a_difference_shrinks() -> (
    None
):
    def accuracy(run: str, value: float, k: int, seed: int = 0) -> rows.Row:
        return rows.row(fitted.ORIGIN, value, run=run, seed=seed, client="a", round=k)

    def told(gaps: list[float]) -> Any:
        made = [
            accuracy(run, 0.6 + (run == fitted.OURS) * gap + 1e-3 * seed * k, k, seed)
            for k, gap in enumerate(gaps, start=1)
            for seed in range(3)
            for run in longer.RUNS
        ]
        return drawn(longer.NAME, HEADERS[longer.NAME], rows.frame(made))

    steady = told([-0.1, 0.1, 0.1, 0.1])
    assert steady.findings[0].verdict == "held"
    mean = fitted.measured(
        rows.frame(
            [accuracy("fedavg", value, k) for k, value in enumerate((9, 1, 2, 3))]
        )
    )
    assert mean.loc[("fedavg", fitted.ORIGIN), 0] == 2
    shrinking = told([0.3, 0.3, 0.2, 0.1])
    assert "still shrinks" in shrinking.findings[0].incomparable
