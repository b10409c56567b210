"""How well ways of choosing the shared layers do, over many federations: what is compared, the runs, the regret."""

from figures.decision import runs  # noqa: F401  (registers the item)
