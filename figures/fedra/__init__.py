"""Figures and tables of FedRA: clients of unequal depth."""

from figures.fedra import allocations, depth, features, further, nobody, tables

__all__ = ["allocations", "depth", "features", "further", "nobody", "tables"]
