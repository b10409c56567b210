"""What a default race loses: by hand, and the counts that the page gives."""

from __future__ import annotations

import pandas as pd
import pytest

from benchmarks.races import ROWS, TABLES, lost


def test_the_loss_is_against_the_arm_that_other_seeds_choose() -> None:
    lines = [  # arm, seed, rate, validation, test
        ("named", 0, None, 0.9, 0.50),
        ("all", 0, 0.1, 0.7, 0.80),
        ("all", 0, 0.2, 0.8, 0.60),  # the rate of "all", though it tests worse
        ("nothing", 0, 0.1, 0.9, 0.95),
        ("all", 1, 0.1, 0.9, 0.10),
        ("all", 1, 0.2, 0.9, 0.70),
        ("nothing", 1, 0.1, 0.9, 0.40),
    ]
    columns = ["arm", "seed", "lr", "validation_auroc", "test_auroc"]
    rows = pd.DataFrame(lines, columns=columns)
    assert lost(rows, "auroc") == pytest.approx(0.60 - 0.50)
    worse = rows.rename(columns=lambda name: name.replace("auroc", "loss"))
    assert lost(worse, "loss") == pytest.approx(0.50 - 0.80)


def test_the_page_counts_the_stored_rows() -> None:
    rows = pd.read_parquet(ROWS)
    of = {name: rows[rows["table"] == name] for name in TABLES}
    points = {
        score: [100 * lost(each, score) for each in of.values()]
        for score in ("macro_f1", "auroc")
    }
    assert sum(value < 1 for value in points["macro_f1"]) == 5
    assert max(points["macro_f1"]) < 5
    assert sum(value < 1 for value in points["auroc"]) == 7
    for each in of.values():
        loss = each.set_index("arm")["test_loss"]
        assert loss["named"] < loss["base_rate"]
