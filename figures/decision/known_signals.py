"""What each command says of a known data set, and what signals say of each layer, all read from one shared model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from sklearn.ensemble import ExtraTreesClassifier

import fedlayers as fl
from diagnostics.measure import diagnose_task
from diagnostics.plots.maps import panels_of
from diagnostics.tuning.copies import Tuner
from diagnostics.tuning.profile import Profile, every
from figures.recipe import where
from fl_core.data.federated import FederatedData
from fl_core.layers import Layer


def commands(name: str, seed: int) -> dict[str, tuple[str, float]]:
    """Return what each command says of a known data set, with its seconds of processor time."""
    found: dict[str, tuple[str, float]] = {}
    seconds = [time.process_time()]
    asked: dict[str, Any] = {"dataset": name, "seed": seed}

    def note(command: str, words: str) -> None:
        seconds.append(time.process_time())
        found[command] = words, seconds[-1] - seconds[-2]

    with TemporaryDirectory() as folder:
        note("hint", "shown" if fl.hint(**asked).skew.low > 0 else "not shown")
        task = fl.assemble(fl.RunConfig(**asked))
        plan = fl.select(diagnose_task(task, ["federation_sensitivity"]))
        note("sensitivity_ratio", f"share {', '.join(plan.shared)}")
        scores = []
        for algorithm, model in (("fedavg", "global"), ("local", "local")):
            out = f"{folder}/{algorithm}"
            run = fl.run(
                **asked, algorithm=algorithm, out=out, rounds=10, progress=False
            )
            at = {"metric": "accuracy", "split": "validation", "model": model}
            rows = where(run.to_frame(), round=10, **at)["value"]
            scores.append(100 * rows.mean())
        note(
            "lead of training alone at round 10", f"{scores[1] - scores[0]:+.0f} points"
        )
        swap = fl.diagnose(f"{folder}/fedavg", metrics="layer_swap", round=5)
        note("layer_swap", str(swap.values("layer_swap").mean(axis=1).idxmax()))
        report = fl.through_time(f"{folder}/fedavg", rounds=[2, 10])
        panels = panels_of(report.layers, report.table)
        outside = sum(panel.outside.to_numpy().any() for panel in panels)
        note("layer map", f"{outside} of {len(panels)} panels")
        choice = fl.choose(**asked, out=f"{folder}/choice", progress=False)
        note("choose", choice.recommended[0].arm)
    return found


def chosen(**asked: Any) -> dict[str, Any]:
    """Return the decision of ``choose``, the accuracy of its model on test samples, and its price in runs."""
    with TemporaryDirectory() as folder:
        choice = fl.choose(**asked, out=folder, progress=False)
    return {
        "named": choice.winner.name if choice.winner else "",
        "left": choice.inference.remaining,
        "arms": [arm.name for arm in choice.arms],
        "test": float(choice.clients["accuracy"].mean()),
        "price": choice.measured.full_runs,
    }


def signals(given: dict[str, Any], layers: Sequence[Layer]) -> dict[str, list[float]]:
    """Return each signal's value of every layer. The layer with the largest is the one that it names.

    Args:
        given: the arguments of a :class:`Tuner` of the shared model.
    """
    tuner, whole = Tuner(**given), every(layers)
    parts = [frozenset(layer.tensors) for layer in layers]
    profile = Profile(tuner)

    def fall(names: frozenset[str]) -> float:
        return profile.mean(profile.of(names).nats).value

    found = {
        "layer_tuning": [fall(part) for part in parts],
        "all but one layer tuned": [fall(whole) - fall(whole - part) for part in parts],
    }
    tuner.workspace.load(given["starts"][0])
    start = {n: p.detach().clone() for n, p in tuner.workspace.params.items()}
    names = [[n for n in layer.parameters if n in start] for layer in layers]

    def vector(tensors: dict[str, torch.Tensor], layer: int) -> torch.Tensor:
        return torch.cat([tensors[name].detach().flatten() for name in names[layer]])

    gradients, changes = [], []
    for k, client in enumerate(given["clients"]):
        gradients.append(gradient(tuner, k))
        own = Tuner(**(given | {"clients": [client], "starts": given["starts"][:1]}))
        own.outputs(whole, 3 * own.training.lr)
        changes.append({n: p - start[n] for n, p in own.workspace.params.items()})
    count = len(layers)
    size = [float(vector(start, k).norm()) for k in range(count)]

    def relative(tensors: list[dict[str, torch.Tensor]]) -> list[float]:
        return [
            float(np.mean([vector(each, k).norm() for each in tensors])) / size[k]
            for k in range(count)
        ]

    units = [
        torch.nn.functional.normalize(torch.stack([vector(g, k) for g in gradients]))
        for k in range(count)
    ]
    pairs = torch.ones(len(gradients), len(gradients)).triu(1).bool()
    return found | {
        "share of parameters": [float(vector(start, k).numel()) for k in range(count)],
        "Auto-RGN": relative(gradients),
        "change after tuning all": relative(changes),
        "gradient conflict": [-float((u @ u.T)[pairs].mean()) for u in units],
    }


def gradient(tuner: Tuner, client: int) -> dict[str, torch.Tensor]:
    """Return the gradient of the loss on a client's training samples at its start."""
    tuner.workspace.load(tuner.starts[client])
    _, x, y = tuner.train[client]
    params = tuner.workspace.params
    tuner.workspace.model.eval()
    loss = tuner.loss(tuner.workspace.forward(params, x), y)
    return dict(zip(params, torch.autograd.grad(loss, [*params.values()]), strict=True))


def inputs_differ(data: FederatedData) -> list[float]:
    """Return how often trees name the client of a validation sample from its pooled inputs, and by chance."""

    def pooled(split: str) -> tuple[Any, Any]:
        own = [each.split(split).x.flatten(1) for each in data.clients]
        client = np.repeat(np.arange(len(own)), [len(each) for each in own])
        return torch.cat(own).numpy(), client

    trees = ExtraTreesClassifier(100, random_state=0).fit(*pooled("train"))
    _, counts = np.unique(pooled("validation")[1], return_counts=True)
    return [float(trees.score(*pooled("validation"))), counts.max() / counts.sum()]
