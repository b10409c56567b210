"""Compare ways of choosing the shared layers over many federations, by their regret."""

from figures.decision import beyond, noise, nulls, prior, privacy, regret, runs, studies

__all__ = ["beyond", "noise", "nulls", "prior", "privacy", "regret", "runs", "studies"]
