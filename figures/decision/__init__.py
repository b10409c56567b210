"""How well ways of choosing the shared layers do, over many federations: what is compared, the runs, the regret."""

from figures.decision import noise, regret, runs

__all__ = ["noise", "regret", "runs"]
