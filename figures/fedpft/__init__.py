"""Figures and tables of FedPFT: its feature transformation, its parts, and what it sends."""

from figures.fedpft import counts, fitted, insides, parts

__all__ = ["counts", "fitted", "insides", "parts"]
