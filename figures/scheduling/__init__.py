"""Figures and tables of layer scheduling: runs, accuracies, data and costs."""

from figures.scheduling import costs, pictures, runs, tables  # noqa: F401
