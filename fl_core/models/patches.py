"""Networks of any depth over the patches of an image, built by timm: vision transformer and MLP-Mixer."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from fl_core.bounds import Size
from fl_core.errors import UsageError
from fl_core.models.layered_model import Shape, image_shape
from fl_core.models.registry import model


@model
def vit(
    shape: Shape,
    n_classes: int,
    *,
    depth: Size = 12,
    width: Size = 192,
    heads: Size = 3,
    patch: Size | None = None,
) -> nn.Module:
    """Vision transformer (Dosovitskiy et al. 2021) of ``depth`` blocks; images of any size.

    It is timm's, with a class token and hidden layers four times as wide. ``patch`` is the side of a patch. It must
    divide the image's sides. By default there are about 8 x 8 patches. The other defaults are ViT-Ti's.
    """
    from timm.models.vision_transformer import VisionTransformer

    channels, sides, side = _cut("vit", shape, patch)
    if width % heads:
        raise UsageError(
            f"vit: width must be a multiple of heads={heads}; got {width}."
        )
    return VisionTransformer(
        sides, side, channels, n_classes, embed_dim=width, depth=depth, num_heads=heads
    )


@model
def mixer(
    shape: Shape,
    n_classes: int,
    *,
    depth: Size = 12,
    width: Size = 192,
    patch: Size | None = None,
) -> nn.Module:
    """MLP-Mixer (Tolstikhin et al. 2021) of ``depth`` blocks; images of any size.

    It is timm's. Layers that mix tokens are half as wide as a patch's vector. Layers that mix channels are four times
    as wide. ``patch`` is as in ``vit``.
    """
    from timm.models.mlp_mixer import MlpMixer

    channels, sides, side = _cut("mixer", shape, patch)
    size: Any = sides  # timm also takes a pair, although its annotation is a number
    network = MlpMixer(
        n_classes, size, channels, patch_size=side, num_blocks=depth, embed_dim=width
    )
    assert isinstance(network.head, nn.Linear)
    network.head.reset_parameters()  # timm's is zero, which blocks the gradient at first
    return network


def _cut(
    name: str, shape: Shape, patch: int | None
) -> tuple[int, tuple[int, int], int]:
    """Return channels, (height, width), and side of a patch, for images of this shape."""
    channels, height, width = image_shape(name, shape)
    both = math.gcd(height, width)
    if patch is None:
        patch = next(
            k
            for k in range(1, both + 1)
            if (both % k == 0 and 8 * k >= max(height, width)) or k == both
        )
    if both % patch:
        raise UsageError(
            f"{name}: patch must divide the image's sides {height} x {width}; got {patch}."
        )
    return channels, (height, width), patch
