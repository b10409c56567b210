"""The papers' published numbers as data: one file per paper below ``published/``, all in one schema."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from fl_core.errors import check_known

PUBLISHED = Path(__file__).parent / "published"
PAPERS = ("player_fl", "scheduling", "fedpft", "pfedla", "fedra")
KEY = ("place", "setting", "dataset", "model", "method", "quantity", "client", "layer")
"""Columns that tell a paper's numbers apart: no two agree in all of these."""
NUMBERS = ("value", "spread", "low", "high")
COLUMNS = ("place", "how", *KEY[1:], *NUMBERS, "note")


def published(paper: str) -> pd.DataFrame:
    """Return a paper's published numbers, one per row, in printed order.

    What does not apply to a number is empty: ``""`` in a column of text, NaN among the numbers. Differences that a
    paper prints in brackets after its values are left out.

    ========  =======================================================================================================
    column    meaning
    ========  =======================================================================================================
    place     ``Table 1``, ``Fig. 4G`` (with its panel), ``Sec. 5.3``; ``recomputed``: no number of the paper, but the
              same quantity computed elsewhere; ``authors' code, May 2025``: what their code lists at that time
    how       ``printed``; ``printed in the authors' repository``, which repeats the paper's appendix; ``read off,
              ...`` from a picture, so about two digits; of what is recomputed, by what
    setting   what else the table distinguishes: ``dirichlet 0.1``, ``non-iid 1, 100 clients``, ``300 rounds``,
              ``feature skew, [4]*6`` (blocks that each client can hold)
    dataset   the registry's name, otherwise the paper's word in lower case; pFedLA's ``emnist`` has 10 classes
    model     the registry's name, where a table distinguishes models
    method    the registry's name, otherwise the paper's word in lower case (``fedpft w/o l_con``, ``vii``)
    quantity  ``accuracy``, ``macro_f1`` and other scores in percent and loss times 100, as printed; ``... fairness``
              is the variance over clients of scores between 0 and 1, ``... incentive`` the percentage of clients above
              both Local and FedAvg, ``mean rank`` that over datasets (1 is best)
    client    the domain of FedRA's tables; without it a score is that of all clients together
    layer     of a quantity that is measured by layer; of ``shared layers`` the last shared one
    value     as printed, misprints too
    spread    what is printed after ±: half of a 95 % interval over runs (PLayer-FL); FedPFT and pFedLA do not say
    low high  of a range: over sites (read off), or the bounds that are printed (``p < 0.005`` is 0 to 0.005)
    note      misprints, and what had to be inferred (the levels of alpha in FedPFT's tables)
    ========  =======================================================================================================

    Raises:
        UsageError: there is no such paper; names the nearest.
    """
    check_known("paper", paper, PAPERS)
    return pd.read_csv(
        PUBLISHED / f"{paper}.csv",
        dtype={column: str for column in COLUMNS if column not in NUMBERS},
        keep_default_na=False,
        na_values={column: [""] for column in NUMBERS},
    )


def published_table(
    paper: str,
    place: str,
    *,
    rows: str = "method",
    values: str = "value",
    **chosen: str,
) -> pd.DataFrame:
    """Return one published table: methods x its other columns, in printed order.

    ``published_table("player_fl", "Table 1", quantity="macro_f1")`` has methods x datasets. Columns are those of
    :data:`KEY` in which the chosen numbers differ, as levels where they are several; a cell that is not printed is NaN.

    Args:
        rows: the column of :data:`KEY` that becomes the index.
        values: ``value``, ``spread``, ``low`` or ``high``.
        chosen: column of :data:`KEY` = the one wanted, for example ``quantity="accuracy"``.

    Raises:
        UsageError: there is no such paper, place, column or choice; names the nearest.
    """
    check_known("column", rows, KEY)
    check_known("number", values, NUMBERS)
    frame = published(paper)
    for column, value in {"place": place, **chosen}.items():
        check_known("column", column, KEY)
        place_text = paper if column == "place" else f"{paper}, {place}"
        check_known(f"{column} of {place_text}", value, frame[column].unique())
        frame = frame[frame[column] == value]
    levels = [
        key_column
        for key_column in KEY
        if key_column != rows and frame[key_column].nunique() > 1
    ] or ["quantity"]
    pivoted = frame.pivot(
        index=rows, columns=levels if len(levels) > 1 else levels[0], values=values
    )
    printed_columns = frame.set_index(levels).index.unique()
    return pivoted.reindex(index=frame[rows].unique(), columns=printed_columns)
