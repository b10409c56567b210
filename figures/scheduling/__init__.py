"""Figures and tables of layer scheduling: runs, schedules and costs."""

from figures.scheduling import costs, pictures, runs, settings, tables, thawing

__all__ = ["costs", "pictures", "runs", "settings", "tables", "thawing"]
