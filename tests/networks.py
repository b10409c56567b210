"""Networks for tests, each as its parts and how they are called."""

from collections.abc import Callable
from typing import Any

from torch import nn


class Wired(nn.Module):
    """Parts by name, in the order given; ``run(network, *inputs)`` is the forward pass."""

    def __init__(self, run: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.run = run

    def forward(self, *inputs: Any) -> Any:
        return self.run(self, *inputs)
