"""Ways of choosing a cut and its rate, from the packed rows of the tuned and finished study.

A cut's rate is chosen by validation in the other seeds. The best cut is chosen by held-out samples of the other seeds.
``REGISTERED_FINISHED.md`` defines every number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from figures.decision.finished import (
    CUTS,
    DECISION,
    DITTO,
    FORGETFUL,
    HELD_OUT,
    JOBS,
    MAIN_CUT,
    PERSONALISED,
    RESTARTS,
    SHARED,
    STOPPED,
    STUDY,
    VALIDATION,
)
from figures.recipe import where

Array = NDArray[np.float64]
SCORE = "macro_f1"
OUTER = ("nothing", "all")
ARMS = ("nothing", "half", MAIN_CUT, "all")
RANDOM, MEAN_OF_ALL = "random cut", "mean of all cuts"
FINE_TUNED_OR_NOT = "fine-tuned or not"
"""FedAvg with as many own epochs as validation prefers, 0 among them."""


@dataclass(frozen=True)
class Scores:
    """Scores of one kind of run in a federation: [seeds, variants, rates]. A run that diverged is NaN.

    Attributes:
        validation, held_out: the mean over clients, weighted by training samples.
        rounds: that were trained.
    """

    variants: tuple[str, ...]
    validation: Array
    held_out: Array
    rounds: Array

    def without_gaps(self, worst: Array) -> Scores:
        """Return the scores with a seed's worst for each run that diverged; on validation that has none."""
        held_out = np.where(
            np.isnan(self.held_out), worst[:, None, None], self.held_out
        )
        return replace(self, held_out=held_out)

    def joined(self, other: Scores, variant: str) -> Scores:
        """Return the scores with one more variant, of other runs with the same rates."""
        k = other.variants.index(variant)
        pairs = [
            (getattr(self, name), getattr(other, name)[:, [k]])
            for name in ("validation", "held_out", "rounds")
        ]
        return Scores(
            (*self.variants, variant), *(np.concatenate(pair, axis=1) for pair in pairs)
        )

    def rate(self, seed: int, variant: int) -> int:
        """Return the rate with the best mean score on validation in all seeds but this one."""
        return best(np.delete(self.validation[:, variant], seed, axis=0).mean(axis=0))

    def tuned(self, seed: int, variant: int) -> float:
        """Return the score on held-out samples at the rate that the other seeds choose."""
        return float(self.held_out[seed, variant, self.rate(seed, variant)])


@dataclass(frozen=True)
class Part:
    """A federation's runs.

    Attributes:
        cuts: those of FedPer, in order of depth.
        kinds: other kinds of runs, by kind.
        base: the place of the rate of somebody who tunes nothing.
        decided: number of shared layers that a rule chose, by rule, one a seed; NaN without a decision.
        layers: shared layers of each cut.
    """

    name: str
    cuts: Scores
    kinds: Mapping[str, Scores]
    base: int
    decided: Mapping[str, Array]
    layers: tuple[int, ...]

    @property
    def family(self) -> str:
        """Return the data family."""
        return STUDY[self.name].family

    @property
    def seeds(self) -> range:
        """Return the seeds' places."""
        return range(len(self.cuts.held_out))

    def cut(self, name: str) -> int:
        """Return the place of a cut."""
        return self.cuts.variants.index(name)

    @property
    def inner(self) -> list[int]:
        """Return the places of the cuts that share some layers."""
        return [k for k, name in enumerate(self.cuts.variants) if name not in OUTER]

    def best_cut(self, seed: int) -> int:
        """Return the best cut on held-out samples of the other seeds, each cut at its rate for this one."""
        others = [other for other in self.seeds if other != seed]
        means = [
            self.cuts.held_out[others, k, self.cuts.rate(seed, k)].mean()
            for k in range(len(self.cuts.variants))
        ]
        return best(np.array(means))

    def reference(self) -> Array:
        """Return the score of the cross-fitted best cut in each seed."""
        return np.array(
            [self.cuts.tuned(seed, self.best_cut(seed)) for seed in self.seeds]
        )


def best(values: Array) -> int:
    """Return the place of the highest number, the first of equal ones; NaN counts as the lowest.

    >>> best(np.array([0.1, np.nan, 0.3, 0.3]))
    2
    """
    return int(np.argmax(np.where(np.isnan(values), -np.inf, values)))


# --- reading ---------------------------------------------------------------------------------------------------


def parts_of(frame: pd.DataFrame) -> list[Part]:
    """Return the federations of packed rows, in the study's order."""
    job = frame["run"].map(JOBS)
    known = frame.assign(
        federation=[each.federation for each in job], kind=[each.kind for each in job]
    )
    known["lr"] = [each.config.training.lr for each in job]
    return [
        _part(name, own)
        for name in STUDY
        if len(own := known[known["federation"] == name])
    ]


def _part(name: str, frame: pd.DataFrame) -> Part:
    each = STUDY[name]
    of_cuts = frame[frame["kind"] == CUTS]
    shared = (
        of_cuts[of_cuts["metric"] == SHARED]
        .groupby("variant")["value"]
        .first()
        .sort_values()
    )
    depths = tuple(str(cut) for cut in shared.index)
    cuts = _scores(of_cuts[of_cuts["estimator"] == CUTS], each.rates, depths)
    worst = np.nanmin(cuts.held_out, axis=(1, 2))
    kinds = {}
    for kind, variants in (
        (FORGETFUL, depths),
        (DITTO, ()),
        (RESTARTS, ()),
        (PERSONALISED, ()),
    ):
        own = frame[frame["estimator"] == kind]
        rates = each.rates if kind != RESTARTS else (each.config.training.lr,)
        if len(own):
            kinds[kind] = _scores(own, rates, variants).without_gaps(worst)
    if tuned := kinds.get(PERSONALISED):
        kinds[FINE_TUNED_OR_NOT] = tuned.joined(cuts.without_gaps(worst), "all")
    rules = frame[frame["metric"] == DECISION].pivot(
        index="variant", columns="seed", values="value"
    )
    decided = {str(rule): values.to_numpy(float) for rule, values in rules.iterrows()}
    assert each.config.training.lr is not None
    base = each.rates.index(each.config.training.lr)
    return Part(
        name,
        cuts.without_gaps(worst),
        kinds,
        base,
        decided,
        tuple(int(count) for count in shared),
    )


def _scores(
    frame: pd.DataFrame, rates: Sequence[float | None], variants: tuple[str, ...]
) -> Scores:
    """Return the arrays of one kind of run; a run that diverged has no scores."""
    variants = variants or tuple(sorted(frame["variant"].unique()))
    seeds = sorted(frame["seed"].unique())
    places = pd.MultiIndex.from_product([seeds, variants, rates])
    shape = len(seeds), len(variants), len(rates)
    keys = ["seed", "variant", "lr"]

    def mean(split: str) -> Array:
        part = where(frame, metric=SCORE, split=split)
        sums = (
            part.assign(product=part["value"] * part["n_train"])
            .groupby(keys)[["product", "n_train"]]
            .sum()
        )
        found: Array = (
            (sums["product"] / sums["n_train"])
            .reindex(places)
            .to_numpy(float)
            .reshape(shape)
        )
        return found

    stopped = frame[frame["metric"] == STOPPED].set_index(keys)["value"].reindex(places)
    return Scores(
        variants,
        mean(VALIDATION),
        mean(HELD_OUT),
        stopped.to_numpy(float).reshape(shape),
    )


# --- ways of choosing ------------------------------------------------------------------------------------------

Way = Callable[[Part], Array]
"""Returns the score on held-out samples that a way of choosing ends with, one a seed."""


def fixed(cut: str) -> Way:
    """Return the way that always takes one cut, at its tuned rate."""
    return lambda part: np.array(
        [part.cuts.tuned(seed, part.cut(cut)) for seed in part.seeds]
    )


def mean_of(inner: bool) -> Way:
    """Return the way that draws a cut, at its tuned rate: an inner one, or any."""

    def way(part: Part) -> Array:
        drawn = part.inner if inner else range(len(part.cuts.variants))
        return np.array(
            [np.mean([part.cuts.tuned(seed, k) for k in drawn]) for seed in part.seeds]
        )

    return way


def untuned(cut: str) -> Way:
    """Return the way that takes one cut at the rate of somebody who tunes nothing."""
    return lambda part: part.cuts.held_out[:, part.cut(cut), part.base]


def rates_of(cut: str) -> Way:
    """Return the way that trains one cut at all rates, and keeps the model that validation prefers."""

    def way(part: Part) -> Array:
        k = part.cut(cut)
        return np.array(
            [
                part.cuts.held_out[seed, k, best(part.cuts.validation[seed, k])]
                for seed in part.seeds
            ]
        )

    return way


def starts_of(part: Part) -> Array:
    """Train the main cut from four starts, at the rate of somebody who tunes nothing; keep what validation prefers."""
    first, others = part.cut(MAIN_CUT), part.kinds[RESTARTS]
    found = []
    for seed in part.seeds:
        validation = np.append(
            part.cuts.validation[seed, first, part.base], others.validation[seed, :, 0]
        )
        held_out = np.append(
            part.cuts.held_out[seed, first, part.base], others.held_out[seed, :, 0]
        )
        found.append(held_out[best(validation)])
    return np.array(found)


def race(arms: Sequence[str] = ARMS, tuned: bool = True, plan: bool = False) -> Way:
    """Return the race of some cuts, each to its stop, by validation in the run itself.

    Args:
        tuned: whether each has its tuned rate, or all the rate of somebody who tunes nothing.
        plan: whether the winner's plan is scored, as the mean over the other seeds' runs, and not its model.
    """

    def way(part: Part) -> Array:
        places = [part.cut(arm) for arm in arms if arm in part.cuts.variants]
        found = []
        for seed in part.seeds:
            rates = [part.cuts.rate(seed, k) if tuned else part.base for k in places]
            won = best(
                np.array(
                    [
                        part.cuts.validation[seed, k, r]
                        for k, r in zip(places, rates, strict=True)
                    ]
                )
            )
            runs = part.cuts.held_out[:, places[won], rates[won]]
            found.append(np.delete(runs, seed).mean() if plan else runs[seed])
        return np.array(found)

    return way


def rates_then_cuts(left: int) -> Way:
    """Return the way that ``choose --tune-rates 4`` goes.

    It trains all but the last layer at four rates, and then the other arms at the best of them. Validation of the run
    itself chooses. It was named after the first federations had been seen.

    Args:
        left: rates at which the other arms are trained.
    """

    def way(part: Part) -> Array:
        found = []
        for seed in part.seeds:
            tried = tried_pairs(part, seed, left)
            won = best(np.array([part.cuts.validation[seed, k, r] for k, r in tried]))
            found.append(part.cuts.held_out[seed, *tried[won]])
        return np.array(found)

    return way


def tried_pairs(part: Part, seed: int, left: int) -> list[tuple[int, int]]:
    """Return the pairs of cut and rate that :func:`rates_then_cuts` trains."""
    main = part.cut(MAIN_CUT)
    scores = np.nan_to_num(part.cuts.validation[seed, main], nan=-np.inf)
    rates = [int(rate) for rate in np.argsort(-scores, kind="stable")]
    others = [part.cut(arm) for arm in ARMS if arm != MAIN_CUT]
    return [
        *((main, rate) for rate in rates),
        *((cut, rate) for rate in rates[:left] for cut in others),
    ]


def pairs(part: Part) -> Array:
    """Train every cut at every rate, and keep the model that validation prefers."""
    count = len(part.seeds)
    won = [best(part.cuts.validation[seed].ravel()) for seed in part.seeds]
    found: Array = part.cuts.held_out.reshape(count, -1)[np.arange(count), won]
    return found


def rule(name: str) -> Way:
    """Return a one-epoch rule: the cut nearest to its decision, at its tuned rate.

    Without a decision it is the main cut.
    """

    def way(part: Part) -> Array:
        return np.array(
            [
                part.cuts.tuned(seed, _nearest(part, part.decided[name][seed]))
                for seed in part.seeds
            ]
        )

    return way


def constant(name: str, parts: Sequence[Part]) -> Way:
    """Return the cut that a rule takes most often in other federations with the same cuts.

    Where there is no other, it is the one in the other seeds.
    """

    def way(part: Part) -> Array:
        others = [
            each
            for each in parts
            if each.layers == part.layers and each.name != part.name
        ]
        found = []
        for seed in part.seeds:
            decisions = [each.decided[name] for each in others] or [
                np.delete(part.decided[name], seed)
            ]
            votes = [_nearest(part, decision) for decision in np.concatenate(decisions)]
            found.append(part.cuts.tuned(seed, int(np.bincount(votes).argmax())))
        return np.array(found)

    return way


def _nearest(part: Part, decision: float) -> int:
    if np.isnan(decision):
        return part.cut(MAIN_CUT)
    return int(np.argmin([abs(count - decision) for count in part.layers]))


def other(kind: str) -> Way:
    """Return another algorithm at its tuned rate.

    Of several variants it is the one that validation prefers in the other seeds.
    """

    def way(part: Part) -> Array:
        scores, found = part.kinds[kind], []
        for seed in part.seeds:
            rates = [scores.rate(seed, k) for k in range(len(scores.variants))]
            means = [
                np.delete(scores.validation[:, k, r], seed).mean()
                for k, r in enumerate(rates)
            ]
            won = best(np.array(means))
            found.append(scores.held_out[seed, won, rates[won]])
        return np.array(found)

    return way


def forgetful(part: Part) -> Array:
    """Return the main cut's score without the optimiser's state, at the rate that suits it so."""
    scores = part.kinds[FORGETFUL]
    return np.array(
        [scores.tuned(seed, scores.variants.index(MAIN_CUT)) for seed in part.seeds]
    )
