"""A rule from outside: share the layers before the knee of the curve.

fedlayers select diagnosis --rule examples.rules.knee:knee --out plan.json
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import fedlayers as fl


@fl.rule(
    summary="share the layers up to the point of the log curve that lies farthest below its chord"
)
def knee(values: Sequence[float]) -> int:
    """l* = argmax_l (c_l - log S_l) with c the straight line from log S_1 to log S_L (Satopaa et al. 2011, Kneedle).

    The number of layers shared, from 1 to L - 1; the first of equals. A curve that never lies below its chord has its
    knee at the first layer.
    """
    logs = [math.log(value) for value in values]
    last = len(logs) - 1
    below = [
        logs[0] + (logs[-1] - logs[0]) * k / last - log
        for k, log in enumerate(logs[:-1])
    ]
    return below.index(max(below)) + 1
