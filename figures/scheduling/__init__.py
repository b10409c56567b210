"""Figures and tables of layer scheduling: runs, accuracies, data and costs."""

from figures.scheduling import (  # noqa: F401
    costs,
    finetuned,
    pictures,
    runs,
    tables,
)
