"""Planted rows of a leaderboard, whose scores are known."""

from benchmarks.leaderboard.methods import METHODS, SCORED
from benchmarks.leaderboard.runs import KEYS


def row(
    federation,
    method,
    seed,
    clients,
    **more,
):
    """Return a row with these clients' scores, and costs of 1, 2 and 3."""
    empty = dict.fromkeys(sorted(KEYS))
    about = {
        "federation": federation,
        "method": method,
        "seed": seed,
        "clients": clients,
        "status": "ok",
    }
    return {
        **empty,
        **about,
        "setting": {},
        "sent": 1e6,
        "computed": 2e9,
        "stored": 3e3,
        **more,
    }


def rows(
    federations,
    score,
    sizes=(10, 30),
):
    """Return the scored rows of all methods. A client's accuracy is its macro-F1, its log loss 1 minus that."""
    found = []
    for federation in federations:
        for method in METHODS:
            for seed in SCORED:
                values = [score(federation, method, seed, k) for k in range(len(sizes))]
                clients = {
                    f"c{k}": [v, v, 1 - v, n]
                    for k, (v, n) in enumerate(zip(values, sizes, strict=True))
                }
                found.append(row(federation, method, seed, clients))
    return found
