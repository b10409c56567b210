"""Compare ways of choosing the shared layers over many federations, by their regret."""

from figures.decision import depth  # noqa: F401
