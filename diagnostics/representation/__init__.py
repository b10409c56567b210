"""Comparisons of clients' representations layer by layer, probes of features, and t-SNE."""

PAIRS = "pairs"
"""The first word of the variant of rows that compare any layer with any other.

The name of the second client's layer follows it.
"""
