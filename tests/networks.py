"""Networks for tests, each as its parts and how they are called."""

import random

import numpy as np
import torch
from torch import nn


class Wired(nn.Module):
    """Parts by name, in the order given; ``run(network, *inputs)`` is the forward pass."""

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
    own = [*model.parameters()]
    return [
        {name: t.tolist() for name, t in model.state_dict().items()},
        [None if p.grad is None else p.grad.tolist() for p in own],
        [(id(p), id(p.grad), p.requires_grad) for p in own],
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
