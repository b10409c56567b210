"""Patients of four hospitals."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from fl_core.data import arrays, targets
from fl_core.data.preprocessing import FIXED, Preprocessing
from fl_core.data.registry import dataset
from fl_core.data.sources import Source

COLUMNS = (
    "age",
    "sex",
    "cp",
    "trestbps",
    "chol",
    "fbs",
    "restecg",
    "thalach",
    "exang",
    "oldpeak",
)
SCALE = {  # column: (mean, variance), fixed by the released code; not the statistics of these rows
    "age": (53.0872973, 70.1459463),
    "cp": (3.23702703, 0.817756772),
    "trestbps": (132.74405405, 345.493057),
    "chol": (220.23648649, 4884.30934),
    "restecg": (0.64513514, 0.592069868),
    "thalach": (138.75459459, 529.172208),
    "oldpeak": (0.89532432, 1.11317517),
}
PREPARED = Preprocessing(
    COLUMNS,
    FIXED,
    centre=tuple(SCALE[column][0] if column in SCALE else 0.0 for column in COLUMNS),
    spread=tuple(
        SCALE[column][1] ** 0.5 if column in SCALE else 1.0 for column in COLUMNS
    ),
)


@dataset(
    "heart",
    clients=4,
    partition="natural",
    model="heart_mlp",
    batch_size=32,
    rounds=20,
    lr=5e-2,
    loss="player_focal",
    loss_options={
        "gamma": 3.0,
        "alpha": [0.12939189, 0.18108108, 0.22331081, 0.22364865, 0.24256757],
    },
    note="PLayer-FL, Table A.4 and released code",
)
def heart() -> Source:
    """Fed-Heart-Disease: 740 patients of four hospitals, 10 features, diagnosis 0..4 (PLayer-FL).

    Rows with a blank in the ten columns are dropped. Seven columns are standardised with fixed numbers. An exported
    model applies them to raw patients by the columns' names.
    """
    path = Path(__file__).with_name("heart.csv")
    rows = pd.read_csv(path).dropna(subset=COLUMNS)
    y, classes = targets.labels(rows["num"].to_numpy())
    owner, owner_names = arrays.owners(rows["hospital"].to_numpy(object))
    x = rows[list(COLUMNS)].to_numpy(np.float64)
    x = arrays.features(PREPARED.transform(x))
    return Source(
        "heart",
        x,
        y,
        classes,
        owner,
        owner_names,
        columns=COLUMNS,
        preprocessing=PREPARED,
    )
