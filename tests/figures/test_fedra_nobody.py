"""Federations in which nobody holds the whole model: what Tables 3 and 5 decide, and one run from end to end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from figures import recipe
from figures.fedra import allocations, depth, nobody
from fl_core import rows
from fl_core.errors import UsageError
from tests.figures.conftest import drawn, made, small
from tests.figures.test_fedra_depth import images

STYLES = ("photo", "sketch")
HEADER = {
    "runs": {name: {"config": config.to_json()} for name, config in nobody.RUNS.items()},
    "seeds": 3, "missing": [], "failed": {},
}  # fmt: skip


def frame_of(
    ends: dict[str, float], seeds: int = 3, noise: float = 0.002
) -> pd.DataFrame:
    """Rows of every run: 0.2 at the start, and at the end that of its method, with a little noise by seed."""
    made_rows = []
    for setting in nobody.DEPTHS:
        for method, end in ends.items():
            run = f"{setting}.{method}"
            for seed in range(seeds):
                for done, value in ((0, 0.2), (5, end + noise * seed)):
                    made_rows += [
                        rows.row("accuracy", value, run=run, seed=seed, round=done, client=style, model="global",
                                 split="test", algorithm="fedra")
                        for style in STYLES
                    ]  # fmt: skip
                which = "0,1,2" if method == "fedra" else ",".join(map(str, range(12)))
                held: dict[str, Any] = {
                    "client": "photo",
                    "variant": which,
                    "algorithm": "fedra",
                }
                made_rows.append(
                    rows.row(nobody.BLOCKS, 3, run=run, seed=seed, round=1, **held)
                )
    return rows.frame(made_rows)


def verdicts(name: str, frame: pd.DataFrame) -> list[bool | None]:
    """What the findings decide, of which none on accuracies is compared with the paper."""
    drawing = drawn(name, HEADER, frame)
    assert "| clients | method |" in drawing.text
    assert all(
        finding.incomparable or "Eq. 3 every block" in finding.expected
        for finding in drawing.findings
    )
    return [finding.held for finding in drawing.findings]


def test_table_3_is_decided_by_differences_alone() -> None:
    assert verdicts("fedra.table3", frame_of({"fedra": 0.4, "inclusivefl": 0.3})) == [
        True,
        True,
        None,
    ]
    worse = frame_of({"fedra": 0.3, "inclusivefl": 0.4})
    assert verdicts("fedra.table3", worse) == [True, False, None]
    assert verdicts("fedra.table3", frame_of({"fedra": 0.15, "inclusivefl": 0.15})) == [
        False,
        None,
        None,
    ]
    few = frame_of({"fedra": 0.4, "inclusivefl": 0.3}, seeds=2)
    assert verdicts("fedra.table3", few) == [None, None, None]
    with pytest.raises(UsageError, match="none"):
        verdicts("fedra.table3", worse[worse["run"] == "pretraining"])


def test_table_5_asks_whether_both_ways_are_level_and_what_nobody_held() -> None:
    assert verdicts("fedra.table5", frame_of({"fedra": 0.4, "fedra_cover": 0.405})) == [
        True,
        True,
    ]
    assert verdicts("fedra.table5", frame_of({"fedra": 0.4, "fedra_cover": 0.5})) == [
        False,
        True,
    ]
    frame = frame_of({"fedra": 0.4, "fedra_cover": 0.4})
    assert set(nobody.without_client(frame, "fedra")) == {9}
    assert set(nobody.without_client(frame, "fedra_cover")) == {0}


def test_the_published_means_are_those_of_both_tables() -> None:
    three, five = (table.published() for table in nobody.TABLES.values())
    assert three.loc["4"].round(4).to_dict() == {"fedra": 0.1354, "inclusivefl": 0.08}
    assert five["fedra"].equals(three["fedra"])
    assert five.loc["6", "fedra_cover"] == pytest.approx(0.6762)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:client")
def test_a_run_records_the_blocks_that_its_clients_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"depth": 4, "embed_dim": 8, "num_heads": 2}
    changes = {
        "rounds": 2,
        "batch_size": 8,
        "eval_every": 2,
        "checkpoint_every": 2,
        "max_samples": None,
    }
    data = {
        "dataset": images(tmp_path / "styles.npz", 64, 7, 2),
        "model_options": options,
    }
    little = {
        "dataset": images(tmp_path / "little.npz", 32, 5, 1), "model_options": {**options, "patch_size": 8}, **changes
    }  # fmt: skip
    runs = {depth.PRETRAINING: nobody.SHORT.with_keys(**little)}
    for name in ("4.fedra", "4.fedra_cover"):
        config = nobody.RUNS[name]
        runs[name] = config.with_keys(
            **data, **changes, options={**config.federation.options, "depths": (3, 2)}
        )
    prepare = lambda config, run, folder: depth.prepared(  # noqa: E731
        runs[depth.PRETRAINING], config, run, folder
    )
    item = small(monkeypatch, replace(nobody.STUDY, prepare=prepare), runs)
    folder = tmp_path / nobody.NAME
    recipe.train(item, folder, seeds=1, progress=False)
    assert made(folder) == {f"{name}-0" for name in runs}
    header, frame = rows.read(folder / "4.fedra-0.jsonl")
    held = frame[frame["metric"] == nobody.BLOCKS]
    again = allocations.allocations(header["about"]["config"], 2, 0, 2)
    which = [
        ",".join(map(str, np.flatnonzero(again[k, c])))
        for k in range(2)
        for c in range(2)
    ]
    assert held["variant"].tolist() == which
    _, covered = rows.read(folder / "4.fedra_cover-0.jsonl")
    monkeypatch.setitem(depth.VIT, "depth", 4)
    assert set(nobody.without_client(covered, "fedra_cover")) == {0}
