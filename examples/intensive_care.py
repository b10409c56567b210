"""Write four constructed tables of intensive-care stays: python -m examples.intensive_care FOLDER."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pandas as pd

STAYS = {"cardiac": 1200, "general": 1400, "neuro": 600, "surgical": 800}
DEATHS = {"cardiac": 0.10, "general": 0.19, "neuro": 0.15, "surgical": 0.10}
MEASURED = {
    "heart_rate": (85, 14),
    "systolic": (120, 17),
    "diastolic": (68, 10),
    "temperature": (37.2, 0.6),
    "breaths": (18, 3.5),
    "oxygen": (95, 1.2),
    "consciousness": (11.5, 0.6),
    "urine": (1700, 300),
    "lactate": (2, 0.4),
    "creatinine": (110, 18),
    "urea": (8, 1.6),
    "sodium": (139, 3.5),
    "potassium": (4.2, 0.4),
    "chloride": (104, 4),
    "calcium": (2.2, 0.12),
    "magnesium": (0.9, 0.1),
    "phosphate": (1.1, 0.2),
    "glucose": (8, 1.5),
    "albumin": (32, 4.5),
    "bilirubin": (14, 3),
    "alt": (40, 8),
    "ast": (42, 8),
    "inr": (1.3, 0.15),
    "platelets": (220, 45),
    "haemoglobin": (105, 15),
    "white_cells": (11, 2.2),
    "crp": (90, 20),
    "ph": (7.38, 0.05),
    "pco2": (40, 5.5),
    "po2": (88, 12),
    "bicarbonate": (24, 3),
    "base_excess": (-1, 2.5),
    "fibrinogen": (3.8, 0.7),
    "troponin": (40, 9),
    "weight": (78, 13),
    "height": (171, 9),
    "fluids": (2200, 450),
}
"""The measurements, each with a mean and a standard deviation that a ward may see."""
MISSING = 0.47
"""The share of empty cells in the column with the most; the first columns have none."""


def tables(seed: int = 0) -> dict[str, pd.DataFrame]:
    """Return one table for each ward: an id, age, sex, admission, 37 measurements, and the outcome as text.

    All are constructed. Severity drives twelve measurements, and the risk of death. In each ward the risk also follows
    its own four measurements.
    """
    draw = np.random.default_rng(seed)
    severe = draw.normal(size=12)
    found = {}
    for ward, count in STAYS.items():
        severity, noise = (
            draw.normal(size=count),
            draw.normal(size=(count, len(MEASURED))),
        )
        values = noise + np.pad(
            np.outer(severity, severe), ((0, 0), (0, len(MEASURED) - 12))
        )
        own = draw.choice(np.arange(12, len(MEASURED)), 4, replace=False)
        age = draw.integers(18, 95, count)
        risk = (
            1.5 * severity
            + noise[:, own].sum(1)
            + 0.03 * age
            + draw.logistic(size=count)
        )
        mean, spread = np.transpose(list(MEASURED.values()))
        table = pd.DataFrame((mean + spread * values).round(3), columns=list(MEASURED))
        for column, share in zip(
            MEASURED, np.linspace(0, MISSING, len(MEASURED)), strict=True
        ):
            table.loc[draw.permutation(count)[: round(share * count)], column] = None
        table.insert(
            0, "admission", draw.choice(["elective", "emergency", "transfer"], count)
        )
        table.insert(0, "sex", draw.choice(["m", "f"], count))
        table.insert(0, "age", age)
        table.insert(0, "record_id", draw.permutation(10**6)[:count])
        died = risk > np.quantile(risk, 1 - DEATHS[ward])
        found[ward] = table.assign(outcome=np.where(died, "died", "survived"))
    return found


def main(folder: str) -> None:
    """Write the tables as CSV files, and say what they are."""
    made = tables()
    Path(folder).mkdir(parents=True, exist_ok=True)
    for ward, table in made.items():
        table.to_csv(Path(folder) / f"{ward}.csv", index=False)
    every = pd.concat(made.values())
    print(
        f"{len(every):,} constructed stays in {len(made)} files: {every.shape[1] - 2} features, "
        f"up to {every.isna().mean().max():.0%} missing, {(every['outcome'] == 'died').mean():.0%} died"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
