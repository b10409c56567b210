"""Figures and tables of FedRA: clients of unequal depth."""

from figures.fedra import depth, dinov2, features, further, tables  # noqa: F401
