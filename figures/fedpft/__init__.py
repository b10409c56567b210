"""Figures and tables of FedPFT: its feature transformation, its data, and what it sends."""

from figures.fedpft import (
    class_shares,
    counts,
    federations,
    fitted,
    insides,
    longer,
    parts,
    pictures,
    separation,
    settings,
    stages,
)

__all__ = [
    "class_shares",
    "counts",
    "federations",
    "fitted",
    "insides",
    "longer",
    "parts",
    "pictures",
    "separation",
    "settings",
    "stages",
]
