"""Images that torchvision can download: handwriting, clothes, and small photographs.

Only the training side is used, since every client is tested on its own distribution.
"""

from __future__ import annotations

from fl_core.data.registry import Location, dataset
from fl_core.data.root import from_torchvision
from fl_core.data.sources import Source


@dataset(
    "mnist",
    max_samples=10_000,
    model="fmnist_cnn",
    mean=(0.1307,),
    std=(0.3081,),
    note="no published recipe; values of the nearest dataset that has one",
)
def mnist(data_root: Location | None, download: bool) -> Source:
    """MNIST: 60,000 handwritten digits, grey images of 28 x 28. The first 10,000 are the pool."""
    return from_torchvision("mnist", "MNIST", "MNIST/raw", data_root, download)


@dataset(
    "fashion_mnist",
    max_samples=10_000,
    model="fmnist_cnn",
    mean=(0.2860,),
    std=(0.3530,),
    note="PLayer-FL, Table A.4 and released code",
)
def fashion_mnist(data_root: Location | None, download: bool) -> Source:
    """FashionMNIST: 60,000 clothes of 10 kinds, grey images of 28 x 28. The first 10,000 are the pool."""
    return from_torchvision(
        "fashion_mnist", "FashionMNIST", "FashionMNIST/raw", data_root, download
    )


@dataset(
    "emnist",
    max_samples=15_000,
    model="fmnist_cnn",
    rounds=75,
    mean=(0.1736,),
    std=(0.3317,),
    note="PLayer-FL, Table A.4 and released code",
)
def emnist(data_root: Location | None, download: bool) -> Source:
    """EMNIST by class: 62 letters and digits, grey images of 28 x 28. The first 15,000 are the pool."""
    return from_torchvision("emnist", "EMNIST", "EMNIST/raw", data_root, download)


@dataset(
    "cifar10",
    max_samples=50_000,
    mean=(0.5071, 0.4867, 0.4408),
    std=(0.2675, 0.2565, 0.2761),
    note="PLayer-FL, Table A.4 and released code, with CIFAR-100's statistics",
)
def cifar10(data_root: Location | None, download: bool) -> Source:
    """CIFAR-10: 50,000 photographs of 10 kinds of things, colour images of 32 x 32."""
    return from_torchvision(
        "cifar10", "CIFAR10", "cifar-10-batches-py", data_root, download
    )


@dataset(
    "cifar100",
    max_samples=50_000,
    mean=(0.5071, 0.4867, 0.4408),
    std=(0.2675, 0.2565, 0.2761),
    note="no published recipe; values of the nearest dataset that has one",
)
def cifar100(data_root: Location | None, download: bool) -> Source:
    """CIFAR-100: 50,000 photographs of 100 kinds of things, colour images of 32 x 32."""
    return from_torchvision(
        "cifar100", "CIFAR100", "cifar-100-python", data_root, download
    )
