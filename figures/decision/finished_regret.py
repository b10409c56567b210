"""Compute the regret of ways of choosing in the tuned and finished study, with intervals over data families.

``REGISTERED_FINISHED.md`` defines every number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd
from scipy import stats

from figures.decision.families import FAMILIES
from figures.decision.finished import (
    DITTO,
    FORGETFUL,
    MAIN_CUT,
    PERSONALISED,
    RESTARTS,
    STUDY,
)
from figures.decision.finished_ways import (
    ARMS,
    FINE_TUNED_OR_NOT,
    MEAN_OF_ALL,
    RANDOM,
    Array,
    Part,
    Way,
    best,
    constant,
    fixed,
    forgetful,
    mean_of,
    other,
    pairs,
    race,
    rates_of,
    rates_then_cuts,
    rule,
    starts_of,
    tried_pairs,
    untuned,
)
from fl_core.statistics import UNKNOWN, Interval, mean_interval, ratio_interval

FIRST_LOOK = ("heart", "tweets_table", "digits_turned", "digits_dirichlet", "mnist_mlp")
LATER = {
    "four rates, then cuts at the best": 1,
    "four rates, then cuts at the best two": 2,
}
"""Ways that were named after the first federations had been seen, with the rates that are left to the other cuts."""
FEWEST_POINTS = 0.01
"""The regret of a random cut below which no ratio is given."""


def ways(parts: Sequence[Part]) -> dict[str, Way]:
    """Return every registered way of choosing that all federations have the runs for."""
    return {
        RANDOM: mean_of(inner=True),
        MEAN_OF_ALL: mean_of(inner=False),
        **{cut: fixed(cut) for cut in ARMS},
        f"{MAIN_CUT}, rate not tuned": untuned(MAIN_CUT),
        "sensitivity_ratio": rule("sensitivity_ratio"),
        "its network's usual cut": constant("sensitivity_ratio", parts),
        "race of four, tuned": race(),
        "race of four, tuned: its plan": race(plan=True),
        "four cuts, one rate": race(tuned=False),
        "four rates, one cut": rates_of(MAIN_CUT),
        "four starts, one cut": starts_of,
        "every cut at every rate": pairs,
        **{name: rates_then_cuts(left) for name, left in LATER.items()},
    }


# --- intervals -------------------------------------------------------------------------------------------------


def by_family(parts: Sequence[Part], values: Sequence[float]) -> pd.Series:
    """Return the mean over each family's federations."""
    return (
        pd.Series(list(values), index=[part.family for part in parts], dtype=float)
        .groupby(level=0)
        .mean()
    )


def ratio(values: Array, random: Array) -> Interval:
    """Return a sum over families as a share of a random cut's, with its 95 % interval; NaN where that is too small."""
    return UNKNOWN if random.mean() < FEWEST_POINTS else ratio_interval(values, random)


def sign_test(values: Array) -> tuple[int, int, float]:
    """Return how many families are above and below 0, and the two-sided p of as uneven a split.

    >>> sign_test(np.array([0.1, 0.2, 0.3, 0.0, -0.1]))
    (3, 1, 0.625)
    """
    above, below = int((values > 0).sum()), int((values < 0).sum())
    return (
        above,
        below,
        float(stats.binomtest(above, above + below).pvalue) if above + below else 1.0,
    )


def everyone(part: Part) -> bool:
    """Return whether a federation is in the whole study."""
    return True


def natural(part: Part) -> bool:
    """Return whether the data name a federation's clients."""
    return STUDY[part.name].natural


def new(part: Part) -> bool:
    """Return whether no way of choosing was developed with a federation's data family."""
    return part.family in FAMILIES


def first_look(part: Part) -> bool:
    """Return whether a federation was in the first look at tuned rates."""
    return part.name in FIRST_LOOK


def table(
    parts: Sequence[Part],
    among: Callable[[Part], bool] = everyone,
    reference: Way = Part.reference,
) -> pd.DataFrame:
    """Return the regret of every way of choosing: one line each, in macro-F1 from 0 to 1.

    ``regret`` is the mean over families, with ``low`` and ``high``. ``share`` is ``regret`` divided by that of a random
    cut. ``median``, ``above`` and ``below`` count families against a random cut: above is worse. ``worst`` is the
    greatest regret of a federation.

    Args:
        among: which federations count.
        reference: what a way's score is held against; :func:`highest` is the check that is not cross-fitted.
    """
    chosen = [part for part in parts if among(part)]
    regrets = {
        name: [float(np.mean(reference(part) - way(part))) for part in chosen]
        for name, way in ways(parts).items()
    }
    families = {
        name: by_family(chosen, values).to_numpy() for name, values in regrets.items()
    }
    lines = []
    for name, values in families.items():
        mean, share = mean_interval(values), ratio(values, families[RANDOM])
        above, below, p = sign_test(values - families[RANDOM])
        lines.append({
            "way": name, "regret": mean.value, "low": mean.low, "high": mean.high, "share": share.value,
            "share_low": share.low, "share_high": share.high, "median": float(np.median(values)), "above": above,
            "below": below, "p": p, "worst": max(regrets[name]), "families": len(values), "federations": len(chosen),
        })  # fmt: skip
    return pd.DataFrame(lines)


def highest(part: Part) -> Array:
    """Return the scores of the cut that is best over all seeds: a reference that is not cross-fitted.

    Each cut has the rate with the best mean on validation over all seeds.
    """
    cuts = part.cuts
    scores = [
        cuts.held_out[:, k, best(cuts.validation[:, k].mean(axis=0))]
        for k in range(len(cuts.variants))
    ]
    return max(scores, key=lambda values: float(values.mean()))


def gain(parts: Sequence[Part], first: Way, second: Way) -> dict[str, float]:
    """Return what one way scores above another: mean over families with its interval, median and sign test."""
    values = by_family(
        parts, [float(np.mean(first(part) - second(part))) for part in parts]
    ).to_numpy()
    mean = mean_interval(values)
    above, below, p = sign_test(values)
    return {
        "gain": mean.value, "low": mean.low, "high": mean.high, "median": float(np.median(values)), "above": above,
        "below": below, "p": p, "families": len(values),
    }  # fmt: skip


Asked = tuple[str, Way, Way]
MAIN_COMPARISONS: tuple[Asked, ...] = (
    (f"{MAIN_CUT} against a random cut", fixed(MAIN_CUT), mean_of(inner=True)),
    (f"race of four against {MAIN_CUT}", race(), fixed(MAIN_CUT)),
    ("four rates against four cuts", rates_of(MAIN_CUT), race(tuned=False)),
    ("four rates against four starts", rates_of(MAIN_CUT), starts_of),
)
"""The registered ones, in their order."""
WORTH: tuple[Asked, ...] = (
    ("cut: best against a random one", Part.reference, mean_of(inner=True)),
    (f"cut: best against {MAIN_CUT}", Part.reference, fixed(MAIN_CUT)),
    (f"rate: {MAIN_CUT}, tuned against not", fixed(MAIN_CUT), untuned(MAIN_CUT)),
    (
        f"algorithm: FedAvg and fine-tuning against {MAIN_CUT}",
        other(PERSONALISED),
        fixed(MAIN_CUT),
    ),
    (
        "algorithm: FedAvg and fine-tuning against the best cut",
        other(PERSONALISED),
        Part.reference,
    ),
    (
        "algorithm: FedAvg, fine-tuned or not, against the best cut",
        other(FINE_TUNED_OR_NOT),
        Part.reference,
    ),
    (
        "algorithm: FedAvg and fine-tuning against four rates, then cuts",
        other(PERSONALISED),
        rates_then_cuts(1),
    ),
)
"""What the cut, the rate and the algorithm are worth; over all federations."""
WORTH_OF_EXTRAS: tuple[Asked, ...] = (
    (f"algorithm: Ditto against {MAIN_CUT}", other(DITTO), fixed(MAIN_CUT)),
    ("algorithm: Ditto against the best cut", other(DITTO), Part.reference),
    (
        f"state of the optimiser: {MAIN_CUT}, kept against not",
        fixed(MAIN_CUT),
        forgetful,
    ),
)
"""The same over the federations that have the extra runs."""


def compared(parts: Sequence[Part], asked: Sequence[Asked]) -> pd.DataFrame:
    """Return what the first of two ways scores above the second, one line a question, in macro-F1 from 0 to 1."""
    return pd.DataFrame(
        [{"what": what, **gain(parts, first, second)} for what, first, second in asked]
    )


def worth(parts: Sequence[Part]) -> pd.DataFrame:
    """Return what the cut, the rate, the algorithm and the optimiser's state are worth."""
    extras = [part for part in parts if {DITTO, FORGETFUL} <= part.kinds.keys()]
    found = [
        compared(parts, WORTH),
        *([compared(extras, WORTH_OF_EXTRAS)] if extras else []),
    ]
    return pd.concat(found, ignore_index=True)


def winners(parts: Sequence[Part]) -> pd.DataFrame:
    """Return by federation each cut's mean score at its tuned rate, the best cut, and the tuned rates."""
    lines = []
    for part in parts:
        scores = {cut: fixed(cut)(part) for cut in part.cuts.variants}
        means = {cut: float(values.mean()) for cut, values in scores.items()}
        top = max(means, key=means.__getitem__)
        rate = STUDY[part.name].rates[part.cuts.rate(0, part.cut(MAIN_CUT))]
        lines.append(
            {
                "federation": part.name,
                "family": part.family,
                **means,
                "best": top,
                "rate": rate,
            }
        )
    return pd.DataFrame(lines)


def at_edge(parts: Sequence[Part]) -> float:
    """Return the share of cuts and seeds whose tuned rate is the least or the greatest that was tried."""
    found = [
        part.cuts.rate(seed, k) in (0, part.cuts.validation.shape[2] - 1)
        for part in parts for seed in part.seeds for k in range(len(part.cuts.variants))
    ]  # fmt: skip
    return float(np.mean(found))


def unstopped(parts: Sequence[Part]) -> float:
    """Return the share of runs that trained all their rounds without a stop."""
    return float(
        np.mean(
            [
                np.nanmean(
                    part.cuts.rounds >= (STUDY[part.name].config.federation.rounds or 0)
                )
                for part in parts
            ]
        )
    )


def costs(parts: Sequence[Part]) -> pd.DataFrame:
    """Return the rounds that a way of choosing trains, in runs of the main cut at the rate of who tunes nothing.

    A tuned way pays for the rates of its cuts in one other seed, and then for its run.
    """

    def rounds(part: Part, cuts: Sequence[str]) -> float:
        return float(
            np.nansum(
                part.cuts.rounds[:, [part.cut(cut) for cut in cuts]], axis=(1, 2)
            ).mean()
        )

    def once(part: Part, cuts: Sequence[str], tuned: bool) -> float:
        places = [part.cut(cut) for cut in cuts]
        found = [
            part.cuts.rounds[seed, k, part.cuts.rate(seed, k) if tuned else part.base]
            for seed in part.seeds for k in places
        ]  # fmt: skip
        return float(np.nansum(found)) / len(part.seeds)

    def later(part: Part, left: int) -> float:
        found = [
            part.cuts.rounds[seed, k, r]
            for seed in part.seeds
            for k, r in tried_pairs(part, seed, left)
        ]
        return float(np.nansum(found)) / len(part.seeds)

    lines = []
    for part in parts:
        one = once(part, [MAIN_CUT], tuned=False)
        starts = float(np.nansum(part.kinds[RESTARTS].rounds, axis=(1, 2)).mean())
        lines.append({
            f"{MAIN_CUT}, rate not tuned": one,
            MAIN_CUT: rounds(part, [MAIN_CUT]) + once(part, [MAIN_CUT], tuned=True),
            "race of four, tuned": rounds(part, ARMS) + once(part, ARMS, tuned=True),
            "four cuts, one rate": once(part, ARMS, tuned=False),
            "four rates, one cut": rounds(part, [MAIN_CUT]),
            "four starts, one cut": one + starts,
            "every cut at every rate": rounds(part, part.cuts.variants),
            **{name: later(part, left) for name, left in LATER.items()},
        })  # fmt: skip
    found = pd.DataFrame(lines, index=[part.name for part in parts])
    return found.div(found[f"{MAIN_CUT}, rate not tuned"], axis=0)
