"""The small residual networks of FedPFT, with one block per stage."""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn
from torch.nn.functional import relu

from fl_core.models.layered_model import Layered, Shape, chain, image_shape
from fl_core.models.registry import model


class Block(nn.Module):
    """Residual block of two 3x3 convolutions with normalisations, a shortcut, and ReLU (He et al. 2016)."""

    def __init__(self, n_in: int, n_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(n_in, n_out, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(n_out)
        self.conv2 = nn.Conv2d(n_out, n_out, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(n_out)
        parts: OrderedDict[str, nn.Module] = OrderedDict()
        if stride != 1 or n_in != n_out:
            parts = OrderedDict(
                conv=nn.Conv2d(n_in, n_out, 1, stride=stride, bias=False),
                norm=nn.BatchNorm2d(n_out),
            )
        self.shortcut = nn.Sequential(parts)  # empty if the shapes agree

    def forward(self, x: Tensor) -> Tensor:
        """Map [n, n_in, h, w] to [n, n_out, h / stride, w / stride]."""
        inner = relu(self.norm1(self.conv1(x)))
        return relu(self.norm2(self.conv2(inner)) + self.shortcut(x))


@model
def resnet8(shape: Shape, n_classes: int) -> Layered:
    """ResNet of 3 blocks for CIFAR-10 (FedPFT); images of any size.

    The stem is a 7x7 convolution with stride 2 and a 3x3 max pooling. Blocks have 64-128-256 channels. The second and
    the third are halved in size. Global average pooling and one linear layer follow. Convolutions are Kaiming-normal
    (fan-out, ReLU). There are 1,232,704 parameters before the classifier. With running statistics and their counters
    there are 1,235,401 numbers.
    """
    return _resnet("resnet8", shape, n_classes, (64, 128, 256))


@model
def resnet10(shape: Shape, n_classes: int) -> Layered:
    """ResNet of 4 blocks for CIFAR-100 and Tiny-ImageNet (FedPFT); images of any size.

    It is ``resnet8`` with a fourth block of 512 channels. There are 4,905,792 parameters before the classifier. With
    running statistics and their counters there are 4,911,564 numbers.
    """
    return _resnet("resnet10", shape, n_classes, (64, 128, 256, 512))


def _resnet(
    name: str, shape: Shape, n_classes: int, widths: tuple[int, ...]
) -> Layered:
    channels, _, _ = image_shape(name, shape, smallest=1)
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
