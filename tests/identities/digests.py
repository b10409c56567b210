"""Digests of small runs of every algorithm: the server's model, the scores and the plan.

They show that a change of structure or of names changes no bit. There is a table for each kind of processor. Write
this one's with ``python -m tests.identities.digests``. A change that means to alter bits does so in its own commit.
"""

import hashlib
import json
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import nn

from diagnostics.measure import instruments
from fl_core.algorithms import find, registry
from fl_core.rounds.recorder import Recorder
from fl_core.run import runner
from tests.conftest import BLOCKS, CONFIG, TOY

TABLE = Path(__file__).with_name("digests.json")
MODELS = frozenset(("global", "personal"))
METRICS = frozenset(
    ("accuracy", "macro_f1", "loss", "auroc", "auprc", "balanced_accuracy", "ece")
)
COLUMNS = ("round", "model", "split", "client", "metric")
"""The scores that the table digests: new metrics, columns and formats of rows do not change it."""

OWN_STEPS = {"keep_optimizer": True, "eval_every": 2, "participation": 0.5}
DROPOUT = {
    "model": "cifar_cnn",
    "model_options": {"width": 0.02, "dropout": 0.4},
    "momentum": 0.9,
    **OWN_STEPS,
}
VARIANTS = {
    "fedavg, adamw": {"optimizer": "adamw", "amsgrad": True, "keep_optimizer": True},
    "fedavg, clipped": {"max_grad_norm": 0.5, "momentum": 0.9, "weight_decay": 0.1},
    "fedavg, dropout": {**DROPOUT, "client_dropout": 0.3},
    "scaffold, dropout": DROPOUT,
    "ditto, dropout": DROPOUT,
    "fedbn, norms": {**OWN_STEPS, "model": "resnet8", "model_options": {}},
    "fedavg, focal": {"loss": "focal", "class_weights": "1,2,0.5"},
    "fedavg, uniform": {"client_weights": "uniform", "client_dropout": 0.3},
    "anti, when": {"options": {"unfreeze": (0, 1), "base": "fedprox", "mu": 1}},
    "apfl, fixed": {"options": {"adapt": False, "alpha": 0.7}},
    "depthfl, exits": {"options": {"exits": (1,), "ensemble": False, "ramp": 2}},
    "fedala, layers": {"options": {"layers": 2, "first": 3}},
    "fedamp, cloud": {"options": {"start": "cloud", "sigma": 4}},
    "fedfomo, explores": {"options": {"downloads": 1}, "rounds": 4},
    "fedlama, rarely": {"options": {"phi": 3}, "rounds": 4},
    "fedlp, rarely": {"options": {"keep": 0.3}},
    "fedpft, at once": {"options": {"alternate": False, "personal_head": True}},
    "fedpft, bare": {"options": {"contrast": False, "heads": 2}},
    "fedra, cover": {"options": {"allocation": "cover", "random_depths": True}},
    "fedper, adapters": {"adapt": "lora:r=2,dropout=0.5"},
    "fedper, auto": {"plan": "auto", "participation": 0.5},
    "fedrep, head": {"options": {"head_epochs": 3}, "epochs": 2},
    "heurpfedla, one": {"options": {"k": 1}},
    "local_adaptation, at": {"options": {"finetune_epochs": 2, "finetune_at": (1,)}},
    "playerfl_plus, rarely": {"threshold": 1.05, "eval_every": 2},
    "pfedhn, clipped": {"options": {"local_clip": 0.1}},
    "pfedpt, narrow": {"options": {"pad": 1}},
}
"""Runs with other options: algorithm and a word, then the keys."""


def config_for(run):
    """Return the configuration of the small run of an algorithm or a variant."""
    name = run.partition(",")[0]
    config = CONFIG.with_keys(
        rounds=2,
        participation=0.75,
        stack="off",
        model="mlp",
        model_options={"sizes": (8, 6)},
    )
    if find(name).needs_blocks:
        config = config.with_keys(model="vit", model_options=BLOCKS["vit"])
    return config.with_keys(algorithm=name, **VARIANTS.get(run, {}))


def digests(engine, out=None):
    """Return the digests of a finished run, whose rows are in a run directory if one is given."""
    lines = engine.listener(Recorder).rows
    if out is not None:
        lines = map(json.loads, (out / "rows.jsonl").read_text("utf-8").splitlines())
    plan = engine.algorithm.plan
    digested = {
        "model": _tensors(engine.server.trees["model"]),
        "scores": sorted(
            _score(row)
            for row in lines
            if row.get("metric") in METRICS and row["model"] in MODELS
        ),
        "plan": [
            (layer.name, layer.tensors, layer.name in plan.shared)
            for layer in plan.layers
        ]
        if plan
        else [],
    }
    return {name: _digest(value) for name, value in digested.items()}


def machine():
    """Return what the bits depend on: the instructions, and the bits of fixed computations for a model and a row."""
    torch_state = torch.random.get_rng_state()
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 3)
    )
    x, y = torch.randn(40, 1, 6, 6), torch.arange(40) % 3
    torch.random.set_rng_state(torch_state)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for _ in range(10):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    logits = net(x).detach().double().numpy()
    falling = -np.sort(-logits, axis=1)
    row = [
        np.exp(logits - logits.max(axis=1, keepdims=True)),
        np.log1p(np.exp(falling[:, 1:])),
        logits.T @ logits,
    ]
    return {
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "model": _digest(_tensors(net.state_dict())),
        "row": _digest(
            [
                repr(float(value))
                for array in row
                for value in (*array.flat, array.sum(), array.mean())
            ]
        ),
    }


def _score(row):
    """Return a score with all its digits. Costs, times and the run's random name are left out."""
    return [str(row[name]) for name in COLUMNS] + [repr(row["value"])]


def _tensors(tensors):
    """Return the name, the type, the shape and the bytes of each tensor."""
    return [
        [
            name,
            str(tensor.dtype),
            str(tuple(tensor.shape)),
            tensor.detach().numpy().tobytes().hex(),
        ]
        for name, tensor in sorted(tensors.items())
    ]


def _digest(value):
    return hashlib.sha256(
        json.dumps(value, sort_keys=True, default=str).encode()
    ).hexdigest()[:16]


OWN = {"data": TOY, "instruments": instruments}


@cache
def played(run, trained_by=None):
    """Run an algorithm or a variant, in this process unless another place is given."""
    return runner.run(config_for(run), trained_by=trained_by, **OWN)


def stored():
    """Return the tables, that of this processor first."""
    tables, machine_name = json.loads(TABLE.read_text(encoding="utf-8")), machine()
    return sorted(tables, key=lambda table: table["machine"] != machine_name)


def main():
    """Run every algorithm and variant, and write the table. If one of this processor changes, it is the only one."""
    runs = {run: digests(played(run)) for run in sorted({*registry(), *VARIANTS})}
    table, others = {"machine": machine(), "runs": runs}, stored()
    if others[0]["machine"] == table["machine"]:
        others = others[1:] if others[0] == table else []
    TABLE.write_text(json.dumps([table, *others], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
