"""Layer scheduling's tables and sections: runs, accuracies and costs."""

from figures.scheduling import costs, runs, tables

__all__ = ["costs", "runs", "tables"]
