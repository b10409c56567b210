"""Fit the judge of validation curves that ``choose`` uses.

``REGISTERED_JUDGE.md`` defines it. It was fitted on the data families of before, and then frozen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import combinations

import numpy as np
import pandas as pd

from fedlayers.studies.race import Judge, features, judged_round
from figures.decision.families import FAMILIES
from figures.decision.finished import CURVE, CUTS, EVERY, JOBS, STUDY
from figures.decision.finished_ways import ARMS, Array, Part
from figures.recipe import where

PENALTY = 0.1
Curves = Mapping[tuple[str, int, str, int], dict[int, float]]
"""Scores on validation by round, of each federation, seed, cut and place of the rate."""


def known(part: Part) -> bool:
    """Return whether the judge was fitted on this federation's data family."""
    return part.family not in FAMILIES


# --- curves and the fit ----------------------------------------------------------------------------------------


def curves_of(frame: pd.DataFrame) -> Curves:
    """Return the validation curves of packed rows."""
    own = where(frame, metric=CURVE, estimator=CUTS).sort_values("round")
    found = {}
    for (run, seed, cut), part in own.groupby(
        ["run", "seed", "variant"], observed=True
    ):
        job = JOBS[str(run)]
        place = STUDY[job.federation].rates.index(job.config.training.lr)
        rounds = (int(done) for done in part["round"])
        found[job.federation, int(str(seed)), str(cut), place] = dict(
            zip(rounds, part["value"], strict=True)
        )
    return found


def seen(part: Part, curves: Curves, seed: int, cut: int, rate: int) -> Array | None:
    """Return a run's curve up to the judge's share of the planned maximum; None if it diverged."""
    curve = curves.get((part.name, seed, part.cuts.variants[cut], rate))
    if curve is None or np.isnan(part.cuts.validation[seed, cut, rate]):
        return None
    end = judged_round(int(STUDY[part.name].config.federation.rounds or 1), EVERY)
    return np.array([value for done, value in curve.items() if done <= end])


def fit(parts: Iterable[Part], curves: Curves) -> Judge:
    """Fit the judge: all pairs of arms at each rate and seed, each family with the same weight.

    The penalty is on standardised features, not on the constant.
    """
    lines, gaps, families = [], [], []
    for part in parts:
        arms = [k for k, name in enumerate(part.cuts.variants) if name in ARMS]
        for seed in part.seeds:
            for rate in range(part.cuts.validation.shape[2]):
                for a, b in combinations(arms, 2):
                    shallow, deep = (
                        seen(part, curves, seed, cut, rate) for cut in (a, b)
                    )
                    if shallow is not None and deep is not None:
                        lines.append(features(shallow, deep))
                        gaps.append(
                            part.cuts.held_out[seed, b, rate]
                            - part.cuts.held_out[seed, a, rate]
                        )
                        families.append(part.family)
    x, y = np.array(lines), np.array(gaps)
    weights = 1 / pd.Series(families).map(pd.Series(families).value_counts()).to_numpy(
        float
    )
    mean, spread = x.mean(axis=0), x.std(axis=0)
    z = np.column_stack([np.ones(len(x)), (x - mean) / spread])
    penalty = PENALTY * weights.sum() * np.diag([0.0] + [1.0] * x.shape[1])
    found = np.linalg.solve(z.T @ (weights[:, None] * z) + penalty, z.T @ (weights * y))
    slopes = found[1:] / spread
    return Judge(float(found[0] - slopes @ mean), tuple(map(float, slopes)))
