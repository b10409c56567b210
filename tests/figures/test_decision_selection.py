"""The replays of selection: their published tables are what the stored rows give."""

import pandas as pd
import pytest

from figures.decision import early, selection_page
from figures.decision.selection import BASE, FACTORS, TEMPERED


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "registered"),
    [(selection_page, "REGISTERED_SCORE.md"), (early, "REGISTERED_EARLY.md")],
)
def test_the_published_table_is_that_of_the_rows(page, registered):
    text = selection_page.ROWS.with_name(registered).read_text("utf-8")
    assert page.table().strip() in text


def rows_of(rates):
    """A federation's rows: the base rate's loss, and one evaluation of a cut at so many rates."""
    lines = [("heart@0", "", 0, "test", BASE, 0.5)]
    for k in range(rates):
        for split in ("validation", "test"):
            scores = {"macro_f1": 0.1 * k, "loss": 1.0 - 0.1 * k, TEMPERED: 0.9}
            lines += [
                (f"heart@{k}", "all", 2, split, name, value)
                for name, value in scores.items()
            ]
    columns = ["run", "variant", "round", "split", "metric", "value"]
    return pd.DataFrame(lines, columns=columns).assign(seed=0)


def test_a_federation_counts_once_all_its_rates_have_ended():
    assert not list(selection_page.federations(rows_of(len(FACTORS) - 1)))
    [(name, seed, base, scores)] = selection_page.federations(rows_of(len(FACTORS)))
    assert (name, seed, base) == ("heart", 0, 0.5)
    assert scores.loc[("heart@1", "all", 2), ("test", "macro_f1")] == pytest.approx(0.1)
