"""A model with early exits: classifiers after some of its blocks (DepthFL)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fl_core.errors import UsageError
from fl_core.model_contexts import Hook, with_hooks
from fl_core.models.blocks import Optional, paths_of_blocks
from fl_core.models.heads import head_path
from fl_core.seeds import seed_of, torch_seeded


class Exits(nn.Module):
    """A model of residual blocks with linear classifiers after some of them, next to its own at the end.

    A classifier reads the features that the model's own would read if its blocks ended there. In a ViT this is the
    normalised class token, in an MLP-Mixer the mean over normalised patches.

    Args:
        after: 1-based numbers of the blocks that a classifier follows.
        ensemble: whether to predict by the mean of all classifiers' logits instead of the last one's.

    Raises:
        UsageError: there is no such block, it is the last one, or the model lacks timm's ``norm`` and ``forward_head``.
    """

    def __init__(
        self,
        model: nn.Module,
        after: Sequence[int],
        *,
        ensemble: bool,
        seed: int,
        example: Tensor,
    ) -> None:
        super().__init__()
        blocks = paths_of_blocks(model)
        for number in after:
            if not 1 <= number < len(blocks):
                raise UsageError(
                    f"exits must be from 1 to {len(blocks) - 1}, before the last block; got {number}."
                )
        if not (
            isinstance(getattr(model, "norm", None), nn.Module)
            and hasattr(model, "forward_head")
        ):
            raise UsageError(
                f"{type(model).__name__} must have norm and forward_head for further classifiers; got a model without."
            )
        head = model.get_submodule(head_path(model, example))
        assert isinstance(head, nn.Linear)
        with torch_seeded(seed_of(seed, "classifiers")):
            classifiers = {
                str(k): nn.Linear(head.in_features, head.out_features)
                for k in sorted(set(after))
            }
        self.model, self.ensemble = model, ensemble
        self.exits = Classifiers(classifiers).to(
            device=head.weight.device, dtype=head.weight.dtype
        )

    def forward(self, x: Tensor, every: bool = False) -> Any:
        """Return logits [n, C].

        Args:
            every: return those of every present classifier instead, from input to output, [classifiers, n, C].
        """
        if not (every or self.ensemble):
            return self.model(x)
        seen: dict[str, Tensor] = {}
        model: Any = self.model

        def note(number: str) -> Hook:
            return lambda _module, _args, output: seen.update({number: output})

        with with_hooks(
            model.blocks, {str(int(k) - 1): note(k) for k, _ in self.exits.present()}
        ):
            last = model(x)
        early = [
            classifier(model.forward_head(model.norm(seen[number]), pre_logits=True))
            for number, classifier in self.exits.present()
        ]
        logits = torch.stack([*early, last])
        return logits if every else logits.mean(0)


class Classifiers(nn.ModuleDict, Optional):
    """The early classifiers, each under the number of the block whose output it reads."""
