"""Gradient boosting of scikit-learn as a module. Its tensors are the trees, which gradients do not train."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fl_core.errors import UsageError

TREES, DEPTH = 100, 3
"""The number of trees of each output, and of questions before a leaf, at most."""


class BoostedTrees(nn.Module):
    """Sums of regression trees, one for each output. All are zero until fitted tensors are loaded.

    Args:
        shape: shape of a sample, (features,).
        n_classes: number of outputs.
        trees: number of trees of each output.
        depth: number of questions before a leaf, at most.

    Attributes:
        nodes: float64 [trees, C, 5, nodes]. The five rows are the nodes to the left and
            to the right, the feature, its threshold and the value. A leaf has -1 on
            both sides. A feature at most the threshold leads to the left, and a larger
            or missing one (NaN) to the right.
        base: the outputs before any tree is added, float64 [C].
        absent: the logarithm of the share that a class without training samples gets,
            float64 [C]. 0 for other outputs.

    Raises:
        UsageError: samples are no rows of numbers.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        n_classes: int,
        trees: int = TREES,
        depth: int = DEPTH,
    ) -> None:
        super().__init__()
        if len(shape) != 1:
            raise UsageError(
                f"samples of boosted trees must be rows of numbers; got shape {shape}. Use another model."
            )
        self.depth = depth
        self.nodes = _fixed(trees, n_classes, 5, 2 ** (depth + 1) - 1)
        self.base, self.absent = _fixed(n_classes), _fixed(n_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map samples [n, d], which are rounded to float32, to outputs, float64 [n, C].

        A class that is absent has its share of the sum of the others' exponentials.
        """
        x = x.float()
        left, right, feature, threshold, value = self.nodes.flatten(0, 1).unbind(1)
        tree = torch.arange(len(value), device=x.device)
        node = tree.new_zeros(len(x), len(tree))
        for _ in range(self.depth):
            is_low = x.gather(1, feature.long()[tree, node]) <= threshold[tree, node]
            child = torch.where(is_low, left[tree, node], right[tree, node]).long()
            node = torch.where(child < 0, node, child)
        leaves = value[tree, node].view(len(x), *self.nodes.shape[:2])
        outputs = self.base + leaves.sum(1)
        is_absent = self.absent < 0
        log_total = outputs.masked_fill(is_absent, -torch.inf).logsumexp(
            1, keepdim=True
        )
        return torch.where(is_absent, log_total + self.absent, outputs)


def _fixed(*shape: int) -> nn.Parameter:
    zeros = torch.zeros(shape, dtype=torch.float64)
    return nn.Parameter(zeros, requires_grad=False)
