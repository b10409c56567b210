"""Figures and tables of FedRA: clients of unequal depth."""

from figures.fedra import allocations, depth, tables

__all__ = ["allocations", "depth", "tables"]
