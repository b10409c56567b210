"""Tiny-ImageNet in two sizes, from a file below the data root."""

from __future__ import annotations

from fl_core.data.registry import Location, dataset
from fl_core.data.root import open_packed, training_side
from fl_core.data.sources import Source


@dataset(
    "tiny_imagenet",
    max_samples=100_000,
    mean=(0.4802, 0.4481, 0.3975),
    std=(0.2770, 0.2691, 0.2821),
    note="no published recipe; values of the nearest dataset that has one",
)
def tiny_imagenet(data_root: Location | None) -> Source:
    """Tiny-ImageNet: 100,000 photographs of 200 kinds of things, colour images of 64 x 64."""
    return training_side(open_packed("tiny_imagenet", data_root))


@dataset(
    "tiny_imagenet32",
    max_samples=50_000,
    mean=(0.4802, 0.4481, 0.3975),
    std=(0.2770, 0.2691, 0.2821),
    note="no published recipe; values of the nearest dataset that has one",
)
def tiny_imagenet32(data_root: Location | None) -> Source:
    """Half the classes of Tiny-ImageNet: 50,000 photographs of 100 kinds of things, colour images of 32 x 32."""
    return training_side(open_packed("tiny_imagenet32", data_root))
