"""A dataset from outside: three silos that see the same two moons, each through an instrument turned by its own angle.

fedlayers run --dataset examples.datasets.two_moons_silos:two_moons_silos --algorithm fedper --out runs/moons
fedlayers diagnose runs/moons
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import make_moons

from fl_core.data import dataset

ANGLES = {"west": 0.0, "centre": 60.0, "east": 120.0}
"""By how many degrees each silo's instrument is turned."""


@dataset(
    "two_moons_silos",
    partition="natural",
    model="mlp",
    model_options={"sizes": (16, 16)},
    batch_size=16,
    rounds=20,
    lr=1e-2,
    note="chosen to train well within seconds",
)
def two_moons_silos() -> dict[str, tuple[NDArray[np.float64], NDArray[np.int64]]]:
    """Two moons in the plane, turned differently for each of three silos: feature skew that can be seen.

    Returns:
        {silo: (x, y)}: 200 points x [200, 2] and which moon each lies on, y [200] of 0 and 1.
    """
    silos = {}
    for number, (silo, angle) in enumerate(ANGLES.items()):
        points, moon = make_moons(200, noise=0.15, random_state=number)
        cos, sin = np.cos(np.radians(angle)), np.sin(np.radians(angle))
        silos[silo] = points @ np.array([[cos, sin], [-sin, cos]]), moon
    return silos
