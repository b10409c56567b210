"""The stability of a decision: how often it stays the same when clients and batches are drawn again."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from fl_core.errors import listing
from fl_core.seeds import numpy_generator

from .curve import Curve
from .rules.base import Rule

RESAMPLES = 500


def stability(
    curve: Curve,
    rule: Rule,
    threshold: float,
    chosen: int,
    seed: int,
    resamples: int = RESAMPLES,
) -> dict[str, Any]:
    """Return how often the decision stays the same when clients and their batches are drawn again.

    The bootstrap has two stages. Each resample first draws the number of all clients, with replacement. Then it draws
    one of the resamples of their batches (:mod:`diagnostics.resampling`). If the rows have no resamples, it adds
    independent normal errors of the rows' standard errors, as far as they are known. It combines the values and
    decides. A pair of clients counts as often as both were drawn. A client has no pair with itself.

    Returns:
        A dict with these keys:

        * ``status``
        * ``resamples``: their number
        * ``of``: what was resampled. It names the clients with resampled batches, unless all have them.
        * ``cuts``: layer -> share of the resamples in which it is the last one shared
        * ``agreement``: share of the resamples that decide as all clients do, 0 to 1
        * ``undecided``: share without a decision, because a value was not above 0 or no pair of clients was drawn
    """
    clients = list(curve.clients)
    of = ["clients"] * (len(clients) > 1)
    if curve.redrawn:
        own = [client for client in clients if (client,) in curve.redrawn]
        of.append("batches" if own == clients else f"batches of {listing(own)}")
    of += ["measurement errors"] * curve.noisy
    if not of:
        return {
            "status": "one client and no measurement errors or resampled batches: nothing to resample"
        }
    random = numpy_generator(seed, "stability")
    counts = random.multinomial(
        len(clients), [1 / len(clients)] * len(clients), size=resamples
    )
    tally: Counter[int] = Counter()
    for drawn in counts.tolist():
        times = dict(zip(clients, drawn, strict=True))
        at = random.random() if curve.redrawn else 0.0
        values = curve.resample(times, random, at)
        if values is not None and np.isfinite(values).all() and (values > 0).all():
            tally[rule.cut(values.tolist(), threshold)] += 1
    return {
        "status": "ok",
        "resamples": resamples,
        "of": " and ".join([", ".join(of[:-1]), of[-1]] if of[:-1] else of),
        "cuts": {
            curve.names[count - 1]: tally[count] / resamples for count in sorted(tally)
        },
        "agreement": tally[chosen] / resamples,
        "undecided": 1 - sum(tally.values()) / resamples,
    }
