"""A classifier next to a store of features, whose nearest entries also predict."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Memory(nn.Module):
    """Stored features and their classes; rows without a class are free.

    Attributes:
        keys: features [capacity, d].
        values: classes [capacity, C] as rows with a single 1, or of zeros.
    """

    keys: Tensor
    values: Tensor

    def __init__(self, capacity: int, width: int, classes: int) -> None:
        super().__init__()
        self.register_buffer("keys", torch.zeros(capacity, width))
        self.register_buffer("values", torch.zeros(capacity, classes))

    def forward(self, features: Tensor, k: int, scale: float) -> Tensor:
        """Return the classes' shares [n, C] among the k nearest entries, each weighted by exp(-distance / scale)."""
        stored = self.values.any(1)
        near = torch.cdist(features, self.keys[stored]).topk(
            min(k, int(stored.sum())), largest=False
        )
        weights = (-near.values / scale).softmax(1)
        return (weights[:, :, None] * self.values[stored][near.indices]).sum(1)


class WithNeighbours(nn.Module):
    """A model whose prediction is mixed with that of the nearest stored samples.

    Training, an empty store and ``lam`` = 0 leave the model's logits as they are.

    Args:
        lam: weight of the neighbours, 0 to 1.
        k: number of neighbours.
        scale: of distances.
        capacity: samples that can be stored.
    """

    def __init__(
        self,
        body: nn.Module,
        head: nn.Linear,
        lam: float,
        k: int,
        scale: float,
        capacity: int,
    ) -> None:
        super().__init__()
        self.body, self.head = body, head
        self.memory = Memory(capacity, head.in_features, head.out_features).to(
            head.weight
        )
        self.lam, self.k, self.scale = lam, k, scale

    def forward(self, x: Tensor, features: bool = False) -> Tensor:
        """Return logits [n, C], or the input [n, d] of the last layer."""
        found = self.body(x)
        if features:
            return found
        logits: Tensor = self.head(found)
        if self.training or self.lam == 0 or not self.memory.values.any():
            return logits
        shares = self.memory(found, self.k, self.scale)
        mixture = self.lam * shares + (1 - self.lam) * logits.softmax(1)
        return mixture.clamp(min=torch.finfo(mixture.dtype).tiny).log()
