"""A model whose features pass through an attention over prompts before the classifier (FedPFT)."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from fl_core.errors import UsageError

PROMPTS = ("prompts", "contrast_prompts")
CONTRAST_WIDTH = 128
"""Width of a contrastive feature, as in MoCo."""


class Transform(nn.Module):
    """Self-attention of a feature over itself and prompts; only the feature's row is used (FedPFT, Eq. 2).

    The tokens are Z = [f; p_1; ...; p_k], all of width d. With biases Q, K, V = Z W_q, Z W_k, Z W_v. Each head computes
    A = softmax(Q K^T / sqrt(d / heads)). The result is row 0 of concat(A V) W_o. This has 4 d^2 + 4 d parameters, as
    the paper's Table 10 counts. Without prompts it is an affine map of f.

    Args:
        width: d. heads: must divide it.
        residual: add f to the result. layernorm: normalise the result, after the sum. The paper mentions neither. Its
            counts rule out a feed-forward part.

    Raises:
        UsageError: ``heads`` does not divide the width.
    """

    def __init__(
        self,
        width: int,
        heads: int = 1,
        residual: bool = False,
        layernorm: bool = False,
    ) -> None:
        super().__init__()
        if heads < 1 or width % heads:
            raise UsageError(
                f"heads must divide {width}, the number of features; got {heads}."
            )
        self.heads, self.residual = heads, residual
        self.query, self.key, self.value, self.out = (
            nn.Linear(width, width) for _ in range(4)
        )
        self.norm = nn.LayerNorm(width) if layernorm else None

    def attention(self, features: Tensor, prompts: Tensor | None) -> Tensor:
        """Return the weights [n, heads, 1 + k] of each feature for itself and the prompts. A row sums to 1."""
        query = self._split(self.query(features))
        scores = (query * self._split(self.key(features))).sum(-1, keepdim=True)
        if prompts is not None:
            scores = torch.cat(
                [
                    scores,
                    torch.einsum("nhc,khc->nhk", query, self._split(self.key(prompts))),
                ],
                -1,
            )
        return (scores / math.sqrt(query.shape[-1])).softmax(-1)

    def forward(self, features: Tensor, prompts: Tensor | None = None) -> Tensor:
        """Transform features [n, d] with prompts [k, d] into features [n, d]."""
        weights = self.attention(features, prompts)
        mixed = weights[..., :1] * self._split(self.value(features))
        if prompts is not None:
            mixed = mixed + torch.einsum(
                "nhk,khc->nhc", weights[..., 1:], self._split(self.value(prompts))
            )
        transformed = self.out(mixed.flatten(1))
        transformed = features + transformed if self.residual else transformed
        return transformed if self.norm is None else self.norm(transformed)

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1))


class Prompted(nn.Module):
    """An extractor, an attention over the client's prompts, and a classifier, with an optional contrastive task.

    Args:
        body, head: extractor and classifier of a model.
        transform: the attention between them.
        prompts: initial values [k, d] of ``prompts`` and ``contrast_prompts``, of the two tasks. Either may be missing.
        project: whether there is a contrastive task, a linear map of the features to :data:`CONTRAST_WIDTH` numbers.
        direct: whether the contrastive task uses the extractor's features directly.
    """

    def __init__(
        self,
        body: nn.Module,
        head: nn.Linear,
        transform: Transform,
        prompts: Mapping[str, Tensor],
        project: bool = False,
        direct: bool = False,
    ) -> None:
        super().__init__()
        self.body, self.transform, self.head, self.direct = (
            body,
            transform,
            head,
            direct,
        )
        self.projection = (
            nn.Linear(head.in_features, CONTRAST_WIDTH) if project else None
        )
        self.prompts, self.contrast_prompts = (
            nn.Parameter(prompts[name]) if name in prompts else None for name in PROMPTS
        )

    def forward(
        self, x: Tensor, task: str = "classify", severed: bool = False
    ) -> Tensor:
        """Return logits [n, C], or unit vectors [n, 128] for ``task="contrast"``.

        With ``severed`` the body receives no gradient.
        """
        features = self.body(x)
        features = features.detach() if severed else features
        if task == "classify":
            return self.head(self.transform(features, self._tokens("prompts")))
        if self.projection is None:
            raise ValueError(f"task must be one with a projection; got {task!r}.")
        features = (
            features
            if self.direct
            else self.transform(features, self._tokens("contrast_prompts"))
        )
        return normalize(self.projection(features))

    def attention(self, x: Tensor) -> dict[str, Tensor]:
        """Return attention weights [n, 1 + k] of each sample's feature, averaged over heads, by the prompts' name."""
        features, weights = self.body(x), {}
        for name in PROMPTS:
            prompts = self._tokens(name)
            if prompts is not None:
                weights[name] = self.transform.attention(features, prompts).mean(1)
        return weights

    def _tokens(self, name: str) -> Tensor | None:
        prompts = getattr(self, name)
        return (
            None if prompts is None else prompts.view_as(prompts)
        )  # FLOP counters accept no leaf as an input
