"""Near copies over a split are noted once, with what to do, by the commands and from Python."""

import json
import warnings

import numpy as np
import pandas as pd
import pytest

import fedlayers as fl
from tests.made import repeated

PART = "have a near copy among the training rows"


def table(rows):
    """A table of numbers with a class from the first column, of four clients."""
    columns = {f"c{k}": column for k, column in enumerate(rows.T)}
    labels = (rows[:, 0] > 0).astype(int)
    return pd.DataFrame(columns).assign(client=np.arange(len(rows)) % 4, label=labels)


@pytest.mark.slow
def test_check_run_and_choose_say_it(fedlayers):
    wards = table(repeated())
    wards.to_csv("wards.csv", index=False)
    short = "--dataset wards.csv --rounds 1"
    for line in (
        "check wards.csv",
        f"run {short} --out r",
        f"choose {short} --seeds 2 --out c",
    ):
        fedlayers(line)
        printed = " ".join(fedlayers.err.split())
        assert printed.count(PART) == printed.count("--group-column NAME") == 1, line
    wards.assign(day=np.arange(600) // 4).to_csv("days.csv", index=False)
    fedlayers("check days.csv --group-column day")
    assert PART not in fedlayers.err


def test_python_says_it_in_its_words():
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        fl.run(data=table(repeated()), rounds=1, progress=False)
    warnings_on_copies = [
        str(note.message) for note in notes if PART in str(note.message)
    ]
    assert len(warnings_on_copies) == 1
    assert "group_column='NAME'" in warnings_on_copies[0]


@pytest.mark.parametrize("rows", [2, 3, 12])
def test_few_rows_are_checked_without_it(fedlayers, rows):
    few = table(np.random.default_rng(0).normal(size=(rows, 2)))
    few.assign(client="a", label=np.arange(rows) % 2).to_csv("few.csv", index=False)
    code = 2 if rows == 2 else 0
    fedlayers("check few.csv --json", code=code)
    assert PART not in fedlayers.err
    assert "Traceback" not in fedlayers.err
    assert code or json.loads(fedlayers.out)
