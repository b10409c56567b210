"""pFedLA: weights and classes, weights by layer, and what retaining layers saves."""

from figures.pfedla import costs, overlap, weights

__all__ = ["costs", "overlap", "weights"]
