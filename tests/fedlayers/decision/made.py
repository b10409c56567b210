"""Tables of losses with a known truth."""

import numpy as np

from fedlayers.decision.table import TEST, VALIDATION, LossTable, Part


def part(losses, client, group=None):
    """Return a way's losses in one seed and split; every client counts alike."""
    sizes = np.bincount(client)
    weight = 1 / sizes[client] / len(sizes)
    groups = np.arange(len(losses)) if group is None else group
    mean = float(weight @ losses)
    return Part(mean, np.asarray(losses, float), weight, groups, client)


def table_of(means, seeds=1, n=60, clients=3, noise=0.1, seed=0, score="loss"):
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
            held = mean + noise * draw.normal(size=n)
            parts[number, way, VALIDATION] = part(held, client)
            moved = tests[way] + 0.01 * draw.normal(size=n)
            parts[number, way, TEST] = part(moved, client)
    names = tuple(f"client {k}" for k in range(clients))
    return LossTable(parts, score, {VALIDATION: 0.3, TEST: 1.0}, names)
