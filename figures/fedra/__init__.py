"""Figures and tables of FedRA: clients of unequal depth."""

from figures.fedra import depth, features, further, nobody, tables

__all__ = ["depth", "features", "further", "nobody", "tables"]
