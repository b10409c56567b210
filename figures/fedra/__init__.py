"""Figures and tables of FedRA: clients of unequal depth."""

from figures.fedra import depth, tables

__all__ = ["depth", "tables"]
