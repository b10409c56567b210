"""Compares clients' representations layer by layer: measures, passes over probe samples, and rows."""

PAIRS = "pairs"
"""The variant of rows that compare different layers, followed by the name of the second client's layer."""
