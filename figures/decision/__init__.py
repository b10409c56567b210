"""Compare ways of choosing the shared layers over many federations, by their regret."""

from figures.decision import (
    finished_page as finished_page,
    judge_page as judge_page,
)
