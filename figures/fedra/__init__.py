"""Figures and tables of FedRA: clients of unequal depth."""

from figures.fedra import depth, features, further, tables  # noqa: F401
