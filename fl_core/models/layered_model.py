"""Base of the networks written as chains of named layers, and a check of their samples."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from fl_core.errors import UsageError

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


def image_shape(model: str, shape: Shape, smallest: int = 1) -> tuple[int, int, int]:
    """Return channels, height and width of the images that a model is built for.

    Raises:
        UsageError: the samples are not images, or too small.
    """
    size = f" of at least {smallest} x {smallest}" if smallest > 1 else ""
    rule = f"model {model}: samples must be images (channels, height, width){size}"
    if len(shape) != 3:
        raise UsageError(f"{rule}; got shape {shape}. Use mlp for any shape.")
    if min(shape[1:]) < smallest:
        raise UsageError(f"{rule}; got {shape[1]} x {shape[2]}. Use mlp for any shape.")
    channels, height, width = shape
    return channels, height, width
