"""Natural tables: what is noted of them is what the page of odd tables says."""

from pathlib import Path

import numpy as np
import pandas as pd

from figures.decision.natural_tables import ROWS
from fl_core.data.near_copies import NearCopies

PAGE = Path(__file__).parents[2] / "docs/results/odd_tables.md"


def test_few_natural_tables_have_a_note_of_copies_and_none_a_mark_of_nines():
    rows = pd.read_csv(ROWS)
    read = rows[rows["faults"] == 0]
    shares = read[["neighbours", "chance", "copies"]].to_numpy()
    assert np.isfinite(shares).all()
    noted = [bool(NearCopies(*share).note) for share in shares]
    assert sum(noted) == 1
    assert rows["nines"].sum() == 0
    text = PAGE.read_text(encoding="utf-8")
    assert (
        f"Of {len(rows)} natural tables, {len(read)} are read. One of these has a note of near copies, and none a mark "
        "of nines."
    ) in " ".join(text.split())
