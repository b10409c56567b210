"""Residual blocks of a model: left out for small clients, or followed by early exits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from fl_core import tree
from fl_core.errors import UsageError, listing
from fl_core.models.extended import head_path
from fl_core.seeds import seed_of, torch_seeded
from fl_core.tree import Hook, in_mode, with_hooks


class Optional(nn.Module):
    """A container whose forward pass leaves out the children named in ``absent``."""

    absent: frozenset[str] = frozenset()

    def present(self) -> Iterator[tuple[str, nn.Module]]:
        """Return the children that take part, by name, in order."""
        return (
            (name, child)
            for name, child in self.named_children()
            if name not in self.absent
        )


class Blocks(nn.Sequential, Optional):
    """A chain of residual blocks. An absent one passes its input on."""

    def forward(self, x: Tensor) -> Tensor:
        for _, block in self.present():
            x = block(x)
        return x


def hold(model: nn.Module, names: Iterable[str] | None = None) -> None:
    """Leave every optional part without any of the named tensors out of the forward pass. None restores all.

    Raises:
        UsageError: a tensor is not named but cannot be left out. The message names the first ones.
    """
    everything = set(tree.named_tensors(model))
    held = everything if names is None else set(names)
    missing = everything - held
    for path, module in model.named_modules():
        if isinstance(module, Optional):
            prefixes = {
                name: f"{path}.{name}.".lstrip(".")
                for name, child in module.named_children()
            }
            tensors = {
                name: {t for t in everything if t.startswith(prefix)}
                for name, prefix in prefixes.items()
            }
            module.absent = frozenset(
                name for name, own in tensors.items() if own and own <= missing
            )
            missing = missing.difference(*(tensors[name] for name in module.absent))
    if missing:
        raise UsageError(
            f"the client's submodel must contain {listing(sorted(missing), 4)}: the forward pass needs it."
        )


def with_optional_blocks(model: nn.Module, example: Tensor) -> nn.Module:
    """Return the model with residual blocks that can be left out: timm's ``blocks``, as in ViT and MLP-Mixer.

    Args:
        example: a batch that the model takes.

    Raises:
        UsageError: the model has no ``blocks``, or does not simply run one after the other with inputs of one shape.
    """
    chained: Any = getattr(model, "blocks", None)
    if not isinstance(chained, nn.Sequential) or not len(chained):
        raise UsageError(
            f"{type(model).__name__} must have residual blocks, a torch.nn.Sequential called 'blocks'; "
            "got none. Use a model such as timm:vit_tiny_patch16_224 or timm:mixer_b16_224."
        )
    blocks = Blocks(*chained)
    model.blocks = blocks
    seen: list[tuple[int, bool]] = []

    def note(k: int) -> Hook:
        return lambda _module, args, output: seen.append(
            (k, output.shape == args[0].shape)
        )

    expected = [(k, True) for k in range(len(blocks))]
    with (
        with_hooks(blocks, {str(k): note(k) for k in range(len(blocks))}),
        in_mode(model, False),
        torch.no_grad(),
    ):
        model(example)
        if seen == expected:
            blocks.absent = frozenset(name for name, _ in blocks.named_children())
            model(example)
            blocks.absent = frozenset()
    if seen != expected:
        raise UsageError(
            f"{type(model).__name__} must run one block after the other, each with an output of its input's shape; "
            "got another way. Choose another model."
        )
    return model


def paths_of_blocks(model: nn.Module) -> tuple[str, ...]:
    """Return the paths of the blocks that can be left out, from input to output. Most models have none."""
    chains = (
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, Blocks)
    )
    return tuple(
        chain.from_iterable(
            (f"{path}.{name}" for name, _ in blocks.named_children())
            for path, blocks in chains
        )
    )


def tensors_below(names: Iterable[str], path: str) -> frozenset[str]:
    """Return the named tensors that belong to the module at a path."""
    return frozenset(name for name in names if name.startswith(f"{path}."))


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


def last_layers(model: nn.Module) -> list[str]:
    """Return the path within a block of the last linear layer of each of its parts.

    In a ViT these are ``attn.proj`` and ``mlp.fc2``, in an MLP-Mixer ``mlp_tokens.fc2`` and ``mlp_channels.fc2``.
    """
    block = model.get_submodule(paths_of_blocks(model)[0])
    linear = (
        path
        for path, module in block.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d)
    )
    return list({path.partition(".")[0]: path for path in linear}.values())
