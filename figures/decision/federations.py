"""The federations of the comparison of ways to choose the shared layers, named before any of them was run."""

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
        part: ``seen``: the way of choosing was developed with it; ``new``: one of the first list's others, which test
            what was then fixed; ``added``: named later, before it was run; ``confirming``: named when the race to the
            end was registered, before it was run.
        config: FedPer on it, whose plan is set for each cut.
    """

    title: str
    differs: str
    part: str
    config: RunConfig


def _of(title: str, differs: str, part: str, *, rounds: int, **settings: Any) -> Federation:
    every = max(1, rounds // EVALUATIONS)
    config = RunConfig(algorithm="fedper", keep_optimizer=True, eval_every=every, checkpoint_every=rounds)
    return Federation(title, differs, part, replace(config, rounds=rounds, **settings))


GREY: dict[str, Any] = {"model_options": {"width": 0.25}, "batch_size": 16}
COLOUR: dict[str, Any] = {"model_options": {"width": 0.125, "dropout": 0.0}, "batch_size": 16}
FEDERATIONS = {
    "fashion_mnist": _of("Fashion-MNIST", "labels", "seen", dataset="fashion_mnist", max_samples=1500, rounds=24,
    **GREY),
    "mnist": _of("MNIST", "labels", "seen", dataset="mnist", max_samples=1500, rounds=24, **GREY),
    "cifar10": _of("CIFAR-10", "labels", "seen", dataset="cifar10", max_samples=1000, rounds=18, **COLOUR),
    "fed_isic": _of("Fed-ISIC", "hospitals", "seen", dataset="fed_isic", max_samples=480, rounds=12, **GREY),
    "heart": _of("Fed-Heart", "hospitals", "seen", dataset="heart", rounds=20),
    "airline_tweets": _of(
        "airline tweets", "airlines", "seen",
        dataset="airline_tweets", max_samples=1500, rounds=12, batch_size=16, model_options={"width": 64},
    ),
    "pacs": _of("PACS", "styles", "seen", dataset="pacs", max_samples=600, rounds=15, **COLOUR),
    "fashion_iid": _of(
        "Fashion-MNIST, IID", "nothing", "new",
        dataset="fashion_mnist", partition="iid", max_samples=1500, rounds=24, **GREY,
    ),
    "pacs_dirichlet": _of(
        "PACS, 8 clients", "styles and labels", "new",
        dataset="pacs", model="fmnist_cnn", partition="natural_dirichlet", clients=8, alpha=0.5, max_samples=800,
        rounds=15, **GREY,
    ),
    "mnist_30": _of(
        "MNIST, 30 clients", "labels (3 classes each)", "new",
        dataset="mnist", partition="pathological", classes_per_client=3, clients=30, max_samples=2400,
        participation=0.2,
        rounds=48, **GREY,
    ),
    "fashion_20": _of(
        "Fashion-MNIST, 20 clients", "labels", "new",
        dataset="fashion_mnist", clients=20, alpha=0.3, max_samples=2400, participation=0.25, rounds=48, **GREY,
    ),
    "cifar10_resnet": _of(
        "CIFAR-10, ResNet-8", "labels", "new",
        dataset="cifar10", model="resnet8", max_samples=500, rounds=12, batch_size=16,
    ),
    PRETRAINED: _of(
        "CIFAR-10, pretrained ViT with adapters", "labels", "new",
        dataset="cifar10", model="figures.decision.sets:lora_vit", max_samples=800, rounds=12, batch_size=16,
    ),
    "tweets_table": _of(
        "tweets as a table, 16 % positive", "airlines", "new",
        dataset="figures.decision.sets:tweets_table", max_samples=2000, rounds=24,
    ),
    "digits_pathological": _of(
        "digits, 10 clients", "labels (3 classes each)", "new",
        dataset="digits", partition="pathological", classes_per_client=3, clients=10, rounds=30, lr=1e-3,
    ),
    "digits_iid": _of(
        "digits, IID", "nothing", "added", dataset="digits", partition="iid", clients=6, rounds=30, lr=1e-3,
    ),
    "digits_dirichlet": _of(
        "digits, 8 clients", "labels", "added",
        dataset="digits", partition="dirichlet", clients=8, alpha=0.3, rounds=30, lr=1e-3,
    ),
    "heart_dirichlet": _of(
        "Fed-Heart, 8 clients", "hospitals and labels", "added",
        dataset="heart", partition="natural_dirichlet", clients=8, alpha=1.0, rounds=20,
    ),
    "tweets_table_12": _of(
        "tweets as a table, 12 clients", "airlines and labels", "added",
        dataset="figures.decision.sets:tweets_table", partition="natural_dirichlet", clients=12, alpha=0.5,
        max_samples=2000, rounds=24,
    ),
    "tweets_12": _of(
        "airline tweets, 12 clients", "airlines and labels", "added",
        dataset="airline_tweets", partition="natural_dirichlet", clients=12, alpha=0.5, max_samples=1500,
        participation=0.5, rounds=24, batch_size=16, model_options={"width": 64},
    ),
    "mnist_mild": _of(
        "MNIST, 10 clients, mild", "labels, a little", "added",
        dataset="mnist", clients=10, alpha=5.0, max_samples=1500, rounds=24, **GREY,
    ),
    "fashion_pathological": _of(
        "Fashion-MNIST, 10 clients", "labels (3 classes each)", "added",
        dataset="fashion_mnist", partition="pathological", classes_per_client=3, clients=10, max_samples=1500,
        rounds=24,
        **GREY,
    ),
    "fashion_sgd": _of(
        "Fashion-MNIST, plain SGD", "labels", "added",
        dataset="fashion_mnist", clients=6, alpha=0.3, max_samples=1500, rounds=24, optimizer="sgd", lr=0.05, **GREY,
    ),
    "fashion_resnet": _of(
        "Fashion-MNIST, ResNet-8", "labels", "added",
        dataset="fashion_mnist", model="resnet8", max_samples=500, rounds=12, batch_size=16,
    ),
    "cifar10_20": _of(
        "CIFAR-10, 20 clients", "labels (2 classes each)", "added",
        dataset="cifar10", partition="pathological", classes_per_client=2, clients=20, max_samples=2000,
        participation=0.25, rounds=36, **COLOUR,
    ),
    "mnist_lenet": _of(
        "MNIST, LeNet, 20 clients", "labels, much", "added",
        dataset="mnist", model="pfedla_cnn", partition="dirichlet", clients=20, alpha=0.1, max_samples=2400,
        participation=0.25, rounds=48, batch_size=16,
    ),
    "mnist_turned": _of(
        "MNIST, turned by client", "directions", "confirming",
        dataset="figures.decision.sets:mnist_turned", max_samples=1500, rounds=24, **GREY,
    ),
    "digits_turned": _of(
        "digits, turned by client", "directions", "confirming",
        dataset="figures.decision.sets:digits_turned", rounds=30,
    ),
    "digits_wide": _of(
        "digits, 20 clients, wide MLP", "labels, much", "confirming",
        dataset="digits", model_options={"sizes": (128, 64, 32)}, partition="dirichlet", clients=20, alpha=0.1,
        participation=0.5, rounds=40, lr=1e-3,
    ),
    "heart_sgd": _of(
        "Fed-Heart, plain SGD", "hospitals", "confirming", dataset="heart", optimizer="sgd", lr=0.05, rounds=20,
    ),
    "tweets_table_deep": _of(
        "tweets as a table, deeper MLP", "airlines", "confirming",
        dataset="figures.decision.sets:tweets_table", model_options={"sizes": (128, 64, 32, 16)}, max_samples=4000,
        rounds=24,
    ),
    "fashion_lenet": _of(
        "Fashion-MNIST, LeNet", "labels (4 classes each)", "confirming",
        dataset="fashion_mnist", model="pfedla_cnn", partition="pathological", classes_per_client=4, clients=8,
        max_samples=1600, rounds=24, batch_size=16,
    ),
    "mnist_mlp": _of(
        "MNIST, MLP, 12 clients", "labels", "confirming",
        dataset="mnist", model="mlp", model_options={"sizes": (128, 64)}, partition="dirichlet", clients=12, alpha=0.3,
        max_samples=2400, rounds=30, batch_size=16,
    ),
    "mnist_capped": _of(
        "MNIST, 10 clients of one size", "labels", "confirming",
        dataset="mnist", model="scheduling_cnn", partition="capped_dirichlet", clients=10, alpha=0.5, max_samples=1500,
        rounds=20, batch_size=16,
    ),
    "fashion_mixer": _of(
        "Fashion-MNIST, MLP-Mixer", "labels", "confirming",
        dataset="fashion_mnist", model="mixer", model_options={"depth": 3, "width": 32}, max_samples=1000, rounds=18,
        batch_size=16,
    ),
    "cifar10_10": _of(
        "CIFAR-10, 10 clients", "labels, much", "confirming",
        dataset="cifar10", partition="dirichlet", clients=10, alpha=0.1, max_samples=1500, rounds=18, **COLOUR,
    ),
}  # fmt: skip
PRETRAINING = RunConfig(
    dataset="tiny_imagenet32", model="vit", model_options={"depth": 4, "width": 64, "heads": 4, "patch": 4},
    algorithm="fedavg", partition="iid", clients=2, max_samples=8000, rounds=6, batch_size=64, lr=1e-3,
    keep_optimizer=True,
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
