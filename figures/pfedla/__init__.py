"""Figures and tables of pFedLA: its methods, its weights against classes and layers, and bytes saved by retention."""

from figures.pfedla import (
    costs,
    dominant,
    methods,
    overlap,
    retained_layers,
    similar,
    weights,
)

__all__ = [
    "costs",
    "dominant",
    "methods",
    "overlap",
    "retained_layers",
    "similar",
    "weights",
]
