"""The stability of a decision: how often it stays the same when clients and batches are drawn again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fl_core.errors import listing
from fl_core.seeds import numpy_generator

from .curve import Curve
from .rules.base import Rule
from .rules.several import vote

RESAMPLES = 500


@dataclass(frozen=True)
class Opinion:
    """A curve, and the rule that decides from it."""

    curve: Curve
    rule: Rule
    threshold: float


def stability(
    opinions: Sequence[Opinion],
    chosen: int,
    seed: int,
    resamples: int = RESAMPLES,
    joint: Callable[[Sequence[int]], int] = vote,
) -> dict[str, Any]:
    """Return how often the decision stays the same when clients and their batches are drawn again.

    The bootstrap has two stages. Each resample first draws the number of all clients, with replacement. Then it draws
    one of the resamples of their batches, the same for all curves (:mod:`diagnostics.resampling`). If the rows have no
    resamples, it adds independent normal errors of the rows' standard errors, as far as they are known. It combines the
    values and decides. Several curves decide by ``joint`` of their cuts. A pair of clients counts as often as both were
    drawn. A client has no pair with itself.

    Returns:
        A dict with these keys:

        * ``status``
        * ``resamples``: their number
        * ``of``: what was resampled. It names the clients with resampled batches, and the metrics, unless all
          have them.
        * ``cuts``: layer -> share of the resamples in which it is the last one shared
        * ``agreement``: share of the resamples that decide as all clients do, 0 to 1
        * ``undecided``: share without a decision, because a value was not above 0 or no pair of clients was drawn
    """
    clients = list(dict.fromkeys(client for opinion in opinions for client in opinion.curve.clients))
    noisy = any(opinion.curve.noisy for opinion in opinions)
    redrawn: dict[str, list[str]] = {}  # whose batches -> of which metrics
    for curve in (opinion.curve for opinion in opinions if opinion.curve.redrawn):
        own = [client for client in clients if (client,) in curve.redrawn]
        redrawn.setdefault("" if own == clients else f" of {listing(own)}", []).append(curve.metric)
    of = ["clients"] * (len(clients) > 1)
    for whose, metrics in redrawn.items():
        of.append(f"batches{whose}" + f" ({listing(metrics)})" * (len(metrics) < len(opinions)))
    of += ["measurement errors"] * noisy
    if not of:
        return {"status": "one client and no measurement errors or resampled batches: nothing to resample"}
    random = numpy_generator(seed, "stability")
    counts = random.multinomial(len(clients), [1 / len(clients)] * len(clients), size=resamples)
    tally: Counter[int] = Counter()
    for drawn in counts.tolist():
        times = dict(zip(clients, drawn, strict=True))
        at = random.random() if redrawn else 0.0
        cuts = []
        for opinion in opinions:
            values = opinion.curve.resample(times, random, at)
            if values is not None and np.isfinite(values).all() and (values > 0).all():
                cuts.append(opinion.rule.cut(values.tolist(), opinion.threshold))
        if cuts:
            tally[joint(cuts)] += 1
    names = opinions[0].curve.names
    return {
        "status": "ok",
        "resamples": resamples,
        "of": " and ".join([", ".join(of[:-1]), of[-1]] if of[:-1] else of),
        "cuts": {names[count - 1]: tally[count] / resamples for count in sorted(tally)},
        "agreement": tally[chosen] / resamples,
        "undecided": 1 - sum(tally.values()) / resamples,
    }


def agreement(cuts: Mapping[str, int], chosen: int) -> float:
    """Return the share of cuts that equal the chosen one, 0 to 1."""
    return sum(cut == chosen for cut in cuts.values()) / len(cuts)
