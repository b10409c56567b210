"""Figures and tables of FedRA: clients of unequal depth."""

from figures.fedra import depth, features

__all__ = ["depth", "features"]
