"""Fit the judge of validation curves that ``choose`` uses, and replay races that rest on it.

``REGISTERED_JUDGE.md`` defines every number. The judge was fitted on the data families of before, and then frozen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import pandas as pd

from fedlayers.studies.judge import SHARE, Judge, features, judged_round, smooth
from figures.decision.families import FAMILIES
from figures.decision.finished import CURVE, CUTS, EVERY, JOBS, MAIN_CUT, STUDY
from figures.decision.finished_regret import by_family
from figures.decision.finished_ways import ARMS, Array, Part, best
from fl_core.statistics import mean_interval

PENALTY = 0.1
Curves = Mapping[tuple[str, int, str, int], dict[int, float]]
"""Scores on validation by round, of each federation, seed, cut and place of the rate."""


def known(part: Part) -> bool:
    """Return whether the judge was fitted on this federation's data family."""
    return part.family not in FAMILIES


# --- curves and the fit ----------------------------------------------------------------------------------------


def curves_of(frame: pd.DataFrame) -> Curves:
    """Return the validation curves of packed rows."""
    own = frame[(frame["metric"] == CURVE) & (frame["estimator"] == CUTS)].sort_values(
        "round"
    )
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


def horizon(part: Part, share: float) -> float:
    """Return the round of a share of the planned maximum; the judge's own share ends with an evaluation."""
    rounds = int(STUDY[part.name].config.federation.rounds or 1)
    return float(judged_round(rounds, EVERY)) if share == SHARE else share * rounds


def seen(
    part: Part, curves: Curves, seed: int, cut: int, rate: int, share: float
) -> Array | None:
    """Return a run's curve up to a share of the planned maximum; None if it diverged."""
    curve = curves.get((part.name, seed, part.cuts.variants[cut], rate))
    if curve is None or np.isnan(part.cuts.validation[seed, cut, rate]):
        return None
    return np.array(
        [value for done, value in curve.items() if done <= horizon(part, share)]
    )


def arms(part: Part, among: Sequence[str] = ARMS) -> list[int]:
    """Return the places of the arms, in order of depth."""
    return [k for k, name in enumerate(part.cuts.variants) if name in among]


def fit(parts: Iterable[Part], curves: Curves, share: float = SHARE) -> Judge:
    """Fit the judge: all pairs of arms at each rate and seed, each family with the same weight.

    The penalty is on standardised features, not on the constant.
    """
    lines, gaps, families = [], [], []
    for part in parts:
        for seed in part.seeds:
            for rate in range(part.cuts.validation.shape[2]):
                for a, b in combinations(arms(part), 2):
                    shallow, deep = (
                        seen(part, curves, seed, cut, rate, share) for cut in (a, b)
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


# --- races -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Raced:
    """The result of a race in one seed.

    Attributes:
        score: of its model on held-out samples.
        race: rounds that the arms trained at the given rate.
        total: rounds in all, those that tuned the rate included.
        cut, rate: places of its cut and its rate.
        gap: the judge's sum of gains, or the best score, of the first arm above the second; 0 with one arm.
    """

    score: float
    race: float
    total: float
    cut: int
    rate: int
    gap: float


def raced(
    part: Part,
    curves: Curves,
    seed: int,
    judge: Judge | None,
    share: float = SHARE,
    rates: float = 1.0,
    among: Sequence[str] = ARMS,
) -> Raced:
    """Race arms to a share of the planned maximum, and finish the preferred one.

    Four rates of all but the last layer come first. The best smoothed score on validation chooses the rate. Without a
    judge it also chooses the arm. All finished runs count: a better run of another rate is the model.

    Args:
        rates: the share to which rates are tried.
    """
    main, trained = part.cut(MAIN_CUT), np.nan_to_num(part.cuts.rounds[seed])
    tried = [
        seen(part, curves, seed, main, rate, rates) for rate in range(trained.shape[1])
    ]
    rate = best(np.array([top(curve) for curve in tried]))
    places = arms(part, among)
    racing = {
        cut: curve
        for cut in places
        if (curve := seen(part, curves, seed, cut, rate, share)) is not None
    }
    shown = list(racing.values())
    values = (
        judge.gains(shown).sum(axis=1)
        if judge and share < 1
        else np.array([top(curve) for curve in shown])
    )
    won = list(racing)[best(values)]
    second, first = np.sort(values)[-2:] if len(values) > 1 else (0.0, 0.0)
    spent = {
        cut: min(float(trained[cut, rate]), horizon(part, share)) for cut in places
    }
    spent[won] = float(trained[won, rate])
    tuning = np.minimum(trained[main], horizon(part, rates))
    again = max(
        0.0, spent[main] - float(tuning[rate])
    )  # what is left of a run that tuned
    total = (
        float(tuning.sum())
        + again
        + sum(rounds for cut, rounds in spent.items() if cut != main)
    )
    if rates == 1.0:
        finished = [(main, k) for k in range(len(tried))] + [(won, rate)]
        ends = [top(seen(part, curves, seed, *run, 1.0)) for run in finished]
        won, rate = finished[best(np.array(ends))]
    return Raced(
        float(part.cuts.held_out[seed, won, rate]),
        sum(spent.values()),
        total,
        won,
        rate,
        float(first - second),
    )


def losses(
    part: Part, curves: Curves, judge: Judge | None
) -> list[tuple[float, float, float]]:
    """Return what each race shows and loses, in macro-F1, one line a seed; without a judge, of a full race.

    It shows by how much the forecasts, or the scores, of the first and the second arm differ. Its model and its plan in
    other seeds lose against the best cut.
    """
    share = 1.0 if judge is None else SHARE
    found = []
    for seed in part.seeds:
        one = raced(part, curves, seed, judge, share)
        lost = part.reference() - part.cuts.held_out[:, one.cut, one.rate]
        found.append((one.gap, float(lost[seed]), float(np.delete(lost, seed).mean())))
    return found


def top(curve: Array | None) -> float:
    """Return the best smoothed score of a curve; NaN without one."""
    return (
        float("nan")
        if curve is None or np.isnan(curve).all()
        else float(np.nanmax(smooth(curve)))
    )


Judges = Callable[[Part], Judge | None]
"""The judge of a federation: the frozen one, one fitted without its family, or none."""


def without_family(
    parts: Sequence[Part], curves: Curves, share: float = SHARE
) -> Judges:
    """Return judges that are fitted on the known families but that of the federation."""
    found = {
        family: fit(
            [part for part in parts if known(part) and part.family != family],
            curves,
            share,
        )
        for family in {part.family for part in parts}
    }
    return lambda part: found[part.family]


# --- the numbers -----------------------------------------------------------------------------------------------

THREE = ("nothing", MAIN_CUT, "all")
RACES: Mapping[str, tuple[bool, float, float, Sequence[str]]] = {
    "four rates to the end, four cuts to the end": (False, 1.0, 1.0, ARMS),
    "the same, cuts judged by the frozen judge": (True, SHARE, 1.0, ARMS),
    "the same, cuts judged by their scores": (False, SHARE, 1.0, ARMS),
    "rates and cuts judged early, cuts by the frozen judge": (True, SHARE, SHARE, ARMS),
    "rates and cuts judged early, by their scores": (False, SHARE, SHARE, ARMS),
    "rates and three cuts judged early, cuts by the frozen judge": (True, SHARE, SHARE, THREE),
}  # fmt: skip
"""Whether the judge decides, the share to which cuts are raced, that to which rates are tried, and the arms."""


def table(parts: Sequence[Part], curves: Curves, judges: Judges) -> pd.DataFrame:
    """Return the loss of each race against the best cut, in macro-F1, and its cost: one line each.

    All columns are means over federations. ``more`` is the loss above that of the first line. The unit of ``race`` and
    ``total`` is one run of all but the last layer at the untuned rate. ``planned`` is the race in planned maxima.
    """
    base = np.array(
        [
            np.nanmean(part.cuts.rounds[:, part.cut(MAIN_CUT), part.base])
            for part in parts
        ]
    )
    most = np.array([horizon(part, 1.0) for part in parts])
    lines: list[dict[str, float | str]] = []
    first = np.array([])
    for name, (judged, share, rates, among) in RACES.items():
        each = [
            [
                raced(
                    part,
                    curves,
                    seed,
                    judges(part) if judged else None,
                    share,
                    rates,
                    among,
                )
                for seed in part.seeds
            ]
            for part in parts
        ]
        lost = [
            float(np.mean(part.reference() - [one.score for one in own]))
            for part, own in zip(parts, each, strict=True)
        ]
        values = by_family(parts, lost).to_numpy()
        first = first if lines else values
        mean, more = mean_interval(values), mean_interval(values - first)
        race, total = (
            np.array([np.mean([getattr(one, what) for one in own]) for own in each])
            for what in COSTS
        )
        lines.append({
            "way": name, "lost": mean.value, "low": mean.low, "high": mean.high, "more": more.value,
            "more_low": more.low, "more_high": more.high, "race": np.mean(race / base), "total": np.mean(total / base),
            "planned": np.mean(race / most), "families": len(values),
        })  # fmt: skip
    return pd.DataFrame(lines)


COSTS = ("race", "total")
