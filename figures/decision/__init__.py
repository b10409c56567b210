"""Compare ways of choosing the shared layers over many federations, by their regret."""

from figures.decision import beyond, finished_page, judge_page, mix, noise, nulls, prior, privacy, regret, runs, studies

__all__ = [
    *("beyond", "finished_page", "judge_page", "mix", "noise", "nulls", "prior", "privacy", "regret", "runs"),
    "studies",
]
