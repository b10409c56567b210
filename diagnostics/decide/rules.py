"""The rules by name: each reads curves or costs and says how many layers, counted from the input, are federated.

A rule of one curve takes the layers' values from input to output, all above 0, and looks for the place where they
rise: the layers before it serve everyone, those after it each client's own task. Only ratios of values matter to it.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_core.errors import UsageError, check_known, listing
from fl_core.seeds import numpy_generator

from .curve import SENSITIVITY, Curve

THRESHOLD = 1.2
RESAMPLES = 500
Cut = Callable[[Sequence[float], float], int]


# --- rules of one curve ----------------------------------------------------------------------------------------


def ratios(values: Sequence[float]) -> list[float]:
    """S_{l+1} / S_l for l = 1 .. L-1, from values that are all above 0."""
    return [after / before for before, after in pairwise(values)]


def sensitivity_ratio(values: Sequence[float], threshold: float = THRESHOLD) -> int:
    """l* = min {l : S_{l+1} / S_l > t}, the number of layers shared; L - 1 if no ratio exceeds t (PLayer-FL, Eq. 3).

    A higher threshold never shares fewer layers. The paper gives no number for t: by the ratios in its Fig. 4, 1.2
    makes the splits of its Table A.2 on six of its seven datasets, and the seventh (Heart) takes about 1.9.
    """
    return next((count for count, ratio in enumerate(ratios(values), 1) if ratio > threshold), len(values) - 1)


def largest_jump(values: Sequence[float], threshold: float = THRESHOLD) -> int:
    """l* = argmax S_{l+1} / S_l, the number of layers shared; the first of equals. No threshold is used."""
    steps = ratios(values)
    return steps.index(max(steps)) + 1


def change_gains(values: Sequence[float]) -> NDArray[np.float64]:
    """By how much a level of its own for the layers after l = 1 .. L-1 lowers the squared error of the log values.

    With y = log S, m_1 and m_2 the means of the first l and of the other L - l values, the error of two levels is
    below that of one by l (L - l) / L (m_2 - m_1)^2. The sign is that of m_2 - m_1: below 0, the level falls.
    """
    y = np.log(np.asarray(values, dtype=np.float64))
    n = np.arange(1, len(y))
    sums = np.cumsum(y)[:-1]
    height = (y.sum() - sums) / (len(y) - n) - sums / n
    height[np.abs(height) <= 1e-12 * np.abs(y).max()] = 0.0  # level, but for rounding
    return np.sign(height) * height**2 * n * (len(y) - n) / len(y)


def change_point(values: Sequence[float], threshold: float = THRESHOLD) -> int:
    """The number of layers before the one change of level in the log values that fits best; L - 1 if none pays.

    Least squares with two levels, each change at the penalty (log t)^2 / 2: what one step by the factor t between
    two layers gains. A change counts where the level rises and the gain of :func:`change_gains` exceeds the penalty;
    of equal gains the first counts. Unlike a ratio of neighbours it sees a rise that several layers share, and does
    not follow one layer that stands out. Higher thresholds share no fewer layers: the change stays, or goes to L - 1.
    """
    gains = change_gains(values)
    best = int(np.argmax(gains))
    return best + 1 if gains[best] > _penalty(threshold) else len(values) - 1


def _penalty(threshold: float) -> float:
    return math.log(max(threshold, 1.0)) ** 2 / 2


def _no_ratio(values: Sequence[float], threshold: float) -> str:
    return "" if max(ratios(values)) > threshold else f"no ratio exceeds {threshold:g}"


def _no_change(values: Sequence[float], threshold: float) -> str:
    pays = change_gains(values).max() > _penalty(threshold)
    return "" if pays else f"no rise of level is worth a step by {threshold:g}"


@dataclass(frozen=True)
class Rule:
    """How a decision is made.

    Attributes:
        summary: one line.
        cut: (values [L], threshold) -> number of layers shared, 1 .. L-1; None where the rule reads something else.
        thresholded: whether the threshold matters.
        lacks: (values, threshold) -> what the curve lacks where the rule shares all but the last layer for want of it.
        reads: ``curve`` (of one metric), ``curves`` (of several), ``names`` (the user's) or what has a budget:
            ``bytes`` or ``flops``.
    """

    summary: str
    cut: Cut | None = None
    thresholded: bool = False
    lacks: Callable[[Sequence[float], float], str] | None = None
    reads: str = "curve"


RULES: dict[str, Rule] = {
    "sensitivity_ratio": Rule(
        "share the layers before the first jump S_{l+1}/S_l above the threshold (PLayer-FL)",
        sensitivity_ratio,
        True,
        _no_ratio,
    ),
    "largest_jump": Rule("share the layers before the largest jump S_{l+1}/S_l", largest_jump),
    "change_point": Rule(
        "share the layers before the one rise of level that best fits log S, if it pays by the threshold",
        change_point,
        True,
        _no_change,
    ),
    "vote": Rule(
        "each of several metrics decides by its own rule; share up to the median of their cuts", reads="curves"
    ),
    "budget_bytes": Rule("share as many first layers as a client's upload a round has bytes for", reads="bytes"),
    "budget_flops": Rule("share as many first layers as the FLOPs of a training sample allow", reads="flops"),
    "manual": Rule("share exactly the layers that are named", reads="names"),
}

VOTERS = {SENSITIVITY: "sensitivity_ratio"}
"""The rule by which a metric votes unless told otherwise; that of any other metric is the next one."""
VOTER = "largest_jump"


def check_asked(rule: str, threshold: float, **given: Any) -> None:
    """Refuse arguments of :func:`diagnostics.decide.select.select` that are missing, or that the rule does not read.

    Raises:
        UsageError: names the rule and the argument.
    """
    chosen = RULES[check_known("rule", rule, RULES)]
    if not (math.isfinite(threshold) and threshold > 0):
        raise UsageError(f"a threshold of {threshold}; it must be above 0")
    budgeted = chosen.reads in ("bytes", "flops")
    if chosen.reads == "names" and given["layers"] is None:
        raise UsageError(f"rule {rule!r} needs the names of the layers to share")
    if chosen.reads != "names" and given["layers"] is not None:
        raise UsageError(f"rule {rule!r} chooses the layers itself; only rule 'manual' takes their names")
    if chosen.reads != "curves" and given["metrics"] is not None:
        raise UsageError(f"rule {rule!r} reads one metric; only rule 'vote' takes several")
    if chosen.reads == "curves" and (given["metric"] is not None or given["variant"] is not None):
        raise UsageError(f"rule {rule!r} reads several metrics; name them with metrics")
    if not budgeted and given["budget"] is not None:
        raise UsageError(f"rule {rule!r} has no budget; budget_bytes and budget_flops have")
    if budgeted and given["budget"] is None:
        raise UsageError(f"rule {rule!r} needs a budget, in {chosen.reads}")
    if budgeted and not (math.isfinite(given["budget"]) and given["budget"] > 0):
        raise UsageError(f"a budget of {given['budget']}; it must be above 0")


# --- several opinions ------------------------------------------------------------------------------------------


def median_cut(cuts: Sequence[int]) -> int:
    """The median of several cuts, which is their majority where there is one; of two middle ones the lower."""
    return statistics.median_low(cuts)


def longest_prefix(costs: Sequence[float], budget: float) -> int:
    """The greatest number of first layers whose costs sum to no more than the budget; 0 if the first is too much."""
    total, count = 0.0, 0
    for count, cost in enumerate(costs, 1):
        total += cost
        if total > budget:
            return count - 1
    return count


# --- how sure is it --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Opinion:
    """A curve with the rule that reads it."""

    curve: Curve
    cut: Cut
    threshold: float


def stability(opinions: Sequence[Opinion], chosen: int, seed: int, resamples: int = RESAMPLES) -> dict[str, Any]:
    """How often the decision stays when the clients and their batches are drawn anew.

    Bootstrap in two stages: each resample draws as many clients as there are, with replacement, and one of the
    resamples of their batches where the rows have some (:mod:`diagnostics.resampling`), the same for all curves;
    elsewhere it adds independent normal errors of the rows' standard errors where they are known. It combines, and
    decides (by the median of the cuts, of several curves). A pair of clients counts as often as both were drawn; a
    client has no pair with itself.

    Returns:
        ``status``; ``resamples``; ``of``, what was resampled; ``cuts``, layer -> share of the resamples in which it
        is the last one shared; ``agreement``, the share that decides as all clients do, 0 to 1; ``undecided``, the
        share without a decision because a value was not above 0 or no pair of clients was drawn.
    """
    clients = list(dict.fromkeys(client for each in opinions for client in each.curve.clients))
    noisy = any(each.curve.noisy for each in opinions)
    redrawn = [each.curve.metric for each in opinions if each.curve.redrawn]
    of = ["clients"] * (len(clients) > 1)
    of += ["batches" if len(redrawn) == len(opinions) else f"batches ({listing(redrawn)})"] * bool(redrawn)
    of += ["measurement errors"] * noisy
    if not of:
        return {"status": "one client and no measurement errors or resampled batches: nothing to resample"}
    random = numpy_generator(seed, "stability")
    counts = random.multinomial(len(clients), [1 / len(clients)] * len(clients), size=resamples)
    found: Counter[int] = Counter()
    for drawn in counts.tolist():
        times = dict(zip(clients, drawn, strict=True))
        at = random.random() if redrawn else 0.0
        cuts = []
        for each in opinions:
            values = each.curve.resampled(times, random, at)
            if values is not None and np.isfinite(values).all() and (values > 0).all():
                cuts.append(each.cut(values.tolist(), each.threshold))
        if cuts:
            found[median_cut(cuts)] += 1
    names = opinions[0].curve.names
    return {
        "status": "ok",
        "resamples": resamples,
        "of": " and ".join([", ".join(of[:-1]), of[-1]] if of[:-1] else of),
        "cuts": {names[count - 1]: found[count] / resamples for count in sorted(found)},
        "agreement": found[chosen] / resamples,
        "undecided": 1 - sum(found.values()) / resamples,
    }


def agreement(cuts: Mapping[str, int], chosen: int) -> float:
    """The share of the cuts that are the chosen one, 0 to 1."""
    return sum(cut == chosen for cut in cuts.values()) / len(cuts)
