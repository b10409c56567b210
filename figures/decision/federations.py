"""The federations on which ways of choosing the shared layers are compared, named before any of them was run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from fl_core.config import RunConfig

EVALUATIONS = 15
"""Evaluated rounds of a run, at least."""
FURTHER = 1500
"""Samples that score a choice beside the test samples, of all clients together, at most."""
PRETRAINED = "vit_adapters"


@dataclass(frozen=True)
class Federation:
    """One federation of the study.

    Attributes:
        title: as it is shown.
        differs: in what its clients differ, in words.
        seen: whether the way of choosing was developed with it; the others test what was then fixed.
        config: FedPer on it, whose plan is set for each cut.
    """

    title: str
    differs: str
    seen: bool
    config: RunConfig


def _of(title: str, differs: str, seen: bool, *, rounds: int, **settings: Any) -> Federation:
    every = max(1, rounds // EVALUATIONS)
    config = RunConfig(algorithm="fedper", keep_optimizer=True, eval_every=every, checkpoint_every=rounds)
    return Federation(title, differs, seen, replace(config, rounds=rounds, **settings))


GREY: dict[str, Any] = {"model_options": {"width": 0.25}, "batch": 16}
COLOUR: dict[str, Any] = {"model_options": {"width": 0.125, "dropout": 0.0}, "batch": 16}
FEDERATIONS = {
    "fashion_mnist": _of("Fashion-MNIST", "labels", True, dataset="fashion_mnist", samples=1500, rounds=24, **GREY),
    "mnist": _of("MNIST", "labels", True, dataset="mnist", samples=1500, rounds=24, **GREY),
    "cifar10": _of("CIFAR-10", "labels", True, dataset="cifar10", samples=1000, rounds=18, **COLOUR),
    "fed_isic": _of("Fed-ISIC", "hospitals", True, dataset="fed_isic", samples=480, rounds=12, **GREY),
    "heart": _of("Fed-Heart", "hospitals", True, dataset="heart", rounds=20),
    "airline_tweets": _of(
        "airline tweets", "airlines", True,
        dataset="airline_tweets", samples=1500, rounds=12, batch=16, model_options={"width": 64},
    ),
    "pacs": _of("PACS", "styles", True, dataset="pacs", samples=600, rounds=15, **COLOUR),
    "fashion_iid": _of(
        "Fashion-MNIST, IID", "nothing", False,
        dataset="fashion_mnist", partition="iid", samples=1500, rounds=24, **GREY,
    ),
    "pacs_dirichlet": _of(
        "PACS, 8 clients", "styles and labels", False,
        dataset="pacs", model="fmnist_cnn", partition="natural_dirichlet", clients=8, alpha=0.5, samples=800,
        rounds=15, **GREY,
    ),
    "mnist_30": _of(
        "MNIST, 30 clients", "labels (3 classes each)", False,
        dataset="mnist", partition="pathological", classes_per_client=3, clients=30, samples=2400, participation=0.2,
        rounds=48, **GREY,
    ),
    "fashion_20": _of(
        "Fashion-MNIST, 20 clients", "labels", False,
        dataset="fashion_mnist", clients=20, alpha=0.3, samples=2400, participation=0.25, rounds=48, **GREY,
    ),
    "cifar10_resnet": _of(
        "CIFAR-10, ResNet-8", "labels", False,
        dataset="cifar10", model="resnet8", samples=500, rounds=12, batch=16,
    ),
    PRETRAINED: _of(
        "CIFAR-10, pretrained ViT with adapters", "labels", False,
        dataset="cifar10", model="figures.decision.sets:lora_vit", samples=800, rounds=12, batch=16,
    ),
    "tweets_table": _of(
        "tweets as a table, 16 % positive", "airlines", False,
        dataset="figures.decision.sets:tweets_table", samples=2000, rounds=24,
    ),
    "digits_pathological": _of(
        "digits, 10 clients", "labels (3 classes each)", False,
        dataset="digits", partition="pathological", classes_per_client=3, clients=10, rounds=30, lr=1e-3,
    ),
}  # fmt: skip
PRETRAINING = RunConfig(
    dataset="tiny_imagenet32", model="vit", model_options={"depth": 4, "width": 64, "heads": 4, "patch": 4},
    algorithm="fedavg", partition="iid", clients=2, samples=8000, rounds=6, batch=64, lr=1e-3, keep_optimizer=True,
    eval_every=6, checkpoint_every=6,
)  # fmt: skip
"""What the transformer with adapters starts from: itself, trained on other pictures."""


def cuts(layers: int) -> dict[str, int]:
    """The cuts that are tried: name and number of shared layers, counted from the input; at most six.

    >>> cuts(7)
    {'nothing': 0, 'quarter': 2, 'half': 3, 'three_quarters': 5, 'all_but_last': 6, 'all': 7}
    >>> cuts(4)
    {'nothing': 0, 'quarter': 1, 'half': 2, 'all_but_last': 3, 'all': 4}
    """
    half = max(1, layers // 2)
    named = {
        "nothing": 0,
        "half": half,
        "all_but_last": layers - 1,
        "all": layers,
        "quarter": round(layers / 4),
        "three_quarters": round(3 * layers / 4),
    }
    distinct: dict[int, str] = {}
    for name, cut in named.items():
        distinct.setdefault(cut, name)
    return {distinct[cut]: cut for cut in sorted(distinct)}
