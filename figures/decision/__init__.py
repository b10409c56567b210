"""How well ways of choosing the shared layers do, over many federations: what is compared, the runs, the regret."""

from figures.decision import beyond, noise, nulls, prior, privacy, regret, runs, studies

__all__ = ["beyond", "noise", "nulls", "prior", "privacy", "regret", "runs", "studies"]
