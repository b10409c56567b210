"""Low-rank adapters (LoRA; Hu et al. 2022) in the residual blocks of a model, by peft."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from fl_core.errors import UsageError, check_known
from fl_core.models.blocks import paths_of_blocks
from fl_core.models.heads import head_path
from fl_core.models.lora import inject

LAST = "last"


def adapt(
    model: nn.Module,
    targets: Sequence[str],
    *,
    rank: int,
    alpha: int,
    dropout: float,
    seed: int,
    example: Tensor,
) -> nn.Module:
    """Add low-rank adapters: W + (alpha / rank) B A for each targeted weight W. Only they and the last layer train.

    B starts at zero, so that the model's first predictions are unchanged. ``dropout`` acts on the adapter's input.

    Args:
        targets: linear layers by their path within a block (``attn.proj``, ``mlp.fc2``) or in the whole model
            (``patch_embed.proj``). With ``last`` it is the last linear layer of each part of a block: those two in a
            ViT, ``mlp_tokens.fc2`` and ``mlp_channels.fc2`` in an MLP-Mixer.
        example: a batch that the model takes.

    Raises:
        UsageError: peft is not installed, a target is unknown, or a number is out of range.
    """
    head = model.get_submodule(head_path(model, example))
    paths = sorted({path for target in targets for path in _paths(model, target)})
    if not paths:
        raise UsageError(
            "lora_targets must name a layer; got none. Use lora_targets=none to train without adapters."
        )
    adapted = inject(model, paths, rank, alpha, dropout, seed)
    for parameter in head.parameters():
        parameter.requires_grad_(True)
    return adapted


def _paths(model: nn.Module, target: str) -> list[str]:
    """Return the module paths of a target: one in every block, or one in the whole model."""
    blocks = paths_of_blocks(model)
    linear = [
        path
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d)
    ]
    within = [
        path.removeprefix(f"{blocks[0]}.")
        for path in linear
        if path.startswith(f"{blocks[0]}.")
    ]
    last = {
        path.partition(".")[0]: path for path in within
    }  # the last of each part, in the order of the modules
    known = {LAST: list(last.values()), **{path: [path] for path in within}}
    around = [
        path
        for path in linear
        if not any(path.startswith(f"{block}.") for block in blocks)
    ]
    check_known("layer for lora_targets", target, [*known, *around])
    return (
        [f"{block}.{path}" for block in blocks for path in known[target]]
        if target in known
        else [target]
    )
