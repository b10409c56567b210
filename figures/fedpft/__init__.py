"""Figures and tables of FedPFT: its feature transformation, its parts, its data, and what it sends."""

from figures.fedpft import apart, counts, fitted, insides, others, parts  # noqa: F401
