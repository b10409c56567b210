"""Networks, samples and tables that tests of several rooms need."""

import random
from itertools import pairwise

import numpy as np
import pandas as pd
import torch
from torch import nn

from fl_core.data.sources import Source
from fl_core.training.loop import train


def mlp(*widths, act=nn.ReLU, norm=False, seed=0):
    """Linear layers of these widths with an activation between them, and weights drawn by the seed.

    With ``norm`` batch normalisation follows the first one.
    """
    torch.manual_seed(seed)
    parts = []
    for width, outputs in pairwise(widths):
        parts += [nn.Linear(width, outputs), act()]
    if norm:
        parts.insert(1, nn.BatchNorm1d(widths[1]))
    return nn.Sequential(*parts[:-1])


def cnn(channels, after="norm", act=nn.ReLU, seed=0):
    """A convolution of images [n, 1, 6, 6] and two linear layers to three classes, with weights drawn by the seed.

    After the convolution come batch normalisation and a ReLU, or with ``after="pool"`` a ReLU and a max pooling.
    """
    torch.manual_seed(seed)
    between, size = [nn.BatchNorm2d(channels), nn.ReLU(inplace=True)], 4
    if after == "pool":
        between, size = [nn.ReLU(inplace=True), nn.MaxPool2d(2)], 2
    convolution = [nn.Conv2d(1, channels, 3), *between, nn.Flatten()]
    return nn.Sequential(
        *convolution, nn.Linear(channels * size**2, 5), act(), nn.Linear(5, 3)
    )


class Wired(nn.Module):
    """A network as its parts by name, in the order given; ``run(network, *inputs)`` is the forward pass."""

    def __init__(self, run, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.run = run

    def forward(self, *inputs):
        return self.run(self, *inputs)


def wired():
    """Batch norm, dropout, an in-place ReLU after a convolution, an LSTM, a layer used twice and one never used."""

    def run(m, x):
        x = m.drop(m.relu(m.norm(m.conv(x))))
        return m.head(m.twice(m.twice(m.lstm(x.transpose(1, 2))[0][:, -1])))

    parts = {
        "conv": nn.Conv1d(2, 3, 3, padding=1),
        "norm": nn.BatchNorm1d(3),
        "relu": nn.ReLU(inplace=True),
    }
    parts |= {
        "drop": nn.Dropout(0.5),
        "lstm": nn.LSTM(3, 4, batch_first=True),
        "twice": nn.Linear(4, 4),
    }
    return Wired(run, **parts, unused=nn.Linear(4, 4), head=nn.Linear(4, 3))


def snapshot(model):
    """Return everything that a measurement must leave alone, by value, and what holds it."""
    ways = [
        f"_{way}{kind}_hooks"
        for way in ("forward", "backward")
        for kind in ("", "_pre")
    ]
    parameters = [*model.parameters()]
    return [
        {name: t.tolist() for name, t in model.state_dict().items()},
        [None if p.grad is None else p.grad.tolist() for p in parameters],
        [(id(p), id(p.grad), p.requires_grad) for p in parameters],
        [id(buffer) for buffer in model.buffers()],
        [m.training for m in model.modules()],
        [len(getattr(m, name)) for m in model.modules() for name in ways],
        torch.get_rng_state().tolist(),
        random.getstate(),
        np.random.get_state()[1].tolist(),
        torch.is_grad_enabled(),
        torch.backends.cudnn.enabled,
        torch.backends.mkldnn.enabled,
    ]


# --- samples ------------------------------------------------------------------------------------------------------


def normal(*shape, seed=0):
    """Numbers drawn by the seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def labelled(n=12, seed=1, shape=(4,), dtype=torch.float32):
    """Samples [n, *shape] with labels of three classes at random."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, *shape, generator=g).to(dtype)
    return x, torch.randint(3, (n,), generator=g)


def separated(n, width, distance=2, seed=0):
    """Samples [n, width] of three classes in turn, each so far from the middle along an axis of its own."""
    y = torch.arange(n) % 3
    return normal(n, width, seed=seed) + distance * torch.eye(width)[y], y


# --- tables, texts and sources ------------------------------------------------------------------------------------

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


def repeated(copies=4, noise=0.01, n=600, width=6):
    """Rows [n, width] of which each stands near so many copies of a random one, in random order."""
    draw = np.random.default_rng(0)
    rows = draw.normal(size=(n // copies, width))
    parts = [rows + noise * draw.normal(size=rows.shape) for _ in range(copies)]
    return draw.permutation(np.concatenate(parts))


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


# --- runs ---------------------------------------------------------------------------------------------------------


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
