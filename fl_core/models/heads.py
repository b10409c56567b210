"""Splitting of a model at its last linear layer, and a model with two such heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fl_core.errors import UsageError
from fl_core.model_contexts import Hook, in_mode, with_hooks


def head_path(model: nn.Module, example: Tensor) -> str:
    """Return the path of the linear layer whose output is the model's.

    Args:
        example: a batch that the model takes.

    Raises:
        UsageError: the model does not end in a linear layer.
    """
    outputs: dict[str, Any] = {}

    def note(path: str) -> Hook:
        return lambda _module, _args, output: outputs.update({path: output})

    linear = [
        path for path, module in model.named_modules() if isinstance(module, nn.Linear)
    ]
    with (
        with_hooks(model, {path: note(path) for path in linear}),
        in_mode(model, False),
        torch.no_grad(),
    ):
        wanted = model(example)
    path = next((path for path, output in outputs.items() if output is wanted), None)
    if path is None:
        raise UsageError(
            f"{type(model).__name__} must end in a linear layer, the classifier. Choose another model."
        )
    return path


def split_head(model: nn.Module, example: Tensor) -> tuple[nn.Module, nn.Linear]:
    """Split a model into feature extractor and classifier, such that ``head(body(x))`` equals ``model(x)``.

    The model itself becomes the extractor. An identity replaces its last linear layer.

    Args:
        example: a batch that the model takes.

    Raises:
        UsageError: the model does not end in a linear layer, or uses it for more than its output.
    """
    path = head_path(model, example)
    with in_mode(model, False), torch.no_grad():
        wanted = model(example)
        head = model.get_submodule(path)
        body = _without(model, path)
        if not torch.equal(head(body(example)), wanted):
            raise UsageError(
                f"{type(model).__name__} must use its last linear layer {path!r} only once. Choose another model."
            )
    assert isinstance(head, nn.Linear)
    return body, head


def _without(model: nn.Module, path: str) -> nn.Module:
    if not path:
        return nn.Identity()
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, nn.Identity())
    return model


class TwoHeads(nn.Module):
    """A feature extractor with a generic and a personal head, whose logits are added.

    The personal head starts at zero, so that the first prediction is the generic head's.
    """

    def __init__(self, body: nn.Module, generic: nn.Linear) -> None:
        super().__init__()
        self.body, self.generic = body, generic
        self.personal = nn.Linear(
            generic.in_features, generic.out_features, bias=generic.bias is not None
        )
        self.personal.to(device=generic.weight.device, dtype=generic.weight.dtype)
        for param in self.personal.parameters():
            nn.init.zeros_(param)

    def forward(self, x: Tensor, both: bool = False) -> Any:
        """Return logits [n, C] of the personal prediction.

        Args:
            both: return the pair of generic and personal logits instead. The latter has a gradient for the personal
                head only.
        """
        features = self.body(x)
        generic = self.generic(features)
        if both:
            return generic, generic.detach() + self.personal(features.detach())
        return generic + self.personal(features)
