"""Compare ways of choosing the shared layers over many federations, by their regret."""

from figures.decision import finished_page

__all__ = ["finished_page"]
