"""Small tables, texts and samples that several tests read."""

import numpy as np
import pandas as pd

from fl_core.data.sources import Source
from fl_core.training.loop import train

SPLITS = ("train", "validation", "test")


WORDS = ("ill", "well")


def frame(n=60, holes=False):
    """Ages and doses of three wards whose scales differ, and a column that is the same everywhere."""
    draw = np.random.default_rng(0)
    table = pd.DataFrame({
        "client": [f"ward_{k % 3}" for k in range(n)],
        "age": draw.normal(50, 10, n).round(1),
        "dose": draw.normal(0, 1e-3, n).round(5),
        "one": 1.0,
        "label": [WORDS[k % 2] for k in range(n)],
    })  # fmt: skip
    if holes:
        table.loc[::7, "dose"] = np.nan
    return table


def written(path, table, **how):
    table.to_csv(path, index=False, **how)
    return path


def train_rows(federated):
    return np.sort(
        np.concatenate([part["train"] for part in federated.partition.indices.values()])
    )


def samples(federated, *splits):
    """Samples of all clients, in the order of the source."""
    parts = [(c, s) for c in federated.clients for s in splits]
    rows = [federated.partition.indices[c.name][s] for c, s in parts]
    x = np.concatenate([c.split(s).x for c, s in parts])
    return x[np.argsort(np.concatenate(rows))]


def targets(n=160):
    """Return a table of two clients with a time, an event and two labels."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(n, 4))
    table = pd.DataFrame(x, columns=list("abcd"))
    table["time"] = draw.exponential(np.exp(-x[:, 0])).round(2)
    table["event"] = (draw.random(n) < 0.7).astype(int)
    return table.assign(
        cough=(x[:, 0] > 0).astype(int),
        fever=(x[:, 1] > 0).astype(int),
        client=["n", "s"] * (n // 2),
    )


TASKS = {
    "survival": {"label_column": "time,event", "exclude_columns": ["cough", "fever"]},
    "multilabel": {"label_column": "cough,fever", "exclude_columns": ["time", "event"]},
}


GOOD, BAD, PLAIN = (
    "good nice great happy",
    "bad late lost rude",
    "the flight was on my way",
)


def lines(n=120):
    """Texts of two clients whose class is in their words."""
    draws = np.random.default_rng(0)
    for k in range(n):
        words = [
            *draws.choice((BAD, GOOD)[k % 2].split(), 3),
            *draws.choice(PLAIN.split(), 4),
        ]
        yield {
            "client": ("north", "south")[k % 3 == 0],
            "label": k % 2,
            "text": f"{' '.join(words)}!",
            "day": k,
        }


LABELS = np.arange(600) * 7 % 10


def source(labels=LABELS, owner=None, is_train=None, **fields):
    y = np.asarray(labels, dtype=np.int64)
    x = np.arange(len(y) * 2, dtype=np.float32).reshape(-1, 2)
    names = (
        tuple(f"site {k}" for k in range(owner.max() + 1)) if owner is not None else ()
    )
    classes = tuple("abcdefghij"[: int(y.max()) + 1])
    return Source("toy", x, y, classes, owner, names, is_train, **fields)


DEMSAR = pd.DataFrame(
    {
        "C4.5": [
            0.763,
            0.599,
            0.954,
            0.628,
            0.882,
            0.936,
            0.661,
            0.583,
            0.775,
            1.000,
            0.940,
            0.619,
            0.972,
            0.957,
        ],
        "C4.5+m": [
            0.768,
            0.591,
            0.971,
            0.661,
            0.888,
            0.931,
            0.668,
            0.583,
            0.838,
            1.000,
            0.962,
            0.666,
            0.981,
            0.978,
        ],
        "C4.5+cf": [
            0.771,
            0.590,
            0.968,
            0.654,
            0.886,
            0.916,
            0.609,
            0.563,
            0.866,
            1.000,
            0.965,
            0.614,
            0.9751,
            0.946,
        ],
        "both": [
            0.798,
            0.569,
            0.967,
            0.657,
            0.898,
            0.931,
            0.685,
            0.625,
            0.875,
            1.000,
            0.962,
            0.669,
            0.975,
            0.970,
        ],
    }
).T


def trained_by(algorithm, space, phase, *how):
    """Train a phase with what its algorithm gives for it, as a client does."""
    problem = algorithm.task_info
    return train(
        space,
        phase,
        *how,
        loss=algorithm.method(phase, "loss"),
        step=algorithm.method(phase, "step") if phase.step else None,
        seed=problem.seed,
        layers=problem.layers,
        frozen=problem.frozen,
    )
