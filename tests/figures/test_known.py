"""The tables of what each command sees, next to other code that reads the rows."""

import math
import re

import pandas as pd
import pytest

from diagnostics.metrics.base import METRICS
from diagnostics.tuning import differ
from figures.decision import first, known
from figures.decision.known_runs import ROWS


def test_the_page_is_made_from_the_rows():
    for made in (known, first):
        page = made.PAGE.read_text(encoding="utf-8")
        assert made.written(page) == page
    rows, page = known.read(), known.PAGE.read_text(encoding="utf-8")
    assert {name for _, name, _ in known.BLOCK.findall(page)} == set(known.TABLES)
    lines = known.truth(rows).splitlines()[2:]
    plans = [[float(cell) for cell in line.split("|")[2:6]] for line in lines]
    gains = [max(own) - own[0] for own in plans if max(own) > own[0]]
    told = f"gained {min(gains):.1f} to {max(gains):.1f} points of accuracy on it"
    assert told in (known.PAGE.parents[2] / "README.md").read_text(encoding="utf-8")
    screen = page.partition("## Whether")[0]
    for cell in known.whether(rows).splitlines()[4].split("|")[2:5]:
        assert f"in {cell.strip()}" in screen
    claims = known.signals(rows).splitlines()[-1].split("|")[2]
    assert claims in " ".join(METRICS["layer_tuning"].compute.__doc__.split())
    for each in known.of(rows, "commands").values():
        assert each["sensitivity_ratio"][0] == "share fc1"
    for size in known.SMALLER:
        found = known.of(rows, f"size {size}")
        right, runs = map(int, known.count(found, "loss", ["known_labels"]).split("of"))
        enough = 6 * size // 5 >= differ.FEWEST  # a fifth of the samples validates
        assert enough == (right >= 0.8 * runs)
        assert enough or known.count(found, "loss", known.KNOWN, "not shown")[0] == "0"
    assert f" {5 * differ.FEWEST // 6} samples a client are enough" in screen


def test_dealt_draws_are_counted_by_the_registered_rule():
    """Two standard errors of a lead over other clients, in loss; and the first rule's gain over the shared model."""
    rows = known.read()
    for arm, end, line in (("differ", ", others", 4), ("whether", "", 2)):
        found = known.of(rows, arm, dealt=True).values()
        called = 0
        for each in found:
            pairs = [each[f"{w}{end}, loss"] for w in ("own epochs", "training alone")]
            called += any(value > 2 * error for value, error in pairs)
        assert f"| {called} of {len(found)} |" in known.whether(rows).splitlines()[line]


@pytest.mark.parametrize(
    ("value", "labels", "end"),
    [(0.9, 1, "head"), (0.3, 1, "before"), (0.7, 1, ""), (0.9, 0, ""), (math.nan, 1, "")],
)  # fmt: skip
def test_a_claim_needs_references_apart_and_an_interval_beyond_their_middle(
    value, labels, end
):
    found = {"ratio": value, "ratio labels": labels, "ratio permuted": 0.2}
    assert known.claim({name: [each, 0.1] for name, each in found.items()}) == end


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
