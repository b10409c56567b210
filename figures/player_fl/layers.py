"""PLayer-FL's networks, layer by layer, after one epoch and at the end: the study behind its Figs. 1-4 and A.1-A.10.

A run is a dataset at one of three moments. ``first`` is after one local epoch from the common start, which both kinds
of training share. ``independent`` and ``federated`` are the last round's locally trained models before averaging. All
train as the figures' models did: plain cross-entropy and AdamW with a decay of 0.01.

EMNIST's 62 classes and MIMIC-III cannot be had; tweets to six airlines stand for the texts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd

from diagnostics.representation.features import probe_set
from figures import items
from figures.items import Item
from figures.layerwise import SENSITIVITY, Epoch, after_run
from figures.player_fl.released import FIGURE_BATCH
from fl_core.config import RunConfig
from fl_core.run import runner

NAME = "player_fl.layers"
RELEASED = "figures.player_fl.released"
"""The module of what the authors' released code measured."""
FIRST, ALONE, FEDERATED = MOMENTS = ("first", "independent", "federated")


@dataclass(frozen=True)
class Network:
    """One dataset, the network trained on it, and the amount of data measured.

    Attributes:
        title: the dataset's.
        config: its runs.
        last_conv: its last convolution; empty without any.
        published: the dataset whose published curves stand beside it; empty where there are none.
        gradient, curvature: at most so many training samples a client for gradients, and for the Hessian's trace.
        probe: validation samples of all clients together on which representations are compared.
        angle: of these samples, how many Procrustes angles take. They go over all shifts of a map, and so take as long
            as everything else. The paper has none of ISIC.
        incomparable: why measurements are not comparable with the paper's; empty where they are.
        epoch: what differs in the run of one epoch.
    """

    title: str
    config: RunConfig
    last_conv: str = ""
    published: str = ""
    gradient: int = 256
    curvature: int = 256
    probe: int = 256
    angle: int = 256
    incomparable: str = ""
    epoch: Mapping[str, Any] = field(default_factory=dict)

    def at(self, moment: str) -> Network:
        """Return the network with what differs at a moment."""
        if moment == FIRST:
            return replace(self, **self.epoch)
        return self


_COMMON: dict[str, Any] = {
    "optimizer": "adamw",
    "amsgrad": True,
    "weight_decay": 1e-2,
    "keep_optimizer": True,
    "loss": "cross_entropy",
    "batch_size": 128,
}
"""Local training behind the figures, every dataset's with cross-entropy, where tables train two with a focal loss."""
_SMALL = {"batch_size": 16}
_CIFAR = RunConfig(dataset="cifar10", lr=5e-4, rounds=6, **_COMMON | _SMALL)

NETWORKS = {
    "fashion_mnist": Network(
        "Fashion-MNIST",
        RunConfig(dataset="fashion_mnist", lr=7e-4, rounds=8, **_COMMON),
        last_conv="conv3",
        published="fashion_mnist",
        curvature=128,
    ),
    "cifar10": Network(
        "CIFAR-10",
        _CIFAR.with_keys(max_samples=500),
        last_conv="conv5",
        published="cifar10",
        gradient=64,
        curvature=32,
        probe=64,
        angle=64,
        incomparable="500 images and about 4 steps a client",
        epoch={
            "config": _CIFAR.with_keys(max_samples=20_000),
            "gradient": 256,
            "curvature": 64,
            "probe": 256,
            "incomparable": "",
        },
    ),
    "fed_isic": Network(
        "Fed-ISIC",
        RunConfig(
            dataset="fed_isic",
            model="isic_cnn",
            lr=7e-4,
            rounds=6,
            max_samples=400,
            **_COMMON | _SMALL,
        ),
        last_conv="conv5",
        published="fed_isic",
        gradient=64,
        curvature=64,
        probe=64,
        angle=0,
        incomparable="400 images and 1 to 7 steps a client",
    ),
    "heart": Network(
        "Fed-Heart",
        RunConfig(dataset="heart", lr=7.5e-3, rounds=50, **_COMMON),
        published="heart",
    ),
    "airline_tweets": Network(
        "airline tweets",
        RunConfig(
            dataset="airline_tweets",
            lr=1e-3,
            rounds=6,
            model_options={"width": 128},
            **_COMMON | {"batch_size": 64},
        ),
        published="sent140",
        gradient=256,
        curvature=64,
        probe=128,
        angle=128,
        incomparable="tweets to airlines instead of Sent-140",
    ),
}


def run_of(dataset: str, moment: str) -> str:
    """Return the name of a run."""
    return f"{dataset}-{moment}"


def recipes() -> dict[str, RunConfig]:
    """Return the runs by name, three per dataset."""
    runs = {}
    for dataset, network in NETWORKS.items():
        for moment in MOMENTS:
            config = network.at(moment).config
            rounds = 1 if moment == FIRST else int(config.federation.rounds or 1)
            runs[run_of(dataset, moment)] = config.with_keys(
                algorithm="fedavg" if moment == FEDERATED else "local",
                rounds=rounds,
                eval_every=rounds,
                checkpoint_every=rounds,
            )
    return runs


def _measure(task: runner.Task, run: str, folder: Path) -> pd.DataFrame:
    """Record every figure's quantity by the default definition and by the one behind the published figure."""
    dataset, _, moment = run.rpartition("-")
    network = NETWORKS[dataset].at(moment)
    models = Epoch(task) if moment == FIRST else after_run(task)
    gradient_data, curvature_data, single_batch = (
        models.subset(size)
        for size in (network.gradient, network.curvature, FIGURE_BATCH)
    )
    probe = probe_set(task.data, network.probe)
    frames = [
        models.frame(["grad_variance", SENSITIVITY], gradient_data),
        models.frame("grad_variance", single_batch, FIGURE_BATCH, reduction="batch"),
        models.frame("hessian_trace", curvature_data),
        models.frame(f"{RELEASED}:hessian_trace", single_batch, FIGURE_BATCH),
        models.frame("cka", probe=probe),
        models.frame(f"{RELEASED}:{SENSITIVITY}"),
    ]
    if network.angle:
        angle_probe = probe_set(task.data, network.angle)
        frames.append(models.frame(f"{RELEASED}:procrustes", probe=angle_probe))
    if isinstance(models, Epoch):
        frames.append(models.sensitivity("training"))
    rows = pd.concat(frames, ignore_index=True)
    return rows[(rows["client"] != "") & (rows["variant"] != "importance")]


FURTHER_SEEDS = {run_of(dataset, FIRST): 8 for dataset in ("fashion_mnist", "cifar10")}
"""Runs that have more seeds than the others, and how many."""


STUDY = items.register(Item(
    NAME, "Layers of PLayer-FL's networks after one epoch and at the end (Figs. 1-4 and A.1-A.10)",
    recipes(), seeds=4, own_seeds=FURTHER_SEEDS,
    budget="some six hours of one core; a run takes seconds to 17 minutes",
    measure=_measure,
))  # fmt: skip
