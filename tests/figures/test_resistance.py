"""Ten wrong cells: the draws are as the page says, and its table is that of the rows."""

import numpy as np
import pandas as pd
import pytest

from figures.decision import resistance as made
from fl_core.data.preprocessing import fences

ROWS = pd.read_csv(made.ROWS)


def test_the_page_is_made_from_the_rows():
    page = made.PAGE.read_text(encoding="utf-8")
    assert made.written(page) == page


@pytest.mark.parametrize("name", made.NAMES)
def test_a_draw_multiplies_ten_numbers_and_fences_find_them(name):
    table = made.table_of(name)
    assert made.with_wrong_cells(table, 0) is table.frame
    client = table.keys["client_column"]
    owner = pd.factorize(table.frame[client])[0]
    for draw in range(1, made.DRAWS + 1):
        wrong = made.with_wrong_cells(table, draw)
        plain = table.frame.select_dtypes("number").astype(float)
        other = wrong[plain.columns].astype(float)
        changed = (plain != other) & plain.notna()
        assert changed.to_numpy().sum() == made.CELLS
        assert np.allclose(other.to_numpy()[changed], 1000 * plain.to_numpy()[changed])
        low, high, _ = fences(other.to_numpy(), owner)
        outside = (other.to_numpy() < low) | (other.to_numpy() > high)
        clipped_cells = (outside & changed.to_numpy()).sum()
        assert clipped_cells == made.CELLS
