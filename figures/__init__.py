"""Reproduces the papers' figures and tables: recipes, stored rows, and pictures next to published values."""
