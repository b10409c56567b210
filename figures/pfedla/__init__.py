"""pFedLA: weights and classes, and what retaining layers saves."""

from figures.pfedla import costs, overlap

__all__ = ["costs", "overlap"]
