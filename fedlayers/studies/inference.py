"""The evidence of a race on its leading arm."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from fl_core.rows import CLASSIFICATION, MAIN

DECIDED, UNDECIDED = "decided", "undecided"

UNSHOWN = "no arm shown to be better than the base rate"

NOTHING = "nothing better than the base rate"

VERDICTS = {
    DECIDED: "every other arm is significantly worse than the leader, or refused",
    UNDECIDED: "some arms show no significant difference from the leader, or have no final score",
    UNSHOWN: "no arm has a significantly lower loss than the base rate",
    NOTHING: "every arm has a significantly higher loss than the base rate",
}


@dataclass(frozen=True)
class Inference:
    """The evidence of a race on its leading arm.

    Attributes:
        verdict: one of :data:`VERDICTS`.
        remaining: the leader, then the arms that are not significantly worse than it.
        differences: a line for each other arm: leader - arm in the score that ranks, its simultaneous 95 % interval,
            ``p_value`` (corrected by Holm for all pairs of arms) and ``excluded``.
        main: the score that ranks, and is compared.
        seeds: number of seeds. With one, the differences hold for this run only.
        refused: the arms whose loss is significantly above the base rate's.
        unfinished: the arms that failed or diverged. They are not excluded.
    """

    verdict: str
    remaining: tuple[str, ...]
    differences: pd.DataFrame
    main: str = MAIN[CLASSIFICATION]
    seeds: int = 1
    refused: tuple[str, ...] = ()
    unfinished: tuple[str, ...] = ()

    @property
    def leader(self) -> str:
        """The arm with the best score."""
        return self.remaining[0] if self.remaining else ""
