"""Reproduces the papers' figures and tables: recipes, their stored rows, and pictures beside published values."""
