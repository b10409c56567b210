"""``python -m docs.answers``: writes the page of thirty answers, which random tables of losses give."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from diagnostics.tuning.permutation import Difference
from fedlayers.decision.answer import Answer
from fedlayers.decision.table import (
    BASE_RATE,
    FEDAVG,
    TEST,
    VALIDATION,
    LossTable,
    Part,
)
from fedlayers.decision.verdict import answer
from fedlayers.decision.ways import ALONE, SHARE_ALL, SHARE_SOME
from fl_core.layers import Layer
from fl_core.plan import LayerPlan
from fl_core.rows import CLASSIFICATION, REGRESSION

PAGE = Path(__file__).parent / "results" / "thirty_answers.md"
HEAD = """# Thirty answers

Each answer below comes from a random table of losses: six ways, the base rate, a pooled model, three clients.
Nothing was trained. The page shows every form that an answer takes, so that a reader can look for contradictions.
`python -m docs.answers` writes it, and a test compares it.
"""
LAYERS = tuple(Layer(name, (f"{name}.weight",)) for name in ("fc1", "fc2", "fc3"))
PLANS = {
    FEDAVG: LayerPlan(LAYERS, ("fc1", "fc2", "fc3")),
    "local": LayerPlan(LAYERS, ()),
    "head_local": LayerPlan(LAYERS, ("fc1", "fc2")),
}
ACTIONS = {
    FEDAVG: SHARE_ALL,
    "local": ALONE,
    "head_local": SHARE_SOME,
    "linear_fedavg": SHARE_ALL,
    "linear_local": ALONE,
    "boosting_local": ALONE,
}
NAMES = (BASE_RATE, *ACTIONS, "linear_pooled")


def part(
    losses: NDArray[np.float64],
    client: NDArray[np.int64],
    group: NDArray[np.int64] | None = None,
) -> Part:
    """Return a way's losses in one seed and split; every client counts alike."""
    sizes = np.bincount(client)
    weight = 1 / sizes[client] / len(sizes)
    groups = np.arange(len(losses)) if group is None else group
    mean = float(weight @ losses)
    return Part(mean, np.asarray(losses, float), weight, groups, client)


def table_of(
    means: Mapping[str, float],
    seeds: int = 1,
    n: int = 60,
    clients: int = 3,
    noise: float = 0.1,
    seed: int = 0,
    score: str = "loss",
) -> LossTable:
    """Return a table of ways with the given means. Test samples are the same in all seeds.

    Args:
        means: of each way. ``n``: samples of each split. ``noise``: standard deviation of a sample's loss.
    """
    draw = np.random.default_rng(seed)
    client = np.arange(n) % clients
    tests = {way: mean + noise * draw.normal(size=n) for way, mean in means.items()}
    parts = {}
    for number in range(seeds):
        for way, mean in means.items():
            validation = mean + noise * draw.normal(size=n)
            parts[number, way, VALIDATION] = part(validation, client)
            moved = tests[way] + 0.01 * draw.normal(size=n)
            parts[number, way, TEST] = part(moved, client)
    names = tuple(f"client {k}" for k in range(clients))
    return LossTable(parts, score, {VALIDATION: 0.3, TEST: 1.0}, names)


def example(number: int) -> Answer:
    """Return the answer of a random table of losses."""
    draw = np.random.default_rng(number)
    spread, noise = draw.choice((0.05, 0.2)), draw.choice((0.1, 0.4))
    means = dict(zip(NAMES, draw.normal(0.6, spread, len(NAMES)), strict=True))
    means[BASE_RATE] += draw.choice((0.0, 0.3))
    means = {way: max(mean, 0.1) for way, mean in means.items()}
    seeds = int(draw.choice((1, 3)))
    table = table_of(means, seeds=seeds, n=150, noise=noise, seed=number)
    tuning = {
        FEDAVG: (int(draw.choice((0, 1, 4))), 0.01),
        "head_local": (int(draw.choice((0, 2))), 0.01),
    }
    p_value = float(draw.choice((0.001, 0.03, 0.4)))
    groups = (("client 0", "client 1"), ("client 2",))
    return answer(
        table,
        table,
        ACTIONS,
        PLANS,
        task=str(draw.choice((CLASSIFICATION, REGRESSION))),
        tuning=tuning,
        differ=Difference(p_value, (0.21,), (2.0,), 0, 0.08, 150 * seeds, seeds),
        alike=groups if draw.random() < 0.2 else (),
        next="fedlayers export out/choice --out out/choice_models",
    )


def page() -> str:
    """Return the page."""
    parts = [HEAD]
    for number in range(1, 31):
        one = example(number)
        parts.append(
            f"## {number}. `{one.way or 'none'}`\n\n```text\n{one.text()}\n```\n"
        )
    return "\n".join(parts)


if __name__ == "__main__":
    sys.stdout.write(f"{PAGE}\n")
    PAGE.write_text(page())
