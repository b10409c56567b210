"""Transformers for sequences of token ids, and vision transformer and MLP-Mixer for the patches of an image."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from fl_core.bounds import Size
from fl_core.errors import UsageError
from fl_core.models.papers import Shape, image_shape
from fl_core.models.registry import model
from fl_core.tokens import PAD, TokenShape


class TokenEmbedding(nn.Module):
    """An embedding of token ids [n, T] as the sum of a token's and its position's row, [n, T, width].

    Rows have length 1 at first.
    """

    def __init__(self, tokens: int, length: int, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(tokens, width, padding_idx=PAD)
        self.position = nn.Embedding(length, width)
        with torch.no_grad():
            for table in (self.token, self.position):
                table.weight.copy_(nn.functional.normalize(table.weight))
            self.token.weight[PAD].zero_()

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
        return self.token(ids) + self.position(places)


class Attention(nn.Module):
    """One attention head over the tokens that are ``there`` [n, T]: x + proj(softmax(q k^T / sqrt(width)) v)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (
            _linear(width, width, bias=False) for _ in range(3)
        )
        self.proj = _linear(width, width)

    def forward(self, x: Tensor, there: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).mT * x.shape[-1] ** -0.5
        weights = scores.masked_fill(~there.unsqueeze(1), -torch.inf).softmax(-1)
        return x + self.proj(weights @ self.value(x))


class FeedForward(nn.Module):
    """A feed-forward layer at every position: x + resid(ReLU(linear(x)))."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.linear, self.relu, self.resid = (
            _linear(width, hidden),
            nn.ReLU(),
            _linear(hidden, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.resid(self.relu(self.linear(x)))


class TextTransformer(nn.Module):
    """A transformer from token ids [n, T] to logits [n, C]: embedding, attention, fc1, and fc2 on the start token."""

    layer_groups = ("embedding", "attention", "fc1", "fc2")

    def __init__(
        self, tokens: int, length: int, n_classes: int, width: int, hidden: int
    ) -> None:
        super().__init__()
        self.embedding = TokenEmbedding(tokens, length, width)
        self.attention = Attention(width)
        self.fc1 = FeedForward(width, hidden)
        self.fc2 = _linear(width, n_classes)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.attention(self.embedding(ids), ids != PAD)
        return self.fc2(self.fc1(x)[:, 0])


@model
def text_transformer(
    shape: tuple[int, ...],
    n_classes: int,
    *,
    width: Size = 768,
    hidden: Size | None = None,
) -> TextTransformer:
    """One transformer block for Sent-140 and MIMIC-III (PLayer-FL); texts.

    It has four layers: embedding, attention, fc1, fc2. The token and position tables have ``width`` 768. One attention
    head has a residual projection. A residual pair of fully connected layers has ``hidden`` units, by default 4 times
    the width. The classifier reads the first position. There is no normalisation and no dropout.

    Apart from the token table there are 7,175,426 parameters for 119 tokens and 2 classes. Weights are Kaiming-normal
    (fan-in, ReLU) and biases zero. The tables' rows have length 1. The paper starts its token table from a language
    model's.
    """
    if not isinstance(shape, TokenShape) or len(shape) != 1:
        raise UsageError(
            f"model text_transformer: samples must be texts, sequences of token ids; got shape {shape}."
        )
    hidden = 4 * width if hidden is None else hidden
    return TextTransformer(shape.tokens, shape[0], n_classes, width, hidden)


def _linear(n_in: int, n_out: int, *, bias: bool = True) -> nn.Linear:
    linear = nn.Linear(n_in, n_out, bias=bias)
    nn.init.kaiming_normal_(linear.weight, mode="fan_in", nonlinearity="relu")
    if bias:
        nn.init.zeros_(linear.bias)
    return linear


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
