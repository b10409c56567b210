"""Figures and tables of pFedLA: aggregation weights against classes and layers, and bytes saved by retention."""

from figures.pfedla import costs, overlap, retained, weights

__all__ = ["costs", "overlap", "retained", "weights"]
