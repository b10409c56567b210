"""Compare ways of choosing the shared layers over many federations, by their regret."""

from figures.decision import beyond as beyond
from figures.decision import finished_page as finished_page
from figures.decision import groups as groups
from figures.decision import judge_page as judge_page
from figures.decision import mix_page as mix_page
from figures.decision import noise as noise
from figures.decision import nulls as nulls
from figures.decision import pretrained as pretrained
from figures.decision import prior as prior
from figures.decision import privacy as privacy
from figures.decision import regret as regret
from figures.decision import runs as runs
from figures.decision import studies as studies
