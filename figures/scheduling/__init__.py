"""Figures and tables of layer scheduling: runs, schedules and costs."""

from figures.scheduling import costs, pictures, runs, tables, thawing

__all__ = ["costs", "pictures", "runs", "tables", "thawing"]
