"""Skin lesions of four imaging centres, from a file below the data root."""

from __future__ import annotations

from fl_core.data.registry import Location, dataset
from fl_core.data.root import only_classes, open_packed
from fl_core.data.sources import Source

CLASSES = ("BCC", "BKL", "MEL", "NV")
"""The four of eight diagnoses that PLayer-FL keeps, in the order of its class weights."""


@dataset(
    "fed_isic",
    clients=4,
    partition="natural",
    rounds=60,
    loss="player_focal",
    loss_options={
        "gamma": 1.0,
        "alpha": [0.87868852, 0.88131148, 0.82793443, 0.41206557],
    },
    mean=(0.585, 0.500, 0.486),
    std=(0.229, 0.224, 0.225),
    model="isic_cnn",
    note="PLayer-FL, Table A.4 and released code; the official folds, images as stored",
)
def fed_isic(data_root: Location | None) -> Source:
    """Fed-ISIC 2019: skin lesions of four imaging centres, which are the clients; four diagnoses (PLayer-FL)."""
    return only_classes(open_packed("fed_isic", data_root), CLASSES)
