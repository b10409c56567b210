"""Compare ways of choosing the shared layers over many federations, by their regret."""

from figures.decision import (
    beyond as beyond,
    finished_page as finished_page,
    groups as groups,
    judge_page as judge_page,
    noise as noise,
    nulls as nulls,
    pretrained as pretrained,
    prior as prior,
    privacy as privacy,
    regret as regret,
    runs as runs,
    studies as studies,
)
