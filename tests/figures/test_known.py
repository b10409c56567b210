"""The tables of what each command sees, next to other code that reads the rows."""

import json
import re

import pandas as pd

from figures.decision import first, known
from figures.decision.known_runs import ROWS


def test_the_page_is_made_from_the_rows():
    for made in (known, first):
        page = made.PAGE.read_text(encoding="utf-8")
        assert made.written(page) == page
    page = known.PAGE.read_text(encoding="utf-8")
    assert {name for _, name, _ in known.BLOCK.findall(page)} == set(known.TABLES)
    lines = re.findall(r"^\| `known_.*", known.truth(known.read()), re.MULTILINE)
    plans = [[float(cell) for cell in line.split("|")[2:6]] for line in lines]
    gains = [max(own) - own[0] for own in plans if max(own) > own[0]]
    told = f"gained {min(gains):.1f} to {max(gains):.1f} points of accuracy on it"
    assert told in (known.PAGE.parents[2] / "README.md").read_text(encoding="utf-8")


def test_dealt_draws_are_counted_by_the_registered_rule():
    """Two standard errors of a lead over other clients, in loss; and the first rule's gain over the shared model."""
    rows = pd.read_parquet(ROWS)
    for arm, end, name in (("differ", ", others", 2), ("whether", "", 0)):
        its = rows[(rows["arm"] == arm) & (rows["draw"] > 0)]
        found = [json.loads(text) for text in its["found"]]
        called = 0
        for each in found:
            pairs = [each[f"{w}{end}, loss"] for w in ("own epochs", "training alone")]
            called += any(value > 2 * error for value, error in pairs)
        line = known.whether(known.read()).splitlines()[2 + name]
        assert f"| {called} of {len(found)} |" in line


def test_a_claim_needs_references_apart_and_an_interval_beyond_their_middle():
    apart = {"ratio labels": [1.0, 0.1], "ratio permuted": [0.2, 0.1]}
    assert known.claim(apart | {"ratio": [0.9, 0.1]}) == "head"
    assert known.claim(apart | {"ratio": [0.3, 0.1]}) == "before"
    assert known.claim(apart | {"ratio": [0.7, 0.1]}) == ""
    assert known.claim({**apart, "ratio labels": [0.1, 0.1], "ratio": [0.9, 0.1]}) == ""
    assert known.claim(apart | {"ratio": [float("nan")] * 2}) == ""


def test_the_stored_study_of_depth_is_explained_and_quoted_right():
    rows = pd.read_parquet(ROWS.with_name("depth.parquet"))
    folder = ROWS.parent / "depth_data"
    lines = (folder / "README.md").read_text(encoding="utf-8").splitlines()
    cells = [line.split("|")[1] for line in lines if line[:3] == "| `"]
    assert re.findall(r"`(\w+)`", " ".join(cells)) == list(rows.columns)
    scored = rows[(rows["seed"] < 4) & rows["arm"].isin(["0", "6", "12", "all"])]
    points = scored["test_macro_f1"].map(lambda each: 100 * sum(each) / len(each))
    keys = ["source", "dose", "arm"]
    means = points.groupby([scored[key] for key in keys]).mean().unstack()
    assert ((means.idxmax(axis=1) == "all").sum(), len(means)) == (8, 10)
    assert round((means["all"] - means["0"]).min()) == -15
