"""Networks of the papers as chains of named layers, small residual networks, and transformers for texts and images."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

from fl_core.errors import (
    ABOVE_0,
    BELOW_1,
    SIZE,
    Size,
    UsageError,
    check_value,
    spelled,
)
from fl_core.models.building import image_shape, model
from fl_core.models.tokens import PAD, TokenShape

Shape = tuple[int, ...]


class Layered(nn.Sequential):
    """A chain of named children. Every child with parameters is one layer."""

    @property
    def layer_groups(self) -> tuple[str, ...]:
        """Return the paths of the modules that form one layer each, from input to output."""
        return tuple(
            name
            for name, child in self.named_children()
            if any(True for _ in child.parameters())
        )


def chain(**children: nn.Module) -> Layered:
    """Return a :class:`Layered` chain of the given named modules."""
    return Layered(OrderedDict(children))


class Block(nn.Module):
    """Residual block of two 3x3 convolutions with normalisations, a shortcut, and ReLU (He et al. 2016).

    Args:
        n_in, n_out: numbers of channels of the input and the output.
        stride: stride of the first convolution.
    """

    def __init__(self, n_in: int, n_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(n_in, n_out, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(n_out)
        self.conv2 = nn.Conv2d(n_out, n_out, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(n_out)
        shortcut_layers: OrderedDict[str, nn.Module] = OrderedDict()
        if stride != 1 or n_in != n_out:
            shortcut_layers = OrderedDict(
                conv=nn.Conv2d(n_in, n_out, 1, stride=stride, bias=False),
                norm=nn.BatchNorm2d(n_out),
            )
        self.shortcut = nn.Sequential(shortcut_layers)  # empty if the shapes agree

    def forward(self, x: Tensor) -> Tensor:
        """Map [n, n_in, h, w] to [n, n_out, h / stride, w / stride], with sides rounded up."""
        hidden = relu(self.norm1(self.conv1(x)))
        return relu(self.norm2(self.conv2(hidden)) + self.shortcut(x))


@model
def resnet8(shape: Shape, n_classes: int) -> Layered:
    """ResNet of 3 blocks for CIFAR-10 (FedPFT); images of any size.

    It maps images [n, channels, height, width] to logits [n, C]. The stem is a 7x7
    convolution with stride 2 and a 3x3 max pooling. Blocks have 64-128-256 channels.
    The second and the third halve height and width. Global average pooling and one
    linear layer follow. Convolutions are Kaiming-normal (fan-out, ReLU). There are
    1,232,704 parameters before the classifier. With running statistics and their
    counters there are 1,235,401 numbers. Both counts are for 3 channels.

    Raises:
        UsageError: samples are no images.
    """
    return _resnet("resnet8", shape, n_classes, (64, 128, 256))


@model
def resnet10(shape: Shape, n_classes: int) -> Layered:
    """ResNet of 4 blocks for CIFAR-100 and Tiny-ImageNet (FedPFT); images of any size.

    It is ``resnet8`` with a fourth block of 512 channels. There are 4,905,792
    parameters before the classifier. With running statistics and their counters there
    are 4,911,564 numbers. Both counts are for 3 channels.

    Raises:
        UsageError: samples are no images.
    """
    return _resnet("resnet10", shape, n_classes, (64, 128, 256, 512))


def _resnet(
    name: str, shape: Shape, n_classes: int, widths: tuple[int, ...]
) -> Layered:
    channels, _, _ = image_shape(name, shape)
    stem = OrderedDict(
        conv=nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False),
        norm=nn.BatchNorm2d(64),
        relu=nn.ReLU(),
        pool=nn.MaxPool2d(3, stride=2, padding=1),
    )
    inputs = (64, *widths)
    blocks = {
        f"block{k + 1}": Block(inputs[k], n_out, 1 + (k > 0))
        for k, n_out in enumerate(widths)
    }
    network = chain(
        stem=nn.Sequential(stem),
        **blocks,
        pool=nn.AdaptiveAvgPool2d(1),
        flatten=nn.Flatten(),
        fc=nn.Linear(widths[-1], n_classes),
    )
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return network


Width = Annotated[float, ABOVE_0]
Dropout = Annotated[float, BELOW_1]


@model
def fmnist_cnn(shape: Shape, n_classes: int, *, width: Width = 1.0) -> Layered:
    """3 conv + 2 fc for FashionMNIST and EMNIST (PLayer-FL); images of 8 x 8 or larger.

    It maps images [n, channels, height, width] to logits [n, C]. Three 5x5 convolutions
    have 64-128-256 channels. Max pooling after each halves height and width. Global
    average pooling and 100 hidden units follow. Weights are Kaiming-normal (fan-in,
    ReLU) and biases zero. It has 1,052,758 parameters for 1 x 28 x 28 and 10 classes.
    ``width`` multiplies channels and hidden units. Time grows with about its square.

    Raises:
        UsageError: samples are no images, or smaller ones.
    """
    *channels, hidden_width = _scale(width, 64, 128, 256, 100)
    return _kaiming(
        _cnn(
            "fmnist_cnn",
            shape,
            8,
            5,
            channels,
            (hidden_width, n_classes),
            padding=2,
            pooled=(1, 2, 3),
        )
    )


@model
def cifar_cnn(
    shape: Shape, n_classes: int, *, dropout: Dropout = 0.3, width: Width = 1.0
) -> Layered:
    """5 conv + 2 fc for CIFAR-10 (PLayer-FL); images of any size.

    It maps images [n, channels, height, width] to logits [n, C]. Five 3x3 convolutions
    with padding 2 have 64-128-256-512-512 channels. Max pooling after the second and
    the fourth halves height and width. Dropout follows each convolution. Global average
    pooling and 100 hidden units come next. Weights are Kaiming-normal (fan-in, ReLU)
    and biases zero. It has 3,963,094 parameters for 3 x 32 x 32 and 10 classes.
    ``width`` multiplies channels and hidden units. ``dropout`` is the share of values
    that are dropped, from 0 to below 1.

    Raises:
        UsageError: samples are no images.
    """
    *channels, hidden_width = _scale(width, 64, 128, 256, 512, 512, 100)
    return _kaiming(
        _cnn(
            "cifar_cnn",
            shape,
            1,
            3,
            channels,
            (hidden_width, n_classes),
            padding=2,
            pooled=(2, 4),
            dropped=(1, 2, 3, 4, 5),
            dropout=dropout,
        )
    )


@model
def isic_cnn(shape: Shape, n_classes: int) -> Layered:
    """5 conv + 2 fc for Fed-ISIC (PLayer-FL); images of 8 x 8 or larger.

    It maps images [n, channels, height, width] to logits [n, C]. Five 3x3 convolutions
    have 32-64-128-256-512 channels. After each of the last three, max pooling halves
    height and width, and dropout of 0.2 follows. Global average pooling and 256 hidden
    units come next. Weights are Kaiming-normal (fan-in, ReLU) and biases zero. It has
    1,700,932 parameters for 3 channels and 4 classes. The paper's images have 200 x 200
    pixels.

    Raises:
        UsageError: samples are no images, or smaller ones.
    """
    return _kaiming(
        _cnn(
            "isic_cnn",
            shape,
            8,
            3,
            (32, 64, 128, 256, 512),
            (256, n_classes),
            padding=1,
            pooled=(3, 4, 5),
            dropped=(3, 4, 5),
            dropout=0.2,
        )
    )


@model
def scheduling_cnn(shape: Shape, n_classes: int) -> Layered:
    """2 conv + 2 fc of the papers on Vanilla and Anti scheduling; images of 16 x 16 or larger.

    It maps images [n, channels, height, width] to logits [n, C]. Two 5x5 convolutions
    without padding have 32-64 channels. Max pooling after each halves height and width.
    512 hidden units follow. Initialisation is PyTorch's default. The size of fc1 grows
    with the image. With 10 classes it has 582,026 parameters for 1 x 28 x 28 and
    878,538 for 3 x 32 x 32.

    Raises:
        UsageError: samples are no images, or smaller ones.
    """
    return _cnn(
        "scheduling_cnn",
        shape,
        16,
        5,
        (32, 64),
        (512, n_classes),
        pooled=(1, 2),
        flat=True,
    )


@model
def pfedla_cnn(shape: Shape, n_classes: int) -> Layered:
    """LeNet of pFedLA and pFedHN: 2 conv + 3 fc; images of 16 x 16 or larger.

    It maps images [n, channels, height, width] to logits [n, C]. Two 5x5 convolutions
    without padding have 16-32 channels. Max pooling after each halves height and width.
    120-84 hidden units follow. Initialisation is PyTorch's default. With 10 classes it
    has 85,822 parameters for 1 x 28 x 28, and 121,278 for 3 x 32 x 32. Images of 3
    channels have batch normalisation after each convolution, before its ReLU. Others,
    such as grey ones, do not, as in the paper.

    Raises:
        UsageError: samples are no images, or smaller ones.
    """
    return _cnn(
        "pfedla_cnn",
        shape,
        16,
        5,
        (16, 32),
        (120, 84, n_classes),
        pooled=(1, 2),
        flat=True,
        norm=shape[0] == 3,
    )


@model
def heart_mlp(shape: Shape, n_classes: int) -> Layered:
    """4 fc for Fed-Heart (PLayer-FL); tables.

    It maps rows [n, features] to logits [n, C]. It has 50-20-20 hidden units. Weights
    are Kaiming-normal (fan-in, ReLU) and biases zero. It has 2,095 parameters for 10
    features and 5 classes.

    Raises:
        UsageError: samples are no rows of a table.
    """
    if len(shape) != 1:
        raise UsageError(
            f"model heart_mlp: samples must be tables of shape (features,); got shape {shape}. Use mlp for any shape."
        )
    return _perceptron(shape[0], (50, 20, 20), n_classes)


@model
def mlp(
    shape: Shape, n_classes: int, *, sizes: Sequence[int] | int = (64, 32)
) -> Layered:
    """Fully connected layers with ReLU, hidden widths sizes=(64, 32); samples of any shape, flattened.

    It maps samples [n, ...] to outputs [n, C]. Weights are Kaiming-normal (fan-in,
    ReLU) and biases zero. With ``sizes=()`` it is multinomial logistic regression.

    Args:
        sizes: widths of the hidden layers. One integer means one hidden layer.

    Raises:
        UsageError: a width is no integer from 1 to 100,000.
    """
    if isinstance(sizes, int):
        sizes = (sizes,)
    for size in sizes:
        check_value("mlp: sizes", size, SIZE)
    return _perceptron(math.prod(shape), sizes, n_classes)


LARGEST_SIDE = 32
"""Rows and columns at most, to which :func:`linear` averages a picture down."""


class WordCounts(nn.Module):
    """A count of each token of a text, from token ids [n, length] to counts [n, counts]. Padding does not count.

    With fewer counts than tokens, tokens whose ids differ by a multiple of ``counts`` share a count.

    Args:
        tokens: number of token ids.
        counts: largest number of counts. None means one for each token.
    """

    def __init__(self, tokens: int, counts: int | None = None) -> None:
        super().__init__()
        self.tokens = tokens
        self.counts = min(tokens, counts or tokens)

    def forward(self, x: Tensor) -> Tensor:
        """Return how often each token occurs in the texts x, float32 [n, counts]."""
        is_token = (x != PAD).float()
        columns = x if self.counts == self.tokens else x % self.counts
        return is_token.new_zeros(len(x), self.counts).scatter_add(1, columns, is_token)


@model
def linear(shape: Shape, n_classes: int, *, counts: Size | None = None) -> Layered:
    """One linear layer; tables, images (averaged down to 32 x 32), texts (counts of words).

    It maps samples [n, ...] to outputs [n, C]. Only sides above 32 are averaged. The
    weights have PyTorch's default initialisation.

    - ``counts``: the largest number of counts of a text. With fewer counts than words, words share a count. By default
      each word has its own.
    """
    features: nn.Module = nn.Flatten()
    size = math.prod(shape)
    if isinstance(shape, TokenShape):
        counter = WordCounts(shape.tokens, counts)
        features, size = counter, counter.counts
    elif len(shape) == 3 and max(shape[1:]) > LARGEST_SIDE:
        sides = tuple(min(side, LARGEST_SIDE) for side in shape[1:])
        features = nn.Sequential(nn.AdaptiveAvgPool2d(sides), nn.Flatten())
        size = shape[0] * math.prod(sides)
    return chain(features=features, fc=nn.Linear(size, n_classes))


def _perceptron(n_inputs: int, hidden: Sequence[int], n_classes: int) -> Layered:
    layers = _fully_connected(n_inputs, *hidden, n_classes)
    return _kaiming(chain(flatten=nn.Flatten(), **layers))


def _fully_connected(*widths: int) -> dict[str, nn.Module]:
    """Return the layers fc1, fc2, ... between these widths, with ReLU after all but the last."""
    layers: dict[str, nn.Module] = {}
    for k in range(1, len(widths)):
        layers[f"fc{k}"] = layer = nn.Sequential()
        layer.linear = nn.Linear(widths[k - 1], widths[k])
        if k < len(widths) - 1:
            layer.relu = nn.ReLU()
    return layers


def _cnn(
    name: str,
    shape: Shape,
    smallest: int,
    kernel: int,
    channels: Sequence[int],
    hidden: Sequence[int],
    *,
    padding: int = 0,
    pooled: tuple[int, ...] = (),
    dropped: tuple[int, ...] = (),
    dropout: float = 0.0,
    flat: bool = False,
    norm: bool = False,
) -> Layered:
    """Return a chain of square convolutions and fully connected layers.

    Args:
        name: the model's name, for messages.
        shape: shape of an image, (channels, height, width).
        smallest: the least height and width of an image.
        kernel: side of a convolution.
        channels: output channels of the convolutions.
        hidden: widths of the fully connected layers. The last are the classes.
        padding: padding of the convolutions.
        pooled, dropped: 1-based numbers of the convolutions with max pooling, and with dropout.
        dropout: share of values that are dropped, from 0 to below 1.
        flat: flatten the last maps. Otherwise they are averaged over all positions.
        norm: whether batch normalisation follows each convolution.

    Raises:
        UsageError: samples are no images, or too small.
    """
    n_channels, *sides = image_shape(name, shape, smallest)
    widths = [n_channels, *channels]
    layers = dict[str, nn.Module]()
    for k in range(1, len(widths)):
        layers[f"conv{k}"] = layer = nn.Sequential()
        layer.conv = nn.Conv2d(widths[k - 1], widths[k], kernel, padding=padding)
        if norm:
            layer.norm = nn.BatchNorm2d(widths[k])
        layer.relu = nn.ReLU()
        sides = [side + 2 * padding - kernel + 1 for side in sides]
        if k in pooled:
            layer.pool = nn.MaxPool2d(2)
            sides = [side // 2 for side in sides]
        if k in dropped:
            layer.drop = nn.Dropout(dropout)
    positions = math.prod(sides) if flat else 1
    layers["flatten"] = nn.Flatten()
    if not flat:
        pooling = OrderedDict(pool=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten())
        layers["flatten"] = nn.Sequential(pooling)
    return chain(**layers, **_fully_connected(widths[-1] * positions, *hidden))


def _kaiming(network: Layered) -> Layered:
    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight, mode="fan_in", nonlinearity="relu")
            assert isinstance(module.bias, Tensor)
            nn.init.zeros_(module.bias)
    return network


def _scale(width: float, *sizes: int) -> list[int]:
    """Return the numbers of channels and hidden units times the width, rounded and at least 1."""
    return [max(1, round(width * size)) for size in sizes]


class TokenEmbedding(nn.Module):
    """An embedding of token ids [n, T] as the sum of a row for the token and one for its position, [n, T, width].

    Rows have length 1 at first. The token row of padding is 0.

    Args:
        tokens: number of token ids.
        length: largest number T of tokens of a sample.
        width: numbers of a token's vector.
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
        positions = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
        return self.token(ids) + self.position(positions)


class Attention(nn.Module):
    """One attention head with a residual connection: x + proj(softmax(q k^T / sqrt(width)) v).

    It maps [n, T, width] to [n, T, width]. Only tokens that are True in the mask ``there``, bool [n, T], get weight.
    """

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
    """A feed-forward layer at every position: x + resid(ReLU(linear(x))).

    It maps [n, T, width] to [n, T, width].
    """

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.linear = _linear(width, hidden)
        self.relu = nn.ReLU()
        self.resid = _linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.resid(self.relu(self.linear(x)))


class TextTransformer(nn.Module):
    """A transformer from token ids [n, T] to logits [n, C]: embedding, attention, fc1, and fc2 on the start token.

    Args:
        tokens: number of token ids.
        length: largest number T of tokens of a sample.
        n_classes: number of outputs.
        width: numbers of a token's vector.
        hidden: hidden units of fc1.
    """

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

    It maps token ids [n, T] to logits [n, C], by the layers embedding, attention, fc1 and
    fc2. The embedding is the sum of a row for the token and one for its position. There is
    one attention head. After it fc1 has two linear layers with ReLU between them. Attention
    and fc1 each add their input to their result. The classifier fc2 reads the first
    position. There is no normalisation and no dropout.

    Linear weights are Kaiming-normal (fan-in, ReLU) and biases zero. Rows of the two tables
    have length 1. The paper starts its token table from a language model's. Apart from the
    token table there are 7,175,426 parameters for texts of 119 tokens and 2 classes.

    Args:
        width: numbers of a token's vector.
        hidden: hidden units of fc1. Default: 4 times the width.

    Raises:
        UsageError: samples are no texts.
    """
    shape = text_shape("text_transformer", shape)
    if hidden is None:
        hidden = 4 * width
    return TextTransformer(shape.tokens, shape[0], n_classes, width, hidden)


class TextBlock(nn.Module):
    """A block of a transformer: attention and a feed-forward layer, each followed by a layer normalisation.

    It maps [n, T, width] to [n, T, width].
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = Attention(width)
        self.norm1 = nn.LayerNorm(width)
        self.feed_forward = FeedForward(width, 4 * width)
        self.norm2 = nn.LayerNorm(width)

    def forward(self, x: Tensor, there: Tensor) -> Tensor:
        return self.norm2(self.feed_forward(self.norm1(self.attention(x, there))))


class TextBlocks(nn.Module):
    """A transformer from token ids [n, T] to logits [n, C], which classifies the mean over positions without padding.

    Args:
        tokens: number of token ids.
        length: largest number T of tokens of a sample.
        n_classes: number of outputs.
        depth: number of blocks.
        width: numbers of a token's vector.
    """

    def __init__(
        self, tokens: int, length: int, n_classes: int, depth: int, width: int
    ) -> None:
        super().__init__()
        self.layer_groups = (
            "embedding",
            *(f"blocks.{k}" for k in range(depth)),
            "head",
        )
        self.embedding = TokenEmbedding(tokens, length, width)
        self.blocks = nn.ModuleList(TextBlock(width) for _ in range(depth))
        self.head = _linear(width, n_classes)

    def forward(self, ids: Tensor) -> Tensor:
        is_token = ids != PAD
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, is_token)
        counts = is_token.sum(1, keepdim=True).clamp(min=1)
        weights = is_token.to(x.dtype) / counts
        return self.head((x * weights.unsqueeze(-1)).sum(1))


@model
def text_blocks(
    shape: tuple[int, ...], n_classes: int, *, depth: Size = 4, width: Size = 64
) -> TextBlocks:
    """A transformer of ``depth`` blocks; texts.

    It maps token ids [n, T] to logits [n, C]. It has the layers embedding, one for each
    block, and head. A token's vector has ``width`` numbers. A block has one attention
    head and a feed-forward layer with a hidden width four times as large. A
    normalisation follows each of the two. The classifier reads the mean over positions
    without padding. Linear weights are Kaiming-normal (fan-in, ReLU), biases zero, and
    rows of the tables have length 1. There is no dropout.

    Raises:
        UsageError: samples are no texts.
    """
    shape = text_shape("text_blocks", shape)
    return TextBlocks(shape.tokens, shape[0], n_classes, depth, width)


def text_shape(name: str, shape: tuple[int, ...]) -> TokenShape:
    """Return the shape of texts, with the number of token ids.

    Args:
        name: the model's name, for messages.
        shape: the shape of a sample.

    Raises:
        UsageError: samples are no texts.
    """
    if not isinstance(shape, TokenShape) or len(shape) != 1:
        raise UsageError(
            f"model {name}: samples must be texts, sequences of token ids; got shape {shape}."
        )
    return shape


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

    It maps images [n, channels, height, width] to logits [n, C]. It is timm's, with a
    class token and hidden layers four times as wide. A patch's vector has ``width``
    numbers, a multiple of the number of attention ``heads``. ``patch`` is the side of a
    patch. It must divide the image's sides. By default it is the smallest that gives at
    most 8 patches a side, or else the largest that divides the sides. The other
    defaults are ViT-Ti's.

    Raises:
        UsageError: samples are no images, ``heads`` does not divide ``width``,
            ``patch`` does not divide the sides, or its default would give more than
            :data:`MOST_PATCHES` patches a side, or a single patch.
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

    It maps images [n, channels, height, width] to logits [n, C]. It is timm's, but the
    classifier starts at random and not at zero. A patch's vector has ``width`` numbers.
    Layers that mix tokens are half as wide as a patch's vector. Layers that mix
    channels are four times as wide. ``patch`` is as in ``vit``.

    Raises:
        UsageError: samples are no images, ``patch`` does not divide the image's sides,
            or its default would give more than :data:`MOST_PATCHES` patches a side, or
            a single patch.
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


MOST_PATCHES = 32
"""The maximum number of patches a side that the default patch gives."""


def _cut(
    name: str, shape: Shape, patch: int | None
) -> tuple[int, tuple[int, int], int]:
    """Return channels, (height, width), and side of a patch, for images of this shape.

    Args:
        name: the model's name, for messages.
        shape: shape of an image, (channels, height, width).
        patch: the side of a patch. None means the smallest that divides the sides and
            gives at most 8 patches a side, or else the largest that divides them.

    Raises:
        UsageError: samples are no images, the patch does not divide their sides, or the
            default gives more than :data:`MOST_PATCHES` patches a side, or a single
            patch.
    """
    channels, height, width = image_shape(name, shape)
    divisor = math.gcd(height, width)
    if patch is None:
        patch = next(
            k
            for k in range(1, divisor + 1)
            if (divisor % k == 0 and 8 * k >= max(height, width)) or k == divisor
        )
        if max(height, width) > MOST_PATCHES * patch:
            raise UsageError(
                f"{name}: sides of images must have a larger common divisor; got {height} x {width}, which patches "
                f"of {patch} divide. Crop the images, or set the patch: {spelled(model_options={'patch': patch})}."
            )
        if patch == height == width > 8:
            cropped = 8 * (patch // 8)
            raise UsageError(
                f"{name}: sides of images must have a common divisor besides 1 and {patch}; got {height} x {width}, "
                f"which is one patch. Crop the images, such as to {cropped} x {cropped}, or set the patch: "
                f"{spelled(model_options={'patch': patch})}."
            )
    if divisor % patch:
        raise UsageError(
            f"{name}: patch must divide the image's sides {height} x {width}; got {patch}."
        )
    return channels, (height, width), patch
