"""Figures and tables of pFedLA: its methods, its weights against classes and layers, and bytes saved by retention."""

from figures.pfedla import by_model, costs, methods, overlap, second, weights  # noqa: F401
