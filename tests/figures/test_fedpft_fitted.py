"""FedPFT's features and a classifier fitted to them: what is measured of a small run, and what its tables decide."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from figures import recipe
from figures.fedpft import federations, fitted
from fl_core import rows
from fl_core.errors import UsageError
from tests.figures.conftest import drawn, header_of
from tests.figures.test_fedpft import CLASSES, images

pytestmark = pytest.mark.filterwarnings("ignore:client")
TABLES = {**fitted.TABLES, **federations.TABLES}
HEADERS = {
    name: header_of(study)
    for study, tables in ((fitted.STUDY, fitted.TABLES), (federations.STUDY, federations.TABLES))
    for name in tables
}


def frame_of(table: fitted.Table, lift: float = 0.0, seeds: int = 3) -> pd.DataFrame:
    """Rows as published, of two clients a run; what FedPFT's classifier takes in is ``lift`` better than that."""
    lifted = fitted.PROBE if fitted.PROBE in table.quantities else fitted.ORIGIN
    made = []
    for (line, metric), value in table.published().items():
        method, _, variant = line.partition(">")
        for seed in range(seeds):
            mean = value + lift * (line in (fitted.OURS, "few.fedpft", "part.all") and metric == lifted) + 0.001 * seed
            made += [
                rows.row(metric, mean + more, run=method, variant=variant, seed=seed, client=client)
                for client, more in (("a", 0.02), ("b", -0.02))
            ]
    return rows.frame(made)


@pytest.mark.parametrize("name", TABLES)
def test_what_is_published_would_be_reproduced_and_its_opposite_not(name: str) -> None:
    table = TABLES[name]

    def held(**how: Any) -> list[bool | None]:
        return [finding.held for finding in drawn(name, HEADERS[name], frame_of(table, **how)).findings]

    drawing = drawn(name, HEADERS[name], frame_of(table))
    assert {finding.verdict for finding in drawing.findings} == {"held"}
    np.testing.assert_allclose(drawing.table["value"], drawing.table["published"] + 0.001, atol=1e-9)
    assert held() == [True] * len(drawing.findings)
    assert False in held(lift=-0.3) + held(lift=0.3)
    assert set(held(seeds=2)) == {None}
    with pytest.raises(UsageError, match="none"):
        drawn(name, HEADERS[name], frame_of(table).assign(run="local"))


def test_a_level_far_below_the_papers_is_not_comparable() -> None:
    low = drawn("fedpft.table7", HEADERS["fedpft.table7"], frame_of(TABLES["fedpft.table7"], lift=-0.5))
    assert {finding.verdict for finding in low.findings} == {"not comparable"}
    assert "78 %" in low.findings[0].incomparable


def test_captions_name_the_federation_that_is_drawn() -> None:
    said = {name: drawn(name, HEADERS[name], frame_of(table)).caption for name, table in TABLES.items()}
    assert "10 clients by Dirichlet(0.5)" in said["fedpft.table7"]
    assert "10 clients by classes, 2 a client" in said["fedpft.table6"]
    assert "10 clients by Dirichlet(0.1)" in said["fedpft.table9"]


def test_a_small_study_measures_every_kind_of_prompts(tmp_path: Path) -> None:
    tiny: dict[str, Any] = {
        "dataset": images(tmp_path / "noise.npz", 600, 12, CLASSES), "clients": 2, "samples_per_client": 40,
        "rounds": 1, "epochs": 2, "batch_size": 20, "eval_every": 1, "checkpoint_every": 1,
    }  # fmt: skip
    wanted = ("fedavg", "fedpft")
    runs = {name: replace(config, **tiny) for name, config in fitted.RUNS.items()}
    item = replace(fitted.STUDY, runs=runs, seeds=1)
    recipe.train(item, tmp_path / fitted.NAME, only=wanted, command="typed", progress=False)
    _, frame = item.read(tmp_path / fitted.NAME)
    assert (frame["status"] == "ok").all()
    assert frame["value"].between(0, 1).all()
    probes = frame[frame["metric"] == fitted.PROBE].groupby("run")["variant"].unique().map(set).to_dict()
    assert probes == {"fedavg": {""}, "fedpft": set(fitted.KINDS)}
    assert frame.groupby(["run", "variant", "metric"])["client"].nunique().eq(2).all()
    values = fitted.measured(frame)
    assert (f"fedpft>{fitted.BARE}", fitted.PROBE) in values.index
