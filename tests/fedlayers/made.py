"""Rows of finished runs, made by hand."""

import numpy as np

from fl_core import rows


def frame_of(scores, n_train, models=None):
    """Rows of finished runs of 2 rounds from ``scores[algorithm][seed][client]``, with rows that must not count."""
    found = []
    for algorithm, by_seed in scores.items():
        model = (models or {}).get(algorithm, "personal")
        counted = {"round": 2, "model": model, "split": "test"}
        others = [{"round": 1}, {"split": "validation"}, {"model": "local"}]
        if model == "personal":
            others.append({"model": "global"})
        for (seed, client), value in np.ndenumerate(np.array(by_seed)):
            run = {"algorithm": algorithm, "seed": seed, "client": f"c{client}"}
            run["n_train"] = n_train[client]
            values = {"macro_f1": value, "accuracy": value / 2, "loss": 1 - value}
            for metric, number in values.items():
                found.append(rows.row(metric, number, **run, **counted))
                for other in others:
                    found.append(rows.row(metric, -9.0, **run, **counted | other))
            found.append(rows.row("bytes_up", 100.0, round=2, split="train", **run))
    return rows.frame(found)
