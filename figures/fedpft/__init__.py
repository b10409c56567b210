"""Figures and tables of FedPFT: its feature transformation, its data, and what it sends."""

from figures.fedpft import counts, dealt, federations, fitted, insides, parts, pictures, settings, stages

__all__ = ["counts", "dealt", "federations", "fitted", "insides", "parts", "pictures", "settings", "stages"]
