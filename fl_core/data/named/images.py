"""Images by name: those that torchvision can download, and those of files below the data root.

Only the training side of most is used, since every client is tested on its own distribution.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from fl_core.data import arrays
from fl_core.data.faults import located
from fl_core.data.files import read_npz
from fl_core.data.names import Names
from fl_core.data.reading import IMAGENET
from fl_core.data.registry import Location, dataset, find_file, find_root
from fl_core.data.sources import Source
from fl_core.errors import RunError, UsageError, about, check_known

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
    name: str,
    summary: str,
    kind: str = "",
    folder: str = "",
    keeps_test: bool = False,
    classes: Names = (),
    **recipe: Any,
) -> None:
    """Register a dataset of images, stored as ``NAME.npz`` below the data root or as torchvision stores it.

    Of the files of torchvision only the training side is read.

    Args:
        name: the dataset's name.
        summary: the dataset's line in lists.
        kind, folder: the class in ``torchvision.datasets``, and torchvision's folder for the files. Empty means none.
        keeps_test: whether an official test set in the .npz file stays the test set.
            Otherwise its samples are left out.
        classes: the classes that are used, in their order. Empty means all.
        recipe: default settings of the dataset.
    """

    def opened(data_root: Location | None, download: bool) -> Source:
        file = f"{name}.npz"
        if not kind:
            source = read_npz(find_file(name, data_root, file))
        else:
            layouts = f"{folder}/ (torchvision's layout) or {file}"
            root = find_root(name, data_root, layouts)
            if (root / folder).is_dir() or (download and not (root / file).is_file()):
                import torchvision

                options = {"split": "byclass"} if kind == "EMNIST" else {}
                requirement = f"{name} must have whole files in {root / folder}"
                error_type: type[Exception] = UsageError
                advice = "Remove the folder, or load with download=True."
                if download:
                    error_type = RunError
                    advice = "Check the network, or copy the files there."
                error_types = (OSError, RuntimeError, ValueError, AssertionError)
                with about(requirement, error_types, error_type, advice):
                    dataset = getattr(torchvision.datasets, kind)(
                        root, train=True, download=download, **options
                    )
                x = np.asarray(dataset.data)
                if kind == "EMNIST":
                    x = x.transpose(0, 2, 1)  # stored with rows and columns exchanged
                with located(str(root / folder)):
                    y, _ = arrays.labels(np.asarray(dataset.targets), dataset.classes)
                    x = arrays.features(x)
                return Source(name, x, y, tuple(dataset.classes), shuffled=True)
            advice = "Load with download=True to fetch it."
            source = read_npz(find_file(name, root, file, layouts, advice))
        if source.is_train is not None and not keeps_test:
            source = replace(
                source.take(np.flatnonzero(source.is_train)), is_train=None
            )
        for label in classes:
            check_known(f"class of {name}", label, source.classes)
        if not classes:
            return source
        new_codes = np.array([*map((*classes, *source.classes).index, source.classes)])
        chosen_samples = source.take(np.flatnonzero(new_codes[source.y] < len(classes)))
        return replace(chosen_samples, y=new_codes[chosen_samples.y], classes=classes)

    opened.__doc__ = summary
    opened.__qualname__ = name
    dataset(name, **recipe)(opened)


images(
    "mnist",
    "MNIST: 60,000 handwritten digits, grey images of 28 x 28. The first 10,000 are the pool.",
    "MNIST",
    "MNIST/raw",
    max_samples=10_000,
    model="fmnist_cnn",
    mean=(0.1307,),
    std=(0.3081,),
    note=NEAREST,
)
images(
    "fashion_mnist",
    "FashionMNIST: 60,000 clothes of 10 kinds, grey images of 28 x 28. The first 10,000 are the pool.",
    "FashionMNIST",
    "FashionMNIST/raw",
    max_samples=10_000,
    model="fmnist_cnn",
    mean=(0.2860,),
    std=(0.3530,),
    note=PLAYER,
)
images(
    "emnist",
    "EMNIST by class: 62 letters and digits, grey images of 28 x 28. The first 15,000 are the pool.",
    "EMNIST",
    "EMNIST/raw",
    max_samples=15_000,
    model="fmnist_cnn",
    rounds=75,
    mean=(0.1736,),
    std=(0.3317,),
    note=PLAYER,
)
images(
    "cifar10",
    "CIFAR-10: 50,000 photographs of 10 kinds of things, colour images of 32 x 32.",
    "CIFAR10",
    "cifar-10-batches-py",
    note=f"{PLAYER}, with CIFAR-100's statistics",
    **CIFAR,
)
images(
    "cifar100",
    "CIFAR-100: 50,000 photographs of 100 kinds of things, colour images of 32 x 32.",
    "CIFAR100",
    "cifar-100-python",
    note=NEAREST,
    **CIFAR,
)
images(
    "tiny_imagenet",
    "Tiny-ImageNet: 100,000 photographs of 200 kinds of things, colour images of 64 x 64.",
    max_samples=100_000,
    **TINY,
)
images(
    "tiny_imagenet32",
    "Half the classes of Tiny-ImageNet: 50,000 photographs of 100 kinds of things, colour images of 32 x 32.",
    max_samples=50_000,
    **TINY,
)
images(
    "pacs",
    "PACS: pictures of 7 kinds of things in four styles, which are the clients.",
    keeps_test=True,
    mean=IMAGENET[0],
    std=IMAGENET[1],
    note=f"{NEAREST}; one client a style, ImageNet's statistics",
    **CLIENTS,
)
images(
    "fed_isic",
    "Fed-ISIC 2019: skin lesions of four imaging centres, which are the clients; four diagnoses (PLayer-FL).",
    keeps_test=True,
    classes=DIAGNOSES,
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
