"""Figures and tables of FedPFT: its feature transformation, its data, and what it sends."""

from figures.fedpft import (
    class_shares,
    counts,
    fitted,
    insides,
    longer,
    parts,
    pictures,
    separation,
)

__all__ = [
    "class_shares",
    "counts",
    "fitted",
    "insides",
    "longer",
    "parts",
    "pictures",
    "separation",
]
