"""Images by name: those that torchvision can download, and those of files below the data root.

Only the training side of the first ones is used, since every client is tested on its own distribution.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fl_core.bounds import IMAGENET
from fl_core.data.registry import Location, dataset
from fl_core.data.root import (
    from_torchvision,
    only_classes,
    open_packed,
    training_side,
)
from fl_core.data.sources import Source

NEAREST = "no published recipe; values of the nearest dataset that has one"
PLAYER = "PLayer-FL, Table A.4 and released code"
CIFAR: dict[str, Any] = {
    "max_samples": 50_000,
    "mean": (0.5071, 0.4867, 0.4408),
    "std": (0.2675, 0.2565, 0.2761),
}
TINY: dict[str, Any] = {
    "mean": (0.4802, 0.4481, 0.3975),
    "std": (0.2770, 0.2691, 0.2821),
    "note": NEAREST,
}
CLIENTS: dict[str, Any] = {"clients": 4, "partition": "natural", "rounds": 60}
DIAGNOSES = ("BCC", "BKL", "MEL", "NV")
"""The four of eight diagnoses that PLayer-FL keeps, in the order of its class weights."""


def images(
    name: str, about: str, open_files: Callable[..., Source], **recipe: Any
) -> None:
    """Register a dataset of images.

    Args:
        about: its line in lists.
        open_files: (data root, whether files may be fetched) -> the samples.
        recipe: its default settings.
    """

    def opened(data_root: Location | None, download: bool) -> Source:
        return open_files(data_root, download)

    opened.__doc__ = about
    opened.__qualname__ = name
    dataset(name, **recipe)(opened)


def of_torchvision(
    name: str, kind: str, folder: str, about: str, **recipe: Any
) -> None:
    """Register a dataset of torchvision, by the name of its class and of its folder."""

    def open_files(data_root: Location | None, download: bool) -> Source:
        return from_torchvision(name, kind, folder, data_root, download)

    images(name, about, open_files, **recipe)


of_torchvision(
    "mnist",
    "MNIST",
    "MNIST/raw",
    "MNIST: 60,000 handwritten digits, grey images of 28 x 28. The first 10,000 are the pool.",
    max_samples=10_000,
    model="fmnist_cnn",
    mean=(0.1307,),
    std=(0.3081,),
    note=NEAREST,
)
of_torchvision(
    "fashion_mnist",
    "FashionMNIST",
    "FashionMNIST/raw",
    "FashionMNIST: 60,000 clothes of 10 kinds, grey images of 28 x 28. The first 10,000 are the pool.",
    max_samples=10_000,
    model="fmnist_cnn",
    mean=(0.2860,),
    std=(0.3530,),
    note=PLAYER,
)
of_torchvision(
    "emnist",
    "EMNIST",
    "EMNIST/raw",
    "EMNIST by class: 62 letters and digits, grey images of 28 x 28. The first 15,000 are the pool.",
    max_samples=15_000,
    model="fmnist_cnn",
    rounds=75,
    mean=(0.1736,),
    std=(0.3317,),
    note=PLAYER,
)
of_torchvision(
    "cifar10",
    "CIFAR10",
    "cifar-10-batches-py",
    "CIFAR-10: 50,000 photographs of 10 kinds of things, colour images of 32 x 32.",
    note=f"{PLAYER}, with CIFAR-100's statistics",
    **CIFAR,
)
of_torchvision(
    "cifar100",
    "CIFAR100",
    "cifar-100-python",
    "CIFAR-100: 50,000 photographs of 100 kinds of things, colour images of 32 x 32.",
    note=NEAREST,
    **CIFAR,
)
images(
    "tiny_imagenet",
    "Tiny-ImageNet: 100,000 photographs of 200 kinds of things, colour images of 64 x 64.",
    lambda root, _: training_side(open_packed("tiny_imagenet", root)),
    max_samples=100_000,
    **TINY,
)
images(
    "tiny_imagenet32",
    "Half the classes of Tiny-ImageNet: 50,000 photographs of 100 kinds of things, colour images of 32 x 32.",
    lambda root, _: training_side(open_packed("tiny_imagenet32", root)),
    max_samples=50_000,
    **TINY,
)
images(
    "pacs",
    "PACS: pictures of 7 kinds of things in four styles, which are the clients.",
    lambda root, _: open_packed("pacs", root),
    mean=IMAGENET[0],
    std=IMAGENET[1],
    note=f"{NEAREST}; one client a style, ImageNet's statistics",
    **CLIENTS,
)
images(
    "fed_isic",
    "Fed-ISIC 2019: skin lesions of four imaging centres, which are the clients; four diagnoses (PLayer-FL).",
    lambda root, _: only_classes(open_packed("fed_isic", root), DIAGNOSES),
    loss="player_focal",
    loss_options={
        "gamma": 1.0,
        "alpha": [0.87868852, 0.88131148, 0.82793443, 0.41206557],
    },
    mean=(0.585, 0.500, 0.486),
    std=(0.229, 0.224, 0.225),
    model="isic_cnn",
    note="PLayer-FL, Table A.4 and released code; the official folds, images as stored",
    **CLIENTS,
)
