"""A model whose blocks of weights are scaled and pruned by a gate that reads the batch (pFedGate)."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call


class SwitchableNorm(nn.modules.batchnorm._BatchNorm):
    """Normalisation of images by learnt mixtures of instance, layer and batch statistics (Luo et al. 2019).

    Let m_k and v_k be the mean and variance over an image's channel, over an image, and over the batch's channel. The
    output is the value below, times a weight and plus a bias:

        (x - sum_k a_k m_k) / sqrt(sum_k b_k v_k + eps)

    Here a and b are softmaxes of three learnt numbers each. In evaluation mode running statistics replace the batch's.
    """

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.means, self.variances = (
            nn.Parameter(torch.ones(3)),
            nn.Parameter(torch.ones(3)),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Normalise images [n, C, H, W]."""
        batch: list[tuple[Tensor, Tensor]] = []
        for over in ((2, 3), (1, 2, 3), (0, 2, 3)):
            variance, mean = torch.var_mean(x, over, correction=0, keepdim=True)
            batch.append((mean, variance))
        if self.running_mean is not None and self.running_var is not None:
            if self.training:
                self._track(*batch[2], x.numel() // x.shape[1])
            else:
                batch[2] = (
                    self.running_mean.view(1, -1, 1, 1),
                    self.running_var.view(1, -1, 1, 1),
                )
        a, b = self.means.softmax(0), self.variances.softmax(0)
        mean = a[0] * batch[0][0] + a[1] * batch[1][0] + a[2] * batch[2][0]
        variance = b[0] * batch[0][1] + b[1] * batch[1][1] + b[2] * batch[2][1]
        normalised = (x - mean) / (variance + self.eps).sqrt()
        return normalised * self.weight.view(1, -1, 1, 1) + self.bias.view(1, -1, 1, 1)

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor, n: int) -> None:
        """Update the running statistics as batch normalisation does, with unbiased variance and a batch count."""
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.momentum is not None
        self.running_mean.lerp_(mean.flatten(), self.momentum)
        self.running_var.lerp_(variance.flatten() * n / max(n - 1, 1), self.momentum)
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)


class Gate(nn.Module):
    """A network that scores a model's blocks in (0, 1) for a batch.

    Its layers are normalisation, linear layer, normalisation and sigmoid.
    """

    def __init__(self, shape: tuple[int, ...], blocks: int) -> None:
        super().__init__()
        self.inputs = (
            SwitchableNorm(shape[0])
            if len(shape) == 3
            else nn.BatchNorm1d(math.prod(shape))
        )
        self.linear = nn.Linear(math.prod(shape), blocks)
        self.scores = nn.BatchNorm1d(blocks)
        self.images = len(shape) == 3

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of the blocks [blocks] for a batch [n, *shape], averaged over its samples."""
        x = self.inputs(x if self.images else x.flatten(1))
        return self.scores(self.linear(x.flatten(1))).sigmoid().mean(0)


class Gated(nn.Module):
    """A model whose blocks of weights are multiplied by the gate's score, or by 0 once the budget is spent.

    Every flattened parameter tensor is cut into at most ``split`` blocks of equal size. The last may be smaller. For
    each batch the gate scores all blocks. A score is at least s_min = min(max(1 / split, 0.1), target).

    The first block of each tensor is kept. The others are chosen in two groups, linear layers and all other tensors. In
    each group the blocks with the highest scores, rounded to tenths, are kept within the budget. The budget is (target
    - s_min) of the group's numbers. With ``target`` 1 all blocks are kept.

    A prediction depends on its batch. In evaluation mode batches have at most ``batch`` samples.

    Raises:
        UsageError: ``target`` outside (0, 1], or fewer than two blocks a tensor.
    """

    def __init__(
        self,
        inner: nn.Module,
        shape: tuple[int, ...],
        target: float,
        split: int,
        batch: int,
    ) -> None:
        super().__init__()
        self.target, self.batch = target, batch
        self.least = min(max(1 / split, 0.1), target)
        linear = {
            f"{path}.{name}".lstrip(".")
            for path, module in inner.named_modules()
            if isinstance(module, nn.Linear)
            for name, _ in module.named_parameters(recurse=False)
        }
        self.blocks: dict[str, list[int]] = {}  # sizes of the blocks of each tensor
        first, is_linear = [], []
        for name, parameter in inner.named_parameters():
            size = math.ceil(parameter.numel() / split)
            sizes = [len(part) for part in torch.arange(parameter.numel()).split(size)]
            self.blocks[name] = sizes
            first += [True] + [False] * (len(sizes) - 1)
            is_linear += [name in linear] * len(sizes)
        self.sizes = np.array(
            [size for sizes in self.blocks.values() for size in sizes]
        )
        self.first = np.array(first)
        self.groups = [np.array(is_linear), ~np.array(is_linear)]
        self.gate, self.inner = Gate(shape, len(self.sizes)), inner

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [n, C]."""
        if not self.training and len(x) > self.batch:
            return torch.cat([self(part) for part in x.split(self.batch)])
        scales = self.scales(x)
        scaled = {
            name: p * scale
            for (name, p), scale in zip(
                self.inner.named_parameters(), self._entry_factors(scales), strict=True
            )
        }
        logits: Tensor = functional_call(self.inner, scaled, (x,))
        return logits

    def scales(self, x: Tensor) -> Tensor:
        """Return the factor of each block of weights for a batch, [blocks]: the gate's score, or 0 if pruned."""
        scores = self.gate(x).clamp(min=self.least)
        kept = torch.from_numpy(self.kept_blocks(scores.detach().cpu().numpy())).to(
            scores.device
        )
        return torch.where(kept, scores, 0.0)

    def kept_blocks(self, scores: np.ndarray) -> np.ndarray:
        """Return which blocks of weights are kept within the budget, bool [blocks]."""
        if self.target == 1:
            return np.ones(len(scores), dtype=bool)
        kept = self.first.copy()
        tenths = np.round(10 * scores)
        for group in self.groups:
            left = round((self.target - self.least) * self.sizes[group].sum())
            others = np.flatnonzero(group & ~self.first)
            for block in others[np.argsort(-tenths[others], kind="stable")]:
                if self.sizes[block] <= left:
                    kept[block] = True
                    left -= self.sizes[block]
        return kept

    def _entry_factors(self, scales: Tensor) -> Iterator[Tensor]:
        """Yield the factor of every entry of each tensor, in the tensor's shape."""
        at = 0
        for sizes, parameter in zip(
            self.blocks.values(), self.inner.parameters(), strict=True
        ):
            repeats = torch.tensor(sizes, device=scales.device)
            repeated = scales[at : at + len(sizes)].repeat_interleave(
                repeats, output_size=parameter.numel()
            )
            yield repeated.view(parameter.shape)
            at += len(sizes)
